"""``PenstockFileSystem``: stores as a file system of fsspec's kind.

The synchronous methods call the engine directly, without fsspec's event loop: a thread that waits for the engine costs less
than a coroutine on another thread. The coroutines are in ``asynchronous.py``.

Not split because it is one interface, fsspec's, and each method is a few lines around what the other modules of this folder do.

Listings are not kept unless ``use_listings_cache=True`` asks for it: what one process has written, another sees at once.
"""

from __future__ import annotations

import os
from glob import has_magic
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar

from fsspec import register_implementation
from fsspec.asyn import AsyncFileSystem, get_loop
from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.config import apply_config
from fsspec.spec import AbstractFileSystem

from penstock.compose import StoreTable, list_buckets
from penstock.config import check_names
from penstock.errors import ConfigError, ObjectExistsError, ObjectMissingError, SpanError
from penstock.fetch import PlanItem
from penstock.fsspec.asynchronous import AsyncFile, ReadBatches, as_coroutine, in_thread
from penstock.fsspec.bulk import (
    CallbackListener,
    Pairs,
    SingleListener,
    copy_files,
    delete_paths,
    get_files,
    pipe_files,
    put_files,
    read_ranges,
    read_streamed,
    stat_many,
)
from penstock.fsspec.files import (
    PART_BYTES_MIN,
    FsspecReader,
    FsspecUncachedReader,
    FsspecWriter,
    compressed,
)
from penstock.fsspec.listing import (
    MARKER,
    add_parents,
    any_below,
    directory_entry,
    file_entry,
    is_marker,
    keys_to_remove,
    list_tree,
)
from penstock.fsspec.options import connect_options, fsspec_options, translated
from penstock.fsspec.paths import SCHEMES, StorePath, split_path
from penstock.redaction import public_url
from penstock.store.presigning import presigned_get
from penstock.store.text import ObjectText
from penstock.tracebacks import boundary
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from datetime import datetime

    from penstock.fsspec.bulk import Pair
    from penstock.fsspec.listing import Entry
    from penstock.store.base import Store
    from penstock.types import Buffer, ObjectInfo

_OPEN_NAMES = ("cache_type", "fill_cache", "size", "version_id", "acl", "max_concurrency", "requester_pays")
"""Options of ``open`` that s3fs and fsspec have, and that change no result here."""

