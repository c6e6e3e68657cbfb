"""The FUSE session with the real kernel, over a file system in memory that a process of its own serves.

Whatever touches the mount is a process with a time limit, so that no test can hang in the kernel.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.mount.fuse.mount_table import find_mount
from penstock.mount.fuse.mounting import unmount
from servers.memory_file_system import content

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="needs /dev/fuse"),
]

TIME_S_MAX = 20
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "LC_ALL": "C"}


class ServedMount:
    """The process that serves the file system, and its directory."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.directory = directory
        self.log = directory.with_suffix(".log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "servers.memory_file_system", str(directory), *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=ENVIRONMENT,
            )
        answer = self._read()
        assert answer["ready"]

    def _read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        assert line, self.log.read_text()
        return json.loads(line)  # type: ignore[no-any-return]

    def tell(self, command: str) -> dict[str, Any]:
        """Have the process do something; what it says then."""
        self.process.stdin.write(command.encode() + b"\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        return self._read()

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a program in the mounted directory, with a time limit."""
        return subprocess.run(
            command, cwd=self.directory, capture_output=True, text=True, timeout=TIME_S_MAX, env=ENVIRONMENT
        )

    def close(self) -> None:
        """End the process, and remove the mount, whatever state they are in."""
        self.process.kill()
        self.process.communicate()
        while find_mount(str(self.directory)) is not None:
            unmount(self.directory, is_lazy=True)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedMount]:
    """A mounted file system in memory."""
    directory = tmp_path / "mount"
    directory.mkdir()
    mounted = ServedMount(directory)
    try:
        yield mounted
    finally:
        mounted.close()


def test_names_attributes_and_bytes(served: ServedMount) -> None:
    """Programs see the entries, their attributes and their bytes."""
    names = served.run("ls", "-1").stdout.split()
    assert {"small.txt", "empty", "large.bin", "folder", "many"} <= set(names)
    assert served.run("stat", "-c", "%s %i %h %a %Y", "small.txt").stdout == "1000 1002 1 644 1700000000\n"
    assert served.run("cat", "folder/näme with spaces").stdout == "x"
    digest = served.run("md5sum", "large.bin").stdout.split()[0]
    assert digest == hashlib.md5(content("large.bin", 20_000_003)).hexdigest()
    assert served.run("cat", "nothing").stderr == "cat: nothing: No such file or directory\n"
