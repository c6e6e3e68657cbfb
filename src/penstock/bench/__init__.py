"""Measurements of ways to read a data set, and ``step``, which says what data costs a training step. See README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.system.lazy import lazy_getattr

if TYPE_CHECKING:
    from penstock.bench.stepping import StepCost as StepCost
    from penstock.bench.stepping import step as step

_ORIGIN = {"StepCost": "stepping", "step": "stepping"}

__all__ = sorted(_ORIGIN)  # noqa: PLE0605 - computed from the one table

if not TYPE_CHECKING:
    __getattr__ = lazy_getattr(__name__, _ORIGIN)
