"""Writes items to a checkpoint directory and reads them, by the storage interfaces of ``torch.distributed.checkpoint``.

The steps are those of its ``save`` and ``load``. They are called here one by one because errors keep their types this way,
and because the values that are written and read need not be those of the tensors that describe them.

The ranks talk over a gloo group of their own (``RankGroup``), because a save in the background must not come between the
collectives of training. An error on one rank is raised on all of them.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from penstock.torch.checkpoint.saved_items import local
from penstock.torch.ranks import rank_and_world_size

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

    from penstock.torch.checkpoint.saved_items import ReadTarget

T = TypeVar("T")


class RankGroup:
    """All ranks of the job; a process without ``torch.distributed`` is the only one of its group.

    Every rank must make it, and call its methods in the same order. Messages are pickled objects of a few kilobytes.

    Attributes:
        rank: Number of this rank.
        size: Number of ranks.
    """

    def __init__(self) -> None:
        self.rank, self.size = rank_and_world_size() or (0, 1)
        self._group: Any = dist.new_group(backend="gloo") if self.size > 1 else None

    def each(self, call: Callable[[], T]) -> list[T]:
        """Call a function on every rank, and return the results of all ranks.

        Raises:
            BaseException: The function failed on this rank, or else on the first rank on which it did.
        """
        outcome: tuple[bool, Any]
        try:
            outcome = True, call()
        except BaseException as error:
            self._gathered((False, _picklable(error)))
            raise
        outcomes = self._gathered(outcome)
        for rank, (is_result, value) in enumerate(outcomes):
            if not is_result:
                value.add_note(f"This happened on rank {rank}.")
                raise value
        return [value for _, value in outcomes]

    def first(self, call: Callable[[], T]) -> T:
        """Call a function on rank 0, and return its result on every rank.

        Raises:
            BaseException: The function failed.
        """
        results: list[Any] = self.each(lambda: call() if self.rank == 0 else None)
        return results[0]  # type: ignore[no-any-return]

    def spread(self, call: Callable[[], Sequence[T]]) -> T:
        """Call a function on rank 0, and return on every rank the item of its result that has the rank's number.

        Raises:
            BaseException: The function failed.
        """
        if self._group is None:
            return call()[0]
        items: Any = None
        outcome: tuple[bool, Any] = True, None
        try:
            items = [(True, item) for item in call()] if self.rank == 0 else None
        except BaseException as error:
            outcome = False, error
            items = [(False, _picklable(error))] * self.size
        box: list[Any] = [None]
        dist.scatter_object_list(box, items, src=0, group=self._group)
        is_result, value = outcome if not outcome[0] else box[0]
        if not is_result:
            raise value
        return value  # type: ignore[no-any-return]

    def _gathered(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


def _picklable(error: BaseException) -> BaseException:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def write_items(
    group: RankGroup, writer: StorageWriter, items: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]
) -> None:
    """Write the items of all ranks as one checkpoint. Every rank of the group calls it.

    Args:
        group: The ranks.
        writer: Writer of this checkpoint.
        items: Contribution of this rank: tensors whose shape and shards are saved.
        values: The values of this rank's shards, by name.

    Raises:
        PenstockError: A rank could not write; there is no checkpoint then.
    """
    planner = _SavePlanner(values)
    is_first = group.rank == 0

    def planned() -> Any:
        planner.set_up_planner(dict(items), writer.storage_meta(), is_first)
        writer.set_up_storage_writer(is_first, rank=group.rank, use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    plans = group.each(planned)
    metadata: list[Metadata] = []

    def decided() -> list[Any]:
        whole, found = planner.create_global_plan(plans)
        metadata.append(found)
        return writer.prepare_global_plan(whole)

    plan = planner.finish_plan(group.spread(decided))
    results = group.each(lambda: writer.write_data(plan, planner).wait())
    group.first(lambda: writer.finish(metadata[0], results))


def read_items(
    group: RankGroup, reader: StorageReader, request: Callable[[Metadata], Mapping[str, ReadTarget]]
) -> Mapping[str, ReadTarget]:
    """Read items into memory. Every rank of the group calls it.

    Args:
        group: The ranks.
        reader: Reader to use; it belongs to this checkpoint.
        request: Returns, from the items of the checkpoint, those that this rank needs.

    Returns:
        The items, whose memory has been filled.

    Raises:
        PenstockError: A rank could not read what it needs, or ``request`` raised it.
    """
    planner = _LoadPlanner()

    def planned() -> Any:
        metadata = reader.read_metadata()
        planner.request(metadata, request(metadata))
        reader.set_up_storage_reader(metadata, group.rank == 0)
        return reader.prepare_local_plan(planner.create_local_plan())

    plans = group.each(planned)
    plan = group.spread(lambda: reader.prepare_global_plan(planner.create_global_plan(plans)))
    group.each(lambda: reader.read_data(planner.finish_plan(plan), planner).wait())
    return planner.targets


class _SavePlanner(DefaultSavePlanner):
    """Plans by the tensors, and gives the values that were captured of them."""

    def __init__(self, values: Mapping[str, torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._values = values

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        """Return the captured value."""
        return local(self._values[index.fqn])


class _LoadPlanner(DefaultLoadPlanner):
    """Plans by the layouts of the targets, and has the values written to their memory."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.targets: Mapping[str, ReadTarget] = {}

    def request(self, metadata: Metadata, targets: Mapping[str, ReadTarget]) -> None:
        """Adopt metadata and targets, as ``set_up_planner`` does, which would give memory to layouts on ``meta``."""
        self.targets = targets
        self.metadata = metadata
        self.state_dict = {name: target.layout for name, target in targets.items()}
        self.original_state_dict = self.state_dict

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the memory in place of the layout."""
        return self.targets[index.fqn].memory
