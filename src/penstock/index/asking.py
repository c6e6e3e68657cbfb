"""Asking a store for many small things at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.store.inflight import InFlight
from penstock.types import Get, Head

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.store import Store
    from penstock.types import Buffer, ByteRange, Key, ObjectInfo

HEADS_IN_FLIGHT_MAX = 64
READS_IN_FLIGHT_MAX = 128


def read_at_once(store: Store, wanted: Sequence[tuple[Key, ByteRange | None]]) -> Iterator[tuple[Key, Buffer]]:
    """Small objects, or ranges, in order, without a window that has to grow first.

    Raises:
        StoreError: one is missing, or cannot be read.
    """
    in_flight: InFlight[int] = InFlight(store)
    here: dict[int, Buffer] = {}
    sent = 0
    try:
        for number, (key, _) in enumerate(wanted):
            while number not in here:
                while sent < len(wanted) and len(in_flight) < READS_IN_FLIGHT_MAX:
                    in_flight.submit(Get(*wanted[sent]), sent)
                    sent += 1
                ended, completion = in_flight.wait()
                if completion.error is not None:
                    raise completion.error
                here[ended] = completion.body
            yield key, here.pop(number)
    finally:
        in_flight.cancel()


def heads(store: Store, keys: list[tuple[int, Key]]) -> Iterator[tuple[int, ObjectInfo]]:
    """What a store says of each, as it answers.

    Raises:
        StoreError: one is missing, or cannot be asked for.
    """
    in_flight: InFlight[int] = InFlight(store)
    waiting = iter(keys)
    try:
        while True:
            while len(in_flight) < HEADS_IN_FLIGHT_MAX and (item := next(waiting, None)) is not None:
                in_flight.submit(Head(item[1]), item[0])
            if not in_flight:
                return
            index, completion = in_flight.wait()
            if completion.error is not None:
                raise completion.error
            assert completion.info is not None
            yield index, completion.info
    finally:
        in_flight.cancel()