_LISTING_NAMES = ("refresh", "detail", "withdirs", "prefix", "maxdepth", "versions", "on_error", "topdown")

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
class PenstockFileSystem(AsyncFileSystem, metaclass=OneSpelling):  # type: ignore[misc]  # fsspec has no types
    """Object storage, directories and HTTP as a file system: ``penstock://s3/bucket/key``, ``penstock://file/tmp/x``, ...

    Every method raises penstock's errors, which are also the exceptions that users of files catch: ``FileNotFoundError``,
    ``PermissionError``, ``FileExistsError``, ``ValueError``, ``OSError``. It is safe to use from any thread, from a forked
    child and, pickled, from another process.

    Args:
        asynchronous: Whether the caller uses the coroutines, such as ``_cat_file``; the other methods work, too, and block.
        loop: The event loop that fsspec's own functions use; None takes fsspec's.
        **options: Those of ``penstock.connect``, fsspec's (``use_listings_cache``, ``skip_instance_cache``, ...), and s3fs's
            names for the same: ``key``, ``secret``, ``token``, ``anon``, ``client_kwargs``, ``config_kwargs``.

    Raises:
        ConfigError: An option is unknown, cannot be followed, or is given twice.

    Cost: no request; a store is connected to when the first path in it is used.
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
        self._batches = ReadBatches()

    def __repr__(self) -> str:
        shown = {name: value for name, value in self._connect_options.items() if name != "credentials"}
        if "endpoint_url" in shown:
            shown["endpoint_url"] = public_url(str(shown["endpoint_url"]))
        shown.pop("sse_customer_key", None)
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def to_dict(self, *, include_password: bool = True) -> dict[str, Any]:
        """Return the file system as a dict for JSON; without `include_password`, it has no secrets."""
        made: dict[str, Any] = super().to_dict(include_password=include_password)
        if include_password:
            return made
        shown = {name: value for name, value in made.items() if name not in _SECRET_NAMES}
        if "endpoint_url" in shown:
            shown["endpoint_url"] = public_url(str(shown["endpoint_url"]))
        return shown

    @property
    def fsid(self) -> str:
        """What tells this file system from others: its protocol and its endpoint."""
        endpoint = public_url(str(self._connect_options.get("endpoint_url") or ""))
        return f"{_first(self.protocol)}-{endpoint}"

    @property
    def loop(self) -> Any:
        """The event loop for fsspec's functions; None if the file system is asynchronous."""
        if self._loop is None and not self.asynchronous:
            return get_loop()
        return self._loop

    def close(self) -> None:
        """Close the stores; the next use connects again. Idempotent."""
        self._stores.close()

    # ── paths and stores ────────────────────────────────────────────────────────────────────────────────────────────

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

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def info(self, path: Any, **options: Any) -> Entry:
        """Return name, size, type, ETag and modification time of an object, or that a path is a directory.

        Raises:
            ObjectMissingError: There is neither an object nor a key below the path.

        Cost: one request, and another one if there is no object of this name.
        """
        check_names("info", options, _LISTING_NAMES)
        path = self.stripped(path)
        if self._is_root(path):
            return directory_entry(path)
        where = self.locate(path)
        if self._keeps_listings and not options.get("refresh"):
            kept = self._ls_from_cache(path)
            entry = next((entry for entry in kept or () if entry["name"] == path), None)
            if entry is not None:
                return dict(entry)
        store = self.store(where.url)
        if not where.key:
            any_below(store, "")  # raises an error if there is no such bucket
            return directory_entry(path)
        try:
            return file_entry(where.base, store.stat(where.key))
        except ObjectMissingError:
            if not any_below(store, where.folder):
                raise
            return directory_entry(path)

    def exists(self, path: Any, **options: Any) -> bool:
        """Return whether there is an object or a directory of this name.

        Raises:
            StoreError: The store could not answer, for example because the keys are wrong; fsspec's own answer would be False.
        """
        try:
            self.info(path, **options)
        except (ObjectMissingError, FileNotFoundError):
            return False
        return True

    def isdir(self, path: Any) -> bool:
        """Return whether a key begins with the path and a slash. Cost: one request."""
        path = self.stripped(path)
        if self._is_root(path):
            return True
        where = self.locate(path)
        try:
            return any_below(self.store(where.url), where.folder) or not where.key
        except ObjectMissingError:
            return False

    def isfile(self, path: Any) -> bool:
        """Return whether there is an object of this name. Cost: one request."""
        path = self.stripped(path)
        if self._is_root(path) or not self.locate(path).key:
            return False
        store, where = self._place(path)
        try:
            store.stat(where.key)
        except ObjectMissingError:
            return False
        return True

    def ls(self, path: Any, detail: bool = True, refresh: bool = False, **options: Any) -> list[Any]:
        """List a directory; an object's path lists the object alone.

        Raises:
            ObjectMissingError: There is neither an object nor a key below the path.

        Cost: one request per 1 000 entries.
        """
        check_names("ls", options, _LISTING_NAMES)
        path = self.stripped(path)
        found = self.dircache.get(path) if self._keeps_listings and not refresh else None
        if found is None:
            found = self._listed(path)
            if self._keeps_listings:
                self.dircache[path] = found
        return [dict(entry) for entry in found] if detail else [entry["name"] for entry in found]

    def _listed(self, path: str) -> list[Entry]:
        if self._is_root(path):
            return self._list_root(path)
        where = self.locate(path)
        store = self.store(where.url)
        infos = list(store.list(where.folder, recursive=False))
        if not infos and where.key:
            return [file_entry(where.base, store.stat(where.key))]
        return [entry for entry in self._entries(where, infos, withdirs=True) if entry["name"] != path]

    def _is_root(self, path: str) -> bool:
        return path == "" or (not self.scheme and path == "s3")

    def _list_root(self, path: str) -> list[Entry]:
        """List the schemes, or the buckets that these keys may see."""
        if path == "" and not self.scheme:
            return [directory_entry(name) for name in SCHEMES]
        names = ("endpoint_url", "region", "profile", "credentials", "anonymous", "transport", "retry")
        options = {name: value for name, value in self._connect_options.items() if name in names}
        base = f"{path}/" if path else ""
        return [directory_entry(base + info.key.rstrip("/")) for info in list_buckets(**options)]

    def _entries(self, where: StorePath, infos: Iterable[ObjectInfo], *, withdirs: bool) -> list[Entry]:
        """Return the entries of listed keys; with `withdirs`, directories, too, even the listed one if it has a marker."""
        base = where.base
        entries = []
        for info in infos:
            if not is_marker(info):
                entries.append(file_entry(base, info))
            elif withdirs:
                entry = directory_entry(base + info.key[:-1])
                entries.append(entry if info.is_prefix else entry | {MARKER: info.key})
        return entries

    def find(
        self, path: Any, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **options: Any
    ) -> Any:
        """List all objects below a path, from one listing of the store that runs in parallel.

        Args:
            path: A directory, or an object.
            maxdepth: The most levels to descend, at least 1; None descends into all.
            withdirs: Whether to return directories, too, the path itself among them.
            detail: True returns a dict of entries by path, False a list of paths.
            **options: ``prefix``: what the names in the directory must begin with.

        Cost: one request per 1 000 keys; with `maxdepth`, one for each directory that it reaches.
        """
        check_names("find", options, _LISTING_NAMES)
        if maxdepth is not None and maxdepth < 1:
            raise ConfigError(f"maxdepth={maxdepth!r} must be at least 1")
        path, stem = self.stripped(path), str(options.get("prefix") or "")
        if self._is_root(path):
            return self._found(self._find_root(path, maxdepth, withdirs=withdirs), detail=detail)
        where = self.locate(path)
        infos = list_tree(self.store(where.url), where.folder, stem=stem, depth_max=maxdepth)
        if not detail and not withdirs:
            base = where.base
            names = [base + info.key for info in infos if not (info.key.endswith("/") and is_marker(info))]
            return sorted(names) if names else self._found(self._find_object(where, path), detail=False)
        found = {entry["name"]: entry for entry in self._entries(where, infos, withdirs=withdirs)}
        if withdirs and found:
            if maxdepth is None:
                add_parents(found, list(found), top=path)
            found.setdefault(path, directory_entry(path))
        return self._found(found or self._find_object(where, path), detail=detail)

    def _find_root(self, path: str, maxdepth: int | None, *, withdirs: bool) -> dict[str, Entry]:
        if maxdepth != 1:
            raise ConfigError("find() and glob() must be given a bucket, not all of them", hint="s3://bucket/")
        return {entry["name"]: entry for entry in self._list_root(path)} if withdirs else {}

    def _find_object(self, where: StorePath, path: str) -> dict[str, Entry]:
        """Return the entry of the object that a path names, because nothing lies below it."""
        if not where.key:
            return {}
        try:
            return {path: file_entry(where.base, self.store(where.url).stat(where.key))}
        except ObjectMissingError:
            return {}

    def _found(self, found: dict[str, Entry], *, detail: bool) -> Any:
        names = sorted(found)
        return {name: found[name] for name in names} if detail else names

    def glob(self, path: Any, maxdepth: int | None = None, **options: Any) -> Any:
        """Return the paths that a pattern matches, by fsspec's rules; the store lists only keys that begin like the pattern."""
        text = self.stripped(path)
        start = min((at for mark in "*?[" if (at := text.find(mark)) >= 0), default=len(text))
        if has_magic(text) and "/" in text[:start] and "prefix" not in options:
            options["prefix"] = text[text.rindex("/", 0, start) + 1 : start]
        return super().glob(path, maxdepth=maxdepth, **options)

    def expand(self, path: Any, *, recursive: bool, depth_max: int | None, literal: bool = False) -> dict[str, Any]:
        """Return what paths, patterns and directories stand for.

        Args:
            path: One path, or several.
            recursive: Whether to add what lies below directories.
            depth_max: The most levels to descend, at least 1; None descends into all.
            literal: Whether ``*``, ``?`` and ``[`` are ordinary characters.

        Returns:
            For each path its entry, or None if nothing was asked about it.

        Raises:
            ObjectMissingError: There is nothing.
        """
        if depth_max is not None and depth_max < 1:
            raise ConfigError(f"maxdepth={depth_max!r} must be at least 1")
        found: dict[str, Any] = {}
        for one in map(self.stripped, [path] if isinstance(path, str | os.PathLike) else path):
            if has_magic(one) and not literal:
                matched = self.glob(one, maxdepth=depth_max, detail=True)
                found |= matched
                if recursive and matched and depth_max != 1:
                    deeper = depth_max - 1 if depth_max is not None else None
                    found |= self.expand(list(matched), recursive=True, depth_max=deeper, literal=True)
                continue
            if recursive:
                found |= self.find(one, maxdepth=depth_max, withdirs=True, detail=True)
            if one not in found and (not recursive or self.exists(one)):
                found[one] = None
        if not found:
            raise ObjectMissingError(f"nothing matches {path!r}")
        return found

    def expand_path(
        self, path: Any, recursive: bool = False, maxdepth: int | None = None, assume_literal: bool = False, **_: Any
    ) -> list[str]:
        """Return the paths that patterns and directories stand for, sorted.

        Raises:
            ObjectMissingError: There is nothing.
        """
        return sorted(self.expand(path, recursive=recursive, depth_max=maxdepth, literal=assume_literal))

    def du(
        self, path: Any, total: bool = True, maxdepth: int | None = None, withdirs: bool = False, **options: Any
    ) -> Any:
        """Return the bytes of all objects below a path, or the size of each, from one listing."""
        found = self.find(path, maxdepth=maxdepth, withdirs=withdirs, detail=True, **options)
        sizes = {name: entry["size"] for name, entry in found.items()}
        return sum(sizes.values()) if total else sizes

    def sizes(self, paths: Sequence[Any]) -> list[int]:
        """Return the size of each object in bytes; 64 are asked for at a time."""
        return [info.size_bytes for info in self._stats(paths)]

    def _stats(self, paths: Sequence[Any]) -> list[ObjectInfo]:
        stripped = [self.stripped(path) for path in paths]
        for path in stripped:
            self._place(path)
        answers = stat_many(self, dict.fromkeys(stripped))
        found = []
        for path in stripped:
            answer = answers[path]
            if isinstance(answer, Exception):
                raise answer
            found.append(answer)
        return found

    def modified(self, path: Any) -> datetime:
        """Return when an object was written, in UTC."""
        moment: datetime | None = self.info(path).get("LastModified")
        if moment is None:
            raise ConfigError(f"{self.stripped(path)} is a directory, or its store keeps no times")
        return moment

    created = modified  # an object is never changed, only replaced

    def checksum(self, path: Any) -> int:
        """Return a number that changes when the object is replaced. Cost: one request."""
        info = self._stats([path])[0]
        text = f"{info.etag} {info.size_bytes} {info.last_modified_s if info.etag is None else ''}"
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())

    def ukey(self, path: Any) -> str:
        """Return a text that changes when the object is replaced. Cost: one request."""
        return f"{self.checksum(path):016x}"

    def sign(self, path: Any, expiration: int = 3600, **options: Any) -> str:
        """Return a URL with which anybody can read an object in S3 for `expiration` seconds. Cost: no request.

        Raises:
            ConfigError: The store is not S3, or the time is longer than seven days.
        """
        check_names("sign", options, ["client_method"])
        if options.get("client_method", "get_object") != "get_object":
            raise ConfigError("penstock signs URLs for reading only", hint="leave client_method= out")
        store, where = self._place(path)
        return presigned_get(store, where.key, expires_s=expiration)

    def url(self, path: Any, expires: int = 3600, **options: Any) -> str:
        """Return a URL with which anybody can read an object in S3 for `expires` seconds, as ``sign`` does."""
        return self.sign(path, expiration=expires, **options)

    def invalidate_cache(self, path: Any = None) -> None:
        """Forget the listings that ``use_listings_cache`` has kept: all of them, or those that a path is in."""
        super().invalidate_cache(path)
        if not self._keeps_listings:
            return
        if path is None:
            self.dircache.clear()
            return
        path = self.stripped(path)
        while path:
            self.dircache.pop(path, None)
            path = path.rpartition("/")[0]

    # ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def cat_file(self, path: Any, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Return an object, or a range of it, in as many parallel requests as pay.

        Args:
            path: Path of the object.
            start: First byte; a negative number counts from the end.
            end: The byte after the last one; a negative number counts from the end, and None is the end.
            **options: Options of ``open``, which change no result.

        Raises:
            ObjectMissingError: There is no such object.
            ObjectChangedError: The object was replaced while it was read.
        """
        check_names("cat_file", options, _OPEN_NAMES)
        store, where = self._place(path)
        span = self._span(store, where.key, start, end)
        if span is not None and span.end <= span.start:
            return b""
        try:
            return bytes(store.read(where.key, span).data)
        except SpanError:
            if span is None:
                raise
            return b""
        except ConfigError:  # it is too long to be held whole by the engine, or the key is not valid
            return read_streamed(store, where.key, span)

    def cat_version(self, path: str, start: int, end: int, *, info: Entry) -> bytes:
        """Return a range of one version of an object.

        Raises:
            ObjectChangedError: The object was replaced since `info` was taken.
        """
        if end <= start:
            return b""
        store, where = self._place(path)
        item = PlanItem(where.key, ByteRange(start, end), info["ETag"], info["size"])
        return bytes(next(store.read_many([item])).data)

    def _span(self, store: Store, key: str, start: int | None, end: int | None) -> ByteRange | None:
        """Return the range that a slice means; None for the whole object. Cost: a request if the size is needed."""
        if start in (None, 0) and end is None:
            return None
        if (start or 0) < 0 or end is None or end < 0:
            start, end, _ = slice(start, end).indices(store.stat(key).size_bytes)
        return ByteRange(start or 0, end)

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **options: Any) -> Any:
        """Return the contents of an object, or a dict of the contents of several, which are read together.

        Args:
            path: A path, a pattern, or a list of them.
            recursive: Whether a path is a directory, of which all objects are wanted.
            on_error: ``"raise"``, ``"omit"`` leaves out what could not be read, and ``"return"`` returns the exception.
            **options: Options of ``open``, which change no result.
        """
        check_names("cat", options, _OPEN_NAMES)
        found = self.expand(path, recursive=recursive, depth_max=None)
        names = sorted(name for name, entry in found.items() if entry is None or entry["type"] == "file")
        if not isinstance(path, list) and names == [self.stripped(path)]:
            return self.cat_file(names[0])
        answers = dict(zip(names, read_ranges(self, [(name, None, None) for name in names]), strict=True))
        _raise_first(answers.values(), on_error)
        if on_error == "omit":
            return {name: answer for name, answer in answers.items() if not isinstance(answer, Exception)}
        return answers

    def cat_ranges(
        self,
        paths: list[Any],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **options: Any,
    ) -> list[Any]:
        """Return ranges of objects; near ones are read together, and many at a time.

        Args:
            paths: Path of each range.
            starts: First byte of each range, or one number for all.
            ends: The byte after the last one of each range, or one number for all.
            max_gap: Has no effect: ``FetchConfig.gap_bytes_max`` says how large a gap is read through.
            on_error: ``"return"`` returns an exception in place of the bytes, ``"raise"`` raises the first one.
            **options: Options of ``open``, which change no result.

        Raises:
            TypeError: `paths` is not a list.
            ValueError: The lists have different lengths.
        """
        check_names("cat_ranges", options, [*_OPEN_NAMES, "batch_size"])
        if not isinstance(paths, list):
            raise TypeError(f"paths must be a list, not {type(paths).__name__}")
        firsts = _for_each(starts, len(paths), "starts")
        lasts = _for_each(ends, len(paths), "ends")
        answers = read_ranges(self, list(zip(map(self._stripped_fast, paths), firsts, lasts, strict=True)))
        _raise_first(answers, "raise" if on_error != "return" else "return")
        return answers

    def _stripped_fast(self, path: Any) -> str:
        """Strip the protocol off a path, unless it is as long as a path without one; ten thousand of them come at once."""
        return path if isinstance(path, str) and ":" not in path and path[-1:] != "/" else self.stripped(path)

    def get(
        self,
        rpath: Any,
        lpath: Any,
        recursive: bool = False,
        callback: Any = DEFAULT_CALLBACK,
        maxdepth: int | None = None,
        **options: Any,
    ) -> None:
        """Write objects to files of this machine, many at a time; each file appears when it is complete.

        The rules that say which file an object becomes are fsspec's.
        """
        check_names("get", options, [*_OPEN_NAMES, "batch_size"])
        pairs = Pairs(self)
        planned = pairs.planned("get", rpath, lpath, recursive=recursive, depth_max=maxdepth)
        get_files(self, planned, pairs.found, CallbackListener(callback, count=len(planned)))

    def get_file(
        self, rpath: Any, lpath: Any = None, callback: Any = DEFAULT_CALLBACK, outfile: Any = None, **options: Any
    ) -> None:
        """Write an object to a file of this machine, or to a file object.

        Args:
            rpath: Path of the object; a directory becomes a directory.
            lpath: Path of the file, or a file object.
            callback: Hears of every part that has arrived.
            outfile: A file object to write to.
            **options: Options of ``open``, which change no result.
        """
        check_names("get_file", options, _OPEN_NAMES)
        output = lpath if hasattr(lpath, "write") else outfile
        if output is None:
            pairs: list[Pair] = [(self.stripped(rpath), os.fspath(lpath))]
            size = self._size_of_file(rpath, lpath)
            if size is not None:
                get_files(self, pairs, {}, SingleListener(callback, count=size))
            return
        store, where = self._place(rpath)
        info = store.stat(where.key)
        callback.set_size(info.size_bytes)
        for chunk in store.read_parts([(where.key, None)] if info.size_bytes else []):
            output.write(chunk.data)
            callback.relative_update(len(chunk.data))

    def _size_of_file(self, path: Any, target: Any) -> int | None:
        """Return the size of an object; a directory becomes a directory, and has none."""
        entry = self.info(path)
        if entry["type"] == "directory":
            os.makedirs(target, exist_ok=True)  # noqa: PTH103 - fsspec passes strings
            return None
        return int(entry["size"])

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        check_names("open", options, _OPEN_NAMES)
        if options.get("version_id"):
            raise ConfigError("version_id= cannot be followed", hint="penstock reads the current version of an object")
        if mode == "rb" and options.get("cache_type") == "none":
            return FsspecUncachedReader(self, path, mode, block_size or "default", cache_type="none")
        if mode == "rb":
            return self.open_version(path)
        if mode not in ("wb", "xb"):
            raise ConfigError(
                f"mode={mode!r} must be one of 'rb', 'wb' and 'xb', or the same for text",
                hint="objects are written whole; read it, and write it anew",
            )
        store, where = self._place(path)
        if mode == "xb" and self.isfile(path):
            raise ObjectExistsError("an object with this key exists", operation="PUT", url=store.describe(where.key))
        return FsspecWriter(
            self, path, store=store, key=where.key, if_absent=mode == "xb", autocommit=autocommit,
            part_bytes=max(block_size, PART_BYTES_MIN) if block_size else None,
        )  # fmt: skip

    def open_version(self, path: str, *, etag: str | None = None) -> FsspecReader:
        """Open one version of an object for reading; None is the current one.

        Raises:
            ObjectChangedError: The object is another version by now.
        """
        store, where = self._place(path)
        return FsspecReader(self, path, store=store, key=where.key, etag=etag)

    def open(
        self,
        path: Any,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: dict[str, Any] | None = None,
        compression: str | None = None,
        **options: Any,
    ) -> Any:
        """Open an object as a file.

        Args:
            path: Path of the object.
            mode: ``"rb"`` (seekable, reads ahead, one version), ``"wb"`` (visible on a clean close), ``"xb"`` (the same, but
                never replaces an object), or ``"r"``, ``"w"`` and ``"x"`` for text.
            block_size: Size of the first parts to write in bytes; has no effect on reading.
            cache_options: fsspec's options of its caches, which are not used; they have no effect.
            compression: fsspec's name of a compression, or ``"infer"`` to take it from the suffix.
            **options: ``encoding``, ``errors`` and ``newline`` for text, ``autocommit``, ``cache_type`` and others.

        Raises:
            ObjectMissingError: The object to read does not exist.
            ObjectExistsError: The mode is ``"x"``, and there is an object.
            ConfigError: The mode or an option is not valid.
        """
        if "b" not in mode:
            names = ("encoding", "errors", "newline")
            text = {name: options.pop(name) for name in names if name in options}
            binary = self.open(
                path, mode.replace("t", "") + "b", block_size=block_size, cache_options=cache_options,
                compression=compression, **options,
            )  # fmt: skip
            return ObjectText(binary, **text)
        path = self.stripped(path)
        autocommit = options.pop("autocommit", not self._intrans)
        file = self._open(path, mode, block_size, autocommit, cache_options, **options)
        if not autocommit and "r" not in mode:
            self.transaction.files.append(file)
        return file if compression is None else compressed(file, path, mode=mode, compression=compression)

    async def open_async(self, path: Any, mode: str = "rb", **options: Any) -> AsyncFile:
        """Open an object as a file whose methods are coroutines."""
        if "b" not in mode or options.get("compression"):
            raise ConfigError(f"open_async() opens binary files without compression, not mode={mode!r}")
        return AsyncFile(await in_thread(self.open, path, mode, **options))

    # ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def pipe_file(self, path: Any, value: Buffer, mode: str = "overwrite", **options: Any) -> None:
        """Write an object.

        Args:
            path: Path of the object.
            value: The bytes.
            mode: ``"overwrite"``, or ``"create"``, which never replaces an object.
            **options: Options of ``open``, which change no result.

        Raises:
            ObjectExistsError: The mode is ``"create"``, and there is an object.
        """
        check_names("pipe_file", options, [*_OPEN_NAMES, "batch_size"])
        if self._intrans:
            with self.open(path, "xb" if mode == "create" else "wb") as file:
                file.write(value)
            return
        store, where = self._place(path)
        store.write(where.key, value, if_absent=_is_create(mode))
        self.invalidate_cache(path)

    def pipe(self, path: Any, value: Any = None, **options: Any) -> None:
        """Write one object, or all of a dict of contents by path, many at a time."""
        if isinstance(path, str):
            self.pipe_file(path, value, **options)
        elif not isinstance(path, dict):
            raise ConfigError(f"pipe() takes a path or a dict, not {type(path).__name__}")
        elif self._intrans or options.get("mode", "overwrite") != "overwrite":
            for one, data in path.items():
                self.pipe_file(one, data, **options)
        else:
            for one in path:
                self._place(one)
            pipe_files(self, path)
            for one in path if self._keeps_listings else ():
                self.invalidate_cache(one)

    def put(
        self,
        lpath: Any,
        rpath: Any,
        recursive: bool = False,
        callback: Any = DEFAULT_CALLBACK,
        maxdepth: int | None = None,
        mode: str = "overwrite",
        **options: Any,
    ) -> None:
        """Write files of this machine to objects, many at a time. The rules for the paths are fsspec's."""
        check_names("put", options, [*_OPEN_NAMES, "batch_size"])
        planned = Pairs(self).planned("put", lpath, rpath, recursive=recursive, depth_max=maxdepth)
        self._put_pairs(planned, CallbackListener(callback, count=len(planned)), mode)

    def put_file(
        self, lpath: Any, rpath: Any, callback: Any = DEFAULT_CALLBACK, mode: str = "overwrite", **options: Any
    ) -> None:
        """Write one file of this machine to an object."""
        check_names("put_file", options, _OPEN_NAMES)
        source = os.fspath(lpath)
        size = os.path.getsize(source)  # noqa: PTH202 - fsspec passes strings
        self._put_pairs([(source, self.stripped(rpath))], SingleListener(callback, count=size), mode)

    def _put_pairs(self, pairs: list[Pair], listener: CallbackListener, mode: str) -> None:
        if self._intrans or _is_create(mode):
            for source, target in pairs:
                if not os.path.isdir(source):  # noqa: PTH112 - fsspec passes strings
                    self._write_file(source, target, "xb" if _is_create(mode) else "wb")
        else:
            put_files(self, pairs, listener)
        for _, target in pairs if self._keeps_listings else ():
            self.invalidate_cache(target)

    def _write_file(self, source: str, target: str, mode: str) -> None:
        with open(source, "rb") as file, self.open(target, mode) as output:  # noqa: PTH123 - fsspec passes strings
            while piece := file.read(self.blocksize):
                output.write(piece)

    def copy(
        self,
        path1: Any,
        path2: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        on_error: str | None = None,
        **options: Any,
    ) -> None:
        """Copy objects, inside a bucket by the store itself. The rules for the paths are fsspec's.

        Args:
            path1: What to copy: a path, a pattern, or a list.
            path2: Where to.
            recursive: Whether to copy what lies below directories.
            maxdepth: The most levels to descend, at least 1; None descends into all.
            on_error: ``"raise"``, or ``"ignore"``, which leaves out objects that are missing by now; the default is
                ``"ignore"`` for a recursive copy.
            **options: Options of ``open``, which change no result.
        """
        check_names("copy", options, [*_OPEN_NAMES, "batch_size"])
        pairs = Pairs(self)
        planned = pairs.planned("copy", path1, path2, recursive=recursive, depth_max=maxdepth)
        ignores = (on_error or ("ignore" if recursive else "raise")) == "ignore"
        listener = CallbackListener(DEFAULT_CALLBACK, count=len(planned), ignores_missing=ignores)
        copy_files(self, planned, pairs.found, listener)
        for _, target in planned if self._keeps_listings else ():
            self.invalidate_cache(target)

    def cp_file(self, path1: Any, path2: Any, **options: Any) -> None:
        """Copy one object; a directory becomes nothing.

        Raises:
            ObjectMissingError: There is no such object.
        """
        check_names("cp_file", options, _OPEN_NAMES)
        listener = CallbackListener(DEFAULT_CALLBACK, count=1)
        copy_files(self, [(self.stripped(path1), self.stripped(path2))], {}, listener)
        self.invalidate_cache(path2)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None, **options: Any) -> None:
        """Remove objects, by requests for 1 000 of them.

        Raises:
            ObjectMissingError: An object does not exist; nothing was removed. A directory needs ``recursive=True``.

        Cost: one request per 1 000 objects, and one for each path that is no pattern and no directory, to see that it is there.
        """
        check_names("rm", options, ["batch_size"])
        found = self.expand(path, recursive=recursive, depth_max=maxdepth)
        self._stats([name for name, entry in found.items() if entry is None])
        delete_paths(self, self._keys_of(found))
        for name in found if self._keeps_listings else ():
            self.invalidate_cache(name)

    def _keys_of(self, found: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Yield the keys that are to be removed, those of the markers of directories among them."""
        for name, entry in found.items():
            where = self.locate(name)
            if entry is None or entry["type"] == "file":
                yield where.url, where.key
            elif MARKER in entry:
                yield where.url, entry[MARKER]

    def rm_file(self, path: Any) -> None:
        """Remove one object.

        Raises:
            ObjectMissingError: It does not exist.
        """
        store, where = self._place(path)
        store.stat(where.key)
        store.delete(where.key)
        self.invalidate_cache(path)

    def mv(self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **options: Any) -> None:
        """Copy objects and then remove the originals, once all of them were copied."""
        check_names("mv", options, ["batch_size"])
        if self._same(path1, path2):
            return
        self.copy(path1, path2, recursive=recursive, maxdepth=maxdepth, on_error="raise")
        self.rm(path1, recursive=recursive, maxdepth=maxdepth)

    def mv_file(self, path1: Any, path2: Any, **_: Any) -> None:
        """Copy one object and remove the original."""
        if not self._same(path1, path2):
            self.cp_file(path1, path2)
            self.rm_file(path1)

    def _same(self, path1: Any, path2: Any) -> bool:
        both = isinstance(path1, str | os.PathLike) and isinstance(path2, str | os.PathLike)
        return self.stripped(path1) == self.stripped(path2) if both else bool(path1 == path2)

    def touch(self, path: Any, truncate: bool = True, **options: Any) -> None:
        """Write an empty object.

        Raises:
            ConfigError: `truncate` is false and the object exists: its time of modification cannot be set.
        """
        check_names("touch", options, _OPEN_NAMES)
        if not truncate and self.exists(path):
            raise ConfigError(f"{self.stripped(path)} exists, and object storage cannot change its time")
        self.pipe_file(path, b"")

    def mkdir(self, path: Any, create_parents: bool = True, **_: Any) -> None:
        """Do nothing: a directory is there when there is an object in it.

        Raises:
            BucketMissingError: The path is a bucket that does not exist; penstock makes no buckets.
        """
        path = self.stripped(path)
        if path and not self._is_root(path) and not self.locate(path).key:
            self.info(path)

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """Do nothing, as ``mkdir`` does.

        Raises:
            FileExistsError: There is an object of this name, and `exist_ok` is false.
        """
        self.mkdir(path)
        if not exist_ok and not self._is_root(self.stripped(path)) and self.locate(path).key and self.isfile(path):
            raise ObjectExistsError(f"{self.stripped(path)} is an object")

    def rmdir(self, path: Any) -> None:
        """Remove the marker of an empty directory.

        Raises:
            OSError: There are objects in it.
        """
        store, where = self._place(path)
        keys = [key for key, _ in zip(keys_to_remove(store, where.folder), range(2), strict=False)]
        if not keys:
            raise ObjectMissingError("there is no such directory", url=store.describe(where.folder))
        if keys != [where.folder]:
            raise ConfigError(f"{self.stripped(path)} is not empty", hint="rm(path, recursive=True)")
        store.delete(where.folder)
        self.invalidate_cache(path)

    # ── coroutines ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _cat_file(self, path: Any, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Do what ``cat_file`` does; reads that come in one turn of the event loop are made together."""
        check_names("cat_file", options, _OPEN_NAMES)
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
    """The same for paths without a scheme, which are all in S3: ``s3://bucket/key``. ``register("s3")`` puts it in place."""

    protocol: ClassVar[Any] = ("s3", "s3a")
    scheme: ClassVar[str] = "s3"


# The installed package says this too; where it was installed before it did, importing this module is enough.
register_implementation("penstock", PenstockFileSystem)

_REGISTERED = {"penstock": PenstockFileSystem, "s3": PenstockS3FileSystem, "s3a": PenstockS3FileSystem}


@boundary
def register(protocol: str = "s3") -> None:
    """Have fsspec open URLs of a protocol by penstock, in this process: ``s3://`` and ``s3a://``, or ``penstock://``.

    fsspec finds ``penstock://`` by itself if penstock is installed. Call this before anything opens a URL of the protocol: what
    another file system has opened stays with it. Processes that are started anew have to register again; a file system that is
    pickled takes its class with it.

    Args:
        protocol: ``"s3"``, ``"s3a"`` or ``"penstock"``.

    Raises:
        ConfigError: The protocol is another one.
    """
    if protocol not in _REGISTERED:
        raise ConfigError(f"register({protocol!r}) must be given one of {', '.join(map(repr, _REGISTERED))}")
    register_implementation(protocol, _REGISTERED[protocol], clobber=True)


def _first(protocol: Any) -> str:
    return protocol if isinstance(protocol, str) else str(protocol[0])


def _for_each(given: Any, count: int, name: str) -> list[Any]:
    values = list(given) if hasattr(given, "__iter__") else [given] * count
    if len(values) != count:
        raise ConfigError(f"{name} has {len(values)} entries, and paths has {count}")
    return values


def _is_create(mode: str) -> bool:
    if mode not in ("overwrite", "create"):
        raise ConfigError(f"mode={mode!r} must be 'overwrite' or 'create'")
    return mode == "create"


def _raise_first(answers: Iterable[Any], on_error: str) -> None:
    if on_error not in ("raise", "omit", "return"):
        raise ConfigError(f"on_error={on_error!r} must be 'raise', 'omit' or 'return'")
    failure = next((answer for answer in answers if isinstance(answer, Exception)), None)
    if on_error == "raise" and failure is not None:
        raise failure
