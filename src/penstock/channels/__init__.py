"""SageMaker's input modes for any program: see README.md in this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.system.lazy import lazy_getattr

if TYPE_CHECKING:
    from penstock.channels.inputs import InputChannel as InputChannel
    from penstock.channels.reader import PipeReader as PipeReader
    from penstock.channels.runner.running import RunResult as RunResult
    from penstock.channels.runner.running import run as run

_ORIGIN = {
    "InputChannel": "inputs",
    "PipeReader": "reader",
    "RunResult": "runner.running",
    "run": "runner.running",
}

__all__ = sorted(_ORIGIN)  # noqa: PLE0605 - computed from the one table

if not TYPE_CHECKING:  # a type checker that saw it would accept every name
    __getattr__ = lazy_getattr(__name__, _ORIGIN)
