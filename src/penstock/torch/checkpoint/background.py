"""A save in the background: a thread of its own, whose failure is not lost even if the process ends.

The thread is not a daemon, so a process that ends normally first finishes its upload. If the save failed and the error has
not been raised by then, it is printed and the exit code becomes 1.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_unheard: list[BackgroundSave] = []
"""Saves that are under way, or that failed without anybody having been told."""


class BackgroundSave:
    """Calls a function in a thread.

    Args:
        call: The function.
        what: Description of the save, for the message at exit.
    """

    def __init__(self, call: Callable[[], None], what: str) -> None:
        self._call = call
        self.what = what
        self.failure: BaseException | None = None
        _unheard.append(self)
        self._thread = threading.Thread(target=self._run, name="penstock-checkpoint", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.failure = error
        else:
            _unheard.remove(self)

    @property
    def is_running(self) -> bool:
        """Whether it is still under way."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it has ended.

        Raises:
            BaseException: It failed; only the first call raises it.
        """
        self._thread.join()
        failure, self.failure = self.failure, None
        if failure is not None:
            _unheard.remove(self)
            raise failure


def _tell_at_exit() -> None:
    failed = [save for save in _unheard if save.failure is not None]
    for save in failed:
        assert save.failure is not None
        print(f"penstock: {save.what} failed, and the process ends without having heard of it:", file=sys.stderr)
        traceback.print_exception(save.failure, file=sys.stderr)
    if failed:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)  # an exception here would be printed, and the exit code would remain 0


atexit.register(_tell_at_exit)
