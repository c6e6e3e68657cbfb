"""What happens to live objects when the user forks.

penstock never forks a process that has its threads. If the user does (a DataLoader with ``fork``), the child has one
thread: the loop threads are gone, locks may be held for ever, sockets are shared with the parent. So in the child every
registered object replaces its locks and forgets its transfers, inherited transfers, iterators and writers raise
``ClosedError``, and the parent goes on undisturbed. ``generation()`` tells whether an object was inherited.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from penstock.errors import ClosedError


class Forked(Protocol):
    """An object with threads, locks or transfers of its own."""

    def after_fork_in_child(self) -> None:
        """Replace locks and forget what belonged to the parent's threads. The child has one thread at this moment."""


_generation = 0
_registered: weakref.WeakSet[Forked] = weakref.WeakSet()


def generation() -> int:
    """Forks between the first process and this one; remember it at construction, compare it at use."""
    return _generation


def register(item: Forked) -> None:
    """Have ``item.after_fork_in_child()`` called in every forked child that inherits it."""
    _registered.add(item)


def check(made_in: int, what: str) -> None:
    """Refuse the use of an object that was made before a fork, in its child.

    Raises:
        ClosedError: `made_in` is not this process's generation.
    """
    if made_in != _generation:
        raise ClosedError(
            f"{what} was inherited through fork", hint="make a new one in the child; stores may be used again"
        )


def _in_child() -> None:
    global _generation
    _generation += 1
    for item in list(_registered):
        item.after_fork_in_child()


os.register_at_fork(after_in_child=_in_child)
