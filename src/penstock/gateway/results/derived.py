"""Finished results in a bucket, so that a cluster transforms each object once, and a new gateway starts warm.

::

    PREFIX/3f/3f...e1-RUN       the bytes of a result, as one run of one gateway produced them
    PREFIX/3f/3f...e1.json      its record: size, headers, CRC-32C, and which run; written last, if there is none
    PREFIX/uploads/3f...e1-RUN  a note about a multipart upload that is in progress, so that it can be dropped if it stays

If two gateways produce the same result at once, the one whose record is written first wins, and the other removes its bytes;
both have the same. The bytes are verified by the record's size and checksum when they are read. The bucket is never needed: if
it does not answer, the result is produced.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from penstock.cache.entry import digest_of
from penstock.checksums.crc32c import crc32c
from penstock.config import MIB
from penstock.errors import ChecksumError, ObjectExistsError, ObjectMissingError, PenstockError, SpanError, StoreError
from penstock.gateway.results.record import BadRecordError, ResultRecord, decode_record
from penstock.gateway.results.storage import KeptResult
from penstock.store.inflight import perform
from penstock.types import AbortMultipart, ByteRange

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable

    from penstock.gateway.metrics import Metrics
    from penstock.gateway.objects import ResultWriter
    from penstock.gateway.results.identity import ResultName, ResultPlan
    from penstock.store.base import Store
    from penstock.store.writing import Writer
    from penstock.types import Buffer, ObjectInfo

T = TypeVar("T")

log = logging.getLogger("penstock.gateway")

_PART_BYTES = 4 * MIB
_THREADS_COUNT_MAX = 8
_NAMESPACE = ""  # of a cache directory; a bucket has its prefix

UPLOADS_PREFIX = "uploads/"
"""Prefix of the notes about multipart uploads."""


class Kept(NamedTuple):
    """The outcome of storing a result.

    Attributes:
        outcome: ``stored``; ``present`` if it was there already; ``gone`` if a block of it is not in the cache any more;
            ``failed`` if the bucket did not take it.
        error: Why it failed.
    """

    outcome: Literal["stored", "present", "gone", "failed"]
    error: str = ""


class DerivedKeys(NamedTuple):
    """Where a result lies in the bucket: the key of its record, and the beginning of the keys of its bytes."""

    record: str
    data_prefix: str

    @classmethod
    def of(cls, name: ResultName) -> DerivedKeys:
        """Return the keys of a result."""
        digest = digest_of(name.record_identity(_NAMESPACE))
        return cls(f"{digest[:2]}/{digest}.json", f"{digest[:2]}/{digest}-")

    def data(self, run: str) -> str:
        """Return the key of the bytes that a run produced."""
        return self.data_prefix + run


class DerivedResults:
    """The results in a bucket. All methods run on the event loop unless they say otherwise.

    Args:
        store: The bucket, or a prefix of it. It is closed with this object.
        metrics: Takes the counters.

    Cost: at most 8 threads; 8 MiB for each result that is read, and five parts for each one that is written.
    """

    def __init__(self, store: Store, *, metrics: Metrics) -> None:
        self.store = store
        self._metrics = metrics
        self._executor = ThreadPoolExecutor(_THREADS_COUNT_MAX, thread_name_prefix="penstock-derived")
        self._closed = False

    def _on_thread(self, function: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def find(self, name: ResultName) -> ResultRecord | None:
        """Return the record of a result; None if there is none, or if the bucket does not answer. Cost: one request."""
        try:
            key = DerivedKeys.of(name).record
            blob = await self._on_thread(self.store.read, key)
            try:
                return _record_at(key, blob.data)
            except BadRecordError as error:
                log.warning("The record %s in the bucket of results is removed, because %s", key, error)
                await self._on_thread(self.store.delete, key)  # or no gateway could store this result again
        except ObjectMissingError:
            pass
        except PenstockError as error:
            log.warning(
                "The result of %r is produced, because the bucket of results did not have it: %s", name.key, error
            )
        return None

    async def check(self) -> None:
        """Make sure that the bucket answers.

        Raises:
            PenstockError: It does not exist, or refuses to be listed.
        """
        await self._on_thread(lambda: next(iter(self.store.list(UPLOADS_PREFIX)), None))

    async def copy(self, record: ResultRecord, output: ResultWriter) -> bool:
        """Write the bytes of a result, and verify them.

        Returns:
            False if they are missing or damaged and nothing was written, as always for a result of one part. The record is
            removed then.

        Raises:
            ChecksumError: They do not match the record. The record is removed, so that the result is produced next time.
            PenstockError: They cannot be read.
        """
        name = record.name
        keys = DerivedKeys.of(name)
        assert record.size_bytes is not None
        crc = offset = 0
        try:
            async for part in self._parts(keys.data(record.run), record.size_bytes):
                crc = crc32c(part, crc)
                is_last = offset + len(part) == record.size_bytes
                if not is_last and len(part) != _PART_BYTES:
                    raise ChecksumError(f"{keys.record} has {offset + len(part)} of {record.size_bytes} bytes")
                if is_last and crc != record.crc32c:
                    raise ChecksumError(f"the bytes of {keys.record} do not match its checksum")
                if not offset:
                    output.begin(record.headers, size_bytes=record.size_bytes)
                offset += len(part)
                await output.write(part)
            if not record.size_bytes:
                output.begin(record.headers, size_bytes=0)
        except (ChecksumError, ObjectMissingError, SpanError) as error:
            with suppress(PenstockError):
                await self._on_thread(self.store.delete, [keys.record, keys.data(record.run)])
            self._metrics.add("penstock_gateway_derived_damaged_total")
            if offset:
                raise
            log.warning(
                "The result of %r in the bucket of results is damaged, and produced again: %s", record.key, error
            )
            return False
        self._metrics.add("penstock_gateway_derived_read_bytes_total", record.size_bytes)
        return True

    async def _parts(self, key: str, size_bytes: int) -> AsyncIterator[memoryview]:
        """Iterate over an object in parts, one of which is read ahead."""
        starts = range(0, size_bytes, _PART_BYTES)
        spans = (ByteRange(start, min(size_bytes, start + _PART_BYTES)) for start in starts)
        following = next(spans, None)
        ahead = self._read(key, following) if following is not None else None
        try:
            while ahead is not None:
                part = await ahead
                following = next(spans, None)
                ahead = self._read(key, following) if following is not None else None
                yield part
        finally:
            if ahead is not None:
                ahead.cancel()

    def _read(self, key: str, span: ByteRange) -> asyncio.Future[memoryview]:
        return self._on_thread(lambda: self.store.read(key, span).data)

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def keep(self, record: ResultRecord, blocks: Callable[[int], memoryview | None]) -> Kept:
        """Store a result that is complete.

        Args:
            record: Record of the result.
            blocks: Returns a block by its number, or None if it is gone; called on a thread.

        Returns:
            What became of it.

        Cost: three requests, or a multipart upload and four more.
        """
        try:
            kept = await self._on_thread(self._keep, record, blocks)
        except PenstockError as error:
            log.warning("The result of %r was not stored in the bucket of results: %s", record.key, error)
            kept = Kept("failed", str(error))
        self._metrics.add("penstock_gateway_derived_stores_total", outcome=kept.outcome)
        return kept

    def _keep(self, record: ResultRecord, blocks: Callable[[int], memoryview | None]) -> Kept:
        keys = DerivedKeys.of(record.name)
        with suppress(ObjectMissingError):
            self.store.stat(keys.record)
            return Kept("present")
        key = keys.data(record.run)
        note = UPLOADS_PREFIX + key.rpartition("/")[2]
        writer = self.store.writer(key)
        is_noted = False
        try:
            for index in range(record.blocks_count):
                block = None if self._closed else blocks(index)
                if block is None:
                    writer.abort()
                    return Kept("gone")
                writer.write(block)
                is_noted = is_noted or self._note_upload(note, key, writer)
            writer.close()
        except BaseException:
            writer.abort()
            raise
        finally:
            if is_noted:
                self.store.delete(note)
        try:
            self.store.write(keys.record, record.encode(), if_absent=True)
        except ObjectExistsError:
            self.store.delete(key)
            return Kept("present")
        return Kept("stored")

    def _note_upload(self, note: str, key: str, writer: Writer) -> bool:
        """Write down that an upload is in progress; False if there is none yet."""
        if writer.upload_id is None:
            return False
        self.store.write(note, json.dumps([key, writer.upload_id]).encode())
        return True

    async def close(self) -> None:
        """Abort writes in progress, end the threads and close the store; idempotent."""
        self._closed = True
        await asyncio.to_thread(self._executor.shutdown)
        await asyncio.to_thread(self.store.close)


class DerivedProducer:
    """Produces a result: copies it from the bucket if that has it, else runs the transform.

    Args:
        plan: Describes the result, and how the transform produces it.
        derived: The results in the bucket.

    Attributes:
        has_copied: Whether the bucket had the result.
    """

    __slots__ = ("_derived", "_plan", "has_copied")

    def __init__(self, plan: ResultPlan, derived: DerivedResults) -> None:
        self._plan = plan
        self._derived = derived
        self.has_copied = False

    async def __call__(self, output: ResultWriter) -> None:
        """Write the result; see ``Transform.run``."""
        record = await self._derived.find(self._plan.name)
        self.has_copied = record is not None and await self._derived.copy(record, output)
        if not self.has_copied and self._plan.produce is not None:
            await self._plan.produce(output)


def was_copied(plan: ResultPlan) -> bool:
    """Whether the bucket of results had the result that a plan has produced."""
    return isinstance(plan.produce, DerivedProducer) and plan.produce.has_copied


class DerivedContent(NamedTuple):
    """The contents of a bucket of results, without objects that this module did not write.

    Attributes:
        results: The results.
        leftovers: Remains of gateways that were killed while storing a result: bytes without a record, a record that is
            damaged, or the note about an upload.
    """

    results: list[KeptResult]
    leftovers: list[ObjectInfo]


def read_derived(store: Store) -> DerivedContent:
    """Return the results in a bucket of results.

    Raises:
        StoreError: The bucket cannot be read.

    Cost: a listing, and one request for each result, many at a time.
    """
    infos = {info.key: info for info in store.list() if _OWN_KEY.fullmatch(info.key)}
    known: set[str] = set()
    results = []
    keys = [key for key in infos if key.endswith(".json")]
    for key, blob in zip(keys, store.try_read_many(keys), strict=True):
        if isinstance(blob, StoreError):
            if not isinstance(blob, ObjectMissingError):
                raise blob
            known.add(key)  # it was removed in the meantime
            continue
        with suppress(BadRecordError):
            record = _record_at(key, blob.data)
            results.append(KeptResult(record, infos[key].last_modified_s or 0.0))
            known |= {key, DerivedKeys.of(record.name).data(record.run)}
    return DerivedContent(results, [info for key, info in infos.items() if key not in known])


_DATA_KEY = re.compile(r"[0-9a-f]{2}/[0-9a-f]{32}-\w+")
_OWN_KEY = re.compile(rf"{UPLOADS_PREFIX}[0-9a-f]{{32}}-\w+|[0-9a-f]{{2}}/[0-9a-f]{{32}}\.json|{_DATA_KEY.pattern}")


def _record_at(key: str, data: Buffer) -> ResultRecord:
    """Return the record that lies at `key`. Raises BadRecordError if it is not one of a result that belongs there."""
    record = decode_record(data)
    keys = DerivedKeys.of(record.name)
    if keys.record != key or not record.is_complete or not _DATA_KEY.fullmatch(keys.data(record.run)):
        raise BadRecordError("it does not belong to a result that is stored there")
    return record


def remove_derived(store: Store, records: Iterable[ResultRecord]) -> None:
    """Remove results from a bucket: the records first, so that nobody finds bytes that are missing."""
    keys = [(DerivedKeys.of(each.name), each.run) for each in records]
    store.delete([each.record for each, _ in keys])
    store.delete([each.data(run) for each, run in keys])


def remove_leftovers(store: Store, leftovers: Iterable[ObjectInfo]) -> None:
    """Remove what killed gateways left behind, and drop their uploads."""
    keys = [each.key for each in leftovers]
    for key in keys:
        if key.startswith(UPLOADS_PREFIX):
            with suppress(
                StoreError, ValueError, TypeError, RecursionError
            ):  # the upload may be over, or the note not ours
                name, upload_id = map(str, json.loads(bytes(store.read(key).data)))
                if _DATA_KEY.fullmatch(name):
                    perform(store, AbortMultipart(name, upload_id))
    store.delete(keys)
