"""``ReadingProcess``: a worker process that reads through doors, and what it answered."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from doors.matrix.data_set import Record, parsed
from doors.matrix.door import Job

TESTS = Path(__file__).parents[2]
ANSWER_S_MAX = 90.0


class DoorError(Exception):
    """A door raised.

    Attributes:
        kind: Name of the exception's class.
        text: Its traceback, as a user would see it.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind
        self.text = text


class ReadingProcess:
    """A process for the doors of one framework. It is started once, because imports take longer than epochs.

    Args:
        folder: Folder for its log.
        cache_home: Where the indexes of data sets are found.
    """

    def __init__(self, folder: Path, *, cache_home: Path) -> None:
        self._log = (folder / "log").open("w+")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "doors.matrix.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            stderr=self._log, start_new_session=True,
            env=environment | {
                "PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(cache_home), "TF_CPP_MIN_LOG_LEVEL": "3",
            },
        )  # fmt: skip
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def epoch(self, door: str, job: Job, environment: Mapping[str, str], *, do: str = "epoch") -> list[Record]:
        """Return the records of an epoch; with ``do="resume"``, of one that was left and continued.

        Raises:
            DoorError: The door raised.
        """
        self._send({"door": door, "job": asdict(job), "environment": dict(environment), "do": do})
        return self._answer()

    def begin_epochs(self, door: str, job: Job, environment: Mapping[str, str]) -> list[Record]:
        """Return the records of the first of two epochs, which one door reads; ``second_epoch`` reads the other."""
        return self.epoch(door, job, environment, do="epochs")

    def second_epoch(self) -> list[Record]:
        """Return the records of the second epoch.

        Raises:
            DoorError: The door raised.
        """
        self._send({})
        return self._answer()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> list[Record]:
        try:
            line = self._answers.get(timeout=ANSWER_S_MAX)
        except queue.Empty:
            line = ""
        if not line:
            self._process.kill()
            self._log.seek(0)
            raise AssertionError(f"no answer within {ANSWER_S_MAX:g} s; its log ends: {self._log.read()[-3000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise DoorError(answer["kind"], answer["error"])
        return [parsed(json.dumps(record)) for record in answer["records"]]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")
