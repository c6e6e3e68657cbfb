"""Sending many small requests at once."""

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


def get_many(store: Store, requests: Sequence[tuple[Key, ByteRange | None]]) -> Iterator[tuple[Key, Buffer]]:
    """Yield the key and bytes of small objects or ranges in order, without a window that has to grow first.

    Args:
        store: Store of the objects.
        requests: Pairs of a key and a range; a range of None reads the whole object.

    Raises:
        StoreError: An object is missing, or cannot be read.
    """
    in_flight: InFlight[int] = InFlight(store)
    arrived: dict[int, Buffer] = {}
    sent = 0
    try:
        for number, (key, _) in enumerate(requests):
            while number not in arrived:
                while sent < len(requests) and len(in_flight) < READS_IN_FLIGHT_MAX:
                    in_flight.submit(Get(*requests[sent]), sent)
                    sent += 1
                ended, completion = in_flight.wait()
                if completion.error is not None:
                    raise completion.error
                arrived[ended] = completion.body
            yield key, arrived.pop(number)
    finally:
        in_flight.cancel()


def stat_many(store: Store, keys: list[tuple[int, Key]]) -> Iterator[tuple[int, ObjectInfo]]:
    """Yield what a store says of each object, in the order of the answers.

    Args:
        store: Store of the objects.
        keys: Pairs of a number, which is yielded with the answer, and a key.

    Raises:
        StoreError: An object is missing, or the store cannot be reached.
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
