"""``Checkpoint``: everything that a training run needs to continue as if it had not stopped, as one checkpoint on the store."""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import sys
import threading
import traceback
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch

from penstock.checkpoints import Checkpoints, check_step, step_directory
from penstock.checkpoints.directory import REPLACED_MAX
from penstock.compose import check_connect_options
from penstock.config import check_whole
from penstock.errors import (
    CheckpointError,
    ClosedError,
    ConfigError,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
)
from penstock.system.tracebacks import boundary
from penstock.text.sizes import format_bytes
from penstock.torch.batches import Stateful
from penstock.torch.checkpoint.exchange import RankGroup, read_items, write_items
from penstock.torch.checkpoint.items import tensor_bytes
from penstock.torch.checkpoint.model_parts import ModelPart, OptimizerPart, own_name
from penstock.torch.checkpoint.parts import LoaderPart, RandomPart, RecordPart
from penstock.torch.checkpoint.place import checked_run_url
from penstock.torch.checkpoint.saved_items import SavedItems, local
from penstock.torch.checkpoint.storage_reader import StorageReader
from penstock.torch.checkpoint.storage_writer import StorageWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.distributed.checkpoint.metadata import Metadata

    from penstock.checkpoints import CheckpointInfo
    from penstock.torch.checkpoint.parts import StatePart
    from penstock.torch.checkpoint.saved_items import ReadTarget

_unreported: list[BackgroundSave] = []
"""Saves that are under way, or that failed without anybody having been told."""


class BackgroundSave:
    """Calls a function in a thread, and makes sure that its failure is noticed, even if the process ends.

    The thread is not a daemon, so a process that ends normally first finishes its upload. If the save failed and the error has
    not been raised by then, it is printed and the exit code becomes 1.

    Args:
        call: The function.
        what: Description of the save, for the message at exit.
    """

    def __init__(self, call: Callable[[], None], what: str) -> None:
        self._call = call
        self.what = what
        self.failure: BaseException | None = None
        _unreported.append(self)
        self._thread = threading.Thread(target=self._run, name="penstock-checkpoint", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.failure = error
        else:
            _unreported.remove(self)

    @property
    def is_running(self) -> bool:
        """Whether it is still under way."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it has ended.

        Raises:
            BaseException: It failed; only the first call raises it.
        """
        self._thread.join()
        failure, self.failure = self.failure, None
        if failure is not None:
            _unreported.remove(self)
            raise failure


def _report_at_exit() -> None:
    failed = [save for save in _unreported if save.failure is not None]
    for save in failed:
        assert save.failure is not None
        print(f"penstock: {save.what} failed, and the process ends without having heard of it:", file=sys.stderr)
        traceback.print_exception(save.failure, file=sys.stderr)
    if failed:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)  # an exception here would be printed, and the exit code would remain 0


atexit.register(_report_at_exit)


