"""Process groups end as a whole, whatever happens to their first process or to the gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.processes.group import ProcessGroup
from servers.gateway import wait_until
from servers.leaks import has_ended

PARENT_AND_CHILD = ["sh", "-c", "sleep 1000 & echo $!; wait"]
PARENT_THAT_ENDS = ["sh", "-c", "sleep 1000 & echo $!; exit 3"]

GATEWAY = """
import asyncio, subprocess, sys
from penstock.processes.group import ProcessGroup

async def main():
    for number in sys.argv[3:]:
        group = ProcessGroup(
            ["sh", "-c", sys.argv[2]], on_exit=lambda: None, folder=sys.argv[1] + number, start_new_session=True)
        print(group.process_id, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def child_of(command: list[str]) -> tuple[ProcessGroup, int, list[str]]:
    """Start a group; return it, the number of the process that its first process prints, and what was noted at its end."""
    notes: list[str] = []
    reading, writing = os.pipe()
    group = ProcessGroup(command, on_exit=lambda: notes.append("ended"), stdout=writing, process_group=0)
    os.close(writing)
    with os.fdopen(reading) as printed:
        return group, int(printed.readline()), notes


@pytest.mark.parametrize("command", [PARENT_AND_CHILD, PARENT_THAT_ENDS], ids=["runs", "has_ended"])
def test_a_released_group_has_ended(command: list[str], nothing_left: Callable[[], Any]) -> None:
    """Release ends the children also of a process that has ended before, and nothing of it is left."""

    async def run() -> None:
        group, child, notes = child_of(command)
        if command is PARENT_THAT_ENDS:
            await group.wait_exit(60)
            assert (notes, group.exit_code()) == (["ended"], 3)
        group.release()
        group.release()
        assert group.is_released
        assert notes == ["ended"]
        assert has_ended(child)

    with nothing_left():
        asyncio.run(run())


def test_a_killed_group_says_how_it_ended() -> None:
    """The exit status is known before and after the release."""

    async def run() -> None:
        group, child, _ = child_of(PARENT_AND_CHILD)
        group.kill()
        await group.wait_exit(60)
        assert group.exit_code() == -signal.SIGKILL
        group.release()
        assert group.exit_code() == -signal.SIGKILL
        assert has_ended(child)

    asyncio.run(run())


def test_groups_end_with_a_killed_gateway(tmp_path: Path) -> None:
    """If the gateway is killed, so is all that its processes started, and their folders are removed."""
    for number in "12":
        (tmp_path / number).mkdir()
        (tmp_path / number / "file").touch()
    note = tmp_path / "children"
    command = f"sleep 1000 & echo $! >> {note}; wait"
    process = subprocess.Popen(
        [sys.executable, "-c", GATEWAY, f"{tmp_path}/", command, "1", "2"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert process.stdout is not None
    try:
        groups = [int(process.stdout.readline()) for _ in range(2)]
        wait_until(lambda: note.exists() and len(note.read_text().split()) == len(groups))
    finally:
        process.kill()
        process.communicate()
    assert [number for number in [*groups, *map(int, note.read_text().split())] if not has_ended(number)] == []
    wait_until(lambda: [path.name for path in tmp_path.iterdir()] == ["children"])
