"""Checks on users' functions: how many arguments they take, and whether they take random numbers."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.system.tracebacks import function_name

if TYPE_CHECKING:
    from collections.abc import Callable


def check_function(fn: object, stage: str) -> None:
    """Check that `fn` can be called with (sample) or (sample, rng).

    Args:
        fn: The user's function.
        stage: Name of the method that takes it, for the message.

    Raises:
        ConfigError: `fn` is not callable, or it requires more than two arguments.
    """
    if not callable(fn):
        raise ConfigError(f".{stage}({fn!r}) must be given a function of a sample")
    if sum(parameter.default is inspect.Parameter.empty for parameter in _positional(fn)) > 2:
        raise ConfigError(
            f".{stage}({function_name(fn)}) must take (sample) or (sample, rng), not more",
            hint="bind further arguments by functools.partial",
        )


def takes_rng(fn: Callable[..., Any]) -> bool:
    """Whether `fn` is passed a ``numpy.random.Generator``: its second parameter is required, or is named ``rng``."""
    parameters = _positional(fn)
    return len(parameters) >= 2 and (parameters[1].default is inspect.Parameter.empty or parameters[1].name == "rng")


def _positional(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature is called with the sample alone
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter for parameter in parameters if parameter.kind in kinds]
