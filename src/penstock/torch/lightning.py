"""Finds which of Lightning's loops calls a dataloader, and the state that the loop read from a checkpoint and did not restore.

``trainer.fit`` saves the states of its dataloaders, but restores them only inside an epoch. It does not restore them at the end
of an epoch, where ``ModelCheckpoint`` saves by default, nor if ``configure_optimizers`` has used
``trainer.estimated_stepping_batches``. The loop keeps such states, though. And it does not tell a dataloader whether it trains
or validates. So this module looks for the loop on the call stack. No other file knows names that are private to Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

_FIT_LOOP = "_FitLoop"
_LOOPS = (_FIT_LOOP, "_EvaluationLoop", "_PredictionLoop")
_DATALOADERS = "_combined_loader"  # attributes of the loop of `trainer.fit`
_STATES = "_combined_loader_states_to_load"
_CALLERS_MAX = 7  # from a dataloader's length, or from set_epoch(), to the loop


def calling_loop(frame: FrameType | None) -> Any:
    """Return the loop of Lightning that calls, or None.

    Args:
        frame: Frame of the method that Lightning calls.
    """
    for _ in range(_CALLERS_MAX):
        if frame is None:
            break
        caller = frame.f_locals.get("self")
        if type(caller).__name__ in _LOOPS:
            return caller
        frame = frame.f_back
    return None


def is_evaluation(loop: Any) -> bool:
    """Whether a loop validates, tests or predicts."""
    return loop is not None and type(loop).__name__ != _FIT_LOOP


def is_limited(loop: Any) -> bool:
    """Whether a loop trains on a given number of batches in each epoch, rather than on all that there are."""
    if loop is None or is_evaluation(loop):
        return False
    limit = loop.trainer.limit_train_batches
    return isinstance(limit, int) or limit < 1.0


def trains_on(loop: Any, batches: object) -> bool:
    """Whether the ``trainer.fit`` that validates in a loop trains on the same iterable of batches."""
    trainer = loop.trainer
    is_fit = trainer.state.fn == "fit"
    return is_fit and any(getattr(each, "batches", None) is batches for each in _dataloaders(trainer.fit_loop))


def is_lost_on_resuming(loop: Any, dataset: object, *, is_sized: bool) -> bool:
    """Whether a loop resumes training, and the position of the ``DataLoader`` of a data set would be lost.

    It is lost if the ``DataLoader`` has no state, and at the end of an epoch. If it does not know its length, it is one batch
    ahead of the step.
    """
    if loop is None or is_evaluation(loop) or loop.trainer.ckpt_path is None:
        return False
    if not any(getattr(each, "dataset", None) is dataset for each in _dataloaders(loop)):
        return False
    is_inside_epoch = loop.restarting and not loop.epoch_loop.batch_progress.is_last_batch
    return not (is_sized and is_inside_epoch and getattr(loop, _STATES, None))


def unrestored_state(loop: Any, dataloader: object) -> dict[str, Any] | None:
    """Return the state of a dataloader that a loop has read from a checkpoint and not restored, or None.

    Args:
        loop: A loop of Lightning, or None.
        dataloader: A dataloader with a state; None is returned if it is not one of the loop's.
    """
    with_state = [each for each in _dataloaders(loop) if hasattr(each, "load_state_dict")]
    states = getattr(loop, _STATES, ())
    return next((state for each, state in zip(with_state, states, strict=False) if each is dataloader), None)


def _dataloaders(loop: Any) -> list[Any]:
    combined = getattr(loop, _DATALOADERS, None)
    return [] if combined is None else combined.flattened
