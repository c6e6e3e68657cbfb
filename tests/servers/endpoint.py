"""What the real S3 servers of the tests have in common, beside ``penstock.testing.ministack.Ministack``, whose face it is."""

from __future__ import annotations

import secrets
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import botocore.config
import botocore.session


class Endpoint(ABC):
    """One running server. Subclasses set the attributes and end it in ``close()``.

    Attributes:
        endpoint_url: ``http://127.0.0.1:port``.
        access_key: Of the only user.
        secret_key: Its secret.
        region: ``us-east-1``; none of these servers looks at it.
    """

    endpoint_url: str
    access_key: str
    secret_key: str
    region = "us-east-1"

    @property
    def environment(self) -> dict[str, str]:
        """The AWS variables with which a child process finds this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """A botocore S3 client."""
        return botocore.session.Session().create_client(
            "s3",
            region_name=self.region,
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=botocore.config.Config(
                proxies={}, s3={"addressing_style": "path"}, request_checksum_calculation="when_required"
            ),
        )

    def create_bucket(self, name: str | None = None) -> str:
        """Create an empty bucket and return its name, a random one by default."""
        name = name or f"penstock-{secrets.token_hex(6)}"
        client = self.client()
        client.create_bucket(Bucket=name)
        client.close()
        return name

    @abstractmethod
    def close(self) -> None:
        """End its processes by their ids and remove its files; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Daemon(Endpoint):
    """A server that is one process and keeps its files in a folder of its own.

    Args:
        command: What to run; ``{port}``, ``{folder}``, ``{access_key}`` and ``{secret_key}`` are filled in.
        ready_s_max: Seconds until it must take connections.
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
        """See ``Endpoint``."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
