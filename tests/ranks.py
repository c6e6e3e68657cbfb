"""Scripts in several processes: as torchrun starts them, by torchrun or forked from a process with PyTorch imported."""

from __future__ import annotations

import multiprocessing.connection
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import warm

END_S_MAX = 30.0  # as torchrun waits for the others once one has failed


def torchrun(processes: int, script: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Run `script` in that many processes, by torchrun itself; what they printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*command, str(script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},  # more threads round in another way
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_ranks(processes: int, script: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Run `script` in that many processes as torchrun does, but much faster; what they printed."""
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = Path(folder, "stdout"), Path(folder, "stderr")
        with Ranks(
            processes, script, *arguments, environment=os.environ | (environment or {}), folder=Path.cwd(),
            stdout=stdout, stderr=stderr,
        ) as ranks:  # fmt: skip
            assert ranks.wait(110) == 0, stderr.read_text()[-3000:]
        return stdout.read_text()


class Ranks:
    """A script that runs in several processes, which find each other by a store that this process holds.

    As under torchrun, all are ended if one fails; here somebody has to wait for that.

    Args:
        processes: How many.
        script: What each runs.
        arguments: Its arguments.
        environment: Its environment variables, to which those of torchrun come.
        folder: Its working directory.
        stdout: File for what all of them print.
        stderr: File for their errors.
    """

    def __init__(
        self, processes: int, script: Path, *arguments: str, environment: Mapping[str, str], folder: Path,
        stdout: Path, stderr: Path,
    ) -> None:  # fmt: skip
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            **environment,
            "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port), "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "test",
        }  # fmt: skip
        self._processes = [
            warm.start(
                script, *arguments, environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, folder=folder,
                stdout=stdout, stderr=stderr,
            )
            for rank in range(processes)
        ]  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def poll(self) -> int | None:
        """Return the exit code, 0 or that of a rank that failed, once all have ended."""
        failed = [each for each in self._processes if each.exitcode]
        if failed:
            for each in self._processes:
                each.terminate()
            deadline_s = time.monotonic() + END_S_MAX
            for each in self._processes:
                each.join(max(0.0, deadline_s - time.monotonic()))
                each.kill()
                each.join()
            return failed[0].exitcode
        return None if any(each.is_alive() for each in self._processes) else 0

    def wait(self, seconds_max: float) -> int:
        """Wait for the end, and return the exit code."""
        deadline_s = time.monotonic() + seconds_max
        while (code := self.poll()) is None:
            left_s = deadline_s - time.monotonic()
            alive = [each.sentinel for each in self._processes if each.is_alive()]
            if left_s <= 0 or not multiprocessing.connection.wait(alive, left_s):
                raise subprocess.TimeoutExpired("ranks", seconds_max)
        return code

    def kill(self) -> None:
        """End what still runs."""
        for each in self._processes:
            each.kill()
            each.join()
