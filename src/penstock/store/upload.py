"""Multipart uploads: parts in flight, and the two ways they end; and ``write``, which needs no more.

What was sent becomes visible by ``commit()`` and by nothing else.
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

from penstock import forks
from penstock.buffers import bytes_buffer
from penstock.config import MIB
from penstock.errors import ChecksumError, ConfigError, ObjectExistsError, PenstockError, StoreError
from penstock.store import checksums
from penstock.store.inflight import InFlight
from penstock.store.waiting import perform
from penstock.types import AbortMultipart, CompleteMultipart, CreateMultipart, Head, ObjectInfo, Part, Put, PutPart

if TYPE_CHECKING:
    from penstock.store.checksums import Hasher
    from penstock.types import Buffer, Completion, Core, Key

PART_BYTES = 8 * MIB
"""First part's size: 90 ms at 90 MB/s, so a request's 30 ms to the first byte cost a quarter; 4 in flight hide it."""

PARTS_MAX = 10_000
PARTS_PER_STEP = 75
"""Parts grow by one ``part_bytes`` every 75: 10 000 parts then hold S3's largest object, 5 TiB; the last has 1 GiB."""

REQUESTS_MAX = 4
"""Parts in flight per writer."""

PENDING_BYTES_MAX = 256 * MIB
"""Bytes of parts in flight per writer, so that the large parts of huge objects go up one at a time."""

ABORT_S_MAX = 10.0
"""Seconds that giving up may take: Ctrl-C must come back also when the store does not answer."""

EXIT_S_MAX = 2.0
"""Seconds that the end of the process waits for uploads to be dropped."""


# ── whole objects ───────────────────────────────────────────────────────────────────────────────────────────────────


def write(core: Core, key: Key, data: Buffer, *, if_absent: bool = False, part_bytes: int = PART_BYTES) -> ObjectInfo:
    """Store `data` as one object: one ``Put`` up to two parts' size, else a multipart upload of views of `data`.

    Raises:
        ObjectExistsError: `if_absent`, and there is an object of that key.
        ConfigError: `data` is not contiguous bytes.

    Cost: no copy of `data`; one request, or one per part and two; one more after a lost answer, with `if_absent`.
    """
    view = bytes_of(data)
    if len(view) <= 2 * part_bytes:
        claim = _claim(if_absent=if_absent)
        try:
            info = perform(core, Put(key, view, if_absent, claim)).info
        except ObjectExistsError as error:
            info = _own(core, key, claim, error)
        return info or ObjectInfo(key, len(view))
    upload = Upload(core, key, if_absent=if_absent)
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


def bytes_of(data: Buffer) -> memoryview:
    """uint8[n] of any contiguous buffer.

    Raises:
        ConfigError: it is none.
    """
    try:
        view = memoryview(data)
        if view.nbytes == 0:  # cast refuses zeros in shapes
            return memoryview(b"")
        return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")
    except (TypeError, ValueError) as error:
        raise ConfigError(f"data must be contiguous bytes, not {type(data).__name__}: {error}") from error


# ── the end of an upload ────────────────────────────────────────────────────────────────────────────────────────────


def _claim(*, if_absent: bool) -> str:
    """What tells this write's object from all others, where there may be one already."""
    return secrets.token_hex(16) if if_absent else ""


def _own(core: Core, key: Key, claim: str, error: ObjectExistsError) -> ObjectInfo | None:
    """The object whose existence is `error`, if it is this write's: the answer to an earlier attempt was lost."""
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
    """Commit an upload of `size_bytes` in all.

    A commit whose answer was lost is asked for again by ``Retrying``, and then there is no such upload any more: it has
    become the object. Whether it has is told by the object, for somebody may also have dropped the upload. With
    ``if_absent`` the store may say instead that there is an object: `claim` tells whose.

    Raises:
        StoreError: it is not committed, as far as the store can tell.

    Cost: one request; one more after a lost answer.
    """
    key = operation.key
    try:
        info = perform(core, operation).info
    except ObjectExistsError as error:
        info = _own(core, key, claim, error)
    except StoreError as error:
        if error.code != "NoSuchUpload" or (error.attempts_count or 0) < 2:
            raise
        try:
            found = perform(core, Head(key))
        except StoreError:
            raise error from None
        info = found.info
        ours = info is not None and ((claim and found.value == claim) or _is_etag_of(info.etag or "", operation.parts))
        if info is None or info.size_bytes != size_bytes or not ours:
            raise
    return ObjectInfo(key, size_bytes) if info is None else info._replace(key=key, size_bytes=size_bytes)


