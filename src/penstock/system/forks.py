"""What happens to live objects when the user forks the process.

penstock itself never forks a process in which its threads are running. If the user does (a DataLoader with ``fork``), the
child has only one thread: the event loops are gone, locks may be held for ever, and sockets are shared with the parent.
Therefore each registered object replaces its locks in the child and forgets its transfers, and inherited transfers, iterators
and writers raise ``ClosedError``. The parent goes on undisturbed. ``generation()`` tells whether an object was inherited.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from penstock.errors import ClosedError


class Forked(Protocol):
    """An object with threads, locks or transfers of its own."""

    def after_fork_in_child(self) -> None:
        """Replace locks, and forget what belonged to the parent's threads; the child has only one thread at this moment."""


_generation = 0
_registered: weakref.WeakSet[Forked] = weakref.WeakSet()


def generation() -> int:
    """Return the number of forks between the first process and this one.

    An object stores it at construction and passes it to ``check`` at use.
    """
    return _generation


def register(item: Forked) -> None:
    """Have ``item.after_fork_in_child()`` called in every forked child that inherits it."""
    _registered.add(item)


def check(made_in: int, what: str) -> None:
    """Refuse to use an object that was inherited through a fork.

    Args:
        made_in: ``generation()`` when the object was created.
        what: The object, for the message.

    Raises:
        ClosedError: The object was created before a fork, and this is the child.
    """
    if made_in != _generation:
        raise ClosedError(
            f"{what} was inherited through fork", hint="create a new one in the child; stores may be used again"
        )


def _in_child() -> None:
    global _generation
    _generation += 1
    for item in list(_registered):
        item.after_fork_in_child()


os.register_at_fork(after_in_child=_in_child)
