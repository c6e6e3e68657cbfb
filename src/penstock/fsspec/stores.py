"""``LocatingFileSystem``: finds the stores and keys for the options and paths of a file system.

fsspec's interface is one class with fifty methods. Here it is a stack of five classes, and each uses only those below it:
``PenstockFileSystem`` (``filesystem.py``), ``MovingFileSystem`` (``moving.py``), ``ContentsFileSystem`` (``contents.py``),
``ListingFileSystem`` (``listing.py``), and at the bottom this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from fsspec.asyn import AsyncFileSystem, get_loop
from fsspec.config import apply_config
from fsspec.spec import AbstractFileSystem

from penstock.compose import StoreTable, split, split_s3
from penstock.errors import ConfigError
from penstock.fsspec.options import connect_options, fsspec_options, translated
from penstock.redaction import public_url
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from penstock.store.base import Store


_SECRET_NAMES = ("secret", "token", "sse_customer_key", "credentials", "password")


class OneSpelling(type(AbstractFileSystem)):  # type: ignore[misc]  # fsspec has no types
    """Translates the options before fsspec looks for a file system that it has made with the same ones."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Return the file system for these options; fsspec keeps it for the next call."""
        if args:
            raise ConfigError(
                f"{cls.__name__} takes options by name only", hint="endpoint_url=..., key=..., secret=..."
            )
        return super().__call__(**translated(apply_config(cls, options)))


@boundary
class LocatingFileSystem(AsyncFileSystem, metaclass=OneSpelling):  # type: ignore[misc]  # fsspec has no types
    """A file system that knows which store a path lies in.

    Args:
        asynchronous: Whether the caller uses the coroutines.
        loop: The event loop that fsspec's own functions use; None takes fsspec's.
        **options: Options of the file system.

    Raises:
        ConfigError: An option is unknown, cannot be followed, or is given twice.
    """

    protocol: ClassVar[Any] = "penstock"
    scheme: ClassVar[str] = ""
    """Scheme of all paths; empty if each path begins with one."""
    mirror_sync_methods = False  # ours do not go by fsspec's event loop
    blocksize = 8 << 20

    def __init__(self, *, asynchronous: bool = False, loop: Any = None, **options: Any) -> None:
        options = translated(options)
        AbstractFileSystem.__init__(self, **{"use_listings_cache": False, **fsspec_options(options)})
        self.asynchronous = asynchronous
        self.batch_size = options.get("batch_size")
        self._loop = loop
        self._keeps_listings = bool(options.get("use_listings_cache"))
        self._connect_options = connect_options(options)
        self._stores = StoreTable(self._connect_options)

    def __repr__(self) -> str:
        shown = _without_secrets(self._connect_options)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def to_dict(self, *, include_password: bool = True) -> dict[str, Any]:
        """Return the file system as a dict for JSON; without `include_password`, it has no secrets."""
        made: dict[str, Any] = super().to_dict(include_password=include_password)
        return made if include_password else _without_secrets(made)

    @property
    def fsid(self) -> str:
        """The identity of this file system: its protocol and its endpoint."""
        endpoint = public_url(str(self._connect_options.get("endpoint_url") or ""))
        return f"{self.protocol if isinstance(self.protocol, str) else self.protocol[0]}-{endpoint}"

    @property
    def loop(self) -> Any:
        """The event loop for fsspec's functions; None if the file system is asynchronous."""
        if self._loop is None and not self.asynchronous:
            return get_loop()
        return self._loop

    def close(self) -> None:
        """Close the stores; the next use connects again. Idempotent."""
        self._stores.close()

    def stripped(self, path: Any) -> str:
        """Return a path without its protocol and without a slash at its end."""
        return str(self._strip_protocol(path))

    def locate(self, path: Any) -> StorePath:
        """Take a path apart into its store and its key.

        Raises:
            ConfigError: The path names no store.
        """
        return split_path(self.stripped(path), scheme=self.scheme)

    def store(self, url: str) -> Store:
        """Return the store of a URL; all paths of one bucket share it."""
        return self._stores.get(url)

    def _place(self, path: Any) -> tuple[Store, StorePath]:
        """Return the store of a path that must name an object, and the path taken apart."""
        where = self.locate(path)
        if not where.key:
            raise ConfigError(f"{self.unstrip_protocol(self.stripped(path))} does not name an object")
        return self.store(where.url), where

    def _is_root(self, path: str) -> bool:
        return path == "" or (not self.scheme and path == "s3")


def _without_secrets(options: dict[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in options.items() if name not in _SECRET_NAMES}
    if "endpoint_url" in shown:
        shown["endpoint_url"] = public_url(str(shown["endpoint_url"]))
    return shown


SCHEMES = ("s3", "file", "memory", "http", "https")
"""Schemes of stores that penstock reads by itself; fsspec has file systems for all others."""


class StorePath(NamedTuple):
    """A path, taken apart.

    Attributes:
        url: URL of the store.
        base: Beginning of all paths of the store; ``base + key`` is a path.
        key: Key in the store; empty for the store itself.
    """

    url: str
    base: str
    key: str

    @property
    def folder(self) -> str:
        """The prefix of the keys below this path: empty, or it ends with a slash."""
        return f"{self.key}/" if self.key else ""


def split_path(path: str, *, scheme: str) -> StorePath:
    """Take a path apart.

    Args:
        path: Path without protocol, such as ``bucket/key``; with an empty `scheme` it begins with one, as ``s3/bucket/key``.
        scheme: Scheme of all paths of the file system; empty if each path names its own.

    Raises:
        ConfigError: The path names no store, or a scheme that penstock does not read by itself.
    """
    if scheme:
        return _in_scheme(scheme, path, "")
    name, _, rest = path.partition("/")
    if name not in SCHEMES:
        raise ConfigError(
            f"penstock://{path} must begin with one of {', '.join(SCHEMES)}", hint="penstock://s3/bucket/key"
        )
    return _in_scheme(name, rest, f"{name}/")


def _in_scheme(scheme: str, path: str, before: str) -> StorePath:
    if scheme == "file":
        rest = path.lstrip("/")
        return StorePath("file:///", before + path[: len(path) - len(rest)], rest)
    if scheme == "s3":
        bucket, key = split_s3(f"s3://{path}")
        return StorePath(f"s3://{bucket}", f"{before}{bucket}/", key)
    url, key = split(f"{scheme}://{path}")
    if scheme in ("http", "https"):
        return StorePath(url, before + path[: len(path) - len(key)], key)
    name = url.partition("://")[2]
    if not name:
        raise ConfigError(f"{scheme}://{path} does not name a store", hint=f"{scheme}://name/key")
    return StorePath(url, f"{before}{name}/", key)
