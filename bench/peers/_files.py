"""What the drivers of file systems share: the work of ``fsspec_clients.py``, by fsspec's interface alone."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEP_BYTES = 8 << 20

Finished = Callable[[], dict[str, Any]]
"""Computes after the clock was stopped what the work has delivered."""


class FileSystemWork:
    """The work on any fsspec file system whose paths begin with `root`."""

    def __init__(self, files: Any, root: str) -> None:
        self._files, self._root = files, root

    def work(self, command: dict[str, Any]) -> Finished:
        """Do what the command names, and return what computes its check."""
        return getattr(self, f"_{command['what']}")(command)

    def _cat(self, command: dict[str, Any]) -> Finished:
        data = self._files.cat_file(f"{self._root}/{command['key']}")
        return lambda: _answer([data])

    def _stream(self, command: dict[str, Any]) -> Finished:
        total = 0
        ends = b""
        with self._files.open(f"{self._root}/{command['key']}", "rb") as file:
            while piece := file.read(STEP_BYTES):
                total += len(piece)
                ends = piece[-64:]
        return lambda: {"bytes": total, "objects": 1, "check": hashlib.md5(ends).hexdigest()}

    def _ranges(self, command: dict[str, Any]) -> Finished:
        starts, length = command["starts"], command["length"]
        path = f"{self._root}/{command['key']}"
        found = self._files.cat_ranges([path] * len(starts), starts, [start + length for start in starts])
        return lambda: _answer(found)

    def _find(self, command: dict[str, Any]) -> Finished:
        found = self._files.find(self._root)
        skip = len(self._root) + 1
        return lambda: _answer([path[skip:].encode() for path in found])

    def _small(self, command: dict[str, Any]) -> Finished:
        found = self._files.cat([f"{self._root}/{key}" for key in command["keys"]])
        return lambda: _answer([found[f"{self._root}/{key}"] for key in command["keys"]])

    def _get(self, command: dict[str, Any]) -> Finished:
        folder = Path(tempfile.mkdtemp(prefix="files-", dir=command["folder"]))
        self._files.get(f"{self._root}/{command['prefix']}/", f"{folder}/", recursive=True)

        def finished() -> dict[str, Any]:
            answer = _answer([path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()])
            shutil.rmtree(folder)
            return answer

        return finished


def _answer(pieces: list[bytes]) -> dict[str, Any]:
    check = hashlib.md5()
    for piece in pieces:
        check.update(piece)
    return {"bytes": sum(map(len, pieces)), "objects": len(pieces), "check": check.hexdigest()}
