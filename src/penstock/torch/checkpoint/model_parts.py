"""The parameters and buffers of a model, and the state of its optimizer, by the names of the parameters.

Names are those of the bare model, whatever wraps it (DDP, ``torch.compile``, activation checkpointing), and sharded tensors
(FSDP2, tensor parallelism) are saved by shards. So a checkpoint can be restored with other wrappers and other shards.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from penstock.errors import CheckpointError, ConfigError
from penstock.torch.checkpoint.parts import check_savable, missing_part, undo_of
from penstock.torch.checkpoint.saved_items import ReadTarget, decoded, encoded, listed, local

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.torch.checkpoint.saved_items import SavedItems

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
_EXTRA = "_extra_state"
_SCHEDULER_OPTIONS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}
"""Options that schedulers add to the groups of an optimizer."""
_MODEL = "model."
RANKS = "ranks."
_STATES = "optimizer.state."
_GROUPS = "optimizer.groups"


def bare_model(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside DDP and ``torch.compile``.

    Raises:
        ConfigError: A part of it is wrapped by the first version of FSDP, whose parameters are flattened.
    """
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        elif isinstance(getattr(model, _WRAPPERS[0], None), torch.nn.Module):
            model = getattr(model, _WRAPPERS[0])
        else:
            break
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise ConfigError(
                f"model{'.' if name else ''}{name} is wrapped by FullyShardedDataParallel, which flattens parameters",
                hint="use torch.distributed.fsdp.fully_shard(module), which replaces it",
            )
    return model


def own_name(rank: int, key: str) -> str:
    """Return the name of an item that a rank has for itself."""
    return f"{RANKS}{rank}.{key}"


def bare_name(name: str) -> str:
    """Return the name of a parameter without the wrappers around its modules."""
    return ".".join(each for each in name.split(".") if each not in _WRAPPERS)


class ModelPart:
    """Parameters and persistent buffers.

    Buffers that are not sharded, such as the statistics of batch normalization, are each rank's own: DDP takes those of rank 0
    at the next step, and FSDP never makes them equal. The checkpoint has those of rank 0 under their names, and those of other
    ranks, where they differ, under names that begin with ``ranks.RANK.``.
    """

    def __init__(self, model: torch.nn.Module, *, rank: int, strict: bool = True) -> None:
        self._model = bare_model(model)
        self._rank = rank
        self._strict = strict
        self._parameters = {bare_name(name) for name, _ in self._model.named_parameters(remove_duplicate=False)}
        self._rest: dict[str, Any] = {}
        self._replaced: list[tuple[torch.Tensor, torch.Tensor]] = []

    def items(self) -> dict[str, torch.Tensor]:
        """Return the tensors, and on rank 0 the records of modules with a state of their own."""
        items = {}
        for name, value in self._model.state_dict().items():
            key = _MODEL + bare_name(name)
            if _is_record(name, value):
                if self._rank == 0:
                    items[key] = encoded(value, key)
                continue
            check_savable(key, value)
            is_own = bare_name(name) not in self._parameters and not isinstance(value, DTensor)
            if is_own:
                items[own_name(self._rank, key)] = value
            if self._rank == 0 or not is_own:
                items[key] = value
        return items

    def request(self, saved: SavedItems) -> dict[str, ReadTarget]:
        """Request every tensor; the names, shapes and dtypes have to be the same."""
        here = {_MODEL + bare_name(name): (name, value) for name, value in self._model.state_dict().items()}
        there = set(saved.below(_MODEL))
        if not there:
            raise missing_part("model", saved)
        if self._strict and here.keys() != there:
            lacks = [f"the checkpoint lacks {listed(sorted(here.keys() - there))}"] if here.keys() - there else []
            lacks += [f"the model lacks {listed(sorted(there - here.keys()))}"] if there - here.keys() else []
            raise CheckpointError(
                f"the checkpoint is of another model: {'; '.join(lacks)}",
                url=saved.what,
                hint="restore(strict=False) takes over the tensors that both have",
            )
        targets = {}
        for key, (name, value) in here.items():
            if key not in there:
                continue
            if _is_record(name, value):
                targets[key] = saved.record(key)
                continue
            check_savable(key, value)
            check_same_shape(key, value, saved)
            _check_writable(key, value)
            own = own_name(self._rank, key)
            target = own if own in saved else key
            targets[target] = saved.target(target, value)
        return targets

    def check(self, targets: Mapping[str, ReadTarget]) -> None:
        """Decode the records of modules."""
        self._rest = {
            name: decoded(targets[key].memory, key)
            for name, value in self._model.state_dict().items()
            if (key := _MODEL + bare_name(name)) in targets and _is_record(name, value)
        }

    def undo(self) -> Callable[[], None]:
        """Keep what the model's own code takes over, which may fail; ``apply`` keeps the tensors in that case."""
        state = self._model.state_dict()
        own = copy.deepcopy({name: state[name] for name in self._loaded_by_code(state)})

        def undo() -> None:
            with torch.no_grad():
                for value, kept in reversed(self._replaced):
                    value.copy_(kept)
            if own:
                self._model.load_state_dict(own, strict=False)

        return undo

    def _loaded_by_code(self, state: Mapping[str, Any]) -> set[str]:
        """Return the names of records, and of copies that a hook of the model made."""
        own = {_address(each) for each in (*self._model.parameters(), *self._model.buffers())}
        return {name for name, value in state.items() if name in self._rest or _address(value) not in own}

    @torch.no_grad()
    def apply(self, targets: Mapping[str, ReadTarget]) -> None:
        """Copy the values into the model's own tensors; what ``state_dict()`` had copied goes by ``load_state_dict``."""
        state = self._model.state_dict()
        by_code = self._loaded_by_code(state)
        rest = dict(self._rest)
        for name, value in state.items():
            key = _MODEL + bare_name(name)
            target = targets.get(own_name(self._rank, key), targets.get(key))
            if target is None or name in self._rest:
                continue
            if name in by_code:
                rest[name] = value.clone()
                local(rest[name]).copy_(target.memory)
                continue
            tensor = local(value)
            if by_code:
                self._replaced.append((tensor, tensor.cpu().clone()))
            tensor.copy_(target.memory)
        if rest:
            self._model.load_state_dict(rest, strict=False)
        self._rest = {}


