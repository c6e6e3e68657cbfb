"""Sending many small requests at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.store.inflight import perform_many
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
    operations = ((number, Get(*request)) for number, request in enumerate(requests))
    answers = perform_many(store, operations, requests_max=READS_IN_FLIGHT_MAX)
    arrived: dict[int, Buffer] = {}
    for number, (key, _) in enumerate(requests):
        while number not in arrived:
            ended, completion = next(answers)
            arrived[ended] = completion.body
        yield key, arrived.pop(number)


def stat_many(store: Store, keys: list[tuple[int, Key]]) -> Iterator[tuple[int, ObjectInfo]]:
    """Yield what a store says of each object, in the order of the answers.

    Args:
        store: Store of the objects.
        keys: Pairs of a number, which is yielded with the answer, and a key.

    Raises:
        StoreError: An object is missing, or the store cannot be reached.
    """
    operations = ((number, Head(key)) for number, key in keys)
    for number, completion in perform_many(store, operations, requests_max=HEADS_IN_FLIGHT_MAX):
        assert completion.info is not None
        yield number, completion.info
