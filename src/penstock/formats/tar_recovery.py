"""Implements ``skip_sample`` for tar: parsing continues at the next valid header.

A header only contains the length of its member, so after a corrupt one the parser searches for the next: a block at a
multiple of 512 bytes that contains ``ustar`` and a correct checksum. It skips both the sample before the corrupt bytes and
the first sample after them, because each may lack a member, and half a sample is worse than none. Old archives (v7) do not
contain ``ustar``, so the rest of such an archive is skipped. A tar stored inside a tar looks like a part of it; such a
shard is better read with ``skip_shard``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from penstock.errors import CorruptShardError
from penstock.formats.parsing import OnCorrupt, ShardParser
from penstock.formats.tar_header import BLOCK_BYTES, read_header

if TYPE_CHECKING:
    from penstock.formats.sample import Sample


class RecoveringParser(ShardParser):
    """Base of ``TarParser`` that repeats ``_go_on`` over a chunk until all of it was parsed or skipped."""

    _tail: bytes  # the start of a header that spans chunks

    def __init__(self, shard: str, *, start_offset_bytes: int = 0, on_corrupt: OnCorrupt = "raise") -> None:
        super().__init__(shard, start_offset_bytes=start_offset_bytes, on_corrupt=on_corrupt)
        self._lost_offset_bytes: int | None = None  # offset from which no header has been found yet
        self._partial = False  # whether the next sample may lack a member
        self._after_bytes = 0  # offset in the shard at which the headers that caused the last error end

    @abstractmethod
    def _go_on(self, view: memoryview, at: int, samples: list[Sample]) -> None:
        """Parse view[at:]. If `at` is 0, first finish what the last chunk left incomplete."""

    @abstractmethod
    def _forget(self) -> int | None:
        """Drop what is held of an incomplete sample. Returns its offset in the shard, or None if nothing was held."""

    def _parse(self, view: memoryview, samples: list[Sample]) -> None:
        at = 0
        while True:
            if self._lost_offset_bytes is not None:
                at = self._seek(view, at)
                if self._lost_offset_bytes is not None:
                    return
            count = len(samples)
            try:
                self._go_on(view, at, samples)
            except CorruptShardError as error:
                self._drop_partial(samples, count)
                if self._on_corrupt != "skip_sample" or error.offset_bytes is None:
                    raise
                at = self._lose(error, error.offset_bytes)
            else:
                self._drop_partial(samples, count)
                return

    def _drop_partial(self, samples: list[Sample], count: int) -> None:
        """Remove the first sample after corrupt bytes; `count` is the number of samples before this round."""
        if self._partial and len(samples) > count:
            self._partial = False
            sample = samples.pop(count)
            self.skipped_samples += 1
            self.skipped_bytes += sample.size_bytes or 0

    def _lose(self, error: CorruptShardError, offset_bytes: int) -> int:
        """Note the error. Returns where in the chunk to search for a header: at the first block after the corrupt ones.

        It is not the first block after the offset of the error. That may lie in an earlier chunk, and then the result would
        depend on how the shard is cut into chunks.
        """
        begin_bytes = self._forget()
        self._note(error, 0)
        self._lost_offset_bytes = offset_bytes if begin_bytes is None else min(begin_bytes, offset_bytes)
        self._partial = True
        return self._after_bytes - self._offset_bytes

    def _seek(self, view: memoryview, at: int) -> int:
        """Find the next header in view[at:]; if there is none, skip all of it."""
        tail, self._tail = self._tail, b""
        if tail:
            at = BLOCK_BYTES - len(tail)
            block = tail + view[:at]
            if len(block) < BLOCK_BYTES:
                self._tail = block
                return at
            if _is_header(block):
                self._tail = tail  # treat it like an ordinary tail
                return self._found(0, len(tail))
        else:
            at += -(self._offset_bytes + at - self._start_offset_bytes) % BLOCK_BYTES
        while at + BLOCK_BYTES <= len(view):
            if bytes(view[at + 257 : at + 262]) == b"ustar" and _is_header(bytes(view[at : at + BLOCK_BYTES])):
                return self._found(at, 0)
            at += BLOCK_BYTES
        self._tail = bytes(view[at:])
        return at

    def _found(self, at: int, tail_bytes: int) -> int:
        assert self._lost_offset_bytes is not None
        self.skipped_bytes += self._offset_bytes + at - tail_bytes - self._lost_offset_bytes
        self._lost_offset_bytes = None
        return at

    def _drop(self) -> int | None:
        return self._forget()

    def _corrupt_until(
        self, after_bytes: int, what: str, offset_bytes: int | None, *, hint: str | None = None
    ) -> CorruptShardError:
        """Return the error of ``_corrupt`` where parsing may continue at the first block from `after_bytes` on."""
        self._after_bytes = after_bytes
        return self._corrupt(what, offset_bytes, hint=hint)


def _is_header(block: bytes) -> bool:
    try:
        read_header(block)
    except ValueError:
        return False
    return block[257:262] == b"ustar"
