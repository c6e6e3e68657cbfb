"""A server of the tests that is one process: beside ministack, whose interface it shares."""

from __future__ import annotations

import secrets
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from penstock.testing.s3_server import S3Server, free_ports


class Daemon(S3Server):
    """A server that is one process and keeps its files in a folder of its own.

    Args:
        command: Command line; ``{port}``, ``{folder}``, ``{access_key}`` and ``{secret_key}`` are filled in.
        ready_s_max: Seconds after which it must accept connections.
    """

    def __init__(self, command: list[str], *, ready_s_max: float = 60.0) -> None:
        self.access_key = secrets.token_hex(10).upper()
        self.secret_key = secrets.token_hex(20)
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-server-")
        (port,) = free_ports(1)
        self.endpoint_url = f"http://127.0.0.1:{port}"
        values = {"access_key": self.access_key, "secret_key": self.secret_key}
        filled = [part.format(port=port, folder=self._folder.name, **values) for part in command]
        log = Path(self._folder.name, "server.log")
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                filled, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        until_s = time.monotonic() + ready_s_max
        while not _listens(port):
            if self._process.poll() is not None or time.monotonic() > until_s:
                error = RuntimeError(f"{command[0]} did not listen within {ready_s_max:g} s")
                error.add_note(log.read_text(errors="replace")[-3000:])
                self.close()
                raise error
            time.sleep(0.05)

    def close(self) -> None:
        """End the process and remove its folder."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
