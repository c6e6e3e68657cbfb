"""The memory in which results are produced, and the blocks that are kept there for a while because readers are near them."""

from __future__ import annotations

import mmap
from collections import OrderedDict, deque
from typing import NamedTuple

from penstock.config import MIB
from penstock.memory import buffers

_FREE_BYTES_MAX = 32 * MIB
"""Memory that is kept for the next blocks. A new mmap costs a page fault per 4 KiB: 150 µs per MiB."""


class BlockPool:
    """Memory for blocks, each at the start of a page, so that whole blocks can be written past the page cache.

    Args:
        block_bytes: Size of a block.
    """

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._free: deque[mmap.mmap] = deque(maxlen=max(1, _FREE_BYTES_MAX // block_bytes))

    def take(self) -> memoryview:
        """Return a block: uint8[block_bytes], writable, with undefined contents. It is free again when nothing refers to it."""
        try:
            owner = self._free.pop()
        except IndexError:
            owner = mmap.mmap(-1, self.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return buffers.lease(owner, self._free, owner)


class BlockKey(NamedTuple):
    """A block of one run: the digest of the run's blocks, and the number of the block."""

    digest: str
    number: int


class RecentBlocks:
    """The blocks that were produced last, up to `bytes_max` bytes. Only the event loop's thread uses it.

    Blocks are written past the page cache, so readers that are a little behind, and the next ranges of a client that reads in
    ranges, would otherwise read them back from the disk.

    Args:
        bytes_max: Largest memory of all blocks together.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._blocks: OrderedDict[BlockKey, memoryview] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, digest: str, index: int) -> memoryview | None:
        """Return a block as uint8[n], read-only; None if it is not here."""
        key = BlockKey(digest, index)
        block = self._blocks.get(key)
        if block is not None:
            self._blocks.move_to_end(key)
        return block

    def put(self, digest: str, index: int, block: memoryview) -> None:
        """Keep a block, and drop those that were used least recently."""
        self.drop(digest, index)
        self._blocks[BlockKey(digest, index)] = block
        self._bytes += _held_bytes(block)
        while self._bytes > self._bytes_max:
            _, oldest = self._blocks.popitem(last=False)
            self._bytes -= _held_bytes(oldest)

    def drop(self, digest: str, index: int) -> None:
        """Forget a block; nothing happens if it is not here."""
        block = self._blocks.pop(BlockKey(digest, index), None)
        if block is not None:
            self._bytes -= _held_bytes(block)

    def drop_run(self, digest: str) -> None:
        """Forget all blocks of a run."""
        for key in [key for key in self._blocks if key.digest == digest]:
            self.drop(*key)

    def clear(self) -> None:
        """Forget everything."""
        self._blocks.clear()
        self._bytes = 0


def _held_bytes(block: memoryview) -> int:
    """Return the memory that a block keeps alive: a small result is the beginning of a larger buffer."""
    return memoryview(block.obj).nbytes
