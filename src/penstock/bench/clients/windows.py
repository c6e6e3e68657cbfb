"""Windows of training steps over an epoch that stays open: with its batches, without them, or at a fixed pace.

Command, a JSON line: {"do": "steps", "job": an epoch's, "kind": "loaded" | "bare" | "paced", "steps": n, "settle": n,
"burn": additions a step} -> {"seconds", "cpu_s", ...} of the `steps` that follow `settle` uncounted ones. ``paced`` takes a
batch every ``STEP_S`` and burns nothing: what the same loader does to the machine, without a loop beside it.
Standard library only.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

STEP_S = 0.02


def burn(loops: int) -> None:
    """What a training step does in Python: holds the interpreter for as long as these additions take."""
    total = 0
    for number in range(loops):
        total += number & 3


class _Used(NamedTuple):
    """What this process and this thread have used so far: seconds of CPU and of waiting for one, context switches."""

    wall_s: float
    thread_s: float
    process_s: float
    queued_s: float
    switches: float

    @classmethod
    def now(cls) -> _Used:
        thread = resource.getrusage(resource.RUSAGE_THREAD)
        _, queued_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
        switches = thread.ru_nvcsw + thread.ru_nivcsw
        return cls(time.perf_counter(), time.thread_time(), time.process_time(), int(queued_ns) / 1e9, switches)


class Windows:
    """One client's epoch, begun by the first window that takes a batch."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._batches: Iterator[Any] | None = None

    def take(self, command: dict[str, Any]) -> dict[str, Any]:
        """Run one window."""
        kind, job = command["kind"], command["job"]
        if self._batches is None and kind != "bare":
            self._client.prepare(job)
            self._batches = self._client.epoch(job)
        self._steps(kind, job, command["settle"], command["burn"])
        before = _Used.now()
        waited_s, taken_s = self._steps(kind, job, command["steps"], command["burn"])
        used = _Used(*(now - then for now, then in zip(_Used.now(), before, strict=True)))
        return {
            "seconds": used.wall_s, "cpu_s": used.thread_s, "others_cpu_s": used.process_s - used.thread_s,
            "waited_s": waited_s, "taken_cpu_s": taken_s, "queued_s": used.queued_s, "switches": used.switches,
        }  # fmt: skip

    def _steps(self, kind: str, job: dict[str, Any], count: int, loops: int) -> tuple[float, float]:
        """Seconds, and seconds of this thread's CPU, that taking the batches took."""
        waited_s = taken_s = 0.0
        began_s = time.perf_counter()
        for number in range(1, count + 1):
            if kind != "bare":
                asked_s, cpu_s = time.perf_counter(), time.thread_time()
                assert self._batches is not None
                images, _ = next(self._batches)
                if len(images) != job["batch"]:
                    raise AssertionError(f"a batch of {len(images)}, not of {job['batch']}")
                del images, _
                waited_s += time.perf_counter() - asked_s
                taken_s += time.thread_time() - cpu_s
            if kind == "paced":
                time.sleep(max(0.0, began_s + number * STEP_S - time.perf_counter()))
            else:
                burn(loops)
        return waited_s, taken_s
