"""What runs on a machine of the cluster: an actor that starts a worker process for each connection of its loader.

The module travels by value, so it begins with the standard library alone, and can say that penstock is missing or of
another version. Worker processes are those of ``Loader(processes=)``. They end with their connection and with the actor,
also those that hang in a function that keeps the interpreter's lock, and cannot see the end of their connection.
"""

from __future__ import annotations

import importlib
import os
import select
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping

CHECK_S = 0.5
"""Seconds between two looks at the memory of the worker processes."""


class Host:
    """An actor on a machine of the cluster."""

    def introduce(self) -> dict[str, Any]:
        """Listen for the loader, and say where; or what is wrong with this machine."""
        import ray

        found: dict[str, Any] = {"node": ray.util.get_node_ip_address(), "pid": os.getpid()}
        try:
            found["version"] = importlib.import_module("penstock.version").__version__
            importlib.import_module("penstock.loader.workers.worker")
        except ImportError as error:
            return {**found, "problem": f"{type(error).__name__}: {error}"}
        self._listener = socket.create_server((found["node"], 0), backlog=64)
        return {**found, "port": self._listener.getsockname()[1]}

    def serve(self, secret: bytes, memory_bytes_max: int | None) -> None:
        """Start a worker process for each connection of a loader that knows the secret; returns when the actor is killed."""
        from penstock.loader.workers.process_pool import start_process
        from penstock.processes.starting import is_running, kill_group
        from penstock.ray.connecting import Acceptor

        acceptor = Acceptor(self._listener, secret)
        processes: list[subprocess.Popen[bytes]] = []
        while True:
            if (end := acceptor.accept(CHECK_S)) is not None:
                process = start_process(end)
                threading.Thread(target=_end_together, args=(process, end), daemon=True).start()
                processes.append(process)
            processes = [process for process in processes if is_running(process)]
            for process in processes:
                if memory_bytes_max is not None and _resident_bytes(process.pid) > memory_bytes_max:
                    print(
                        f"penstock: worker process {process.pid} holds more than {memory_bytes_max} bytes, and is replaced",
                        file=sys.stderr,
                    )
                    kill_group(process)


class Shares:
    """A named actor that divides a pool among the loaders of a job. What it knows is reported anew all the time.

    Args:
        forget_s: Seconds after which a loader that has not reported is gone.
    """

    def __init__(self, forget_s: float) -> None:
        self._forget_s = forget_s
        self._reports: dict[str, tuple[float, int]] = {}

    def report(self, name: str, wanted_count: int, capacity: int) -> int:
        """Say how many workers a loader wants. Returns how many it may have."""
        now_s = time.monotonic()
        self._reports[name] = now_s, wanted_count
        self._reports = {each: found for each, found in self._reports.items() if now_s - found[0] < self._forget_s}
        return fair_shares({each: count for each, (_, count) in self._reports.items()}, capacity)[name]


def fair_shares(wanted: Mapping[str, int], capacity: int) -> dict[str, int]:
    """Divide the workers of a pool among loaders so that none gets more while another that wants as many gets fewer.

    Args:
        wanted: Number of workers that each loader wants, by name.
        capacity: Number of workers of the pool.

    Returns:
        Number of workers of each loader; their sum is at most `capacity`. Those whose names come first get what does not
        divide evenly.
    """
    shares: dict[str, int] = {}
    left = capacity
    for index, name in enumerate(sorted(wanted, key=lambda name: (wanted[name], name))):
        share = min(wanted[name], left // (len(wanted) - index))
        shares[name] = share
        left -= share
    for name in sorted(wanted):
        if left and shares[name] < wanted[name]:
            shares[name] += 1
            left -= 1
    return shares


def _end_together(process: subprocess.Popen[bytes], end: socket.socket) -> None:
    """Wait until a worker process or its connection ends, and end both, with what the process has started."""
    from penstock.processes.starting import kill_group

    ended = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(end, select.POLLRDHUP)  # the loader has closed its end, or the connection has failed
        poll.poll()
    finally:
        os.close(ended)
    kill_group(process)
    process.wait()
    end.close()  # the loader learns only now that the process has ended


def _resident_bytes(process_id: int) -> int:
    try:
        return int(Path(f"/proc/{process_id}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0  # it has ended
