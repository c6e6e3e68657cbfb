"""Where the bodies of requests land, and what is reserved for them: one place per part, or one for all parts of an object."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import forks
from penstock.fetch.budget import POOLED_BYTES_MIN, Budget
from penstock.types import Landing

if TYPE_CHECKING:
    from penstock.fetch.requests import ObjectRead, PartRequest


class LandingAllocator:
    """Gives slots the memory that their bodies go to. Called under the lock of a ``RequestScheduler``, but for ``release``.

    Args:
        budget: What they are charged to.
        whole: Items are delivered as one piece of memory each; else part by part.
    """

    def __init__(self, budget: Budget, *, whole: bool) -> None:
        self._budget = budget
        self._whole = whole
        self._generation = forks.generation()

    def prepare(self, slot: PartRequest, estimate_bytes: int, *, force: bool) -> bool:
        """Reserve the slot's bytes and say where they land; False where the budget lacks them, unless `force`.

        Args:
            slot: About to be sent.
            estimate_bytes: What a body of unknown length is taken for.
            force: Let it in beyond the budget.
        """
        length = slot.length_bytes
        if self._whole and slot is not slot.item.slots[0]:  # also where it is small: one piece of memory for the object
            return self._prepare_shared(slot, force=force)
        if length is None or length < POOLED_BYTES_MIN:
            size_bytes = length if length is not None else estimate_bytes
            if not self._budget.reserve(size_bytes, force=force):
                return False
            slot.reserved_bytes = size_bytes
            return True
        return self.take_buffer(slot, length, force=force)

    def take_buffer(self, slot: PartRequest, size_bytes: int, *, force: bool) -> bool:
        """A buffer of the slot's own; False where the budget lacks the bytes, unless `force`."""
        buffer = self._budget.acquire(size_bytes, force=force)
        if buffer is None:
            return False
        slot.buffer = buffer
        if slot.item.rest is None:
            self.land(slot)
        # else the answer's head has to be heard first, which a store may skip where it knows the landing beforehand
        return True

    @staticmethod
    def land(slot: PartRequest) -> None:
        """Let the slot's body go to its own buffer."""
        buffer, length = slot.buffer, slot.length_bytes
        assert buffer is not None and length is not None  # noqa: PT018 - a buffer is made for a length
        slot.landing = Landing(buffer.view, 0, length, direct=buffer.owner)

    def _prepare_shared(self, slot: PartRequest, *, force: bool) -> bool:
        """A part of an object that is delivered whole: its place in the object's one buffer."""
        item = slot.item
        span = item.span()
        assert span is not None
        assert slot.length_bytes is not None
        if item.buffer is None:
            item.buffer = self._budget.acquire(span.length_bytes, force=force)
            if item.buffer is None:
                return False
            self.join_first(item)
        offset = slot.start - span.start
        slot.landing = Landing(item.buffer.view, offset, offset + slot.length_bytes)
        return True

    def join_first(self, item: ObjectRead) -> None:
        """Copy the first part, which landed by itself, to the head of its object's one buffer: one part per object."""
        first = item.slots[0]
        completion = first.completion
        if item.buffer is None or completion is None:
            return
        if first.landing is not None and first.landing.buffer is item.buffer.view:
            return  # done before
        body = completion.body
        first.landing = Landing(item.buffer.view, 0, len(body))
        first.landing.position = len(body)
        item.buffer.view[: len(body)] = body
        completion.landing = first.landing
        first.buffer = None

    def release(self, slot: PartRequest) -> None:
        """Give back what was reserved for a delivered slot; a ``PartBuffer`` goes back by itself."""
        if slot.reserved_bytes and self._generation == forks.generation():
            self._budget.release(slot.reserved_bytes)
            slot.reserved_bytes = 0
