"""A sample on its way through the stages: where it came from, and its own stream of random numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from penstock.formats import Sample

_STREAM = 0x70656E73746F636B  # "penstock": tells these streams from others with the same seed


class SampleRandom:
    """One Philox per thread, put where a sample's own stream begins.

    Its key is (seed, epoch); its counter starts at (0, index, position, _STREAM), whose low word runs on with the
    numbers drawn, so that streams of different samples never meet. The index is that within ``flat_map``, from 1; a
    sample before it has 0.
    """

    def __init__(self, *, seed: int, epoch: int) -> None:
        self.epoch = epoch
        self._bits = np.random.Philox()
        self._generator = np.random.Generator(self._bits)
        self._key = np.array([seed, epoch], dtype=np.uint64)

    def at(self, position: int, index: int = 0) -> np.random.Generator:
        """The generator, at the start of the stream of `position` and `index`; valid until the next call."""
        self._bits.state = {
            "bit_generator": "Philox",
            "state": {"counter": np.array([0, index, position, _STREAM], dtype=np.uint64), "key": self._key},
            "buffer": np.zeros(4, dtype=np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        return self._generator


class SampleContext:
    """A sample under way: where it is from, and its random stream, begun when it is first asked for."""

    __slots__ = ("_index", "_random", "_rng", "children_count", "joined", "position", "sample", "shard")

    def __init__(self, sample: Sample, shard: str, position: int, random: SampleRandom) -> None:
        self.sample = sample
        self.shard = shard
        self.position = position
        self.children_count = 0
        self.joined: set[str] = set()  # fields that decode leaves in
        self._random = random
        self._index = 0
        self._rng: np.random.Generator | None = None

    @property
    def epoch(self) -> int:
        """That it is read in."""
        return self._random.epoch

    def rng(self) -> np.random.Generator:
        """Its random stream, where that has got to."""
        if self._rng is None:
            self._rng = self._random.at(self.position, self._index)
        return self._rng

    def begin_child(self) -> None:
        """The next of ``flat_map``'s samples gets a stream of its own."""
        self.children_count += 1
        self._index = self.children_count
        self._rng = None
