"""Ceph's RGW on loopback: a production S3, independent of the everyday test server. See ``ceph.sh``."""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import botocore.config
import botocore.session

SCRIPT = Path(__file__).with_name("ceph.sh")
START_S_MAX = 300
"""The first start may install 100 MB of packages; later ones take seconds."""


class Ceph:
    """One running Ceph: monitor, OSD in memory, RGW. The same face as ``penstock.testing.ministack.Ministack``.

    Attributes:
        endpoint_url: ``http://127.0.0.1:port``.
        access_key: Of the only user.
        secret_key: Its secret.
        region: ``us-east-1``; RGW takes any.
    """

    region = "us-east-1"

    def __init__(self) -> None:
        self.access_key = secrets.token_hex(10).upper()
        self.secret_key = secrets.token_hex(20)
        self._folder = tempfile.mkdtemp(prefix="penstock-ceph-")
        rgw_port, mon_port = _free_ports(2)
        self.endpoint_url = f"http://127.0.0.1:{rgw_port}"
        command = [str(SCRIPT), "up", self._folder, str(rgw_port), str(mon_port), self.access_key, self.secret_key]
        try:
            # its output goes to files: a pipe would stay open in the daemons, and this would wait for them
            with Path(self._folder, "up.log").open("wb") as log:
                subprocess.run(command, check=True, stdout=log, stderr=subprocess.STDOUT, timeout=START_S_MAX)
        except BaseException as error:
            error.add_note(Path(self._folder, "up.log").read_text(errors="replace")[-3000:])
            self.close()
            raise

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

    def close(self) -> None:
        """End its processes by their ids and remove its files; idempotent."""
        if Path(self._folder).exists():
            subprocess.run([str(SCRIPT), "down", self._folder], check=True, timeout=60)
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
