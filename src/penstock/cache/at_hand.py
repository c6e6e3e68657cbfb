"""Reading what needs neither the store nor the disk nor another thread, for event loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.cache.directory import BlockRead
from penstock.cache.entry import block_name
from penstock.memory.buffers import small_buffer

if TYPE_CHECKING:
    from penstock.cache.context import CacheContext
    from penstock.types import ByteRange, ObjectInfo


def read_at_hand(context: CacheContext, info: ObjectInfo, wanted: ByteRange) -> memoryview | None:
    """Return a range of one version; see ``Cached.read_nowait``."""
    if info.etag is None:
        return None
    identity, digest = context.identities.of_version(info.key, info.etag)
    view = small_buffer(wanted.length_bytes)[: wanted.length_bytes]
    block_bytes = context.config.block_bytes
    index, begin = divmod(wanted.start, block_bytes)
    start = wanted.start - begin
    if wanted.end <= start + block_bytes:  # most objects lie in one block
        size_bytes = min(block_bytes, info.size_bytes - start)
        blocks = [BlockRead(block_name(digest, index), index, size_bytes, begin, view)]
    else:
        blocks = blocks_of(wanted, view, digest, size_bytes=info.size_bytes, block_bytes=block_bytes)
    return view if context.directory.read_blocks_nowait(identity, blocks) else None


def blocks_of(
    wanted: ByteRange, view: memoryview, digest: str, *, size_bytes: int, block_bytes: int
) -> list[BlockRead]:
    """Return the reads that fill a view with a range of an object.

    Args:
        wanted: The range.
        view: uint8[wanted], writable.
        digest: Digest of the identity of the object's version.
        size_bytes: Size of the object.
        block_bytes: Size of a full block.
    """
    found = []
    for index in range(wanted.start // block_bytes, (wanted.end - 1) // block_bytes + 1):
        start, end = index * block_bytes, min((index + 1) * block_bytes, size_bytes)
        begin, stop = max(start, wanted.start), min(end, wanted.end)
        part = view[begin - wanted.start : stop - wanted.start]
        found.append(BlockRead(block_name(digest, index), index, end - start, begin - start, part))
    return found
