"""``S3Server``: the interface that S3 servers for tests share."""

from __future__ import annotations

import secrets
import socket
from abc import ABC, abstractmethod
from functools import cache
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType


class S3Server(ABC):
    """A running server with one user. It is a context manager that closes it.

    Attributes:
        endpoint_url: URL of the server, ``http://127.0.0.1:port``.
        access_key: Access key of the user, who may do everything.
        secret_key: Secret key of the user.
        region: Region of the server, ``us-east-1``.
    """

    endpoint_url: str
    access_key: str
    secret_key: str
    region = "us-east-1"

    @property
    def environment(self) -> dict[str, str]:
        """The AWS environment variables that let a child process use this server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, service: str = "s3") -> Any:
        """Return a botocore client with the user's keys, to check independently what penstock did."""
        return self._client(service, self.access_key, self.secret_key)

    def create_bucket(self, name: str | None = None) -> str:
        """Create an empty bucket and return its name, which is random by default."""
        name = name or f"penstock-{secrets.token_hex(6)}"
        client = self.client()
        client.create_bucket(Bucket=name)
        client.close()
        return name

    @abstractmethod
    def close(self) -> None:
        """End the server, wait for its end, and remove its files; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _client(self, service: str, access_key: str, secret_key: str) -> Any:
        import botocore.config
        import botocore.session

        session = botocore.session.Session()
        session.register_component("data_loader", _descriptions())
        return session.create_client(
            service,
            region_name=self.region,
            endpoint_url=self.endpoint_url,
            aws_access_key_id=access_key,
            aws_secret_access_key=secret_key,
            config=botocore.config.Config(
                proxies={}, s3={"addressing_style": "path"}, request_checksum_calculation="when_required"
            ),
        )


@cache
def _descriptions() -> Any:
    """Return botocore's descriptions of services, read once per process; each client would take 150 ms for S3's."""
    import botocore.loaders

    return botocore.loaders.create_loader()


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 on which nothing listens now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
