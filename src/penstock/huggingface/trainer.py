"""``TrainerCallback``: transformers' ``Trainer`` on a loader, so that ``resume_from_checkpoint`` trains on the very next batch.

The Trainer does not save the state of its dataloader. It counts steps and resumes by skipping as many batches of the epoch.
For this it takes the dataloader apart: ``accelerate.skip_first_batches`` makes another dataloader of its ``dataset``. So this
dataset has the loader's state restored, and then begins with as many placeholders as the Trainer is going to skip. With
``ignore_data_skip`` the Trainer would skip nothing, which is simpler, but it then takes the rest of an epoch for a whole one:
the logged epoch is wrong, and the last gradients of the epoch are not applied if they were not accumulated in full.
"""

from __future__ import annotations

import importlib
import itertools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed
import torch.utils.data

from penstock.errors import ConfigError
from penstock.loader import Loader
from penstock.system.lazy import needing
from penstock.transfer.directories import upload_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

with needing("transformers", "TrainerCallback needs transformers. Hint: pip install transformers accelerate"):
    _Callback: Any = importlib.import_module("transformers").TrainerCallback

_STATE_NAME = "penstock.TrainerCallback"


class TrainerCallback(_Callback):  # type: ignore[misc]  # transformers is not installed where types are checked
    """Saves a loader's state in each checkpoint of transformers' ``Trainer``, and restores it when training resumes.

    Return ``dataloader()`` from the Trainer's ``get_train_dataloader``, and pass this object in its ``callbacks``. After
    ``train(resume_from_checkpoint=...)``, the batches and losses are those of a run that was not interrupted. The state is a
    part of ``trainer_state.json``. Nothing is read in order to be skipped.

    Args:
        batches: ``ps.torch.Tensors(loader)``; the loader must know its length, so shards need an index.
        upload_to: URL below which each checkpoint is uploaded, as ``checkpoint-N``, in place of the objects there; None uploads
            nothing. With several nodes, ``output_dir`` must be a directory that they share.
        **options: Options of ``penstock.connect`` for the upload.

    Raises:
        ConfigError: `batches` has no state or no length; or, when training begins, the Trainer reads other data, its arguments
            say ``ignore_data_skip=True``, or the checkpoint was saved without this callback, with another number of batches per
            epoch, or with other ``gradient_accumulation_steps``.
        StoreError: When a checkpoint is saved: it could not be uploaded.

    Cost: one ``state_dict()`` of the loader per optimizer step. The training waits for the upload.
    """

    def __init__(self, batches: Any, *, upload_to: str | None = None, **options: Any) -> None:
        if isinstance(batches, Loader) or not hasattr(batches, "load_state_dict"):
            raise ConfigError(
                f"TrainerCallback(batches) must be given tensors with a state, not a {type(batches).__name__}",
                hint="ps.torch.Tensors(loader)",
            )
        self._data = _Data(batches)
        self._upload_to = None if upload_to is None else upload_to.rstrip("/")
        self._options = options
        self._counts: dict[str, int] = {}

    def dataloader(self) -> Any:
        """Return the ``torch.utils.data.DataLoader`` for ``get_train_dataloader``. Do not pass it to ``accelerator.prepare``.

        Raises:
            ConfigError: The loader does not know its length, by which the Trainer finds out in which epoch a checkpoint is.
        """
        try:
            len(self._data)
        except TypeError as error:
            raise ConfigError(
                "the Trainer resumes by the number of batches in an epoch, and this loader does not know it",
                hint="run `penstock index`, and leave out stages that drop or multiply samples",
            ) from error
        return torch.utils.data.DataLoader(self._data, batch_size=None, collate_fn=_unchanged)

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Restore the loader's state, if training resumes."""
        if getattr(others.get("train_dataloader"), "dataset", None) is not self._data:
            raise ConfigError(
                "the Trainer does not read the batches of this callback, so it would resume on other samples",
                hint="return callback.dataloader() from the Trainer's get_train_dataloader()",
            )
        if args.ignore_data_skip:
            raise ConfigError(
                "with ignore_data_skip=True the Trainer takes the rest of an epoch for a whole one",
                hint="leave it out: with this callback, batches are not read in order to be skipped",
            )
        self._counts = {
            "batches_per_epoch": len(self._data),
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
        }
        self._data.placeholders_count = 0
        if not state.global_step:
            return
        saved = state.stateful_callbacks.get(_STATE_NAME)
        if saved is None:
            raise ConfigError(
                f"the checkpoint of step {state.global_step} was saved without this callback, so it has no loader's state",
                hint="resume from a checkpoint that was saved with TrainerCallback",
            )
        for name, value in self._counts.items():
            if saved.get(name) != value:
                raise ConfigError(
                    f"the checkpoint was saved with {name}={saved.get(name)}, and this run has {value}",
                    hint="resume with the same data, batch size, number of ranks and gradient accumulation",
                )
        self._data.batches.load_state_dict(saved["loader"])
        steps_per_epoch = math.ceil(len(self._data) / args.gradient_accumulation_steps)
        self._data.placeholders_count = state.global_step % steps_per_epoch * args.gradient_accumulation_steps

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Put the loader's state where the Trainer saves it, if it saves a checkpoint now."""
        state.stateful_callbacks[_STATE_NAME] = {"loader": self._data.batches.state_dict(), **self._counts}

    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Upload the checkpoint."""
        if self._upload_to is None:
            return
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()  # each rank writes files of its own
        if state.is_world_process_zero:
            name = f"checkpoint-{state.global_step}"
            upload_directory(Path(args.output_dir) / name, f"{self._upload_to}/{name}", delete=True, **self._options)


class _Data(torch.utils.data.IterableDataset[Any]):
    """Batches, after as many placeholders as the Trainer is going to skip in the first iteration."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches
        self.placeholders_count = 0

    def __iter__(self) -> Iterator[Any]:
        count, self.placeholders_count = self.placeholders_count, 0
        return itertools.chain(itertools.repeat(None, count), self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _unchanged(batch: Any) -> Any:
    return batch
