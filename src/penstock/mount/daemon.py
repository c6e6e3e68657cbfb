"""The process that serves a mount: ``python -m penstock.mount.daemon``.

A program must not use a mount that its own process serves: a page fault in a mapped file would wait for a thread that waits
for the interpreter's lock, and a process that is killed while it waits for itself never ends. Each mount has its own process.

It receives a ``DaemonRequest`` on its standard input. Once the mount can be used or has failed, it answers on its standard
output: a pickled pair of an error or None, and a warning or an empty text. With ``is_bound``, it ends when its standard input
ends, with the process that started it. A byte on standard input (``HURRY``) ends it too, without a long wait for open files.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.mount.log_file import start_logging
from penstock.mount.serving import MountServer, collect_rarely, serve_until_signal
from penstock.redaction import public_url

if TYPE_CHECKING:
    from penstock.mount.config import MountConfig

HURRY = b"!"
"""What a daemon is sent to end soon."""

_log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonRequest:
    """The request that a daemon receives.

    Attributes:
        config: The mount.
        log_file: Path of its log.
        is_bound: Whether it ends with the process that started it.
        is_verbose: Whether it logs requests and retries as well.
    """

    config: MountConfig
    log_file: str
    is_bound: bool
    is_verbose: bool


def main() -> int:
    """Serve one mount until it is unmounted, a signal arrives, or the process that it is bound to ends."""
    request: DaemonRequest = pickle.load(sys.stdin.buffer)
    start_logging(Path(request.log_file), is_verbose=request.is_verbose)
    collect_rarely()
    try:
        server = MountServer(request.config)
    except (PenstockError, OSError) as error:
        _answer(error, keeps_input=False)
        return 1
    with server:
        if request.is_bound:
            threading.Thread(target=_end_with_input, args=(server,), name="penstock-bound", daemon=True).start()
        os.chdir("/")  # not earlier: paths of the configuration may be relative
        _log.info("%s is mounted on %s.", public_url(request.config.url), request.config.directory)
        serve_until_signal(server, announce=partial(_answer, None, server.warning, keeps_input=request.is_bound))
    _log.info("%s was unmounted.", request.config.directory)
    return 0


def _answer(error: BaseException | None, warning: str = "", *, keeps_input: bool) -> None:
    """Answer the process that started this one, and let go of its terminal and its pipes."""
    pickle.dump((error, warning), sys.stdout.buffer)
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDWR)
    for number in (1, 2) if keeps_input else (0, 1, 2):
        os.dup2(null, number)
    os.close(null)


def _end_with_input(server: MountServer) -> None:
    if os.read(0, len(HURRY)) == HURRY:
        server.hurry()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
