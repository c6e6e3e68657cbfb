"""The record of a run: a file of JSON lines, to which each measurement is added as soon as it is there.

A run that is stopped keeps what it measured, and goes on where it stopped. The lines by their "kind":

* ``run``: the first one; "url", "scenario", "part" (its title), "settings", "data" (see ``DataFacts``), and "commit",
  "machine", "python" as of ``surroundings``, "started" (Unix time).
* ``not run``: "name" and "reason" of a client that cannot read this data here, or that failed.
* ``turn``: "name", "round", "settings" (of a sweep), "versions", what ``run_epoch`` answered, "pss_bytes", and "monitor" as
  ``Monitor.series`` has it; where they are known, "requests" (numbers by kind), "fetched_bytes" and "throttled_count" (answers
  by which the store asked to slow down). The name ``raw reading`` is that of the store alone, ``one cached batch`` that of
  the step alone.
* ``end``: the run is complete.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, DataError
from penstock.text.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE = "record.jsonl"


@dataclass(slots=True)
class BenchRecord:
    """The record in a folder.

    Attributes:
        path: The file.
        run: The line of the run; empty before it was begun.
        turns: The lines of turns.
        not_run: Reasons by names of clients.
        is_complete: Whether the run came to its end.
    """

    path: Path
    run: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, Any]] = field(default_factory=list)
    not_run: dict[str, str] = field(default_factory=dict)
    is_complete: bool = False

    @classmethod
    def load(cls, folder: str | Path, *, is_continued: bool = False) -> BenchRecord:
        """Read the record in a folder, without a last line that was cut off by the end of its process.

        Args:
            folder: The folder.
            is_continued: Whether the run goes on: such a line is then removed from the file, too.

        Raises:
            ConfigError: There is none, or nothing was measured yet.
            DataError: A line is damaged.
        """
        path = Path(folder) / FILE
        record = cls(path)
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            raise ConfigError(f"{folder} has no {FILE}", hint="the folder of --out of penstock bench run") from None
        complete = [line for line in lines if line.endswith(b"\n")]
        for number, line in enumerate(complete, start=1):
            try:
                record._take(json.loads(line))
            except ValueError as error:
                raise DataError(f"line {number} is damaged: {error}", shard=str(path)) from error
        if is_continued and len(complete) < len(lines):
            path.write_bytes(b"".join(complete))
        if not is_continued and not record.run:
            raise ConfigError(f"{path} holds no run", hint="penstock bench run URL --out DIR")
        return record

    @classmethod
    def load_parts(cls, folder: str | Path) -> list[BenchRecord]:
        """Read the record in a folder, or those of the parts of a scenario in its folders, in the order of their runs.

        Raises:
            ConfigError: There is none, or nothing was measured yet.
            DataError: A line is damaged.
        """
        parts = [] if (Path(folder) / FILE).exists() else [path.parent for path in Path(folder).glob(f"*/{FILE}")]
        return sorted(map(cls.load, parts or [Path(folder)]), key=lambda record: record.run["started"])

    def add(self, kind: str, **values: Any) -> None:
        """Add a line, which is on the disk when this returns."""
        line = {"kind": kind, **values}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._take(line)

    @property
    def title(self) -> str:
        """What was measured, and the latency of its store, as the title of a table."""
        data, part = self.run["data"], self.run.get("part")
        counted = f"{self.amount}, first byte after {data['first_byte_s'] * 1e3:.1f} ms"
        return f"{part}: {self.run['url']}  ({counted})" if part else f"{self.run['url']}  ({counted})"

    @property
    def amount(self) -> str:
        """How much data there is, and what is not read of it."""
        data = self.run["data"]
        about = "about " if data.get("is_estimated") else ""
        some = (
            f", of which other libraries read the first {data['keys']:,}"
            if data["keys"] < data["objects_count"]
            else ""
        )
        noun = "object" if data["objects_count"] == 1 else "objects"
        others = f", {data['left_out']}" if data.get("left_out") else ""
        return f"{about}{data['objects_count']:,} {noun}{some}, {about}{format_bytes(data['total_bytes'])}{others}"

    def _take(self, line: Mapping[str, Any]) -> None:
        kind = line.get("kind")
        if kind == "run":
            self.run = dict(line)
        elif kind == "turn":
            self.turns.append(dict(line))
        elif kind == "not run":
            self.not_run[line["name"]] = line["reason"]
        elif kind == "end":
            self.is_complete = True

    def has_turn(self, name: str, settings: Mapping[str, Any], number: int) -> bool:
        """Return whether this client has been measured in this round with these settings."""
        return any(
            turn["name"] == name and turn["round"] == number and turn["settings"] == dict(settings)
            for turn in self.turns
        )
