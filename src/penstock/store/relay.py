"""Relays: what a wrapper puts between the store inside and the caller's sink.

A relay passes everything on; a wrapper's own relay changes one thing on the way. One is made for each operation, so the
subclasses on the path of every read set the attributes of their base themselves: a call of ``super().__init__`` would
be one more for each request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from penstock.types import ByteRange, Completion, Landing, ObjectInfo, Operation, Sink, Transfer

Owner = TypeVar("Owner")


class Relay:
    """A sink that passes everything on to another sink.

    A subclass that overrides ``done`` passes the end on whatever fails on the way (``try``/``finally``), so that a
    defect in a wrapper leaves no caller waiting.

    Attributes:
        sink: The sink that everything is passed on to.
        landing: The landing of `sink`; None if it has none beforehand.
    """

    __slots__ = ("landing", "sink")

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.landing: Landing | None = sink.landing

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """Return where the body goes; see ``types.Sink.head``."""
        return self.sink.head(info, span)

    def done(self, completion: Completion) -> None:
        """Take the end of the operation; see ``types.Sink.done``."""
        self.sink.done(completion)


class OperationRelay(Relay, Generic[Owner]):
    """A relay that is also the caller's transfer: one object for both sides of an operation.

    Args:
        owner: The wrapper.
        operation: The operation, as the caller submitted it.
        sink: The caller's sink.

    Attributes:
        transfer: The transfer of the store inside; None before it is submitted and after it has ended.
        cancelled: Whether the caller gave the operation up.
    """

    __slots__ = ("cancelled", "operation", "owner", "transfer")

    def __init__(self, owner: Owner, operation: Operation, sink: Sink) -> None:
        self.owner = owner
        self.operation = operation
        self.sink = sink
        self.landing = sink.landing
        self.transfer: Transfer | None = None
        self.cancelled = False

    def cancel(self) -> None:
        """Give the operation up; see ``types.Transfer.cancel``."""
        self.cancelled = True
        if (transfer := self.transfer) is not None:
            transfer.cancel()

    def unanswered_s(self) -> float:
        """Return how long it has waited for an answer; see ``types.Transfer.unanswered_s``."""
        transfer = self.transfer
        return transfer.unanswered_s() if transfer is not None else 0.0


class Resent:
    """The transfer of an operation that may be sent several times; a mixin for the class that sends it.

    Attributes:
        cancelled: Whether the caller gave the operation up.
        transfers: The transfers under way. There may be two for a moment, because the first one may be added when the
            second is already under way; cancelling one that has ended does nothing.
    """

    __slots__ = ()

    cancelled: bool
    transfers: list[Transfer]

    def cancel(self) -> None:
        """Give the operation up; see ``types.Transfer.cancel``."""
        self.cancelled = True  # type: ignore[misc]  # a slot of every class that mixes this in
        for transfer in tuple(self.transfers):
            transfer.cancel()

    def unanswered_s(self) -> float:
        """Return how long it has waited for an answer; see ``types.Transfer.unanswered_s``."""
        return max((transfer.unanswered_s() for transfer in tuple(self.transfers)), default=0.0)
