"""``PenstockFileSystem``: stores as an fsspec file system, and its registration.

The synchronous methods come from the layers below: ``moving.py``, ``contents.py``, ``listing.py`` and ``stores.py``.
"""

from __future__ import annotations

from typing import Any, ClassVar

from fsspec import register_implementation

from penstock.config import check_names
from penstock.errors import ConfigError
from penstock.fsspec.asynchronous import AsyncFile, ReadBatches, as_coroutine, in_thread
from penstock.fsspec.moving import MovingFileSystem
from penstock.fsspec.options import OPEN_NAMES
from penstock.system.tracebacks import boundary
from penstock.types import ByteRange


@boundary
class PenstockFileSystem(MovingFileSystem):
    """Object storage, directories and HTTP as a file system: ``penstock://s3/bucket/key``, ``penstock://file/tmp/x``, ...

    Every method raises penstock's errors, which inherit the exceptions that users of files catch: ``FileNotFoundError``,
    ``PermissionError``, ``FileExistsError``, ``ValueError``, ``OSError``. It may be used from any thread, from a forked
    child and, pickled, from another process.

    Args:
        asynchronous: Whether the caller uses the coroutines, such as ``_cat_file``; the other methods work, too, and block.
        loop: The event loop that fsspec's own functions use; None takes fsspec's.
        **options: Options of ``penstock.connect`` and of fsspec (``use_listings_cache``, ``skip_instance_cache``, ...), also
            under s3fs's names: ``key``, ``secret``, ``token``, ``anon``, ``client_kwargs``, ``config_kwargs``.

    Raises:
        ConfigError: An option is unknown, cannot be followed, or is given twice.

    Cost: no request; a store is connected to when the first path in it is used.
    """

    def __init__(self, *, asynchronous: bool = False, loop: Any = None, **options: Any) -> None:
        super().__init__(asynchronous=asynchronous, loop=loop, **options)
        self._batches = ReadBatches()

    async def open_async(self, path: Any, mode: str = "rb", **options: Any) -> AsyncFile:
        """Open an object as a file whose methods are coroutines."""
        if "b" not in mode or options.get("compression"):
            raise ConfigError(f"open_async() opens binary files without compression, not mode={mode!r}")
        return AsyncFile(await in_thread(self.open, path, mode, **options))

    async def _cat_file(self, path: Any, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Do what ``cat_file`` does; reads that come in one turn of the event loop are made together."""
        check_names("cat_file", options, OPEN_NAMES)
        if (start or 0) < 0 or (end or 0) < 0 or (start and end is None):
            return bytes(await in_thread(self.cat_file, path, start, end))
        store, where = self._place(path)
        span = None if end is None else ByteRange(start or 0, end)
        if span is not None and span.end <= span.start:
            return b""
        return await self._batches.read(store, where.key, span)

    _ls = as_coroutine("ls")
    _info = as_coroutine("info")
    _exists = as_coroutine("exists")
    _isdir = as_coroutine("isdir")
    _isfile = as_coroutine("isfile")
    _find = as_coroutine("find")
    _glob = as_coroutine("glob")
    _du = as_coroutine("du")
    _size = as_coroutine("size")
    _sizes = as_coroutine("sizes")
    _expand_path = as_coroutine("expand_path")
    _checksum = as_coroutine("checksum")
    _url = as_coroutine("url")
    _cat = as_coroutine("cat")
    _cat_ranges = as_coroutine("cat_ranges")
    _get = as_coroutine("get")
    _get_file = as_coroutine("get_file")
    _pipe = as_coroutine("pipe")
    _pipe_file = as_coroutine("pipe_file")
    _put = as_coroutine("put")
    _put_file = as_coroutine("put_file")
    _copy = as_coroutine("copy")
    _cp_file = as_coroutine("cp_file")
    _rm = as_coroutine("rm")
    _rm_file = as_coroutine("rm_file")
    _mv_file = as_coroutine("mv_file")
    _touch = as_coroutine("touch")
    _mkdir = as_coroutine("mkdir")
    _makedirs = as_coroutine("makedirs")
    _rmdir = as_coroutine("rmdir")


class PenstockS3FileSystem(PenstockFileSystem):
    """The same file system for paths that are all in S3: ``s3://bucket/key``. ``register("s3")`` registers it."""

    protocol: ClassVar[Any] = ("s3", "s3a")
    scheme: ClassVar[str] = "s3"

    def ls(self, path: Any, detail: bool = False, refresh: bool = False, **options: Any) -> list[Any]:
        """List a directory as the base class does, but names by default, as s3fs, whose protocol this is."""
        return super().ls(path, detail, refresh, **options)

    def split_path(self, path: Any) -> tuple[str, str, None]:
        """Return bucket, key and, because penstock reads the current version, None, as s3fs does."""
        where = self.locate(path)
        return where.base.rstrip("/"), where.key, None


# The installed package says this too; where it was installed before it did, importing this module is enough.
register_implementation("penstock", PenstockFileSystem)

_REGISTERED = {"penstock": PenstockFileSystem, "s3": PenstockS3FileSystem, "s3a": PenstockS3FileSystem}


@boundary
def register(protocol: str = "s3") -> None:
    """Have fsspec open URLs of a protocol with penstock, in this process: ``s3://`` and ``s3a://``, or ``penstock://``.

    fsspec finds ``penstock://`` by itself if penstock is installed. Call this before anything opens a URL of the protocol:
    files that another file system has opened stay with it. Processes that start from scratch have to register again; a pickled
    file system takes its class with it.

    Args:
        protocol: ``"s3"``, ``"s3a"`` or ``"penstock"``.

    Raises:
        ConfigError: The protocol is another one.
    """
    if protocol not in _REGISTERED:
        raise ConfigError(f"register({protocol!r}) must be given one of {', '.join(map(repr, _REGISTERED))}")
    register_implementation(protocol, _REGISTERED[protocol], clobber=True)
