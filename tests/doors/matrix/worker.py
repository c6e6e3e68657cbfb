"""A process that reads through doors: one JSON command per line on its standard input, one JSON answer per line.

Commands: ``{"door": "MODULE:CLASS", "job": {...}, "environment": {...}, "do": ...}``, where ``do`` is ``"epoch"``, ``"epochs"``
(two, with an answer after each and a line to wait for between them) or ``"resume"``. An answer is
``{"records": [...]}`` or ``{"kind": "...", "error": "..."}``.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
import traceback
import warnings
from typing import Any, TextIO

from doors.matrix.data_set import Record
from doors.matrix.door import Door, Job, ProgramError
from penstock.errors import PenstockError

RESUMES_AFTER = 3  # batches


def opened(command: dict[str, Any]) -> Door:
    """Return the door of a command."""
    module, _, name = command["door"].partition(":")
    kind: type[Door] = getattr(importlib.import_module(module), name)
    return kind(Job(**{**command["job"], "files": tuple(command["job"]["files"])}))


def epoch_of(door: Door) -> list[Record]:
    """Return the records of an epoch."""
    return [record for batch in door.epoch() for record in batch]


def resumed(command: dict[str, Any]) -> list[Record]:
    """Return the records of an epoch that one door began and another finished."""
    door = opened(command)
    try:
        first, state = door.head(RESUMES_AFTER)
    finally:
        door.close()
    door = opened(command)
    try:
        door.restore(state)
        return first + epoch_of(door)
    finally:
        door.close()


def execute(command: dict[str, Any], answers: TextIO) -> None:
    """Execute a command, and write its answers."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ.update(command["environment"])
    if command["do"] == "resume":
        answer(answers, records=resumed(command))
        return
    door = opened(command)
    try:
        if command["do"] == "epochs":
            answer(answers, records=epoch_of(door))
            sys.stdin.readline()
        answer(answers, records=epoch_of(door))
    finally:
        door.close()


def answer(answers: TextIO, **values: Any) -> None:
    """Write one answer."""
    answers.write(json.dumps(values) + "\n")
    answers.flush()


def kind_of(error: Exception) -> str:
    """Return an exception's class, with the system's number if it is an error of a file; or the exit code of a program."""
    if isinstance(error, ProgramError):
        return f"exit code {error.code}"
    number = error.errno if isinstance(error, OSError) and not isinstance(error, PenstockError) else None
    return type(error).__name__ + (f" ({errno.errorcode[number]})" if number in errno.errorcode else "")


def main() -> None:
    """Serve until the standard input ends."""
    warnings.filterwarnings("ignore")  # of frameworks; what matters here are samples and errors
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not become an answer
    for line in sys.stdin:
        try:
            execute(json.loads(line), answers)
        except Exception as error:
            answer(answers, kind=kind_of(error), error="".join(traceback.format_exception(error)))


if __name__ == "__main__":
    main()
