"""The host of workers on a machine of the cluster, without the cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.loader.workers.messages import MessageChannel, pickled_by_value
from penstock.ray.connecting import connect
from servers.leaks import has_ended, is_alive

SECRET = b"s" * 32
HOST = """
import socket, sys
from penstock.ray.host import Host

host = Host()
host._listener = socket.create_server(("127.0.0.1", 0))
print(host._listener.getsockname()[1], flush=True)
host.serve(bytes.fromhex(sys.argv[1]), None)
"""
HANGS = """
import os, re, subprocess
program = subprocess.Popen(["sleep", "1000"])
with open({note!r} + ".new", "w") as file:
    print(os.getpid(), program.pid, file=file)
os.rename({note!r} + ".new", {note!r})
re.match("(a+)+$", "a" * 60 + "b")  # takes years, and keeps the interpreter's lock
"""


class Hanging:
    """Unpickling it starts a program, and then hangs."""

    def __init__(self, note: Path) -> None:
        self._code = HANGS.format(note=str(note))

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self._code,)


@pytest.fixture
def host() -> Iterator[tuple[int, int]]:
    """Process id and port of a host."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOST, SECRET.hex()],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert process.stdout is not None
    try:
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("way", ["closed", "killed"])
def test_a_worker_that_hangs_ends_with_its_connection(tmp_path: Path, host: tuple[int, int], way: str) -> None:
    """It cannot see the end of its connection itself. What it has started ends, too, and the host keeps no descriptor."""
    host_id, port = host
    note = tmp_path / "processes"
    descriptors = Path(f"/proc/{host_id}/fd")
    held_count = len(list(descriptors.iterdir()))
    channel = MessageChannel(connect("127.0.0.1", port, SECRET))
    channel.send_raw(pickled_by_value(Hanging(note)))
    while not note.exists():
        time.sleep(0.01)
    worker, program = map(int, note.read_text().split())
    try:
        if way == "killed":
            os.kill(worker, 9)
            with pytest.raises((EOFError, OSError)):
                channel.receive()
        channel.close()
        assert has_ended(worker)
        assert has_ended(program)
        deadline_s = time.monotonic() + 20
        while len(list(descriptors.iterdir())) > held_count:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
    finally:
        for each in (worker, program):
            if is_alive(each):
                os.kill(each, 9)
