"""The interface to iopath: a ``PathHandler`` for ``s3://``. No other part of penstock imports iopath."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.compose import StoreTable, split
from penstock.errors import ConfigError, ObjectMissingError
from penstock.store.file import ObjectText
from penstock.store.inflight import perform
from penstock.store.local import LocalStore
from penstock.system.lazy import needing
from penstock.system.tracebacks import boundary
from penstock.transfer import FileReceiver, RaisingListener, TransferItem, copy_between, is_downloaded, stream
from penstock.types import ListPage, ObjectInfo

with needing("iopath", "penstock.iopath needs iopath. Hint: pip install iopath"):
    from iopath.common.file_io import PathHandler, get_cache_dir

if TYPE_CHECKING:
    from penstock.store.base import Store
    from penstock.types import Key

__all__ = ["PenstockPathHandler"]

_PREFIX = "s3://"
_FOLDER = "penstock_s3"

log = logging.getLogger("penstock.iopath")


@boundary
class PenstockPathHandler(PathHandler):  # type: ignore[misc]  # iopath has no types
    """Handles ``s3://`` paths: ``path_manager.register_handler(PenstockPathHandler(endpoint_url=...))``.

    Args:
        cache_dir: Directory for ``get_local_path``; None takes iopath's.
        **options: Options of ``penstock.connect``.

    Raises:
        ConfigError: An option is not valid; raised when a path is used.

    Cost: no request.
    """

    def __init__(self, *, cache_dir: str | None = None, **options: Any) -> None:
        super().__init__()
        self._cache_dir = cache_dir
        self._stores = StoreTable(options)

    def _get_supported_prefixes(self) -> list[str]:
        return [_PREFIX]

    def _place(self, path: str) -> tuple[Store, Key]:
        url, key = split(path)
        return self._stores.get(url), key

    def _object(self, path: str) -> tuple[Store, Key]:
        store, key = self._place(path)
        if not key or key.endswith("/"):
            raise ConfigError(f"{path!r} does not name an object")
        return store, key

    # ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _open(
        self,
        path: str,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        **options: Any,
    ) -> Any:
        """Open an object; `buffering` has no effect, because the engine reads ahead and writes in parts."""
        self._check_kwargs(options)
        store, key = self._object(path)
        if "b" in mode:
            return store.open(key, mode)  # type: ignore[call-overload]
        if mode.replace("t", "") not in ("r", "w", "x"):
            raise ConfigError(f"mode={mode!r} must be 'r', 'w' or 'x'", hint="objects are written whole")
        file: Any = store.open(key, mode.replace("t", "") + "b")  # type: ignore[call-overload]
        return ObjectText(file, encoding=encoding or "utf-8", errors=errors, newline=newline)

    def _get_local_path(self, path: str, force: bool = False, **options: Any) -> str:
        """Download an object, or everything below a directory, unless the cache directory already has this version."""
        self._check_kwargs(options)
        store, key = self._place(path)
        root = Path(get_cache_dir(self._cache_dir)) / _FOLDER / split(path)[0].removeprefix(_PREFIX)
        infos = [store.stat(key)] if self._isfile(path) else list(store.list(f"{key.rstrip('/')}/" if key else ""))
        if not infos:
            raise ObjectMissingError("there is neither an object nor a directory", url=store.describe(key))
        items = []
        files = LocalStore(root)
        for info in infos:
            if info.key.endswith("/") and not info.size_bytes:
                continue  # what consoles make for a folder
            target = files.path(info.key)  # refuses keys that would lead out of the directory
            if force or not is_downloaded(target, info):
                items.append(TransferItem(info, info.key, target))
        listener = RaisingListener()
        stream(store, iter(items), FileReceiver(listener), listener)
        return str(root / key) if key else str(root)

    def _copy_from_local(self, local_path: str, dst_path: str, overwrite: bool = False, **options: Any) -> bool:
        """Write a file of this machine to an object; False if there is one that must not be replaced."""
        self._check_kwargs(options)
        store, key = self._object(dst_path)
        if self._refuses(dst_path, overwrite=overwrite):
            return False
        source = Path(local_path).absolute()
        info = ObjectInfo(str(source).lstrip("/"), source.stat().st_size)
        listener = RaisingListener()
        with LocalStore("/") as files:
            copy_between(files, store, iter([TransferItem(info, key, None)]), listener)
        return True

    def _copy(self, src_path: str, dst_path: str, overwrite: bool = False, **options: Any) -> bool:
        """Copy an object, inside a bucket by the store itself; False if there is one that must not be replaced."""
        self._check_kwargs(options)
        (source, key), (target, copy) = self._object(src_path), self._object(dst_path)
        if self._refuses(dst_path, overwrite=overwrite):
            return False
        if source is target:
            source.copy(key, copy)
            return True
        copy_between(source, target, iter([TransferItem(source.stat(key), copy, None)]), RaisingListener())
        return True

    def _refuses(self, path: str, *, overwrite: bool) -> bool:
        if overwrite or not self._isfile(path):
            return False
        log.error("%s exists, and overwrite=True was not given.", path)
        return True

    def _mv(self, src_path: str, dst_path: str, **options: Any) -> bool:
        """Copy an object and remove the original; False if there is another one in its place."""
        (store, key), place = self._object(src_path), self._object(dst_path)
        if (store, key) == place:
            store.stat(key)  # an object that does not exist is an error
            return True
        if not self._copy(src_path, dst_path, **options):
            return False
        store.delete(key)
        return True

    # ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _exists(self, path: str, **options: Any) -> bool:
        return self._isfile(path, **options) or self._isdir(path, **options)

    def _isfile(self, path: str, **options: Any) -> bool:
        self._check_kwargs(options)
        store, key = self._place(path)
        if not key or key.endswith("/"):
            return False
        try:
            store.stat(key)
        except ObjectMissingError:
            return False
        return True

    def _isdir(self, path: str, **options: Any) -> bool:
        self._check_kwargs(options)
        store, key = self._place(path)
        try:
            page = perform(store, ListPage(f"{key.rstrip('/')}/" if key else "", keys_max=1)).value
        except ObjectMissingError:
            return False
        return not key or bool(page.objects or page.prefixes)

    def _ls(self, path: str, **options: Any) -> list[str]:
        """Return the names in a directory, without their path and without slashes."""
        self._check_kwargs(options)
        store, key = self._place(path)
        folder = f"{key.rstrip('/')}/" if key else ""
        names = [info.key[len(folder) :].rstrip("/") for info in store.list(folder, recursive=False)]
        if not names and not self._isdir(path):
            raise ObjectMissingError("there is no such directory", url=store.describe(folder))
        return [name for name in names if name]

    def _mkdirs(self, path: str, **options: Any) -> None:
        """Do nothing: a directory is there when there is an object in it."""
        self._check_kwargs(options)

    def _rm(self, path: str, **options: Any) -> None:
        """Remove an object."""
        self._check_kwargs(options)
        store, key = self._object(path)
        store.stat(key)  # an object that does not exist is an error, as for files
        store.delete(key)
