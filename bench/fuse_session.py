"""What does the FUSE session cost alone? MB/s, files/s and entries/s over a file system in memory, and the CPU of its process.

The programs that read are dd, cat and find. Their own work is in the rates, and not in the CPU.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clients import HERE, Function
from harness import arguments, memory_folder
from peers import serve_memory

from penstock.bench.process import BenchError
from penstock.bench.turns import Row, Run

MIB = 1 << 20
SMALL_REQUEST_BYTES = 128 * 1024  # the kernel's default
METRICS = {
    "units/s": lambda answer: answer["units"] / answer["elapsed_s"],
    "CPU us/unit": lambda answer: answer["cpu_s"] / answer["units"] * 1e6,
}
PROGRAM_S_MAX = 300


@contextmanager
def served(directory: Path, request_bytes: int) -> Iterator[int]:
    """Mount the file system on a directory; the process id of what serves it."""
    directory.mkdir()
    process = subprocess.Popen(
        [sys.executable, HERE / "peers" / "serve_memory.py", directory, str(request_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        if process.stdout.readline() != "ready\n":
            raise BenchError("the file system was not mounted")
        yield process.pid
    finally:
        process.communicate(timeout=30)


def cpu_s(process_id: int) -> float:
    """Time that the threads of a process have run so far; /proc/PID/stat is too coarse for 20 000 entries."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{process_id}/task").glob("*/schedstat")) / 1e9


def measured(process_id: int, directory: Path, script: str, units: float) -> dict[str, Any]:
    """Run a shell script in the mounted directory."""
    before_s, cpu_before_s = time.perf_counter(), cpu_s(process_id)
    subprocess.run(["sh", "-ec", script], cwd=directory, check=True, timeout=PROGRAM_S_MAX)
    return {
        "units": units,
        "elapsed_s": time.perf_counter() - before_s,
        "cpu_s": cpu_s(process_id) - cpu_before_s,
    }


def main(options: Any) -> None:
    large_mb, folders = serve_memory.LARGE_BYTES / 1e6, serve_memory.FOLDER_COUNT * (serve_memory.FOLDER_FILES + 1) + 1
    dd = "dd if=large/%s of=/dev/null bs=1M status=none"
    eight = " & ".join(dd % number for number in range(8)) + " & wait"
    files = "find small -type f -print0 | xargs -0 -n 250 -P %d cat > /dev/null"
    with (
        memory_folder() as folder,
        served(folder / "mount", MIB) as wide,
        served(folder / "narrow", SMALL_REQUEST_BYTES) as narrow,
    ):
        clients = [
            Function("sequential, MB", measured, wide, folder / "mount", dd % 0, large_mb),
            Function("sequential, 128 KiB per request, MB", measured, narrow, folder / "narrow", dd % 0, large_mb),
            Function("8 readers, MB", measured, wide, folder / "mount", eight, large_mb * 8),
            Function("small files, 1 reader", measured, wide, folder / "mount", files % 1, serve_memory.SMALL_COUNT),
            Function("small files, 16 readers", measured, wide, folder / "mount", files % 16, serve_memory.SMALL_COUNT),
            Function("find, entries", measured, wide, folder / "mount", "find folders > /dev/null", folders),
            Function(
                "find -size, entries", measured, wide, folder / "mount", "find folders -size +1 > /dev/null", folders
            ),
        ]
        run = Run("the FUSE session alone", None, options.select(clients), METRICS, options.turns(5, 2))
        with run:
            run.turns(lambda client: client.measure(), warm=lambda client: client.measure())
        limits = {
            "sequential, MB": (2_000, 3_500),
            "8 readers, MB": (2_000, 3_500),
            "small files, 16 readers": (8_000, 16_000),
            "find, entries": (100_000, 180_000),
        }
        rows = [Row(name, run.values(name, "units/s"), *limits[name]) for name in limits if name in run.answers]
        run.report(rows)


if __name__ == "__main__":
    main(arguments(__doc__))
