"""``FsspecStore``: any file system that fsspec knows, as a store: ``gs://``, ``az://``, ``hf://``, ``sftp://``, ...

Only this module imports fsspec (extra ``penstock-data[fsspec]``), when such a store is made. Its blocking calls run on a
bounded pool of threads. Some guarantees are weaker than those of other stores:

- *A version is pinned* by the ETag, checksum or version that the file system reports, or else by size and modification time.
- *Objects are written* whole, by ``pipe_file``, and become visible when the file system makes them so. ``if_absent`` looks
  first, so two writers can both succeed. Parts are kept in memory until the upload is committed.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.errors import (
    ConfigError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectMissingError,
    ShortReadError,
    StoreError,
)
from penstock.redaction import public_url, stored_key
from penstock.store.base import check_key
from penstock.store.threaded import ThreadedStore, span_within
from penstock.system import forks
from penstock.types import CopyPart, ObjectInfo, Page, Part, strong_etag
from penstock.version import install_hint

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.store.threaded import BlockingJob
    from penstock.types import CompleteMultipart, Copy, Get, Head, Key, ListPage, Put, PutPart

_PINS = ("ETag", "etag", "e_tag", "md5Hash", "generation", "version_id", "content_md5", "sha256", "uid")
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "created")


class FsspecStore(ThreadedStore[dict[int, bytes]]):
    """A directory of any fsspec file system.

    Args:
        url: URL of the directory that is the store's root, such as ``"gs://bucket/prefix"``.
        threads_max: The most calls at the same time; at least 1.
        options: Options of the file system's constructor, which fsspec documents for each protocol.

    Attributes:
        variant: Digest of the options and of a login, which ``describe`` does not show; empty if there are none.

    Raises:
        ConfigError: fsspec, or the package that it needs for this protocol, is missing, or it does not know the protocol.

    Cost: Threads while there is work; one copy of the bytes read, besides the file system's own.
    """

    def __init__(self, url: str, *, threads_max: int = 32, options: Mapping[str, Any] | None = None) -> None:
        self.url_root = url.rstrip("/")
        self._options = dict(options or {})
        self._files, self._root = _file_system(url, self._options)
        hidden = json.dumps([self.url_root, self._options], sort_keys=True, default=_type_name)
        has_hidden = self._options or public_url(self.url_root) != self.url_root
        self.variant = stored_key(f"?{hidden}") if has_hidden else ""
        super().__init__(threads_max=threads_max, name="fsspec")
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Forget the parent's uploads."""
        self._uploads = {}

    def describe(self, key: Key) -> str:
        """Return the root's URL, a slash, and `key`."""
        return f"{public_url(self.url_root)}/{key}"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(FsspecStore, threads_max=self._pool.threads_max, options=self._options), (self.url_root,)

    def __repr__(self) -> str:
        return f"<FsspecStore {public_url(self.url_root)!r}>"

    def check_key(self, key: Key) -> None:
        """Refuse ``.``, ``..`` and empty segments, because file systems differ in what they mean.

        Raises:
            ConfigError: The key breaks the rule that the message names.
        """
        check_key(key)
        for segment in key.split("/"):
            if segment in ("", ".", ".."):
                raise ConfigError(f"key {key!r} has a {segment!r} segment, which file systems read differently")

    def _path(self, key: Key) -> str:
        return f"{self._root}/{key}" if self._root else key

    def _info(self, key: Key) -> ObjectInfo:
        found = self._files.info(self._path(key))
        if found.get("type") == "directory":
            raise ObjectMissingError("no file has this name", status=404)
        return _as_info(key, found)

    def _pinned(self, key: Key, if_match: str | None) -> ObjectInfo:
        info = self._info(key)
        if if_match is not None and info.etag != if_match:
            raise ObjectChangedError(f"the file is now version {info.etag}, not {if_match}", status=412)
        return info

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _get(self, operation: Get, job: BlockingJob) -> None:
        job.completion.info = info = self._pinned(operation.key, operation.if_match)
        span = span_within(operation, info.size_bytes)
        if span is None:
            return
        landing, view = job.land(info, span)
        job.check()
        body = self._files.cat_file(self._path(operation.key), start=span.start, end=span.start + len(view))
        if len(body) != len(view):
            raise ShortReadError(f"{len(body)} bytes arrived, but {len(view)} were announced")
        if self._info(operation.key).etag != info.etag:
            raise ObjectChangedError("the file changed while it was being read", status=412)
        view[:] = body
        landing.offset += len(body)

    def _head(self, operation: Head) -> ObjectInfo:
        return self._info(operation.key)

    def _list_page(self, operation: ListPage) -> Page:
        """Return all that follows in one page, because fsspec's ``find`` and ``ls`` have no pages."""
        prefix, base = operation.prefix, operation.prefix.rpartition("/")[0]
        path = self._path(base) if base else self._root
        if operation.delimiter not in ("", "/"):
            raise ConfigError(f"delimiter={operation.delimiter!r} must be '' or '/'")
        try:
            if operation.delimiter:
                found = {entry["name"]: entry for entry in self._files.ls(path, detail=True)}
            else:
                found = self._files.find(path, detail=True)
        except FileNotFoundError:
            found = {}
        skip = len(self._root) + 1 if self._root else 0
        infos = [_as_info(name.rstrip("/")[skip:], entry) for name, entry in found.items()]
        wanted = [info for info in infos if info.key.startswith(prefix) and info.key > operation.start_after]
        wanted.sort(key=lambda info: info.key)
        objects = [info for info in wanted if not info.is_prefix]
        return Page(objects, [info.key for info in wanted if info.is_prefix], None)

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _store(self, key: Key, data: bytes, *, if_absent: bool) -> ObjectInfo:
        path = self._path(key)
        if if_absent and self._files.exists(path):
            raise ObjectExistsError("an object with this key exists", status=412)
        if "/" in path:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._files.pipe_file(path, data)
        return self._info(key)

    def _put(self, operation: Put) -> ObjectInfo:
        return self._store(operation.key, bytes(operation.body), if_absent=operation.if_absent)

    def _delete(self, operation: Any, job: BlockingJob) -> dict[Key, str]:
        failed: dict[Key, str] = {}
        for key in operation.keys:
            job.check()
            try:
                self._files.rm_file(self._path(key))
            except FileNotFoundError:
                continue
            except OSError as error:
                failed[key] = str(error)
        return failed

    def _bytes(self, key: Key, if_match: str | None, start: int | None = None, end: int | None = None) -> bytes:
        self._pinned(key, if_match)
        return bytes(self._files.cat_file(self._path(key), start=start, end=end))

    def _copy(self, operation: Copy, job: BlockingJob) -> ObjectInfo:
        job.check()
        return self._store(operation.target, self._bytes(operation.source, operation.if_match), if_absent=False)

    def _new_upload(self, key: Key, upload_id: str) -> dict[int, bytes]:
        return {}

    def _put_part(self, operation: PutPart | CopyPart, job: BlockingJob) -> Part:
        job.check()
        if isinstance(operation, CopyPart):
            key = operation.target
            data = self._bytes(operation.source, operation.if_match, operation.span.start, operation.span.end)
        else:
            key, data = operation.key, bytes(operation.body)
        self._upload(key, operation.upload_id)[operation.part_number] = data
        return Part(operation.part_number, f'"{operation.part_number}-{len(data)}"')

    def _complete(self, operation: CompleteMultipart, job: BlockingJob) -> ObjectInfo:
        parts = self._upload(operation.key, operation.upload_id)
        job.check()
        numbers = [part.part_number for part in operation.parts]
        if not numbers or numbers != sorted(set(numbers)) or not parts.keys() >= set(numbers):
            raise StoreError(
                f"parts {numbers[:9]} must ascend, and must have been sent",
                status=400,
                code="InvalidPart",
            )
        data = b"".join(parts[number] for number in numbers)
        info = self._store(operation.key, data, if_absent=operation.if_absent)
        self._end_upload(operation.key, operation.upload_id)
        return info


