"""``Monitor``: what a process tree, the machine and its GPU do while a client runs; by psutil and NVML."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

from penstock.errors import ConfigError

INTERVAL_S = 0.25


class Monitor:
    """Takes samples of a process and its descendants while the context is open.

    Args:
        process_id: The process.
        requests: Log of the store's answers.

    Attributes:
        start_s: When it began, by ``time.perf_counter``.
        series: Rows of seconds since the start, CPU of the tree and of the host (1 is one core), memory of the tree in bytes
            (PSS: what is shared counts once), bytes that the host received, the busy share of the GPU, which is None
            without one, and the requests that the store has answered, which is None without a log.
        peak_pss_bytes: Largest memory of the tree in bytes, also of a context that is too short for a row.
    """

    def __init__(self, process_id: int, requests: RequestLog | None = None) -> None:
        self.series: list[tuple[float, float, float, int, int, float | None, int | None]] = []
        self.peak_pss_bytes = 0
        self.start_s = 0.0
        self._process, self._requests = psutil.Process(process_id), requests
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="penstock-bench-monitor", daemon=True)
        self._gpu = gpu_handle()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        self.start_s = before_s = time.perf_counter()
        tree_s, host_s, received = self._cpu_s(), _host_cpu_s(), psutil.net_io_counters().bytes_recv
        self._pss_bytes()
        while not self._ended.wait(INTERVAL_S):
            now_s, tree_now_s, host_now_s = time.perf_counter(), self._cpu_s(), _host_cpu_s()
            passed_s = now_s - before_s
            self.series.append(
                (
                    round(now_s - self.start_s, 3), round(max(0.0, tree_now_s - tree_s) / passed_s, 3),
                    round((host_now_s - host_s) / passed_s, 3), self._pss_bytes(),
                    psutil.net_io_counters().bytes_recv - received, gpu_busy_ratio(self._gpu),
                    self._requests.answered() if self._requests else None,
                )
            )  # fmt: skip
            before_s, tree_s, host_s = now_s, tree_now_s, host_now_s
        self._pss_bytes()

    def _tree(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            return [self._process, *self._process.children(recursive=True)]
        return []

    def _cpu_s(self) -> float:
        total_s = 0.0
        for process in self._tree():
            with suppress(psutil.Error):
                total_s += sum(process.cpu_times()[:4])  # with the children that have ended
        return total_s

    def _pss_bytes(self) -> int:
        total = 0
        for process in self._tree():
            with suppress(psutil.Error):
                total += process.memory_full_info().pss
        self.peak_pss_bytes = max(self.peak_pss_bytes, total)
        return total


class RequestLog:
    """Counts the answers that ``penstock bench origin --log`` writes to a file.

    Args:
        path: The file.

    Raises:
        ConfigError: There is none.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        if not self._path.exists():
            raise ConfigError(f"{path} does not exist", hint="the file of penstock bench origin --log")
        self._at = self._seen_at = self._path.stat().st_size
        self._seen = 0

    def counted(self) -> dict[str, Any]:
        """Return "requests", numbers by kind, and "fetched_bytes" since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            complete = file.read().rpartition(b"\n")
        self._at += len(complete[0]) + len(complete[1])
        self._seen_at, self._seen = self._at, 0
        answers = [line.decode().split() for line in complete[0].splitlines()]
        kinds = Counter(method if status < "400" else f"{method} {status}" for method, status, _ in answers)
        return {"requests": dict(kinds), "fetched_bytes": sum(int(size) for _, _, size in answers)}

    def answered(self) -> int:
        """Return the number of answers since the last call of ``counted``, of which none is forgotten."""
        with self._path.open("rb") as file:
            file.seek(self._seen_at)
            new = file.read()
        self._seen_at += len(new)
        self._seen += new.count(b"\n")
        return self._seen


def _host_cpu_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - getattr(times, "guest", 0.0))


def gpu_handle() -> Any:
    """Return NVML's handle of the first GPU; None without one."""
    with suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByIndex(0)
    return None


def gpu_busy_ratio(handle: Any) -> float | None:
    """Return the share of the time in which the GPU ran a kernel, as NVML samples it; None without one."""
    if handle is None:
        return None
    import pynvml

    return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu) / 100
