"""What a cache is made with, and the short spelling ``"/nvme/penstock:200GB"``."""

from __future__ import annotations

import math
import os
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from penstock.config import KIB, MIB
from penstock.errors import ConfigError
from penstock.sizes import parse_bytes

_HINT = "/nvme/penstock:200GB, or CacheConfig(path, bytes_max)"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """A directory that keeps what was read, for all processes that name it.

    Attributes:
        path: The directory; made, private to the user, where it does not exist. Fast local disk; sharing it over a network
            file system works as far as that has locks.
        bytes_max: Of all entries together, headers and rounding to 4 KiB included.
        free_ratio_min: Part of the file system to be left free, whoever fills it.
        block_bytes: Objects up to this size are kept whole, larger ones in blocks of it. A miss fetches whole blocks, so a
            small read of a large object costs one; a block costs about 7 system calls to store and 4 to read.
        metadata_ttl_s: Seconds for which listings, sizes, versions and misses are believed without asking. 0 asks each
            time: a listing, or a HEAD for each object that was not listed; ``math.inf`` never asks again.
        namespace: Kept apart from other namespaces of the directory, e.g. one for each team or role whose credentials may
            read different things. See docs/concepts/cache.md for what it isolates.
        wait_s_max: Seconds to wait for a block that another process fetches, before fetching it as well.
        record_path: A file to which every read is appended, for ``penstock cache warm --accesses`` on another node.
        threads_max: Reads and writes of the disk at the same time, per process.
    """

    path: str | os.PathLike[str]
    bytes_max: int
    _: KW_ONLY
    free_ratio_min: float = 0.05
    block_bytes: int = 1 * MIB
    metadata_ttl_s: float = 0.0
    namespace: str = ""
    wait_s_max: float = 30.0
    record_path: str | None = None
    threads_max: int = 8

    def __post_init__(self) -> None:
        path = os.fspath(self.path)
        if not isinstance(path, str) or not path or "\0" in path:
            raise ConfigError(f"the cache's path {path!r} is no directory name", hint=_HINT)
        object.__setattr__(self, "path", str(Path(path).expanduser().absolute()))
        if not 4 * KIB <= self.block_bytes <= 64 * MIB:
            raise ConfigError(f"block_bytes={self.block_bytes!r} must lie in [4 KiB, 64 MiB]")
        if self.bytes_max < 8 * self.block_bytes:
            raise ConfigError(f"bytes_max={self.bytes_max!r} must be at least 8 blocks of {self.block_bytes} bytes")
        if not 0 <= self.free_ratio_min < 1:
            raise ConfigError(f"free_ratio_min={self.free_ratio_min!r} must lie in [0, 1)")
        if math.isnan(self.metadata_ttl_s) or self.metadata_ttl_s < 0:
            raise ConfigError(f"metadata_ttl_s={self.metadata_ttl_s!r} must be 0, seconds, or math.inf")
        if not self.wait_s_max >= 0:
            raise ConfigError(f"wait_s_max={self.wait_s_max!r} must not be negative")
        if not 1 <= self.threads_max <= 256:
            raise ConfigError(f"threads_max={self.threads_max!r} must lie in [1, 256]")
        if not isinstance(self.namespace, str) or "\0" in self.namespace or len(self.namespace.encode()) > 256:
            raise ConfigError(f"namespace={self.namespace!r} must be text of at most 256 bytes, without NUL")

    @classmethod
    def of(cls, value: CacheConfig | str | os.PathLike[str]) -> CacheConfig:
        """A config as it is, or from ``"PATH:SIZE"``.

        Raises:
            ConfigError: it is neither.
        """
        if isinstance(value, CacheConfig):
            return value
        if not isinstance(value, (str, os.PathLike)):
            raise ConfigError(f"cache={value!r} is neither a CacheConfig nor PATH:SIZE", hint=_HINT)
        text = os.fspath(value)
        path, colon, size = text.rpartition(":")
        if not colon or not path:
            raise ConfigError(f"cache={text!r} does not say how large it may become", hint=_HINT)
        return cls(path, parse_bytes(size))

    def whole_blocks(self, part_bytes: int) -> int:
        """The most bytes up to `part_bytes` that are blocks, or a block's half, quarter, ...

        Parts of that size share no block, or a whole one: what begins or ends inside a block is copied once more.
        """
        grain_bytes = self.block_bytes
        while grain_bytes > part_bytes and grain_bytes % 2 == 0:
            grain_bytes //= 2
        return part_bytes - part_bytes % grain_bytes if grain_bytes <= part_bytes else part_bytes
