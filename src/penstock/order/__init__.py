"""Which sample comes when: pure functions of the job (seed, epoch, lanes, window, ranks) and integers.

``stream`` is the order without an index; ``permutation`` is the only source of chance. Golden tests pin both.
"""

from penstock.order.permutation import ORDER_VERSION, key_of, permutation
from penstock.order.stream import LANES_DEFAULT, RoundRobin, StreamOrder

__all__ = ["LANES_DEFAULT", "ORDER_VERSION", "RoundRobin", "StreamOrder", "key_of", "permutation"]
