"""What a fork does to live objects: only the child is notified, and inherited objects refuse to be used."""

from __future__ import annotations

import os
import warnings

import pytest

from penstock.errors import ClosedError
from penstock.system import forks


def in_child(check: str) -> int:
    """Return the exit status of a forked child that asserts `check`, an expression over this module's names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other tests' threads may live
        child = os.fork()
    if child == 0:
        try:
            os._exit(0 if eval(check, {**globals(), **_LOCALS}) else 1)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


_LOCALS: dict[str, object] = {}


class Told:
    """Counts its notifications."""

    def __init__(self) -> None:
        self.count = 0
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Count a notification."""
        self.count += 1


def refused(made_in: int) -> bool:
    """Whether the use of an inherited object is refused."""
    try:
        forks.check(made_in, "this thing")
    except ClosedError as error:
        return "this thing was inherited through fork" in str(error)
    return False


def test_only_the_child_is_told() -> None:
    """A registered object is notified once in the child, and never in the parent."""
    told = _LOCALS["told"] = Told()
    assert in_child("told.count == 1") == 0
    assert told.count == 0


def test_the_child_is_another_generation() -> None:
    """``generation()`` grows in the child, and ``check`` refuses objects that the parent created."""
    here = _LOCALS["here"] = forks.generation()
    assert in_child("forks.generation() == here + 1 and refused(here)") == 0
    assert forks.generation() == here
    forks.check(here, "this")
    with pytest.raises(ClosedError):
        forks.check(here - 1, "this")


def test_registering_keeps_nothing_alive() -> None:
    """Registering an object does not keep it alive."""
    import gc
    import weakref

    reference = weakref.ref(Told())
    gc.collect()
    assert reference() is None
