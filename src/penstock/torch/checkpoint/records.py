"""Small objects as tensors: what a checkpoint holds beside the tensors of the training.

They are written by ``torch.save`` and read with ``weights_only=True``, so that reading a checkpoint runs no code from it.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from penstock.errors import ConfigError, DataError
from penstock.torch.checkpoint.archive import load_guarded


def encoded(value: Any, what: str) -> torch.Tensor:
    """uint8[n] that ``decoded`` makes equal to `value`.

    Args:
        value: Numbers, strings, None, tensors, and lists, tuples, dicts of them.
        what: Description of the value, for the message.

    Raises:
        ConfigError: The value holds an object of another class, which could not be read again.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except (pickle.PicklingError, pickle.UnpicklingError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{what} holds an object that cannot be read from a checkpoint: {_first_line(error)}",
            hint="use numbers, strings, lists, dicts and tensors; torch.serialization.add_safe_globals allows other classes",
        ) from None
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def decoded(data: torch.Tensor, what: str) -> Any:
    """Return the value that ``encoded`` was given.

    Raises:
        DataError: It is damaged, or holds a class that ``torch.load`` does not allow.
    """
    try:
        return load_guarded(data.numpy().tobytes())
    except Exception as error:
        raise DataError(f"{what} in the checkpoint cannot be read: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