class OptimizerPart:
    """Options of the parameter groups, and what the optimizer keeps for each parameter.

    An optimizer that has not made a step has no state yet: it gets the saved one, without a step that would change it.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: torch.nn.Module, *, rank: int, strict: bool = True
    ) -> None:
        self._optimizer = optimizer
        self._rank = rank
        self._strict = strict
        self._state: dict[str, Any] = {}
        known = {id(each): bare_name(name) for name, each in bare_model(model).named_parameters(remove_duplicate=False)}
        self._parameters: dict[str, torch.Tensor] = {}
        self._groups: list[list[str]] = []
        for number, group in enumerate(optimizer.param_groups):
            if unknown := [each for each in group["params"] if id(each) not in known]:
                raise ConfigError(
                    f"parameter group {number} of the optimizer has {len(unknown)} parameters that are not the model's",
                    hint="make the optimizer after the model is sharded or moved: Adam(model.parameters())",
                )
            self._groups.append([known[id(each)] for each in group["params"]])
            self._parameters.update({known[id(each)]: each for each in group["params"]})

    def items(self) -> dict[str, torch.Tensor]:
        """Return the tensors by parameter, and on rank 0 everything else as a record."""
        state = self._optimizer.state_dict()
        names = [name for group in self._groups for name in group]
        items: dict[str, torch.Tensor] = {}
        values: dict[str, dict[str, Any]] = {}
        for number, entries in state["state"].items():
            for entry, value in entries.items():
                if isinstance(value, torch.Tensor):
                    key = f"{_STATES}{names[number]}.{entry}"
                    check_savable(key, value)
                    items[key] = value
                else:
                    values.setdefault(names[number], {})[entry] = value
        if self._rank == 0:
            groups = [
                {**group, "params": params} for group, params in zip(state["param_groups"], self._groups, strict=True)
            ]
            record = {"groups": groups, "values": values, "kind": type(self._optimizer).__name__}
            items[_GROUPS] = encoded(record, "the options of the optimizer")
        return items

    def request(self, saved: SavedItems) -> dict[str, ReadTarget]:
        """Request the state of every parameter, laid out like the parameter if it has the same shape."""
        if _GROUPS not in saved:
            raise missing_part("optimizer", saved)
        targets = {_GROUPS: saved.record(_GROUPS)}
        unknown = []
        for key in saved.below(_STATES):
            name, entry = self._split(key)
            if name is None:
                unknown.append(key.removeprefix(_STATES))
                continue
            size = saved.tensor(key).size
            parameter = self._parameters[name]
            layout = self._optimizer.state.get(parameter, {}).get(entry)
            if not isinstance(layout, torch.Tensor) or layout.shape != size:
                layout = parameter if parameter.shape == size else torch.empty(size, device="meta")
            targets[key] = saved.target(key, layout)
        if unknown and self._strict:
            raise CheckpointError(
                f"the checkpoint's optimizer has parameters that are not here: {listed(unknown)}",
                url=saved.what,
                hint="restore(strict=False) takes over the parameters that both have",
            )
        return targets

    def _split(self, key: str) -> tuple[str | None, str]:
        """Split a key into parameter and entry; both may contain dots, so the longest known name counts."""
        name, entry = key.removeprefix(_STATES), ""
        while name:
            name, _, last = name.rpartition(".")
            entry = f"{last}.{entry}" if entry else last
            if name in self._parameters:
                return name, entry
        return None, ""

    def check(self, targets: Mapping[str, ReadTarget]) -> None:
        """Compare the groups, and put the optimizer's state together."""
        saved = decoded(targets[_GROUPS].memory, "the options of the optimizer")
        groups: list[dict[str, Any]] = saved["groups"]
        there = [group["params"] for group in groups]
        if [len(each) for each in there] != [len(each) for each in self._groups] or (
            self._strict and there != self._groups
        ):
            raise CheckpointError(
                f"the checkpoint's optimizer has {len(there)} groups with {[len(each) for each in there]} parameters, this "
                f"one has {len(self._groups)} with {[len(each) for each in self._groups]}, or they are in another order",
                hint="make the optimizer as the run did that saved the checkpoint",
            )
        state: dict[str, dict[str, Any]] = {name: dict(values) for name, values in saved["values"].items()}
        for key in targets:
            if key.startswith(_STATES):
                name, entry = self._split(key)
                assert name is not None
                state.setdefault(name, {})[entry] = targets[key]
        self._check_kind(saved.get("kind"), groups, state)
        numbers = {name: number for number, name in enumerate(name for group in self._groups for name in group)}
        counted = iter(range(len(numbers)))
        self._state = {
            "state": {number: state[name] for name, number in numbers.items() if name in state},
            "param_groups": [{**group, "params": [next(counted) for _ in group["params"]]} for group in groups],
        }

    def _check_kind(
        self, kind: str | None, groups: list[dict[str, Any]], state: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Refuse the state of another kind of optimizer, which ``load_state_dict`` would take over without a word.

        A newer PyTorch adds options, and schedulers do, so only names that are missing on both sides tell another kind. Early
        checkpoints do not name the class.
        """
        here = type(self._optimizer).__name__
        pairs = [
            ("groups", self._optimizer.param_groups, groups),
            ("states", self._optimizer.state.values(), state.values()),
        ]
        lacks = [] if kind in (None, here) else [f"it is of {kind}, and this one is {here}"]
        for what, *both in pairs:
            ours, theirs = ({name for each in side for name in each} - _SCHEDULER_OPTIONS for side in both)
            if ours - theirs and theirs - ours:
                lacks.append(
                    f"its {what} have {listed(sorted(theirs - ours))}, and those of {here} have {listed(sorted(ours - theirs))}"
                )
        if lacks:
            raise CheckpointError(
                f"the checkpoint is of another kind of optimizer: {'; '.join(lacks)}",
                hint="make the optimizer as the run did that saved the checkpoint, or leave optimizer= out",
            )

    def undo(self) -> Callable[[], None]:
        """Keep the options and the state, whose tensors are replaced and not written to."""
        return undo_of(self._optimizer)

    @torch.no_grad()
    def apply(self, targets: Mapping[str, ReadTarget]) -> None:
        """Load the state, with its tensors on the devices and in the shards of their parameters."""
        for entries in self._state["state"].values():
            for entry, value in entries.items():
                if isinstance(value, ReadTarget):
                    entries[entry] = _as_tensor(value)
        self._optimizer.load_state_dict(self._state)
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        for number, entries in self._state["state"].items():
            loaded = self._optimizer.state[parameters[number]]
            for entry, value in entries.items():
                if entry in loaded:
                    loaded[entry] = _with_own_dtypes(loaded[entry], value)
        self._state = {}


def _with_own_dtypes(loaded: Any, saved: Any) -> Any:
    """Return `loaded` with the dtypes of the tensors in `saved`, because PyTorch gives them the dtype of their parameter."""
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return {
            name: _with_own_dtypes(value, saved[name]) if name in saved else value for name, value in loaded.items()
        }
    if type(loaded) in (list, tuple) and isinstance(saved, list | tuple) and len(loaded) == len(saved):
        return type(loaded)(map(_with_own_dtypes, loaded, saved))
    return loaded


def check_same_shape(key: str, value: torch.Tensor, saved: SavedItems) -> None:
    """Refuse to load a tensor of another shape or dtype.

    Raises:
        CheckpointError: They differ.
    """
    there = saved.tensor(key)
    if value.shape != there.size or value.dtype != there.properties.dtype:
        raise CheckpointError(
            f"the checkpoint is of another model: {key} is {list(there.size)} of {there.properties.dtype} there, and "
            f"{list(value.shape)} of {value.dtype} here",
            url=saved.what,
        )


def _check_writable(key: str, value: torch.Tensor) -> None:
    """Refuse to load into a tensor that ``expand`` made; PyTorch would notice after others were loaded.

    Raises:
        ConfigError: Several of its elements share memory.
    """
    shard = local(value)
    if any(stride == 0 and size > 1 for stride, size in zip(shard.stride(), shard.shape, strict=True)):
        hint = "make the buffer by .contiguous()"
        raise ConfigError(f"{key} cannot be restored, because several of its elements share memory", hint=hint)


def _is_record(name: str, value: Any) -> bool:
    return name.rpartition(".")[2] == _EXTRA or not isinstance(value, torch.Tensor)


def _address(value: torch.Tensor) -> int:
    return local(value).data_ptr()


def _as_tensor(target: ReadTarget) -> torch.Tensor:
    layout = target.layout
    if not isinstance(layout, DTensor):
        return target.memory
    shard = target.memory.to(layout.to_local().device)
    return DTensor.from_local(
        shard, layout.device_mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride()
    )