class SnapshotMemory:
    """Memory for one snapshot, which every save uses again; pinned for tensors from a GPU.

    Args:
        bytes_max: The most bytes that a snapshot may take on this rank; None means no limit.

    Raises:
        ConfigError: `bytes_max` is not a positive number of bytes.
    """

    def __init__(self, *, bytes_max: int | None) -> None:
        if bytes_max is not None:
            check_whole("snapshot_bytes_max", bytes_max, 1)
        self._bytes_max = bytes_max
        self._held: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def take(self, items: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy this rank's part of `items`, and return the copies by name. The previous snapshot is overwritten.

        Raises:
            ConfigError: They take more bytes than the limit; nothing is copied.

        Cost: one copy of the state; memory is allocated at the first call.
        """
        shards = {name: local(value) for name, value in items.items()}
        size_bytes = sum(each.nbytes for each in shards.values())
        if self._bytes_max is not None and size_bytes > self._bytes_max:
            raise ConfigError(
                f"a snapshot takes {format_bytes(size_bytes)}, more than snapshot_bytes_max={self._bytes_max}",
                hint="save(wait=True) needs no snapshot",
            )
        self._held = {name: self._memory(name, shard) for name, shard in shards.items()}
        is_on_gpu = False
        for name, shard in shards.items():
            is_on_gpu = is_on_gpu or shard.is_cuda
            self._held[name].copy_(shard, non_blocking=shard.is_cuda)
        if is_on_gpu:
            torch.cuda.current_stream().synchronize()
        return self._held

    def release(self) -> None:
        """Free the memory."""
        self._held = {}

    def _memory(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        held = self._held.get(name)
        if held is not None and held.shape == shard.shape and held.dtype == shard.dtype:
            return held
        return torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda)


logger = logging.getLogger("penstock")


@boundary
class Checkpoint:
    """Saves and restores a whole training run: model, optimizer, scheduler, random generators, and position in the data.

    A restored run continues bit for bit as if it had not been interrupted. Checkpoints are directories below a URL, such
    as ``s3://bucket/run/step-0000001000/``, in the format of ``torch.distributed.checkpoint``. Each rank writes its shards
    directly to the store, and the checkpoint becomes visible when all ranks have finished. Model and optimizer may be
    plain, or wrapped by DDP, ``fully_shard`` (FSDP2), tensor parallelism or ``torch.compile``; they can be restored with other
    wrappers and on another number of ranks.

    Every rank of ``torch.distributed`` creates one and calls its methods in the same order; a call on only one rank would
    wait for the others. It is a context manager.

    Args:
        model: The model.
        optimizer: Optimizer of the model, made after the model was sharded or moved; None saves none.
        loader: The ``Loader``, or another object that hands out batches (``ps.torch.Prefetch``, a ``StatefulDataLoader``). The
            saved state counts only the batches that the training loop received, not those that were read ahead.
        scheduler: A learning rate scheduler, or any object with ``state_dict()`` whose state is the same on all ranks.
        rng: Whether to save the random generators of each rank: Python's, NumPy's, and PyTorch's on the CPU and on the
            current GPU.
        extras: Other objects with ``state_dict()`` and ``load_state_dict()`` by name, such as a ``GradScaler``; their
            state must be small and the same on all ranks.
        snapshot_bytes_max: Largest copy of the state, in bytes, that ``save(wait=False)`` may make on this rank; None means
            no limit.
        **options: The same options as for ``penstock.connect``.

    Raises:
        ConfigError: An argument is invalid, for example because the optimizer has parameters that are not the model's, or
            an object has no ``state_dict()``.

    Cost: nothing until it is used. The first ``save(wait=False)`` allocates memory for one copy of this rank's state, in pinned
        memory if the state is on a GPU; it is used again until ``close()``.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        loader: Stateful | None = None,
        scheduler: Any = None,
        rng: bool = True,
        extras: Mapping[str, Stateful] | None = None,
        snapshot_bytes_max: int | None = None,
        **options: Any,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._loader = loader
        self._rng = rng
        self._records = _records(scheduler, extras)
        self._memory = SnapshotMemory(bytes_max=snapshot_bytes_max)
        self._options = options
        self._group: RankGroup | None = None
        self._save: BackgroundSave | None = None
        self._is_closed = False
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model= must be a module, not {type(model).__name__}")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"optimizer= must be an optimizer of PyTorch, not {type(optimizer).__name__}")
        if loader is not None and not isinstance(loader, Stateful):
            raise ConfigError(
                f"loader= has no state_dict() and load_state_dict(): {type(loader).__name__}",
                hint="pass a ps.Loader, or torchdata's StatefulDataLoader in place of a DataLoader",
            )
        check_connect_options("Checkpoint", options)
        self._parts(0, 1, strict=True)  # raises if the arguments are wrong

    # ── saving ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def save(
        self,
        url: str | os.PathLike[str],
        *,
        step: int,
        wait: bool = True,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        """Save the state as the checkpoint of a step. A checkpoint of the same step is replaced.

        Args:
            url: URL of the checkpoints of this run: ``s3://bucket/run/``.
            step: Number of steps that have been trained; the checkpoint with the largest one is the newest.
            wait: Whether to wait until the checkpoint is on the store. False returns when the state has been copied to
                memory, and uploads the copy while training continues; if another save is running, it waits for that first.
            keep_last: Number of the newest whole checkpoints to keep when this one is complete; None removes none.
            keep_every: Steps that are multiples of this number are kept, too; needs `keep_last`.

        Raises:
            ConfigError: An argument is invalid, the ranks pass different steps, or the state cannot be saved, for example
                because a tensor is on ``meta``.
            StoreError: The store failed. Earlier checkpoints are unchanged, and nothing of this one is visible. With
                ``wait=False`` the next ``save``, ``wait`` or ``close`` raises the error; if none of them is called, the exit
                code of the process is 1.
            ClosedError: This object is closed.

        Cost: one upload of this rank's shards, and a few small requests for the commit. With ``wait=False`` the caller waits
            only for one copy of this rank's state in memory.
        """
        self._check_open()
        self.wait()
        group = self._ranks()
        job = _SaveJob(group, url, step, keep_last, keep_every, self._options)
        job.capture(self._parts(group.rank, group.size), None if wait else self._memory)
        if wait or job.failure is not None:
            job.run()
        else:
            self._save = BackgroundSave(job.run, f"saving the checkpoint of step {step}")

    def wait(self) -> None:
        """Wait until the save in the background has ended, if there is one.

        Raises:
            StoreError: It failed.
        """
        save = self._save
        if save is None:
            return
        try:
            save.wait()
        finally:
            if not save.is_running:  # after Ctrl-C it is: another save must not overwrite the snapshot that it reads
                self._save = None

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way in the background."""
        return self._save is not None and self._save.is_running

    # ── restoring ──────────────────────────────────────────────────────────────────────────────────────────────────

    def latest(self, url: str | os.PathLike[str]) -> int | None:
        """Return the step of the newest checkpoint below `url` that is whole, or None if there is none.

        Cost: one request per 1 000 files, and one or two for each checkpoint until a whole one is found.
        """
        self._check_open()
        info = self._ranks().first(lambda: _find(url, None, self._options))
        return None if info is None else info.step

    def restore(self, url: str | os.PathLike[str], *, step: int | None = None, strict: bool = True) -> int | None:
        """Continue from a checkpoint: the newest one that is whole, or that of a step.

        Nothing is changed before every rank has read and checked its part. After an error, the run is as it was: if an object
        refuses its state, the others get back what they had.

        Args:
            url: URL of the checkpoints of this run: ``s3://bucket/run/``.
            step: Step of the checkpoint; None takes the newest one.
            strict: Whether the model and the optimizer must have exactly the parameters of the checkpoint. False restores
                those that both have; their shapes and dtypes must match in any case.

        Returns:
            The step of the checkpoint; None if `step` is None and there is no checkpoint, so the run starts from the beginning.

        Raises:
            ConfigError: The URL is that of one checkpoint, not of the run; or an argument is invalid.
            CheckpointError: The checkpoint is damaged, is of another model or class of optimizer, lacks a part that is asked
                for, or was saved by another number of ranks, each with its own place in the data; or there is no checkpoint
                of this step.
            StoreError: The store failed.

        Cost: parallel requests for this rank's part of the state, and memory for a second copy of it until it is restored.
        """
        self._check_open()
        self.wait()
        group = self._ranks()
        parts = self._parts(group.rank, group.size, strict=strict)
        read = _read_parts(group, parts, url, step, self._options)
        if read is None:
            logger.info("%s has no checkpoint: the run begins", url)
            return None
        found, targets = read

        def check() -> None:
            for part in parts:
                part.check(targets)

        group.each(check)
        _apply(group, parts, targets)
        return found

    # ── closing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Wait until the save in the background has ended, and free the memory of snapshots; idempotent.

        Raises:
            StoreError: The save failed.
        """
        self._is_closed = True
        try:
            self.wait()
        finally:
            self._memory.release()

    def __repr__(self) -> str:
        return f"<Checkpoint of {type(self._model).__name__}{', closed' if self._is_closed else ''}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"The last save of the checkpoint failed, too: {failure}")

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("this Checkpoint is closed")

    def _ranks(self) -> RankGroup:
        if self._group is None:
            self._group = RankGroup()
        return self._group

    def _parts(self, rank: int, size: int, *, strict: bool = True) -> list[StatePart]:
        """Return the parts in the order in which they are taken over: what may refuse its state comes first."""
        parts: list[StatePart] = [RecordPart(name, target, rank=rank) for name, target in self._records.items()]
        if self._optimizer is not None:
            parts.append(OptimizerPart(self._optimizer, self._model, rank=rank, strict=strict))
        if self._loader is not None:
            parts.append(LoaderPart(self._loader, rank=rank, size=size))
        parts.append(ModelPart(self._model, rank=rank, strict=strict))
        if self._rng:
            parts.append(RandomPart(rank=rank))
        return parts


def _read_parts(
    group: RankGroup, parts: list[StatePart], url: str | os.PathLike[str], step: int | None, options: Mapping[str, Any]
) -> tuple[int, Mapping[str, ReadTarget]] | None:
    """Read what `parts` want of a checkpoint, on all ranks; one that is replaced or removed meanwhile is chosen again.

    Returns:
        The step, and what was read; None if there is no checkpoint.
    """
    for attempts_left in reversed(range(REPLACED_MAX)):
        info = group.first(lambda: _find(url, step, options))
        if info is None or info.step is None:
            return None
        with StorageReader(_directory_url(url, info.step), **options) as reader:

            def request(metadata: Metadata, url: str = reader.checkpoint_id) -> dict[str, ReadTarget]:
                saved = SavedItems(metadata.state_dict_metadata, url)
                return {name: target for part in parts for name, target in part.request(saved).items()}

            def is_replaced(reader: StorageReader, error: BaseException) -> bool:
                return (
                    isinstance(error, (CheckpointError, ObjectMissingError, ObjectChangedError))
                    and reader.is_replaced()
                )

            try:
                return info.step, read_items(group, reader, request)
            except BaseException as error:  # the ranks may have different ones, and all take part in the next step
                if not any(group.each(partial(is_replaced, reader, error))) or not attempts_left:
                    raise
    raise AssertionError  # the last attempt returns or raises


def _apply(group: RankGroup, parts: list[StatePart], targets: Mapping[str, ReadTarget]) -> None:
    """Take the state of all parts over, on all ranks; after an error on one of them, all are as before.

    The model's tensors come after all ranks have succeeded with the rest, because a copy of them would be needed to undo it.
    The random generators come last once more, as the model's own code may draw numbers.
    """
    undo = [RandomPart(rank=group.rank).undo()]  # code that loads a state may draw random numbers

    def apply(some: list[StatePart]) -> None:
        for part in some:
            undo.append(part.undo())
            part.apply(targets)

    try:
        group.each(lambda: apply([part for part in parts if not isinstance(part, ModelPart)]))
        group.each(lambda: apply([part for part in parts if isinstance(part, ModelPart | RandomPart)]))
    except BaseException as error:
        for call in reversed(undo):
            try:
                call()
            except Exception as failure:
                error.add_note(f"The run is not as it was, because something could not be put back: {failure!r}")
        raise


@dataclass(slots=True)
class _SaveJob:
    """One save: what is captured while training waits, and what is done afterwards on any thread.

    If capturing fails on this rank, the others hear of it when it runs, rather than wait for this rank.
    """

    group: RankGroup
    url: str | os.PathLike[str]
    step: int
    keep_last: int | None
    keep_every: int | None
    options: Mapping[str, Any]
    items: dict[str, torch.Tensor] = field(default_factory=dict)
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)
    failure: Exception | None = None

    def capture(self, parts: list[StatePart], memory: SnapshotMemory | None) -> None:
        """Take the state of `parts`, copied to `memory` if there is one."""
        try:
            checked_run_url(self.url)
            check_step(self.step)
            if self.keep_every is not None and self.keep_last is None:
                raise ConfigError("keep_every= needs keep_last=", hint="keep_last=3, keep_every=1000")
            for name, value in (("keep_last", self.keep_last), ("keep_every", self.keep_every)):
                if value is not None:
                    check_whole(name, value, 1)
            for part in parts:
                self.items.update(part.items())
            self.values = self.items if memory is None else memory.take(self.items)
        except Exception as error:
            self.failure = error

    def run(self) -> None:
        """Write what was captured, and remove what is not to be kept."""
        group = self.group
        claims = group.each(self._claim)
        if len({step for step, _, _ in claims}) > 1:
            raise ConfigError(f"the ranks save different steps; this one is step={self.step}")
        if len({names for _, names, _ in claims}) > 1:
            raise ConfigError(
                "the ranks have different parameters; Checkpoint saves models that are replicated or sharded",
                hint="with pipeline parallelism, save the parts by torch.distributed.checkpoint",
            )
        first = claims[0][2]
        for key, digest in claims[group.rank][2].items():
            if group.rank == 0 or digest == first.get(key):  # those of rank 0 have names of their own
                del self.items[own_name(group.rank, key)]
        with StorageWriter(_directory_url(self.url, self.step), **self.options) as writer:
            write_items(group, writer, self.items, self.values)
        if self.keep_last is not None:
            group.first(self._retain)

    def _retain(self) -> None:
        with Checkpoints(checked_run_url(self.url), **self.options) as checkpoints:
            try:
                checkpoints.retain(keep_last=self.keep_last, keep_every=self.keep_every)
            except StoreError as error:  # keys that may write need not be allowed to delete; the checkpoint is there
                logger.warning(
                    "The checkpoint of step %d is saved, but older ones were not removed: %s", self.step, error
                )

    def _claim(self) -> tuple[int, bytes, dict[str, bytes]]:
        """Return what the ranks compare: the step, a digest of the names, and digests of what each rank has for itself."""
        if self.failure is not None:
            raise self.failure
        prefix = own_name(self.group.rank, "")
        own = {name.removeprefix(prefix): value for name, value in self.values.items() if name.startswith(prefix)}
        names = {name for name in self.items if name.startswith(("model.", "optimizer.state."))}
        digests = {name: _digest(tensor_bytes(local(value).cpu().contiguous())) for name, value in own.items()}
        return self.step, _digest("\0".join(sorted(names | own.keys())).encode()), digests


def _digest(data: Any) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _directory_url(url: str | os.PathLike[str], step: int) -> str:
    return checked_run_url(url) + step_directory(step)


def _find(url: str | os.PathLike[str], step: int | None, options: Mapping[str, Any]) -> CheckpointInfo | None:
    """Return the checkpoint of a step, or else the newest one that is whole; None if there is none."""
    with Checkpoints(checked_run_url(url), **options) as checkpoints:
        return checkpoints.newest() if step is None else checkpoints.find(check_step(step))


def _records(scheduler: Any, extras: Mapping[str, Stateful] | None) -> dict[str, Stateful]:
    """Return the objects that are saved as one record each, by name.

    Raises:
        ConfigError: A name or an object is not valid.
    """
    records = {} if scheduler is None else {"scheduler": scheduler}
    for name, target in (extras or {}).items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"extras has the name {name!r}, which is not an identifier")
        records[f"extras.{name}"] = target
    for name, target in records.items():
        if not isinstance(target, Stateful):
            hint = None if name == "scheduler" else "wrap a plain value in a class with these two methods"
            raise ConfigError(f"{name} has no state_dict() and load_state_dict(): {type(target).__name__}", hint=hint)
    return records
