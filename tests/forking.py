"""A forked child of a test: whatever happens in it, it ends there, and never goes on with the tests of its parent."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable


def start_child(work: Callable[[], object]) -> int:
    """Return the pid of a forked child, which exits with 0 if `work` returns something true, 1 if not, and 2 if it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, from Python 3.12 on
        child = os.fork()
    if child:
        return child
    status = 2
    try:
        status = 0 if work() else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def exit_code_of(child: int) -> int:
    """Wait for a child, and return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
