"""``ContentsFileSystem``: the contents of objects, as bytes and as open files.

The synchronous methods call the engine directly, without fsspec's event loop: a thread that waits for the engine costs less
than a coroutine on another thread.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from penstock.config import check_names
from penstock.errors import ConfigError, ObjectExistsError, SpanError, StoreError
from penstock.fetch import PlanItem
from penstock.fsspec.files import PART_BYTES_MIN, FsspecReader, FsspecUncachedReader, FsspecWriter, compressed
from penstock.fsspec.listing import REQUESTS_MAX, ListingFileSystem, stat_many
from penstock.fsspec.options import OPEN_NAMES, is_create, type_to_write
from penstock.memory.buffers import byte_view
from penstock.store.file import ObjectReader, ObjectText
from penstock.store.inflight import perform_many
from penstock.system.tracebacks import boundary
from penstock.types import ByteRange, ObjectInfo, Put

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from penstock.fsspec.listing import Entry
    from penstock.fsspec.stores import StorePath
    from penstock.store.base import Store
    from penstock.types import Buffer, Key


@boundary
class ContentsFileSystem(ListingFileSystem):
    """A file system whose objects can be read and written, whole or as files."""

    def cat_file(self, path: Any, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Return the bytes of an object, or of a range of it, read in as many parallel requests as pay.

        Args:
            path: Path of the object.
            start: First byte; a negative number counts from the end.
            end: The byte after the last one; a negative number counts from the end, and None is the end.
            **options: Options of ``open``, which change no result.

        Raises:
            ObjectMissingError: There is no such object.
            ObjectChangedError: The object was replaced while it was read.
        """
        check_names("cat_file", options, OPEN_NAMES)
        store, where = self._place(path)
        item = self._item(store, where.key, start, end)
        if item.span is not None and item.span.end <= item.span.start:
            return b""
        try:
            if item.size_bytes is None:
                return bytes(store.read(item.key, item.span).data)
            return bytes(next(store.read_many([item])).data)  # of the version by whose size the range was counted
        except SpanError:
            if item.span is None:
                raise
            return b""
        except ConfigError:  # it is too long to be held whole by the engine, or the key is not valid
            return read_streamed(store, item)

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

    def _item(self, store: Store, key: str, start: int | None, end: int | None) -> PlanItem:
        """Return the range that a slice means. Cost: a request if the size is needed."""
        if start in (None, 0) and end is None:
            return PlanItem(key)
        if (start or 0) < 0 or end is None or end < 0:
            return slice_of(store.stat(key), key, start, end)
        return PlanItem(key, ByteRange(start or 0, end))

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **options: Any) -> Any:
        """Return the contents of an object, or a dict of the contents of several, which are read together.

        Args:
            path: A path, a pattern, or a list of them.
            recursive: Whether a path is a directory, of which all objects are wanted.
            on_error: ``"raise"``, ``"omit"`` leaves out what could not be read, and ``"return"`` returns the exception.
            **options: Options of ``open``, which change no result.
        """
        check_names("cat", options, OPEN_NAMES)
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
        """Return the bytes of ranges of objects; ranges near each other are read by one request, and many at a time.

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
        check_names("cat_ranges", options, [*OPEN_NAMES, "batch_size"])
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

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        content_type = type_to_write("open", options)
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
            part_bytes=max(block_size, PART_BYTES_MIN) if block_size else None, content_type=content_type,
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

    def pipe_file(self, path: Any, value: Buffer, mode: str = "overwrite", **options: Any) -> None:
        """Write an object.

        Args:
            path: Path of the object.
            value: The bytes.
            mode: ``"overwrite"``, or ``"create"``, which never replaces an object.
            **options: ``ContentType``, the object's media type, and options of ``open``, which change no result.

        Raises:
            ObjectExistsError: The mode is ``"create"``, and there is an object.
        """
        content_type = type_to_write("pipe_file", options, "batch_size")
        if self._intrans or content_type:
            with self.open(path, "xb" if is_create(mode) else "wb", ContentType=content_type) as file:
                file.write(value)
            return
        store, where = self._place(path)
        store.write(where.key, value, if_absent=is_create(mode))
        self.invalidate_cache(path)

    def pipe(self, path: Any, value: Any = None, **options: Any) -> None:
        """Write one object, or all of a dict of contents by path, many at a time."""
        content_type = type_to_write("pipe", options, "mode", "batch_size")
        if isinstance(path, str):
            self.pipe_file(path, value, **options)
        elif not isinstance(path, dict):
            raise ConfigError(f"pipe() takes a path or a dict, not {type(path).__name__}")
        elif self._intrans or content_type or options.get("mode", "overwrite") != "overwrite":
            for one, data in path.items():
                self.pipe_file(one, data, **options)
        else:
            for one in path:
                self._place(one)
            pipe_files(self, path)
            for one in path if self._keeps_listings else ():
                self.invalidate_cache(one)

    def touch(self, path: Any, truncate: bool = True, **options: Any) -> None:
        """Write an empty object.

        Raises:
            ConfigError: `truncate` is false and the object exists: its time of modification cannot be set.
        """
        type_to_write("touch", options)
        if not truncate and self.exists(path):
            raise ConfigError(f"{self.stripped(path)} exists, and object storage cannot change its time")
        self.pipe_file(path, b"", **options)


def _for_each(given: Any, count: int, name: str) -> list[Any]:
    values = list(given) if hasattr(given, "__iter__") else [given] * count
    if len(values) != count:
        raise ConfigError(f"{name} has {len(values)} entries, and paths has {count}")
    return values


def _raise_first(answers: Iterable[Any], on_error: str) -> None:
    if on_error not in ("raise", "omit", "return"):
        raise ConfigError(f"on_error={on_error!r} must be 'raise', 'omit' or 'return'")
    failure = next((answer for answer in answers if isinstance(answer, Exception)), None)
    if on_error == "raise" and failure is not None:
        raise failure


PUT_BYTES_MAX = 16 << 20
"""Largest object that one put writes; larger ones are sent in parts, one object at a time."""


def read_ranges(
    files: ListingFileSystem, requests: Sequence[tuple[str, int | None, int | None]]
) -> list[bytes | Exception]:
    """Read ranges of any objects.

    Args:
        files: The file system.
        requests: Path, start and end of each range; negative numbers count from the end of the object, and None is its
            beginning or end.

    Returns:
        For each range its bytes, or the ``StoreError`` that reading it failed with.
    """
    answers: list[bytes | Exception] = [b""] * len(requests)
    infos = _infos_needed(files, requests, answers)
    wanted: dict[str, list[tuple[int, PlanItem]]] = defaultdict(list)
    where: StorePath | None = None
    before = None
    for index, (path, start, end) in enumerate(requests):
        if isinstance(answers[index], Exception):
            continue
        if path is not before or where is None:
            where, before = files.locate(path), path
        item = PlanItem(where.key)
        if (info := infos.get(path)) is not None:
            item = slice_of(info, where.key, start, end)
        elif end is not None:
            item = PlanItem(where.key, ByteRange(start or 0, end))
        if item.span is None or item.span.end > item.span.start:
            wanted[where.url].append((index, item))
    for url, items in wanted.items():
        for number, answer in read_each(files.store(url), (item for _, item in items)):
            answers[items[number][0]] = answer
    return answers


def slice_of(info: ObjectInfo, key: Key, start: int | None, end: int | None) -> PlanItem:
    """Return the range of an object that a slice means, in the version whose size it was counted by."""
    span = ByteRange(*slice(start, end).indices(info.size_bytes)[:2])
    return PlanItem(key, span, info.etag, info.size_bytes, last_modified_s=info.last_modified_s)


def _infos_needed(
    files: ListingFileSystem, requests: Sequence[tuple[str, int | None, int | None]], answers: list[bytes | Exception]
) -> dict[str, ObjectInfo]:
    """Ask for the sizes of the objects of which a range cannot be requested without; errors go to `answers`."""
    needed: dict[str, list[int]] = defaultdict(list)
    for index, (path, start, end) in enumerate(requests):
        if (start or 0) < 0 or (end or 0) < 0 or (start and end is None):
            needed[path].append(index)
    infos: dict[str, ObjectInfo] = {}
    for path, info in stat_many(files, needed).items():
        if isinstance(info, ObjectInfo):
            infos[path] = info
        else:
            for index in needed[path]:
                answers[index] = info
    return infos


def read_each(store: Store, items: Iterator[PlanItem]) -> Iterator[tuple[int, bytes | Exception]]:
    """Read ranges of objects together, and yield the number of each with its bytes or its error, as they arrive.

    A range past the end of its object is empty, or ends there.
    """
    asked: list[PlanItem] = []
    answered: set[int] = set()

    def noted() -> Iterator[PlanItem]:
        for item in items:
            asked.append(item)
            yield item

    try:
        for answer in store.try_read_many(noted(), ordered=False):
            number = answer.request_index
            assert number is not None
            answered.add(number)
            if isinstance(answer, SpanError) and asked[number].span is not None:
                yield number, b""
            else:
                yield number, answer if isinstance(answer, StoreError) else bytes(answer.data)
    except ConfigError:  # one is too long to be held whole by the engine, or its key is not valid
        asked.extend(items)
        for number, item in enumerate(asked):
            if number not in answered:
                try:
                    yield number, read_streamed(store, item)
                except (StoreError, ConfigError) as error:
                    yield number, error


def read_streamed(store: Store, item: PlanItem) -> bytes:
    """Return one range of an object of any size; parts are fetched in parallel, straight into the result."""
    with ObjectReader(store, item.key, etag=item.etag) as reader:
        if item.span is None:
            return reader.read()
        reader.seek(item.span.start)
        return reader.read(item.span.length_bytes)


def pipe_files(files: ListingFileSystem, contents: Mapping[str, Buffer]) -> None:
    """Write objects from memory, 64 small ones at a time.

    Raises:
        StoreError: An object could not be written; others may be there.
    """
    small: dict[str, list[tuple[str, Buffer]]] = defaultdict(list)
    large: list[tuple[str, str, Buffer]] = []
    for path, data in contents.items():
        where, view = files.locate(path), byte_view(data)
        if len(view) <= PUT_BYTES_MAX:
            small[where.url].append((where.key, view))
        else:
            large.append((where.url, where.key, view))
    for url, items in small.items():
        for _ in perform_many(
            files.store(url), ((key, Put(key, data)) for key, data in items), requests_max=REQUESTS_MAX
        ):
            pass
    for url, key, data in large:
        files.store(url).write(key, data)
