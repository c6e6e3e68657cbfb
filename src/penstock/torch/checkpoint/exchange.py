"""Items to and from a checkpoint directory, by the storage interfaces of ``torch.distributed.checkpoint``.

The steps are those of its ``save`` and ``load``. They are taken here one by one because errors keep their types this way,
and because the values that are written and read need not be those of the tensors that describe them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from penstock.torch.checkpoint.saved_items import local

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

    from penstock.torch.checkpoint.rank_group import RankGroup
    from penstock.torch.checkpoint.saved_items import ReadTarget


def write_items(
    group: RankGroup, writer: StorageWriter, items: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]
) -> None:
    """Write the items of all ranks as one checkpoint. Every rank of the group calls it.

    Args:
        group: The ranks.
        writer: Where to write; it belongs to this checkpoint.
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
        request: Returns, from what the checkpoint holds, the items that this rank needs.

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
        """Take over what to read, as ``set_up_planner`` does, which would give memory to layouts on ``meta``."""
        self.targets = targets
        self.metadata = metadata
        self.state_dict = {name: target.layout for name, target in targets.items()}
        self.original_state_dict = self.state_dict

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the memory in place of the layout."""
        return self.targets[index.fqn].memory
