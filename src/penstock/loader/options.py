"""The keyword arguments of a ``Loader``: their names, types, defaults and bounds; and how they determine batches.

``Loader`` documents the arguments, and takes its signature from ``LoaderOptions``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypedDict

from penstock.config import MIB, check_configs, check_path, check_whole, cores_count
from penstock.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from penstock.cache import CacheConfig
    from penstock.config import FetchConfig
    from penstock.loader.statistics import LoaderStatistics, Meter
    from penstock.pipeline import Batch, BatchBySize, Pipeline, TokenBlocks
    from penstock.samples.transform import SampleTransform

PREFETCH_BATCHES = 2
PREFETCH_BYTES = 4 * MIB
"""More than ``PREFETCH_BATCHES`` batches wait while together they are smaller than this. Two batches of 128 samples of 3 KB
are made in a millisecond; a reader that then waits for the training loop spends as long on handing over the interpreter."""
INDEXES = ("auto", "require", "stream")
_BOUNDS = (("threads", 1, 256), ("lanes", 1, None), ("prefetch_batches", 1, 1024))
_FUNCTIONS = (
    ("on_epoch", "of an epoch and its statistics"),
    ("agree", "that takes an int and returns the smallest of all ranks"),
    ("share", "that calls its argument on one rank"),
)


class ClusterWorkers(Protocol):
    """The workers of a cluster, as an argument of ``Loader``: ``penstock.ray.Workers``."""

    @property
    def fallback(self) -> bool:
        """Whether the loader goes on in threads when there are no workers."""

    def open(self, meter: Meter) -> Any:
        """The ``WorkerPool`` of one loader, whose statistics are counted by `meter`."""


class LoaderArguments(TypedDict, total=False):
    """The keyword arguments of ``Loader``, for functions that pass them on: ``**options: Unpack[LoaderArguments]``."""

    lanes: int | None
    threads: int | None
    processes: int
    restart_workers: bool
    workers: ClusterWorkers | None
    stride: tuple[int, int]
    in_order: bool
    rank: int | None
    world_size: int | None
    mesh: Any
    agree: Callable[[int], int] | None
    share: Callable[[Callable[[], bytes]], bytes] | None
    prefetch_batches: int | None
    index: Literal["auto", "require", "stream"]
    index_dir: str | os.PathLike[str] | None
    on_epoch: Callable[[int, LoaderStatistics], Pipeline | None] | None
    fetch: FetchConfig | None
    cache: CacheConfig | str | os.PathLike[str] | None
    progress: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderOptions:
    """The keyword arguments of one ``Loader``, checked.

    Raises:
        ConfigError: A bound is broken.
    """

    lanes: int | None = None
    threads: int | None = None
    processes: int = 0
    restart_workers: bool = False
    workers: ClusterWorkers | None = None
    stride: tuple[int, int] = (0, 1)
    in_order: bool = True
    rank: int | None = None
    world_size: int | None = None
    mesh: Any = None
    agree: Callable[[int], int] | None = None
    share: Callable[[Callable[[], bytes]], bytes] | None = None
    prefetch_batches: int | None = None
    index: Literal["auto", "require", "stream"] = "auto"
    index_dir: str | os.PathLike[str] | None = None
    on_epoch: Callable[[int, LoaderStatistics], Pipeline | None] | None = None
    fetch: FetchConfig | None = None
    cache: CacheConfig | str | os.PathLike[str] | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        check_whole("processes", self.processes, 0, 128)
        for name, low, high in _BOUNDS:
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, low, high)
        for name, what in _FUNCTIONS:
            if (value := getattr(self, name)) is not None and not callable(value):
                raise ConfigError(f"{name}={value!r} must be a function {what}")
        if self.workers is not None:
            if not callable(getattr(self.workers, "open", None)):
                raise ConfigError(
                    f"workers={self.workers!r} must be workers of a cluster", hint="ps.ray.Workers(count=4)"
                )
            if self.processes:
                raise ConfigError(f"processes={self.processes} and workers= both say who decodes: give only one")
        self._check_stride()
        check_configs(fetch=self.fetch)
        check_path("index_dir", self.index_dir)
        if (self.rank is None) != (self.world_size is None):
            raise ConfigError(f"rank={self.rank!r} and world_size={self.world_size!r}: give both or neither")
        if self.rank is not None and self.mesh is not None:
            raise ConfigError("rank= and mesh= both say which part of the data this process reads: give only one")
        if self.index not in INDEXES:
            raise ConfigError(f"index={self.index!r} must be one of {', '.join(map(repr, INDEXES))}")
        if self.cache is not None:
            from penstock.cache import CacheConfig  # here, so that a loader without a cache does not import it

            CacheConfig.of(self.cache)

    def _check_stride(self) -> None:
        try:
            which, every = self.stride
            is_stride = 0 <= which < every
        except (TypeError, ValueError):
            is_stride = False
        if not is_stride:
            raise ConfigError(f"stride={self.stride!r} must be (j, n) with 0 <= j < n")
        if every > 1 and not self.in_order:
            raise ConfigError("stride= counts batches in their order, so it needs in_order=True")
        if every > 1 and (self.processes or self.workers is not None):
            raise ConfigError(
                "stride= is for workers of a DataLoader, which do not need processes= or workers= as well"
            )

    @property
    def prefetch_count(self) -> int:
        """Number of batches that may wait, whatever their size."""
        return PREFETCH_BATCHES if self.prefetch_batches is None else self.prefetch_batches

    @property
    def threads_count(self) -> int:
        """Number of decode threads: as given, otherwise one for each core that this process may use."""
        return self.threads or cores_count()

    def given(self) -> dict[str, Any]:
        """The options that differ from their default, by name."""
        return {entry.name: value for entry in fields(self) if (value := getattr(self, entry.name)) != entry.default}


class Batching(NamedTuple):
    """The batches that a pipeline asks for.

    Attributes:
        global_size: Number of samples in a batch of all ranks together, at least 1.
        drop_last: Whether an incomplete last batch is left out.
        take_count: Largest number of samples of an epoch; None takes all of them.
    """

    global_size: int
    drop_last: bool
    take_count: int | None


class BatchPlan(NamedTuple):
    """The settings by which batches are made, in every epoch.

    Attributes:
        transforms: Transform of the samples of each source, by number of the source.
        batch: The stage of the pipeline that makes batches.
        batch_size: Number of rows of a full batch of this rank.
        drop_last: Whether the last batch is left out if it is not full.
        threads_count: Number of decode threads.
        prefetch_batches: Number of batches that may wait for the training loop, whatever their size.
        prefetch_bytes: Total size in bytes up to which more batches than that may wait.
        seed: Seed of the random numbers of samples.
        token_blocks: Stage that cuts outputs of the others into blocks, the rows of batches; None if there is none.
        in_order: Whether batches are handed out in order; otherwise whichever is complete first.
    """

    transforms: tuple[SampleTransform, ...]
    batch: Batch | BatchBySize
    batch_size: int
    drop_last: bool
    threads_count: int
    prefetch_batches: int
    prefetch_bytes: int
    seed: int
    token_blocks: TokenBlocks | None = None
    in_order: bool = True
