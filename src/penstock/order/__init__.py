"""The order of samples as pure functions of integers: seed, epoch, lanes, window, ranks and position.

``stream.py`` is the order without an index, ``indexed.py`` the order with one, ``mix.py`` the order of several sources.
All randomness comes from ``permutation.py``. Golden tests fix every one of them.
"""

from penstock.order.batches import Batches, BatchPositions
from penstock.order.indexed import IndexedOrder, Segment, SourcePosition
from penstock.order.laned import LANES_DEFAULT, Location, SampleLocations
from penstock.order.mix import MixedSource, MixOrder, MixWeights
from penstock.order.permutation import ORDER_VERSION, key_of, permutation
from penstock.order.stream import StreamOrder

__all__ = [
    "LANES_DEFAULT",
    "ORDER_VERSION",
    "BatchPositions",
    "Batches",
    "IndexedOrder",
    "Location",
    "MixOrder",
    "MixWeights",
    "MixedSource",
    "SampleLocations",
    "Segment",
    "SourcePosition",
    "StreamOrder",
    "key_of",
    "permutation",
]
