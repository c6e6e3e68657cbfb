"""The one source of chance in an order: a permutation of n, written down to the bit.

Definition, ORDER_VERSION 1, on unsigned 64-bit integers with wrap-around::

    G         = 0x9E3779B97F4A7C15                                   2**64 over the golden ratio, made odd
    mix(x)    = x ^= x >> 30; x *= 0xBF58476D1CE4E5B9; x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31
    key_of()  = 0;   key_of(*words, w) = mix((key_of(*words) ^ w) + G)
    permutation(n, key) = the numbers 0 .. n-1 sorted by mix(key + (i + 1) * G)

``mix`` over a counter is SplitMix64 (Steele, Lea, Flood 2014: "Fast splittable pseudorandom number generators"), which
passes BigCrush. ``mix`` is a bijection and G odd, so the n sort keys differ: there are no ties, and the order does not
depend on the sort. Nothing here uses the bit streams of ``random`` or numpy, which may change between versions.

Alternatives: Fisher-Yates needs a Python step per element (0.5 us; this takes 0.05 us), or numpy's own ``shuffle``,
whose stream is not promised. A keyed Feistel network gives any element in O(1) memory, but takes several times as long
at the run lengths that occur (256), and is not exactly uniform on tiny n. Where runs of many millions become real (an
index, and a window as long as the data), it may come as another version, for large n.

Cost: 16 bytes per element while it runs, 8 after. n is a number of shards, or of samples in one run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

ORDER_VERSION = 1
"""Of every definition in this package that decides which sample comes when; part of a saved state."""

SHARDS, RUN, LANES, SOURCE, PASS = range(1, 6)  # what a key is for: the first word, so that no two uses share keys

GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def key_of(*words: int) -> int:
    """A 64-bit key from integers of 64 bits; every word and its place matter."""
    key = 0
    for word in words:
        key = mix((key ^ word) + GAMMA & _MASK)
    return key


def mix(x: int) -> int:
    """SplitMix64's finalizer, a bijection of the 64-bit integers."""
    x = (x ^ x >> 30) * _M1 & _MASK
    x = (x ^ x >> 27) * _M2 & _MASK
    return x ^ x >> 31


def permutation(count: int, key: int) -> npt.NDArray[np.int64]:
    """0 to `count` - 1 in the order that `key` gives; int64[count].

    The element that comes k-th is ``permutation(count, key)[k]``.
    """
    x = np.arange(1, count + 1, dtype=np.uint64)
    x *= np.uint64(GAMMA)
    x += np.uint64(key)
    x ^= x >> np.uint64(30)
    x *= np.uint64(_M1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_M2)
    x ^= x >> np.uint64(31)
    return np.argsort(x)
