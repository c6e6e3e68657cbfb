"""Stores results in the directory of the node's cache, under its limits, or nowhere.

A result consists of blocks and of a record, which names the run that produced them. Blocks of different runs have different
names, so the blocks of a killed process are never mixed with those of another run. The record is written when the first
block is full, so that other processes of the node can follow the run, and again when the result is complete.

All methods may be called from any thread. Methods that use the disk for longer than a system call are meant for a thread
of a pool.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache.config import CacheConfig
from penstock.cache.directory import BlockRead, CacheDirectory, NewEntry, folders
from penstock.cache.entry import (
    BLOCK,
    RESULT,
    SUFFIXES,
    CorruptEntryError,
    block_name,
    check_data,
    decode,
    digest_of,
    encode,
    header_bytes_of,
)
from penstock.cache.eviction import Evictor
from penstock.cache.maintenance import open_directory
from penstock.cache.statistics import Counts
from penstock.checksums.crc32c import crc32c
from penstock.gateway.results.identity import ResultName, record_entry
from penstock.gateway.results.record import BadRecordError, ResultRecord, decode_record, is_pointer
from penstock.memory.buffers import small_buffer
from penstock.system.private import is_trusted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from penstock.cache.entry import EntryName

_GAP_COUNT_MAX = 64
"""Blocks are stored by a few threads, so a killed run leaves gaps of a few blocks at its end, but none as long as this."""

_LEASE_DIGITS = 15
_TOUCH_S = 600.0
_MARKED_COUNT_MAX = 16_384
_LIMITLESS_BYTES = 1 << 62


class RunBlocks(NamedTuple):
    """The blocks of one run: their identity, and its digest."""

    identity: bytes
    digest: str


class ResultStorage:
    """Where the blocks and records of results are kept.

    This class keeps nothing: results are shared only while they are produced or in the memory of recent blocks.

    Args:
        block_bytes: Size of a full block.
        namespace: ``CacheConfig.namespace`` of the entries.

    Attributes:
        block_bytes: Size of a full block.
        result_bytes_max: Size in bytes from which a result is not kept, because it would evict its own blocks.
    """

    result_bytes_max = 0

    def __init__(self, block_bytes: int, *, namespace: str = "") -> None:
        self.block_bytes = block_bytes
        self._namespace = namespace

    def blocks_of(self, name: ResultName, run: str) -> RunBlocks:
        """Return the identity of the blocks of a run."""
        identity = name.blocks_identity(self._namespace, run, self.block_bytes)
        return RunBlocks(identity, digest_of(identity))

    def find(self, name: ResultName) -> ResultRecord | None:
        """Return the record of a result, complete or not. Cost: one system call if there is none, four if there is one."""
        return None

    def put_block(self, blocks: RunBlocks, index: int, data: memoryview) -> tuple[int, bool]:
        """Store a block, and return its CRC-32C and whether it was stored. Cost: as ``CacheDirectory.write``."""
        return crc32c(data), False

    def put_result(
        self, blocks: RunBlocks, data: memoryview, record_of: Callable[[int], ResultRecord]
    ) -> tuple[int, bool]:
        """Store a result of one block with its record at once, and return its CRC-32C and whether both were stored.

        Args:
            blocks: The blocks of the run.
            data: The result.
            record_of: Returns the record for a CRC-32C.
        """
        return crc32c(data), False

    def put_record(self, record: ResultRecord) -> bool:
        """Store a record in place of an earlier one, and return whether it was stored."""
        return False

    def read(self, blocks: RunBlocks, index: int, size_bytes: int, start: int, view: memoryview) -> bool:
        """Fill `view` from a block, beginning with its byte `start`; False if the block is missing or corrupt."""
        return False

    def read_at_once(self, blocks: RunBlocks, size_bytes: int) -> memoryview | None:
        """Return a result of one block, verified, if the page cache has it; else None.

        Cost: four system calls, none of which waits for the disk if the file's name was looked up before.
        """
        return None

    def has_block(self, blocks: RunBlocks, index: int) -> bool:
        """Whether a full block is stored; the last block of a result may be shorter. Cost: one system call."""
        return False

    def remove(self, record: ResultRecord) -> None:
        """Remove a result: its record, if that is still the same, and its blocks."""

    def remove_blocks(self, blocks: RunBlocks, count: int | None) -> None:
        """Remove the blocks of a run; without a count, as many as there are. Cost: two system calls for each block."""

    def mark_used(self, name: ResultName) -> None:
        """Mark a result as used now. Cost: one system call."""

    def unused_s(self, name: ResultName) -> float | None:
        """Return the time since a result was last used, in seconds; None if there is no record. Cost: one system call."""
        return None

    def try_lease(self, name: ResultName) -> bool:
        """Take the right to produce a result; False if another process of the node has it."""
        return True

    def release_lease(self, name: ResultName) -> None:
        """Give the right back."""

    def close(self) -> None:
        """Release the resources of the storage; idempotent."""


class DirectoryStorage(ResultStorage):
    """Keeps results as entries of a cache directory.

    Args:
        directory: The directory. It evicts results as it evicts blocks: those that were not used for longest first.
        config: The configuration of the directory's cache.
    """

    def __init__(self, directory: CacheDirectory, config: CacheConfig) -> None:
        super().__init__(config.block_bytes, namespace=config.namespace)
        self.directory = directory
        self.result_bytes_max = config.bytes_max // 2
        self._marked_s: dict[str, float] = {}  # when blocks that were read at once were last marked as used

    def find(self, name: ResultName) -> ResultRecord | None:
        """Return the record of a result, complete or not."""
        identity = name.record_identity(self._namespace)
        found = self.directory.read_entry(record_entry(identity)[0], identity)
        if found is None or found[0].kind != RESULT:
            return None
        try:
            record = decode_record(found[1])
        except BadRecordError:
            return None
        # Blocks of another size have another identity, so they cannot be read.
        return record if record.block_bytes == self.block_bytes else None

    def put_block(self, blocks: RunBlocks, index: int, data: memoryview) -> tuple[int, bool]:
        """Store a block, and return its CRC-32C and whether it was stored. Cost: as ``CacheDirectory.write``."""
        crc, entry = self._block_entry(blocks, index, data)
        return crc, self.directory.write([entry]) == 1

    def _block_entry(self, blocks: RunBlocks, index: int, data: memoryview) -> tuple[int, NewEntry]:
        header = encode(BLOCK, blocks.identity, data, block_index=index, block_bytes=self.block_bytes)
        entry = NewEntry(block_name(blocks.digest, index), data, len(header) + len(data), lambda: header)
        return decode(header).data_crc, entry

    def put_result(
        self, blocks: RunBlocks, data: memoryview, record_of: Callable[[int], ResultRecord]
    ) -> tuple[int, bool]:
        """Store a result of one block with its record at once, and return its CRC-32C and whether both were stored."""
        crc, entry = self._block_entry(blocks, 0, data)
        return crc, self.directory.write([entry, self._record_entry(record_of(crc))]) == 2

    def put_record(self, record: ResultRecord) -> bool:
        """Store a record in place of an earlier one, and return whether it was stored."""
        return self.directory.write([self._record_entry(record)]) == 1

    def _record_entry(self, record: ResultRecord) -> NewEntry:
        """Return the entry of a record, and remove an earlier one."""
        identity = record.name.record_identity(self._namespace)
        name = record_entry(identity)[0]
        data = record.encode()
        self.directory.remove(name)  # this subtracts it from the number of its folder
        size_bytes = header_bytes_of(identity, len(data)) + len(data)
        return NewEntry(name, memoryview(data), size_bytes, lambda: encode(RESULT, identity, data))

    def read(self, blocks: RunBlocks, index: int, size_bytes: int, start: int, view: memoryview) -> bool:
        """Fill `view` from a block, beginning with its byte `start`; False if the block is missing or corrupt."""
        wanted = BlockRead(block_name(blocks.digest, index), index, size_bytes, start, view)
        return self.directory.read_blocks(blocks.identity, [wanted])[0]

    def read_at_once(self, blocks: RunBlocks, size_bytes: int) -> memoryview | None:
        """Return a result of one block, verified, if the page cache has it; else None."""
        head = bytearray(header_bytes_of(blocks.identity, size_bytes))
        view = small_buffer(size_bytes)[:size_bytes]
        path = self.directory.entries + block_name(blocks.digest, 0).path
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            if os.preadv(fd, [head, view], 0, os.RWF_NOWAIT) != len(head) + size_bytes or not is_trusted(os.fstat(fd)):
                return None
            header = decode(head)
            check_data(header, view)
            self._mark_block_used(fd, blocks)
        except (OSError, CorruptEntryError):
            return None  # a thread reads it again, and reports what is wrong
        finally:
            os.close(fd)
        return view if (header.identity, header.block_index) == (blocks.identity, 0) else None

    def _mark_block_used(self, fd: int, blocks: RunBlocks) -> None:
        now_s = time.monotonic()
        if now_s - self._marked_s.get(blocks.digest, -_TOUCH_S) >= _TOUCH_S:
            if len(self._marked_s) >= _MARKED_COUNT_MAX:
                self._marked_s.clear()
            self._marked_s[blocks.digest] = now_s
            with suppress(OSError):  # read-only: other processes then maintain the order of use
                os.utime(fd)

    def has_block(self, blocks: RunBlocks, index: int) -> bool:
        """Whether a full block is stored."""
        file_bytes = header_bytes_of(blocks.identity, self.block_bytes) + self.block_bytes
        try:
            path = self.directory.entries + block_name(blocks.digest, index).path
            return os.stat(path).st_size == file_bytes  # noqa: PTH116 - paths are text here
        except OSError:
            return False

    def remove(self, record: ResultRecord) -> None:
        """Remove a result: its record, if that is still the same, and its blocks."""
        name = record.name
        current = self.find(name)
        if current is not None and current.run == record.run:
            self.directory.remove(record_entry(name.record_identity(self._namespace))[0])
        self.remove_blocks(self.blocks_of(name, record.run), record.blocks_count if record.is_complete else None)

    def remove_blocks(self, blocks: RunBlocks, count: int | None) -> None:
        """Remove the blocks of a run; without a count, as many as there are. Cost: two system calls for each block."""
        index = missing_count = 0
        while index < count if count is not None else missing_count < _GAP_COUNT_MAX:
            existed = self.directory.remove(block_name(blocks.digest, index))
            missing_count = 0 if existed else missing_count + 1
            index += 1

    def mark_used(self, name: ResultName) -> None:
        """Mark a result as used now."""
        with suppress(
            OSError
        ):  # it is gone or read-only, or another user's: other processes then maintain the order of use
            os.utime(self._record_path(name), follow_symlinks=False)

    def unused_s(self, name: ResultName) -> float | None:
        """Return the time since a result was last used, in seconds; None if there is no record."""
        try:
            return time.time() - os.stat(self._record_path(name)).st_mtime  # noqa: PTH116 - paths are text here
        except OSError:
            return None

    def _record_path(self, name: ResultName) -> str:
        return self.directory.entries + record_entry(name.record_identity(self._namespace))[0].path

    def try_lease(self, name: ResultName) -> bool:
        """Take the right to produce a result; also True if leases are not available."""
        return self.directory.leases.try_take(self._lease_number(name)) is not False

    def release_lease(self, name: ResultName) -> None:
        """Give the right back."""
        self.directory.leases.release(self._lease_number(name))

    def _lease_number(self, name: ResultName) -> int:
        return int(record_entry(name.record_identity(self._namespace))[1][:_LEASE_DIGITS], 16)

    def close(self) -> None:
        """Close the shared files of the directory; idempotent."""
        self.directory.close()


def open_storage(config: CacheConfig | None, *, block_bytes: int = 1 << 20) -> ResultStorage:
    """Return storage in the directory of a cache, which is created if necessary; without a configuration, none.

    Args:
        config: The node's cache. The same directory may be open elsewhere in this process, and in other processes.
        block_bytes: Size of a block in memory if there is no cache.

    Raises:
        ConfigError: Other users could have put files into the directory.
    """
    if config is None:
        return ResultStorage(block_bytes)
    counts = Counts()
    directory = CacheDirectory(config, counts)
    directory.reserve = Evictor(directory, config, counts).reserve
    directory.prepare()
    return DirectoryStorage(directory, config)


# ── for those who look after a directory ─────────────────────────────────────────────────────────────────────────────


class KeptResult(NamedTuple):
    """A result in a cache directory, or in the bucket of results.

    Attributes:
        record: Record of the result, whose size is None if it was never completed and not announced.
        used_s: Time of its last use in the cache, known to 10 minutes, or when it was stored in the bucket, in seconds since
            1970.
        namespace: ``CacheConfig.namespace`` of its entries.
    """

    record: ResultRecord
    used_s: float
    namespace: str = ""

    @property
    def unused_s(self) -> float:
        """Time since then, in seconds."""
        return max(0.0, time.time() - self.used_s)


def iter_kept(path: str | os.PathLike[str]) -> Iterator[KeptResult]:
    """Iterate over the results that a cache directory keeps, complete or not, in no order.

    Args:
        path: The cache directory.

    Raises:
        ConfigError: `path` is not a cache directory.

    Cost: one scan of the directory, and four system calls for each result.
    """
    return _iter_kept(open_directory(path))


def _iter_kept(directory: CacheDirectory) -> Iterator[KeptResult]:
    try:
        for folder in folders():
            for used_s, _, name in directory.scan(folder):
                found = _kept(directory, name, used_s)
                if found is not None:
                    yield found
    finally:
        directory.close()


def _kept(directory: CacheDirectory, name: EntryName, used_s: float) -> KeptResult | None:
    if not name.file.endswith(f".{SUFFIXES[RESULT]}"):
        return None
    found = directory.read_entry(name)
    if found is None or found[0].kind != RESULT:
        return None
    try:
        record = decode_record(found[1])
    except BadRecordError:
        return None
    if is_pointer(record):
        return None
    return KeptResult(record, used_s, found[0].identity.partition(b"\0")[0].decode())


def remove_kept(path: str | os.PathLike[str], results: Iterable[KeptResult]) -> int:
    """Remove results with their blocks.

    Args:
        path: The cache directory.
        results: Results that ``iter_kept`` returned.

    Returns:
        The number of bytes of the results that were removed, as far as their sizes are known.

    Raises:
        ConfigError: `path` is not a cache directory.

    Cost: two system calls for each block.
    """
    directory = open_directory(path)
    removed_bytes = 0
    try:
        for each in results:
            config = CacheConfig(path, _LIMITLESS_BYTES, block_bytes=each.record.block_bytes, namespace=each.namespace)
            DirectoryStorage(directory, config).remove(each.record)
            removed_bytes += each.record.size_bytes or 0
    finally:
        directory.close()
    return removed_bytes
