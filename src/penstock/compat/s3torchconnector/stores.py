"""``S3ClientConfig``, and the stores of the buckets that ``s3://`` URIs name, with one region, endpoint and configuration."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.compose import connect, split_s3
from penstock.config import GIB, MIB, FetchConfig, RetryConfig, check_number, check_whole
from penstock.errors import ConfigError
from penstock.redaction import public_url
from penstock.store import s3  # noqa: F401 - forked workers inherit it; else each would import it at its first read
from penstock.store.credentials import setting_endpoint_url

if TYPE_CHECKING:
    from penstock.store.base import Store

PART_BYTES_MIN = 5 * MIB
PART_BYTES_MAX = 5 * GIB
"""S3's limits for a part of a multipart upload, which the connector's clients have for downloads, too."""


@dataclass(frozen=True, slots=True)
class S3ClientConfig:
    """Options of the S3 client, with the connector's names and defaults.

    Attributes:
        throughput_target_gbps: Has no effect: the number of requests in flight adapts to what the store and the network can
            deliver, so no target is needed.
        part_size: Size in bytes of the parts in which large objects are read and written, from 5 MiB to 5 GiB.
        unsigned: Whether to send unsigned requests, for public data.
        force_path_style: Whether buckets are always in the path of the URL. Otherwise they are in the host's name on Amazon,
            and in the path elsewhere.
        max_attempts: Largest number of attempts for a request, including the first.
        profile: Section of ``~/.aws/config``.
        requester_pays: Whether to agree to pay for requests and transfer.
    """

    throughput_target_gbps: float = 10.0
    part_size: int = 8 * MIB
    unsigned: bool = False
    force_path_style: bool = False
    max_attempts: int = 10
    profile: str | None = None
    requester_pays: bool = False

    def __post_init__(self) -> None:
        check_number("throughput_target_gbps", self.throughput_target_gbps, 0, opened=True)
        check_whole("part_size", self.part_size, PART_BYTES_MIN, PART_BYTES_MAX)
        check_whole("max_attempts", self.max_attempts, 1)
        if self.unsigned and (self.profile is not None or self.requester_pays):
            raise ConfigError("unsigned=True excludes profile= and requester_pays=, which need keys")

    def connect_options(self) -> dict[str, Any]:
        """Return the arguments of ``penstock.connect`` that say the same."""
        return {
            "anonymous": self.unsigned,
            "addressing": "path" if self.force_path_style else "auto",
            "profile": self.profile,
            "requester_pays": self.requester_pays,
            "retry": RetryConfig(attempts_max=self.max_attempts),
            "fetch": FetchConfig(part_bytes=self.part_size),
        }


def parse_uri(uri: object) -> tuple[str, str]:
    """Return bucket and key of an ``s3://`` URI.

    Raises:
        ConfigError: It is not an ``s3://`` URI, or it has no bucket; a ``ValueError``, as in the connector.
    """
    if not isinstance(uri, str) or not uri.startswith("s3://"):
        raise ConfigError(f"{uri!r} is not an s3:// URI", hint="s3://bucket/key")
    return split_s3(uri)


class BucketStores:
    """One store for each bucket, connected when it is first needed. It pickles without them, and may be used after a fork.

    Args:
        region: Region of the buckets; None takes the environment's. If it is wrong, the store's answer corrects it.
        endpoint: URL of an S3-compatible store, or its host and port. None takes ``AWS_ENDPOINT_URL_S3`` or
            ``AWS_ENDPOINT_URL``, else Amazon's.
        config: Options of the client.
    """

    def __init__(
        self, *, region: str | None = None, endpoint: str | None = None, config: S3ClientConfig | None = None
    ) -> None:
        if config is not None and not isinstance(config, S3ClientConfig):
            raise ConfigError(f"s3client_config={config!r} must be an S3ClientConfig")
        for name, value in (("region", region), ("endpoint", endpoint)):
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name}={value!r} must be a str")
        self.region = region
        self.endpoint = endpoint
        self.config = config or S3ClientConfig()
        self._stores: dict[str, Store] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), region=self.region, endpoint=self.endpoint, config=self.config), ()

    def store(self, bucket: str) -> Store:
        """Return the store of a bucket. Cost: no request."""
        store = self._stores.get(bucket)
        if store is None:
            made = connect(f"s3://{bucket}", **self.connect_options())
            store = self._stores.setdefault(bucket, made)  # another thread may have connected meanwhile
        return store

    def connect_options(self) -> dict[str, Any]:
        """Return the arguments of ``penstock.connect`` besides the URL."""
        return {"endpoint_url": self._endpoint_url(), "region": self.region, **self.config.connect_options()}

    def _endpoint_url(self) -> str | None:
        endpoint = self.endpoint or setting_endpoint_url(self.config.profile)
        return endpoint if endpoint is None or "://" in endpoint else with_scheme(endpoint)


def with_scheme(endpoint: str) -> str:
    """Return an endpoint that lacks a scheme as a URL: ``http`` if it names a port other than 443, else ``https``.

    It warns, because a wrong guess would otherwise be hard to find.
    """
    port = endpoint.partition("/")[0].rpartition(":")[2]
    url = f"{'http' if port.isdigit() and port != '443' else 'https'}://{endpoint}"
    warnings.warn(
        f"The endpoint {public_url(endpoint)!r} has no scheme, so {public_url(url)!r} is used. Hint: name it with http:// or "
        "https://, in endpoint= or AWS_ENDPOINT_URL",
        UserWarning,
        stacklevel=2,
    )
    return url
