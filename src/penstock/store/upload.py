"""Multipart uploads, and ``write``, which stores an object of any size from memory.

Only ``commit()`` makes the parts of an upload visible.
"""

from __future__ import annotations

import _thread
import atexit
import hashlib
import secrets
import time
import weakref
from contextlib import suppress
from queue import Empty
from typing import TYPE_CHECKING

from penstock.checksums import algorithms as checksums
from penstock.config import MIB
from penstock.errors import (
    ChecksumError,
    ConfigError,
    ObjectChangedError,
    ObjectExistsError,
    PenstockError,
    StoreError,
)
from penstock.fetch.concurrency import Concurrency
from penstock.memory.buffers import byte_view, bytes_buffer
from penstock.store.inflight import InFlight, perform
from penstock.system import forks
from penstock.types import (
    PARTS_MAX,
    AbortMultipart,
    CompleteMultipart,
    CreateMultipart,
    Head,
    ObjectInfo,
    Part,
    Put,
    PutPart,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.checksums.algorithms import Hasher
    from penstock.types import Buffer, Completion, Core, Key

PART_BYTES = 8 * MIB
"""Size of the first parts: 90 ms at 90 MB/s, so that the 30 ms to the first byte cost a quarter, which 4 in flight hide."""

PARTS_PER_STEP = 75
"""Parts grow by one ``part_bytes`` every 75 parts, so that 10 000 of them hold S3's largest object of 5 TiB; the last parts
have 1 GiB."""

REQUESTS_MIN = 4
"""Parts in flight per writer at first. More are sent while the writer has to wait for them and that makes it faster."""

REQUESTS_MAX = 24
"""The most parts in flight per writer: 192 MiB of the first ones, and 1.6 GB/s at 90 MB/s per connection and 30 ms."""

PENDING_BYTES_MAX = 256 * MIB
"""Bytes of parts in flight per writer, so that the large parts of huge objects are sent one at a time."""

ABORT_S_MAX = 10.0
"""Seconds that an abort may take: Ctrl-C must return even if the store does not answer."""

EXIT_S_MAX = 2.0
"""Seconds that the end of the process waits until uploads are dropped."""


# ── whole objects ───────────────────────────────────────────────────────────────────────────────────────────────────


def write(
    core: Core,
    key: Key,
    data: Buffer,
    *,
    if_absent: bool = False,
    part_bytes: int = PART_BYTES,
    if_match: str | None = None,
    headers: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
) -> ObjectInfo:
    """Store `data` as one object: one ``Put`` up to the size of two parts, else a multipart upload of views of `data`.

    Args:
        core: The store.
        key: Key of the object.
        data: Any contiguous buffer of bytes.
        if_absent: Whether to refuse to replace an object.
        part_bytes: Size of the first parts in bytes.
        if_match: ETag of the one version that may be replaced; None replaces any.
        headers: Headers to keep with the object, as ``types.Put`` says.
        tags: Tags of the object.

    Raises:
        ObjectExistsError: `if_absent` is true, and there is an object of that key.
        ObjectChangedError: The object is another version than `if_match`.
        ConfigError: `data` is not contiguous bytes, or the store cannot keep what is given.

    Cost: No copy of `data`; one request, or one per part and two; one more after a lost answer, with a condition.
    """
    view = byte_view(data)
    if len(view) <= 2 * part_bytes:
        claim = _claim(if_absent, if_match)
        try:
            info = perform(core, Put(key, view, if_absent, claim, headers or {}, tags or {}, if_match)).info
        except (ObjectExistsError, ObjectChangedError) as error:
            info = _own(core, key, claim, error)
        return info or ObjectInfo(key, len(view))
    upload = Upload(core, key, if_absent=if_absent, if_match=if_match, headers=headers, tags=tags)
    try:
        start = 0
        while start < len(view):
            end = min(start + upload.next_part_bytes(part_bytes), len(view))
            upload.send(view[start:end])
            start = end
        return upload.commit()
    except BaseException:
        upload.abort()
        raise


# ── the end of an upload ────────────────────────────────────────────────────────────────────────────────────────────


def _claim(if_absent: bool, if_match: str | None) -> str:
    """Return a random mark of this write, if it has a condition that its own first attempt makes false; else empty."""
    return secrets.token_hex(16) if if_absent or if_match is not None else ""


def _own(core: Core, key: Key, claim: str, error: ObjectExistsError | ObjectChangedError) -> ObjectInfo | None:
    """Return the object that is in the way if this write has made it itself, by an attempt whose answer was lost.

    Raises:
        ObjectExistsError, ObjectChangedError: Somebody else has written it; this is `error`.
    """
    if (error.attempts_count or 0) < 2 or not claim:
        raise error
    try:
        found = perform(core, Head(key))
    except StoreError:
        raise error from None
    if found.value != claim:
        raise error
    return found.info


def complete(core: Core, operation: CompleteMultipart, size_bytes: int, *, claim: str = "") -> ObjectInfo:
    """Commit an upload.

    If the answer to a commit is lost, ``Retrying`` sends it again, and then the upload no longer exists, because it has
    become the object or because somebody aborted it. The object itself shows which. With ``if_absent`` the store may say
    instead that an object exists, and `claim` shows whose it is.

    Args:
        core: The store.
        operation: The commit.
        size_bytes: Size of the whole object in bytes.
        claim: The mark that the upload was created with; empty if it has none.

    Raises:
        StoreError: The commit failed, or the store does not show that it succeeded.

    Cost: One request; one more after a lost answer.
    """
    key = operation.key
    try:
        info = perform(core, operation).info
    except (ObjectExistsError, ObjectChangedError) as error:
        info = _own(core, key, claim, error)
    except StoreError as error:
        if error.code != "NoSuchUpload" or (error.attempts_count or 0) < 2:
            raise
        try:
            found = perform(core, Head(key))
        except StoreError:
            raise error from None
        info = found.info
        if info is None or info.size_bytes != size_bytes:
            raise
        has_these_parts = (info.etag or "").strip('"').lower() == multipart_etag(part.etag for part in operation.parts)
        if not (has_these_parts or (claim and found.value == claim)):
            raise
    return ObjectInfo(key, size_bytes) if info is None else info._replace(key=key, size_bytes=size_bytes)


def multipart_etag(part_etags: Iterable[str]) -> str | None:
    """Return the ETag, without quotes, that S3 gives an object of parts: the MD5 of the parts' MD5s, and their number.

    The number by itself would also fit another version of the object. If the parts have ETags of another kind, as with some
    encryptions and in some stores, this returns None.
    """
    try:
        digests = [bytes.fromhex(etag.strip('"')) for etag in part_etags]
    except ValueError:
        return None
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


# ── streams ─────────────────────────────────────────────────────────────────────────────────────────────────────────


_held: weakref.WeakSet[Core] = weakref.WeakSet()
"""Stores of which one checksum of an object in parts was compared with that of the bytes sent, or which keep none."""
_wrong: weakref.WeakSet[Core] = weakref.WeakSet()
"""Stores that kept a wrong checksum: none is requested from them any more, because the objects could not be read again."""


class Upload:
    """One multipart upload. It does not refer to its writer, and outlives it. For one thread at a time.

    Args:
        core: The store.
        key: Key of the object.
        if_absent: Whether to refuse to replace an object.
        requests_min: Parts in flight at first.
        if_match: ETag of the one version that may be replaced; None replaces any.
        headers: Headers to keep with the object, as ``types.Put`` says.
        tags: Tags of the object.

    Attributes:
        started: Whether something was sent, so that there is something to commit or to drop.
    """

    def __init__(
        self,
        core: Core,
        key: Key,
        *,
        if_absent: bool,
        requests_min: int = REQUESTS_MIN,
        if_match: str | None = None,
        headers: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self._core = core
        self._key = key
        self._if_absent = if_absent
        self._if_match = if_match
        self._headers = headers or {}
        self._tags = tags or {}
        self._claim = _claim(if_absent, if_match)
        self._checksum = getattr(core, "keeps_checksums", False) and core not in _wrong
        self._hasher = checksums.PartsCrc() if self._checksum else None
        self._in_flight: InFlight[int] = InFlight(core)
        self.upload_id: str | None = None  # the store's name of the upload; None before the first part
        self.started = False
        self._pending_bytes = 0
        self._window = Concurrency(limit=requests_min, limit_min=1, limit_max=REQUESTS_MAX)
        self._memory: dict[int, memoryview] = {}  # memory of the parts in flight, to be used again
        self._spare: list[memoryview] = []
        self._lengths: list[int] = []
        self._parts: dict[int, Part] = {}
        self._ending = False
        self._committed_or_dropped = False
        self._made_in = forks.generation()

    def take_memory(self, part_bytes: int) -> memoryview:
        """Return uint8[part_bytes] to fill: memory of a part that was sent, or new memory, which costs more than filling it."""
        spare = self._spare.pop() if self._spare else None
        return spare if spare is not None and len(spare) == part_bytes else bytes_buffer(part_bytes)

    def next_part_bytes(self, part_bytes: int) -> int:
        """Return the size of the next part in bytes, if the first ones have `part_bytes`."""
        return part_bytes * (1 + len(self._lengths) // PARTS_PER_STEP)

    def send(self, body: Buffer, memory: memoryview | None = None) -> None:
        """Send one part; waits while too many are in flight.

        Args:
            body: The part; it must not change until the upload has ended.
            memory: The memory of the part, if it came from ``take_memory``; the upload owns it from now on.

        Raises:
            StoreError: This part or an earlier one failed.
            ConfigError: The upload has as many parts as it may have.
        """
        if len(self._lengths) >= PARTS_MAX:
            raise ConfigError(f"{self._key!r} needs more than {PARTS_MAX} parts", hint="begin with a larger part_bytes")
        if self.upload_id is None:
            self.started = True
            create = CreateMultipart(self._key, self._claim, self._checksum, self._headers, self._tags)
            self._in_flight.submit(create, 0)
            self._collect()
            _watch(self)
        length = len(body)
        while self._is_full(length):
            self._window.starving()
            self._collect()
        assert self.upload_id is not None
        self._lengths.append(length)
        crc = self._hasher.add(body) if self._hasher is not None else None
        self._pending_bytes += length
        self._window.started(time.monotonic())
        number = len(self._lengths)
        if memory is not None:
            self._memory[number] = memory
        self._in_flight.submit(PutPart(self._key, self.upload_id, number, body, crc), number)

    def _is_full(self, length: int) -> bool:
        count = len(self._in_flight)
        return count >= self._window.limit or (count > 0 and self._pending_bytes + length > PENDING_BYTES_MAX)

    def _collect(self) -> Completion:
        number, completion = self._in_flight.wait()
        self._note(number, completion)
        if completion.error is not None:
            raise completion.error
        return completion

    def _note(self, number: int, completion: Completion) -> None:
        if number:
            length, throttled = self._lengths[number - 1], any(attempt.throttled for attempt in completion.attempts)
            self._pending_bytes -= length
            self._window.completed(length, time.monotonic(), throttled=throttled)
            if (memory := self._memory.pop(number, None)) is not None:
                self._spare.append(memory)
        if completion.error is None:
            if number:
                self._parts[number] = completion.value
            else:
                self.upload_id = completion.value

    def commit(self) -> ObjectInfo:
        """Wait for the parts, then make the object visible.

        Raises:
            ChecksumError: The object is visible, but the store keeps another checksum of it than that of the bytes sent.
            StoreError: A part or the commit failed; the caller then aborts.

        Cost: One request; one more, once for each store, if the answer does not tell the checksum.
        """
        while self._in_flight:
            self._spare.clear()
            self._collect()
        assert self.upload_id is not None
        parts = tuple(self._parts[number] for number in sorted(self._parts))
        operation = CompleteMultipart(self._key, self.upload_id, parts, self._if_absent, self._checksum, self._if_match)
        info = complete(self._core, operation, sum(self._lengths), claim=self._claim)
        self._ending = self._committed_or_dropped = True
        if self._hasher is not None:
            self._check_kept(info, self._hasher)
        return info

    def _check_kept(self, info: ObjectInfo, sent: Hasher) -> None:
        """Compare the checksum that the store keeps of the object with that of the bytes that were sent."""
        core = self._core
        if "crc32c" not in info.checksums and core not in _held:
            with suppress(StoreError):  # credentials that may write need not be allowed to read
                found = perform(core, Head(self._key)).info
                if found is not None and found.etag == info.etag:
                    info = found
        _held.add(core)
        if "crc32c" not in info.checksums:
            return
        try:
            checksums.check("crc32c", sent, info.checksums["crc32c"])
        except ChecksumError:
            _wrong.add(core)
            raise ChecksumError(
                f"{core.describe(self._key)} was written, but the store keeps the crc32c {info.checksums['crc32c']}, "
                f"and the crc32c of the bytes sent is {checksums.text(sent)}",
                hint="write it again: this process no longer asks this store for checksums; upload_checksums=False is for "
                "stores that compute them wrongly",
                retryable=False,
            ) from None

    @property
    def finished(self) -> bool:
        """Whether it was committed or dropped; always true in a forked child, because the upload is the parent's."""
        return self._committed_or_dropped or self._made_in != forks.generation()

    def abort(self, wait_s_max: float | None = None) -> None:
        """Cancel the parts in flight, wait until they have ended, and let the store drop the upload. Never raises; idempotent.

        It waits first, at most `wait_s_max` or ``ABORT_S_MAX`` seconds, because S3 may keep a part that arrives afterwards,
        and bill it.
        """
        if self._ending or self.finished:
            return
        self._ending = True
        try:
            with suppress(PenstockError, Empty):  # the upload or the store is gone; nothing is visible either way
                self._drop(time.monotonic() + (ABORT_S_MAX if wait_s_max is None else wait_s_max))
        finally:
            self._in_flight.cancel()
            self._committed_or_dropped = True

    def _drop(self, until_s: float) -> None:
        self._in_flight.cancel()
        while self._in_flight:
            number, completion = self._in_flight.wait(max(0.0, until_s - time.monotonic()))
            self._note(number, completion)
        if self.upload_id is not None:
            self._in_flight.submit(AbortMultipart(self._key, self.upload_id), 0)
            self._in_flight.wait(max(0.0, until_s - time.monotonic()))


_open: weakref.WeakSet[Upload] = weakref.WeakSet()
_hooked = False


def _watch(upload: Upload) -> None:
    """Abort `upload` if the process ends.

    Exit hooks run newest first, so this one is registered here, after the store's threads have registered theirs.
    """
    global _hooked
    _open.add(upload)
    if not _hooked:
        _hooked = True
        atexit.register(_at_exit)


def _at_exit() -> None:
    until = time.monotonic() + EXIT_S_MAX
    for upload in list(_open):
        if upload.started:
            upload.abort(
                max(0.0, until - time.monotonic())
            )  # in this thread: from Python 3.12 on, no other can be started


def drop(upload: Upload) -> None:
    """Abort `upload` on a thread of its own; for finalisers.

    Finalisers run anywhere, even on an engine's thread, so they must not wait. ``threading.Thread`` takes a lock that the
    interrupted code may hold; ``_thread`` takes none.
    """
    if upload.started and not upload.finished:
        with suppress(RuntimeError):  # the interpreter no longer starts threads
            _thread.start_new_thread(upload.abort, ())
