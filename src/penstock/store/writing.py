"""Writing: whole objects, streams of any size, deleting, copying.

An object becomes visible when all of it is stored and its writer is closed without an error. An exception in ``with``,
``abort()``, a dropped writer and the end of the process all drop the bytes that were sent. The destructor of ``io.IOBase``
would close a half-written object, and so commit it; ``Writer`` replaces that destructor.
"""

from __future__ import annotations

import io
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, Self

from penstock.config import GIB, MIB, check_whole
from penstock.errors import ClosedError, ConfigError, PenstockError, StoreError
from penstock.memory.buffers import byte_view
from penstock.store.inflight import InFlight, perform
from penstock.store.records import written_headers
from penstock.store.upload import PART_BYTES, REQUESTS_MIN, Upload, complete, drop, write
from penstock.system import forks
from penstock.system.tracebacks import boundary
from penstock.types import (
    PARTS_MAX,
    AbortMultipart,
    ByteRange,
    CompleteMultipart,
    Copy,
    CopyPart,
    CreateMultipart,
    Delete,
    Head,
    ObjectInfo,
    Part,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import TracebackType

    from penstock.types import Completion, Core, Key, Operation


__all__ = ["Writer", "copy", "delete", "write"]

COPY_BYTES_MAX = 5 * GIB
"""S3's limit for one Copy and one CopyPart."""

COPY_PART_BYTES = 512 * MIB
DELETE_KEYS_MAX = 1000
DELETE_REQUESTS_MAX = 8
COPY_REQUESTS_MAX = 16


class Abortable(Protocol):
    """An output that becomes visible when it is closed."""

    def close(self) -> None:
        """Make the written bytes visible."""

    def abort(self) -> None:
        """Drop the bytes that were written."""


@boundary
class CommitOnExit:
    """A context manager that calls ``close()`` when its block ends, or ``abort()`` if an exception ends it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self: Abortable, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()


@boundary
class Writer(CommitOnExit, io.RawIOBase):
    """A file object that writes one object; ``Store.writer`` returns it. For one thread at a time.

    Args:
        core: The store.
        key: Key of the object.
        part_bytes: Size of the first parts in bytes, at least 5 MiB on S3; later parts are larger (``PARTS_PER_STEP``).
        if_absent: Whether to refuse to replace an object.
        if_match: ETag of the one version that may be replaced; None replaces any.
        headers: Headers to keep with the object, as ``types.Put`` says.
        tags: Tags of the object.

    Attributes:
        info: The stored object; None until ``close()`` has returned.

    Cost: Memory for the part that is being filled and those in flight: 4 at first, and up to 24 if the writer has to wait for
        them and more are faster, but never more than 256 MiB of several parts. Objects smaller than one part are one
        request, at ``close()``.
    """

    _requests_min = REQUESTS_MIN

    def __init__(
        self,
        core: Core,
        key: Key,
        *,
        part_bytes: int | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
        headers: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._state = "failed"  # the state after a constructor that raises
        super().__init__()
        part_bytes = PART_BYTES if part_bytes is None else part_bytes
        check_whole("part_bytes", part_bytes, 1)
        self._core = core
        self._key = key
        self._part_bytes = part_bytes
        self._options: dict[str, Any] = {
            "if_absent": if_absent, "if_match": if_match, "headers": headers, "tags": tags,
        }  # fmt: skip
        self._made_in = forks.generation()
        self._upload = Upload(core, key, requests_min=self._requests_min, **self._options)
        self._memory = memoryview(b"")  # of the part that is being filled
        self._filled = 0
        self._position = 0
        self.info: ObjectInfo | None = None
        self._finalizer = weakref.finalize(self, drop, self._upload)
        self._finalizer.atexit = False  # upload.py has a hook of its own, which waits
        self._state = "open"

    def __del__(self) -> None:
        """Do nothing, because ``io.IOBase`` would close the writer and so commit; the finaliser aborts instead."""

    def __repr__(self) -> str:
        return f"<Writer {self._key!r}, {self._state}, {self._position} bytes>"

    def __enter__(self) -> Self:
        self._check()
        return self

    @property
    def name(self) -> str:
        """The object's URL."""
        return self._core.describe(self._key)

    @property
    def mode(self) -> str:
        """``"wb"``."""
        return "wb"

    @property
    def closed(self) -> bool:
        """Whether the writer was closed or aborted, or has failed."""
        return self._state != "open"

    @property
    def upload_id(self) -> str | None:
        """ID of the multipart upload, with which anybody can drop it; None if there is none."""
        return self._upload.upload_id

    def writable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._position

    def flush(self) -> None:
        """Do nothing: full parts are sent at once, the rest at ``close()``, and an S3 object cannot be visible in part."""

    def _check(self) -> None:
        forks.check(self._made_in, f"the writer of {self._key!r}")
        if self._state != "open":
            raise ClosedError(f"the writer of {self._key!r} is {self._state}")

    def write(self, data: Any, /) -> int:
        """Take all of `data`, which may be reused at once; sends full parts, and waits while too many are in flight.

        Returns:
            The length of `data` in bytes.

        Raises:
            StoreError: An earlier part failed; the writer is then aborted.
            ClosedError: The writer was closed or aborted, or this is a forked child.
        """
        self._check()
        view = byte_view(data)
        try:
            start = 0
            while start < len(view):
                if not self._filled:
                    self._memory = self._upload.take_memory(self._upload.next_part_bytes(self._part_bytes))
                end = min(len(view), start + len(self._memory) - self._filled)
                filled = self._filled + end - start
                self._memory[self._filled : filled] = view[start:end]
                self._filled, start = filled, end
                if filled == len(self._memory):
                    self._send()
        except BaseException:  # Ctrl-C included
            self.abort()
            raise
        self._position += len(view)
        return len(view)

    def _send(self) -> None:
        self._upload.send(self._memory[: self._filled], self._memory)
        self._memory, self._filled = memoryview(b""), 0

    def close(self) -> None:
        """Send the rest and make the object visible; does nothing if the writer was closed or aborted.

        Raises:
            StoreError: A part or the commit failed; nothing is visible, and the bytes that were sent are dropped.
            ObjectExistsError: ``if_absent`` is true, and there is an object of that key.
            ObjectChangedError: The object is another version than ``if_match``.
        """
        if self._state != "open":
            return
        self._check()
        try:
            if not self._upload.started:
                self.info = write(self._core, self._key, self._memory[: self._filled], **self._options)
            else:
                if self._filled:
                    self._send()
                self.info = self._upload.commit()
        except BaseException:  # Ctrl-C included
            self.abort()
            raise
        self._end("closed")

    def abort(self) -> None:
        """Drop the bytes that were sent, so that no object becomes visible. Idempotent; does nothing after ``close()``."""
        if self._state == "open":
            self._end("aborted")
            self._upload.abort()

    def _end(self, state: str) -> None:
        self._state = state
        self._memory = memoryview(b"")
        self._finalizer.detach()
        super().close()  # marks io.IOBase as closed; it calls flush(), which does nothing


# ── deleting and copying ────────────────────────────────────────────────────────────────────────────────────────────


def delete(core: Core, keys: Key | Iterable[Key], *, keys_max: int = DELETE_KEYS_MAX) -> None:
    """Remove objects, 8 requests at a time.

    Args:
        core: The store.
        keys: One key, or an iterable of keys, which is consumed lazily.
        keys_max: The most keys per request, from 1 to 1 000.

    Raises:
        StoreError: A request failed, or the store did not delete a key. Requests in flight are finished and no more are
            sent; some objects may be gone.
    """
    _all_of(core, (Delete(tuple(batch)) for batch in _batches(keys, keys_max)), DELETE_REQUESTS_MAX, _check_deleted)


def _batches(keys: Key | Iterable[Key], keys_max: int) -> Iterator[list[Key]]:
    if not hasattr(keys, "__iter__"):
        raise ConfigError(f"delete({keys!r}) must be given a key, or an iterable of keys")
    batch: list[Key] = []
    for key in (keys,) if isinstance(keys, str) else keys:
        if not isinstance(key, str):
            raise ConfigError(f"delete() was given the key {key!r}, but a key must be a str")
        batch.append(key)
        if len(batch) == keys_max:
            yield batch
            batch = []
    if batch:
        yield batch


def _check_deleted(_: int, completion: Completion) -> None:
    if completion.value:
        failed = list(completion.value)
        reasons = completion.value if isinstance(completion.value, dict) else {}
        first = f"{failed[0]!r} ({reasons.get(failed[0], 'no reason given')})"
        raise StoreError(f"{len(failed)} objects were not deleted, the first of them {first}", operation="DELETE")


def _all_of(
    core: Core, operations: Iterable[Operation], requests_max: int, note: Callable[[int, Completion], None]
) -> None:
    """Perform `operations`, at most `requests_max` at a time, and call `note` with the index and end of each, in any order.

    Raises:
        StoreError: The first operation that failed did so by this; the others in flight have ended.
    """
    in_flight: InFlight[int] = InFlight(core)
    try:
        for index, operation in enumerate(operations):
            while len(in_flight) >= requests_max:
                _take(in_flight, note)
            in_flight.submit(operation, index)
        while in_flight:
            _take(in_flight, note)
    except StoreError:
        in_flight.drain()
        raise
    except BaseException:
        in_flight.cancel()
        raise


def _take(in_flight: InFlight[int], note: Callable[[int, Completion], None]) -> None:
    index, completion = in_flight.wait()
    if completion.error is not None:
        raise completion.error
    note(index, completion)


def check_writable(core: Core, key: Key) -> None:
    """Raise what a write of `key` would raise, such as for a missing bucket or missing rights, and leave nothing behind.

    Raises:
        StoreError: The store does not accept an upload there.
        ConfigError: The store can only be read.

    Cost: two requests: a multipart upload is begun, which no listing of objects shows, and dropped.
    """
    upload_id = perform(core, CreateMultipart(key)).value
    with suppress(StoreError):  # keys that may write but not drop uploads are sound
        perform(core, AbortMultipart(key, upload_id))


def copy(
    core: Core, source: Key, target: Key, *, copy_bytes_max: int = COPY_BYTES_MAX, part_bytes: int = COPY_PART_BYTES
) -> ObjectInfo:
    """Let the store copy an object within itself; all parts are of the version that is there at the beginning.

    Args:
        core: The store.
        source: Key of the object to copy.
        target: Key of the copy.
        copy_bytes_max: Size in bytes up to which one ``Copy`` is enough.
        part_bytes: Size of a part in bytes for larger objects; 16 parts are copied at a time.

    Raises:
        ObjectMissingError: `source` does not exist.
        ObjectChangedError: `source` was replaced during the copy.

    Cost: Two requests, or one per part and three; no bytes pass through this process.
    """
    info = perform(core, Head(source)).info
    assert info is not None
    if info.size_bytes <= copy_bytes_max:
        copied = perform(core, Copy(source, target, info.etag)).info
        return (
            ObjectInfo(target, info.size_bytes)
            if copied is None
            else copied._replace(key=target, size_bytes=info.size_bytes)
        )
    part_bytes = max(part_bytes, -(-info.size_bytes // PARTS_MAX))
    headers = (
        written_headers(info) if getattr(core, "keeps_records", False) else {}
    )  # which a copy in one request keeps by itself
    upload_id = perform(core, CreateMultipart(target, headers=headers, tags=dict(info.tags))).value
    try:
        parts = _copied_parts(core, info, target, upload_id, part_bytes)
        return complete(core, CompleteMultipart(target, upload_id, parts), info.size_bytes)
    except BaseException:
        with suppress(PenstockError):
            perform(core, AbortMultipart(target, upload_id))
        raise


def _copied_parts(core: Core, info: ObjectInfo, target: Key, upload_id: str, part_bytes: int) -> tuple[Part, ...]:
    parts: dict[int, Part] = {}

    def note(index: int, completion: Completion) -> None:
        parts[index] = completion.value

    starts = range(0, info.size_bytes, part_bytes)
    spans = (ByteRange(start, min(start + part_bytes, info.size_bytes)) for start in starts)
    operations = (
        CopyPart(info.key, span, target, upload_id, number, info.etag) for number, span in enumerate(spans, 1)
    )
    _all_of(core, operations, COPY_REQUESTS_MAX, note)
    return tuple(parts[index] for index in sorted(parts))
