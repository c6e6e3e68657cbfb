"""``ps.bench.step``: what data costs a training step, on the user's own step and loader."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WINDOWS_COUNT = 10
"""Windows into which the batches are divided: as few as show a spread."""
FREE_RATIO = 0.05
"""Share of a step below which data is not worth a change."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepCost:
    """Seconds of a training step with and without the loading of its batches.

    Each figure is a median over windows of some steps; the first window of each kind, which compiles and fills buffers, does
    not count.

    Attributes:
        streamed_s: Seconds of a step whose batch comes from the loader.
        streamed_range_s: First and third quartile of the windows, in seconds.
        cached_s: Seconds of a step on one batch in memory, again and again.
        cached_range_s: First and third quartile of the windows, in seconds.
        batches: Number of streamed batches that were measured.
    """

    streamed_s: float
    streamed_range_s: tuple[float, float]
    cached_s: float
    cached_range_s: tuple[float, float]
    batches: int

    @property
    def data_s(self) -> float:
        """Cost of data: seconds by which a streamed step is longer than a cached one; negative if noise is larger."""
        return self.streamed_s - self.cached_s

    @property
    def data_range_s(self) -> tuple[float, float]:
        """Least and most cost of data that the quartiles allow, in seconds."""
        return self.streamed_range_s[0] - self.cached_range_s[1], self.streamed_range_s[1] - self.cached_range_s[0]

    @property
    def stall_ratio(self) -> float:
        """Share of the training time that data costs, from 0 to 1."""
        return max(0.0, self.data_s / self.streamed_s) if self.streamed_s else 0.0

    @property
    def verdict(self) -> str:
        """Whether data is the bottleneck, as a sentence."""
        if self.data_range_s[0] <= 0 or self.stall_ratio < FREE_RATIO:
            return "Data is not the bottleneck: its cost is within the noise or small."
        return f"Data is a bottleneck: without its cost, training would be {self.streamed_s / self.cached_s:.2f} times as fast."

    def __repr__(self) -> str:
        lines = [
            f"streamed      {_milliseconds(self.streamed_s, self.streamed_range_s)} a step, {self.batches} batches",
            f"cached batch  {_milliseconds(self.cached_s, self.cached_range_s)} a step",
            f"cost of data  {_milliseconds(self.data_s, self.data_range_s)} a step, {self.stall_ratio:.0%} of the time",
            self.verdict,
        ]
        return "\n".join(lines)


def step(
    train_step: Callable[[Any], object],
    loader: Iterable[Any],
    *,
    batches: int = 200,
    synchronise: Callable[[], object] | None = None,
) -> StepCost:
    """Measure a training step on batches of a loader and on one batch in memory; the difference is the cost of data.

    Args:
        train_step: Your step, which is called with a batch. It must leave the batch as it is, since one is used many times.
        loader: Any iterable of batches: ``penstock.Loader``, a DataLoader of PyTorch, a data set of TensorFlow, ...
        batches: Number of streamed batches, at least 20; fewer are measured if the loader ends before. As many steps are made
            on one batch.
        synchronise: Waits for the device, if it works behind the program's back: ``torch.cuda.synchronize``, or
            ``lambda: jax.block_until_ready(params)``. It is called at the ends of windows only, so that steps overlap
            with loading as they do in training.

    Raises:
        ConfigError: `batches` is less than 20, or the loader ends before two windows of a tenth of them.

    Cost: it takes the time of twice as many steps, and trains.
    """
    if batches < 2 * WINDOWS_COUNT:
        raise ConfigError(f"batches={batches} must be at least {2 * WINDOWS_COUNT}")
    size = batches // WINDOWS_COUNT
    kept: list[Any] = []

    def streamed() -> Iterable[Any]:
        for batch in loader:
            kept[:] = [batch]
            yield batch

    streaming = streamed()
    streamed_s = _windows(train_step, streaming, size, synchronise)
    del streaming  # so that the loader does not work beside what follows
    if len(streamed_s) < 2:
        raise ConfigError(
            f"the loader ended before two windows of {size} batches",
            hint="a longer loader, or fewer: batches=20",
        )
    cached_s = _windows(train_step, itertools.repeat(kept[0]), size, synchronise, windows=len(streamed_s))
    return StepCost(
        streamed_s=statistics.median(streamed_s[1:]),
        streamed_range_s=_quartiles(streamed_s[1:]),
        cached_s=statistics.median(cached_s[1:]),
        cached_range_s=_quartiles(cached_s[1:]),
        batches=size * (len(streamed_s) - 1),
    )


def _windows(
    train_step: Callable[[Any], object],
    batches: Iterable[Any],
    size: int,
    synchronise: Callable[[], object] | None,
    windows: int = WINDOWS_COUNT,
) -> list[float]:
    """Return the seconds of a step in each complete window."""
    found = []
    begun_s = time.perf_counter()
    for number, batch in enumerate(batches, start=1):
        train_step(batch)
        if number % size == 0:
            if synchronise is not None:
                synchronise()
            now_s = time.perf_counter()
            found.append((now_s - begun_s) / size)
            begun_s = now_s
            if len(found) == windows:
                break
    return found


def _quartiles(values_s: list[float]) -> tuple[float, float]:
    """Return the first and the third quartile: a pause of the machine in one window is no spread."""
    if len(values_s) < 2:
        return values_s[0], values_s[0]
    low, _, high = statistics.quantiles(values_s, n=4, method="inclusive")
    return low, high


def _milliseconds(median_s: float, range_s: tuple[float, float]) -> str:
    return f"{median_s * 1e3:8.2f} ms ({range_s[0] * 1e3:.2f}..{range_s[1] * 1e3:.2f})"
