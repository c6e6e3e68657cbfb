"""Where the bodies of requests land, and the bytes that are reserved for them.

A part that is delivered separately has its own buffer. The parts of an object that is delivered whole share one buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.fetch.budget import POOLED_BYTES_MIN, Budget
from penstock.system import forks
from penstock.types import UNKNOWN_BYTES, Landing

if TYPE_CHECKING:
    from penstock.fetch.requests import ObjectRead, PartRequest
    from penstock.types import ByteRange, Core

OBJECT_BYTES_MAX = 1 << 46
"""The largest object of S3 has 50 TB. A listing that states more would be cut into more parts than memory can hold."""


class LandingAllocator:
    """Gives requests the memory that their bodies go to. All methods but ``release`` run under the caller's lock.

    Args:
        core: The store; it names objects in messages.
        budget: The budget that the memory is charged to.
        whole: True delivers each item as one piece of memory, False part by part.
    """

    def __init__(self, core: Core, budget: Budget, *, whole: bool) -> None:
        self._core = core
        self._budget = budget
        self._whole = whole
        self._generation = forks.generation()

    def prepare(self, part: PartRequest, estimate_bytes: int, *, force: bool) -> bool:
        """Reserve the part's bytes, and say where they land if that is already known.

        Args:
            part: The request that is about to be sent.
            estimate_bytes: Bytes to reserve for a body of unknown length.
            force: Whether to reserve them even if that exceeds the budget.

        Returns:
            False if the budget lacks the bytes and `force` is false.
        """
        length, target = part.length_bytes, part.read.item.target
        if target is not None and target.takes_whole == self._whole and (self._whole or length is not None):
            part.landing = target.landing(part.start, length)
            return True
        # One piece of memory for the object, even if this part is small.
        if self._whole and part is not part.read.parts[0]:
            return self._prepare_shared(part, force=force)
        if length is None or length < POOLED_BYTES_MIN:
            size_bytes = length if length is not None else estimate_bytes
            if not self._budget.reserve(size_bytes, force=force):
                return False
            part.reserved_bytes = size_bytes
            return True
        return self.take_buffer(part, length, force=force)

    def take_buffer(self, part: PartRequest, size_bytes: int, *, force: bool) -> bool:
        """Give the part a buffer of its own; False if the budget lacks the bytes and `force` is false."""
        buffer = self._budget.acquire(size_bytes, force=force)
        if buffer is None:
            return False
        part.buffer = buffer
        if part.read.rest is None:
            self.land(part)
        # Otherwise the head of the answer is needed first, and a store may skip it if the landing is known beforehand.
        return True

    @staticmethod
    def land(part: PartRequest) -> None:
        """Let the part's body go to its own buffer."""
        buffer, length = part.buffer, part.length_bytes
        assert buffer is not None and length is not None  # noqa: PT018 - a buffer is made for a length
        part.landing = Landing(buffer.view, 0, length, direct=buffer.owner)

    def _prepare_shared(self, part: PartRequest, *, force: bool) -> bool:
        """Give a part of an object that is delivered whole its place in the object's one buffer."""
        read = part.read
        span = read.span()
        assert span is not None
        assert part.length_bytes is not None
        if read.buffer is None:
            read.buffer = self._budget.acquire(span.length_bytes, force=force)
            if read.buffer is None:
                return False
            self.join_first(read)
        offset = part.start - span.start
        part.landing = Landing(read.buffer.view, offset, offset + part.length_bytes)
        return True

    def join_first(self, read: ObjectRead) -> None:
        """Copy the first part, which landed in its own buffer, to the start of its object's buffer, if both exist."""
        first = read.parts[0]
        completion = first.completion
        if read.buffer is None or completion is None:
            return
        if first.landing is not None and first.landing.buffer is read.buffer.view:
            return  # it was copied before
        body = completion.body
        first.landing = Landing(read.buffer.view, 0, len(body))
        first.landing.position = len(body)
        read.buffer.view[: len(body)] = body
        completion.landing = first.landing
        first.buffer = None

    def held_bytes(self, read: ObjectRead, span: ByteRange | None) -> int:
        """Bytes that `read` has to hold together to deliver `span`; 0 if they go to the caller's memory, or part by part."""
        return span.length_bytes if self._whole and span is not None and read.item.target is None else 0

    def refuse_oversize(self, read: ObjectRead, span: ByteRange | None) -> None:
        """Refuse a read that could fill more than half of the budget on its own, or of an object larger than any.

        Raises:
            ConfigError: `span` is too long to be delivered whole, or the object is too large.
        """
        if span is not None and OBJECT_BYTES_MAX < span.end < UNKNOWN_BYTES:
            raise ConfigError(
                f"{self._core.describe(read.item.key)}: an object of {span.end} bytes or more is larger than any store has: "
                f"the limit is {OBJECT_BYTES_MAX} bytes"
            )
        held_bytes = self.held_bytes(read, span)
        if held_bytes > self._budget.bytes_max // 2:
            raise ConfigError(
                f"{self._core.describe(read.item.key)}: a read of {held_bytes} bytes is more than half of the budget of "
                f"{self._budget.bytes_max} bytes",
                hint="stream it with read_parts() or open(), or raise FetchConfig(budget_bytes_max=...)",
            )

    def reserve_growth(self, part: PartRequest, length_bytes: int, *, force: bool) -> bool:
        """Reserve bytes for a body of unknown length that is about to have `length_bytes`.

        Returns:
            False if the budget lacks the bytes and `force` is false; ``part.grown_bytes`` then says how many it needs.

        Raises:
            ConfigError: The body has more than half of the budget. It is collected whole, so it can become no longer.
        """
        half_bytes = self._budget.bytes_max // 2
        if length_bytes > half_bytes:
            raise ConfigError(
                f"{self._core.describe(part.read.item.key)}: a body of unknown length has {length_bytes} bytes or more, "
                f"which is more than half of the budget of {self._budget.bytes_max} bytes",
                hint="stream it with read_parts(), if the store has ranges, or raise FetchConfig(budget_bytes_max=...)",
            )
        wanted_bytes = min(2 * length_bytes, half_bytes)
        if not self._budget.reserve(wanted_bytes - part.reserved_bytes, force=force):
            part.grown_bytes = wanted_bytes
            return False
        part.reserved_bytes = wanted_bytes
        return True

    def release(self, part: PartRequest) -> None:
        """Release what was reserved for a part; a ``PartBuffer`` returns itself. Nothing happens in a forked child."""
        if part.reserved_bytes and self._generation == forks.generation():
            self._budget.release(part.reserved_bytes)
            part.reserved_bytes = 0
