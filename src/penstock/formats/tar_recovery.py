"""What ``skip_sample`` means in a tar: go on at the next header.

Members say only how long they are, so after a corrupt header the next one is looked for: a block at a multiple of 512
bytes that says ``ustar`` and has its checksum. Neither the sample before the corrupt place nor the first after it is
given: each may lack a member, and half a sample is worse than none. Old archives (v7) do not say ``ustar``: the rest of
those is passed over. A tar stored in a tar looks like a part of it; such a shard is better read with ``skip_shard``.
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
    """Base of ``TarParser``: repeats ``_go_on`` over a chunk, until all of it was parsed or passed over."""

    _tail: bytes  # of a header that spans chunks

    def __init__(self, shard: str, *, start_offset_bytes: int = 0, on_corrupt: OnCorrupt = "raise") -> None:
        super().__init__(shard, start_offset_bytes=start_offset_bytes, on_corrupt=on_corrupt)
        self._lost_offset_bytes: int | None = None  # from where on no header was found yet
        self._partial = False  # the sample that comes next may lack a member
        self._after_bytes = 0  # in the shard: where the headers end that are to blame for the last error

    @abstractmethod
    def _go_on(self, view: memoryview, at: int, samples: list[Sample]) -> None:
        """Parse view[at:], after what the last chunk left open where `at` is 0."""

    @abstractmethod
    def _forget(self) -> int | None:
        """Drop what is held of an incomplete sample; where in the shard it began, None where nothing is held."""

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
                self._settle(samples, count)
                if self._on_corrupt != "skip_sample" or error.offset_bytes is None:
                    raise
                at = self._lose(error, error.offset_bytes)
            else:
                self._settle(samples, count)
                return

    def _settle(self, samples: list[Sample], count: int) -> None:
        """Leave out the first sample after a corrupt place; `count`: of samples before this round."""
        if self._partial and len(samples) > count:
            self._partial = False
            sample = samples.pop(count)
            self.skipped_samples += 1
            self.skipped_bytes += sample.size_bytes or 0

    def _lose(self, error: CorruptShardError, offset_bytes: int) -> int:
        """Note the error; where in the chunk to look for a header: the first block after the corrupt ones.

        Not the first after the error's offset: that may lie in a chunk that is gone, and then the answer would depend on
        where chunks are cut.
        """
        begin_bytes = self._forget()
        self._note(error, 0)
        self._lost_offset_bytes = offset_bytes if begin_bytes is None else min(begin_bytes, offset_bytes)
        self._partial = True
        return self._after_bytes - self._offset_bytes

    def _seek(self, view: memoryview, at: int) -> int:
        """The next header in view[at:]; while there is none, all of it is passed over."""
        tail, self._tail = self._tail, b""
        if tail:
            at = BLOCK_BYTES - len(tail)
            block = tail + view[:at]
            if len(block) < BLOCK_BYTES:
                self._tail = block
                return at
            if _is_header(block):
                self._tail = tail  # as if it had been an ordinary tail
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
        """As ``_corrupt``, for an error behind which parsing may go on: at the first block from `after_bytes` on."""
        self._after_bytes = after_bytes
        return self._corrupt(what, offset_bytes, hint=hint)


def _is_header(block: bytes) -> bool:
    try:
        read_header(block)
    except ValueError:
        return False
    return block[257:262] == b"ustar"