def _file_system(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    protocol = url.partition("://")[0]
    try:
        import fsspec
    except ImportError as error:
        raise ConfigError(f"{protocol}:// URLs need fsspec", hint=install_hint("fsspec")) from error
    try:
        files, root = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise ConfigError(f"fsspec needs another package for {protocol}://: {error}") from error
    except ValueError as error:
        hint = "penstock itself opens s3://, file:///dir or a path, http://, https:// and memory://; fsspec opens all others"
        reason = "" if "@" in url else f": {error}"  # urllib's message quotes parts of a password
        failure = ConfigError(f"fsspec cannot open {url}{reason}", hint=hint)
    else:
        return files, str(root).rstrip("/")
    raise failure  # outside of the handlers, so that the error above is not its context


def _type_name(value: object) -> str:
    return type(value).__qualname__


def _as_info(key: Key, found: dict[str, Any]) -> ObjectInfo:
    if found.get("type") == "directory":
        return ObjectInfo(f"{key}/", 0, is_prefix=True)
    size = int(found.get("size") or 0)
    moment = next((found[name] for name in _TIMES if found.get(name)), None)
    pin = next((etag for name in _PINS if (etag := strong_etag(str(found.get(name) or "")))), None)
    seconds = moment.timestamp() if isinstance(moment, datetime) else moment
    seconds = float(seconds) if isinstance(seconds, int | float) else None
    return ObjectInfo(key, size, pin or f'"{size:x}-{moment}"', seconds)