def _is_etag_of(etag: str, parts: tuple[Part, ...]) -> bool:
    """Whether `etag` is the one that S3 gives an object of `parts`: the MD5 of theirs, and their number.

    The number alone would also fit the object's last version, if that had the same size. Where parts have ETags of
    another kind (some encryptions, some stores), nothing tells, and the answer is no.
    """
    try:
        digests = b"".join(bytes.fromhex(part.etag.strip('"')) for part in parts)
    except ValueError:
        return False
    digest = hashlib.md5(digests, usedforsecurity=False).hexdigest()
    return etag.strip('"').lower() == f"{digest}-{len(parts)}"


# ── streams ─────────────────────────────────────────────────────────────────────────────────────────────────────────


_held: weakref.WeakSet[Core] = weakref.WeakSet()
"""Stores whose checksum of an object in parts was compared once with that of the bytes sent, or that keep none."""
_wrong: weakref.WeakSet[Core] = weakref.WeakSet()
"""Stores that kept another one: they are asked for none any more, for nothing that has it could be read again."""


class Upload:
    """One multipart upload. It knows nothing of its writer, and outlives it. For one thread at a time.

    Attributes:
        begun: Something was sent: there is something to commit or to drop.
        finished: It was committed or dropped; always so in a forked child, where it is the parent's.
    """

    def __init__(self, core: Core, key: Key, *, if_absent: bool) -> None:
        self._core = core
        self._key = key
        self._if_absent = if_absent
        self._claim = _claim(if_absent=if_absent)
        self._checksum = getattr(core, "keeps_checksums", False) and core not in _wrong
        self._hasher = checksums.hasher("crc32c") if self._checksum else None
        self._in_flight: InFlight[int] = InFlight(core)
        self._upload_id: str | None = None
        self.begun = False
        self._pending_bytes = 0
        self._memory: dict[int, memoryview] = {}  # of parts in flight, to be used again
        self._spare: list[memoryview] = []
        self._lengths: list[int] = []
        self._parts: dict[int, Part] = {}
        self._ending = False
        self._committed_or_dropped = False
        self._made_in = forks.generation()

    @property
    def upload_id(self) -> str | None:
        """The store's name of it; None before the first part."""
        return self._upload_id

    def take_memory(self, part_bytes: int) -> memoryview:
        """uint8[part_bytes], writable: that of a part which has gone, else new. Fresh memory costs more than filling it."""
        spare = self._spare.pop() if self._spare else None
        return spare if spare is not None and len(spare) == part_bytes else bytes_buffer(part_bytes)

    def next_part_bytes(self, part_bytes: int) -> int:
        """Size of the next part."""
        return part_bytes * (1 + len(self._lengths) // PARTS_PER_STEP)

    def send(self, body: Buffer, memory: memoryview | None = None) -> None:
        """Send one part; waits while too many are in flight. `body` must stay as it is until the upload has ended.

        Args:
            body: The part.
            memory: In which it lies, where it came from ``take_memory``: the upload's again from now on.

        Raises:
            StoreError: of this part or an earlier one.
        """
        if len(self._lengths) >= PARTS_MAX:
            raise ConfigError(f"{self._key!r} needs more than {PARTS_MAX} parts", hint="begin with a larger part_bytes")
        if self._upload_id is None:
            self.begun = True
            self._in_flight.submit(CreateMultipart(self._key, self._claim, self._checksum), 0)
            self._collect()
            _watch(self)
        length = len(body)
        while self._is_full(length):
            self._collect()
        assert self._upload_id is not None
        self._lengths.append(length)
        if self._hasher is not None:
            self._hasher.update(body)
        self._pending_bytes += length
        number = len(self._lengths)
        if memory is not None:
            self._memory[number] = memory
        self._in_flight.submit(PutPart(self._key, self._upload_id, number, body), number)

    def _is_full(self, length: int) -> bool:
        count = len(self._in_flight)
        return count >= REQUESTS_MAX or (count > 0 and self._pending_bytes + length > PENDING_BYTES_MAX)

    def _collect(self) -> Completion:
        number, completion = self._in_flight.wait()
        self._note(number, completion)
        if completion.error is not None:
            raise completion.error
        return completion

    def _note(self, number: int, completion: Completion) -> None:
        if number:
            self._pending_bytes -= self._lengths[number - 1]
            if (memory := self._memory.pop(number, None)) is not None:
                self._spare.append(memory)
        if completion.error is None:
            if number:
                self._parts[number] = completion.value
            else:
                self._upload_id = completion.value

    def commit(self) -> ObjectInfo:
        """Wait for the parts, then make the object visible.

        Raises:
            ChecksumError: the object is visible, but the store keeps another checksum of it than that of the bytes sent.
            StoreError: of any part, or of the commit; the caller then aborts.

        Cost: one request; one more where the store does not tell the checksum, once for each store.
        """
        while self._in_flight:
            self._spare.clear()
            self._collect()
        assert self._upload_id is not None
        parts = tuple(self._parts[number] for number in sorted(self._parts))
        operation = CompleteMultipart(self._key, self._upload_id, parts, self._if_absent, self._checksum)
        info = complete(self._core, operation, sum(self._lengths), claim=self._claim)
        self._ending = self._committed_or_dropped = True
        if self._hasher is not None:
            self._check_kept(info, self._hasher)
        return info

    def _check_kept(self, info: ObjectInfo, sent: Hasher) -> None:
        """Compare the checksum that the store keeps of the object with that of what was sent."""
        core = self._core
        if "crc32c" not in info.checksums and core not in _held:
            with suppress(StoreError):  # who may write need not be allowed to look
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
                f"{core.describe(self._key)} was written, but the store keeps the crc32c {info.checksums['crc32c']} of it, "
                f"and that of the bytes sent is {checksums.text(sent)}",
                hint="write it again: this process asks this store for no checksums any more; upload_checksums=False "
                "is for stores that compute them wrongly",
                retryable=False,
            ) from None

    @property
    def finished(self) -> bool:
        """See the class."""
        return self._committed_or_dropped or self._made_in != forks.generation()

    def abort(self) -> None:
        """Give up the parts in flight, wait until they are, and have the store drop the others; idempotent, no error.

        Waiting first: S3 may keep a part that arrives after the abort, and bill it. At most ``ABORT_S_MAX``.
        """
        if self._ending or self.finished:
            return
        self._ending = True
        try:
            with suppress(PenstockError, Empty):  # gone already, or the store is: nothing is visible either way
                self._drop(time.monotonic() + ABORT_S_MAX)
        finally:
            self._in_flight.cancel()
            self._committed_or_dropped = True

    def _drop(self, until_s: float) -> None:
        self._in_flight.cancel()
        while self._in_flight:
            number, completion = self._in_flight.wait(max(0.0, until_s - time.monotonic()))
            self._note(number, completion)
        if self._upload_id is not None:
            self._in_flight.submit(AbortMultipart(self._key, self._upload_id), 0)
            self._in_flight.wait(max(0.0, until_s - time.monotonic()))


_open: weakref.WeakSet[Upload] = weakref.WeakSet()
_hooked = False


def _watch(upload: Upload) -> None:
    """Have `upload` aborted when the process ends.

    The hook is set here, after the store's own threads began and set theirs: hooks run newest first.
    """
    global _hooked
    _open.add(upload)
    if not _hooked:
        _hooked = True
        atexit.register(_at_exit)


def _at_exit() -> None:
    waiting = [upload for upload in _open if not upload.finished]
    for upload in waiting:
        drop(upload)
    until = time.monotonic() + EXIT_S_MAX
    while time.monotonic() < until and not all(upload.finished for upload in waiting):
        time.sleep(0.01)


def drop(upload: Upload) -> None:
    """Abort on a thread of its own: for finalisers.

    They run anywhere, also on an engine's thread, so they must not wait. ``threading.Thread`` takes a lock that the
    interrupted code may hold; ``_thread`` takes none.
    """
    if upload.begun and not upload.finished:
        with suppress(RuntimeError):  # the interpreter is past starting threads
            _thread.start_new_thread(upload.abort, ())
