"""Which sample comes when: pure functions of the job (seed, epoch, lanes, window, ranks) and integers.

``stream`` is the order without an index, ``indexed`` the one with it, ``mix`` that of several sources; ``permutation`` is
the only source of chance. Golden tests pin them all.
"""

from penstock.order.batches import Batches, BatchPositions
from penstock.order.indexed import IndexedOrder, Leaving, Location, Segment, SourcePlace
from penstock.order.mix import Mix, Source
from penstock.order.permutation import ORDER_VERSION, key_of, permutation
from penstock.order.progress import HandedOut
from penstock.order.stream import LANES_DEFAULT, RoundRobin, StreamOrder
from penstock.order.weights import Weights

__all__ = [
    "LANES_DEFAULT",
    "ORDER_VERSION",
    "BatchPositions",
    "Batches",
    "HandedOut",
    "IndexedOrder",
    "Leaving",
    "Location",
    "Mix",
    "RoundRobin",
    "Segment",
    "Source",
    "SourcePlace",
    "StreamOrder",
    "Weights",
    "key_of",
    "permutation",
]
