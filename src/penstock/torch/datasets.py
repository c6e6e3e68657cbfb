"""``IterableDataset``: a pipeline for ``torch.utils.data.DataLoader(dataset, batch_size=None)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.utils.data

from penstock.errors import ConfigError
from penstock.loader import Loader
from penstock.torch.batches import Tensors
from penstock.torch.ranks import rank_and_world_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.config import FetchConfig
    from penstock.loader import LoaderStatistics
    from penstock.pipeline import Pipeline


class IterableDataset(torch.utils.data.IterableDataset[dict[str, Any]]):
    """Batches of tensors, ready made: give it to ``DataLoader(dataset, batch_size=None)``, or iterate it as it is.

    Each ``iter`` is one epoch, in the ``Loader``'s order. It decodes in threads of its own and needs no workers.

    Args:
        pipeline: Ends with ``.batch(n)``.
        lanes: This and the others as in ``penstock.Loader``.
        threads: See there.
        rank: Default: ``torch.distributed``'s where it is initialised, else the environment's.
        world_size: The same.
        prefetch_batches: See there.
        fetch: See there.

    Raises:
        ConfigError: as ``Loader`` does; when iterated: inside a DataLoader's worker process.

    Cost: as ``Loader``.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        lanes: int | None = None,
        threads: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        prefetch_batches: int = 2,
        fetch: FetchConfig | None = None,
    ) -> None:
        self._lanes = lanes
        self._threads = threads
        self._rank = rank
        self._world_size = world_size
        self._prefetch_batches = prefetch_batches
        self._fetch = fetch
        self.pipeline = pipeline
        self._check_only_here()
        self._loader: Loader | None = None
        self._made()  # refuses bad arguments here, not at the first batch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._check_only_here()
        if self._loader is None:
            self._loader = self._made()
        return iter(Tensors(self._loader))

    def statistics(self) -> LoaderStatistics:
        """The loader's; see there."""
        return (self._loader or self._made()).statistics()

    def close(self) -> None:
        """End the loader's threads; idempotent. The next ``iter`` begins with epoch 0."""
        loader, self._loader = self._loader, None
        if loader is not None:
            loader.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loader": None}  # threads stay here; a copy makes its own

    def _made(self) -> Loader:
        rank, world_size = self._rank, self._world_size
        if rank is None and world_size is None and (ours := rank_and_world_size()) is not None:
            rank, world_size = ours
        return Loader(
            self.pipeline,
            lanes=self._lanes,
            threads=self._threads,
            rank=rank,
            world_size=world_size,
            prefetch_batches=self._prefetch_batches,
            fetch=self._fetch,
        )

    @staticmethod
    def _check_only_here() -> None:
        worker = torch.utils.data.get_worker_info()
        if worker is not None:
            raise ConfigError(
                f"worker {worker.id} of {worker.num_workers} would read every batch again",
                hint="DataLoader(dataset, batch_size=None, num_workers=0): the dataset decodes in threads of its own",
            )
