"""``S3ClientConfig``: the connector's options, and what each means for ``penstock.connect``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock.config import GIB, MIB, FetchConfig, RetryConfig, check_number, check_whole
from penstock.errors import ConfigError

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
