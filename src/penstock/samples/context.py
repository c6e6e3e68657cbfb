"""A sample on its way through the stages: where it came from, and its own stream of random numbers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from penstock.formats import Sample

_STREAM = 0x70656E73746F636B  # "penstock": separates these streams from other Philox streams with the same seed


class SampleRandom:
    """The random numbers of one thread: a Philox generator that is set to the start of each sample's own stream.

    The key is (seed, epoch). The counter of a sample's stream starts at (0, index, position, _STREAM); drawing numbers
    advances its low word, so the streams of different samples never overlap. The index is 0 before a ``flat_map`` and
    counts the samples that it returned, from 1, after it.

    Args:
        seed: Seed of the pipeline, in [0, 2**64).
        epoch: Epoch number, from 0.
    """

    def __init__(self, *, seed: int, epoch: int) -> None:
        self.epoch = epoch
        self._bits = np.random.Philox()
        self._generator = np.random.Generator(self._bits)
        self._key = np.array([seed, epoch], dtype=np.uint64)

    def at(self, position: int, index: int = 0) -> np.random.Generator:
        """Return the generator, set to the start of the stream of `position` and `index`; valid until the next call."""
        self._bits.state = {
            "bit_generator": "Philox",
            "state": {"counter": np.array([0, index, position, _STREAM], dtype=np.uint64), "key": self._key},
            "buffer": np.zeros(4, dtype=np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        return self._generator


class ThreadRandom(threading.local):
    """The random numbers of each thread, as the attribute ``random``.

    Args:
        seed: Seed of the pipeline, in [0, 2**64).
        epoch: Epoch number, from 0.
    """

    def __init__(self, *, seed: int, epoch: int) -> None:
        self.random = SampleRandom(seed=seed, epoch=epoch)


class SampleContext:
    """A sample on its way through the stages.

    Attributes:
        sample: The sample as stored.
        shard: URL of its shard or object.
        position: Position of the sample in the epoch, from 0.
        children_count: Number of samples that a ``flat_map`` has made of it so far.
        joined: Names of joined fields, which ``decode`` keeps although it does not name them.
    """

    __slots__ = ("_index", "_random", "_rng", "children_count", "joined", "position", "sample", "shard")

    def __init__(self, sample: Sample, shard: str, position: int, random: SampleRandom) -> None:
        self.sample = sample
        self.shard = shard
        self.position = position
        self.children_count = 0
        self.joined: set[str] = set()
        self._random = random
        self._index = 0
        self._rng: np.random.Generator | None = None

    @property
    def epoch(self) -> int:
        """Number of the epoch in which the sample is read, from 0."""
        return self._random.epoch

    def rng(self) -> np.random.Generator:
        """Return the sample's random stream; the first call sets it to its start, later calls continue it."""
        if self._rng is None:
            self._rng = self._random.at(self.position, self._index)
        return self._rng

    def begin_child(self) -> None:
        """Give the next sample that a ``flat_map`` returned a random stream of its own."""
        self.children_count += 1
        self._index = self.children_count
        self._rng = None
