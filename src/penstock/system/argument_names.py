"""What was meant by the name of an argument that does not exist: a similar name, or another library's word for it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

_UNEXPECTED = re.compile(r"got an unexpected keyword argument '(\w+)'")
_SAME_WORD = 0.85  # num_worker is num_workers, and window is not workers
_WINDOW = ".shuffle(window=n) of the pipeline holds n samples to draw from"
_PREFETCH = "ps.Loader(prefetch_batches=) is the number of batches that wait; requests are read ahead by themselves"
_SIDES = "height= and width= are its sides in pixels"
_MAP = ".map(fn) of the pipeline calls a function on every sample"
_PROCESSES = "ps.Loader(processes=) is the number of worker processes; without it, threads= decode"
_KEYS = "keys are a ps.Credentials, the argument credentials"
OTHER_WORDS = {
    "aws_access_key_id": _KEYS,
    "aws_secret_access_key": _KEYS,
    "batch_size": ".batch(n) of the pipeline makes batches of n samples",
    "buffer_size": _WINDOW,
    "collate_fn": ".batch(n, collate=fn) of the pipeline",
    "drop_last": ".batch(n, drop_last=True) of the pipeline",
    "handler": 'ps.shards(url, on_corrupt="skip_sample") leaves out damaged samples',
    "image_size": _SIDES,
    "num_parallel_calls": _PROCESSES,
    "num_replicas": "world_size= of ps.Loader",
    "num_workers": _PROCESSES,
    "persistent_workers": "the workers of a ps.Loader live as long as it does",
    "pin_memory": "ps.torch.Prefetch(loader) copies to the device through pinned memory",
    "prefetch_factor": _PREFETCH,
    "prefetch_size": _PREFETCH,
    "sampler": ".pick(numbers) of the pipeline, or a ps.torch.MapDataset in a DataLoader",
    "shuffle": ".shuffle(window=) of the pipeline",
    "shuffle_buffer": _WINDOW,
    "size": _SIDES,
    "transform": _MAP,
    "transforms": _MAP,
}
"""What takes the place of an argument of PyTorch, torchvision, WebDataset, tf.data or boto3."""


def unknown_argument(what: str, name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for an argument that does not exist.

    Args:
        what: Name of the function, for the message.
        name: Name of the argument.
        known: Names of all arguments that exist.
    """
    from difflib import get_close_matches

    names = list(known)
    near = get_close_matches(name, names, n=1, cutoff=_SAME_WORD)
    foreign = [] if near else get_close_matches(name, OTHER_WORDS, n=1, cutoff=_SAME_WORD)
    near = near or ([] if foreign else get_close_matches(name, names, n=1, cutoff=0.5))
    hint = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(names)}"
    return ConfigError(
        f"{what}({name}=...) is not an option of {what}()", hint=OTHER_WORDS[foreign[0]] if foreign else hint
    )


def check_call(function: Any, error: TypeError) -> None:
    """Raise the error of ``unknown_argument`` if a call of `function` failed because it has no such argument.

    Args:
        function: The function that was called.
        error: Error that the call raised, as the caller caught it.

    Raises:
        ConfigError: The function has no such argument.
    """
    match = _UNEXPECTED.search(str(error))
    if match is None or error.__traceback__ is None or error.__traceback__.tb_next is not None:
        return  # it is something else, or comes from inside the function
    owner, _, name = function.__qualname__.rpartition(".")
    raise unknown_argument(owner if name == "__init__" else name, match[1], arguments_of(function)) from None


def arguments_of(function: Any) -> list[str]:
    """Return the names of the arguments of a function or method."""
    import inspect

    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind is not each.VAR_KEYWORD and each.name != "self"]
