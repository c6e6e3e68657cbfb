"""The configuration of a cache, and its short form ``"/nvme/penstock:200GB"``."""

from __future__ import annotations

import math
import os
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from penstock.config import KIB, MIB
from penstock.errors import ConfigError
from penstock.text.sizes import parse_bytes

_HINT = "/nvme/penstock:200GB, or CacheConfig(path, bytes_max)"


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The directory of a cache, for all processes that name it.

    Attributes:
        path: The directory. If it does not exist it is created, private to the user. It should be on a fast local disk; a
            network file system works if it supports locks.
        bytes_max: Largest disk space of all entries together, including headers and rounding to 4 KiB.
        free_ratio_min: Share of the file system, in [0, 1), that must remain free, whatever fills the rest.
        block_bytes: Size of a block. Objects up to this size are kept whole, larger ones in several blocks. A miss fetches
            whole blocks, so a small read of a large object costs one block. Storing a block takes about 7 system calls, and
            reading it takes 4.
        metadata_ttl_s: Seconds for which listings, sizes, versions and misses are trusted without asking the store. With 0
            each use asks: a listing, or a HEAD for each object that was not listed. With ``math.inf`` none asks again.
        namespace: Name that separates these entries from others in the directory, e.g. one for each team or role whose
            credentials may read different things. docs/concepts/cache.md describes what it isolates.
        wait_s_max: Seconds to wait for a block that another process is fetching, before fetching it as well.
        record_path: File to which every read is appended, for ``penstock cache warm --accesses`` on another node.
        threads_max: Largest number of threads per process that read and write the disk.
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
            raise ConfigError(f"the cache's path {path!r} is not the name of a directory", hint=_HINT)
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
        """Return `value` if it is a config, or make one from ``"PATH:SIZE"``, e.g. ``"/nvme/penstock:200GB"``.

        ``"PATH:SIZE,free_ratio_min=0.01"`` also sets the share of the file system that must remain free.

        Raises:
            ConfigError: `value` is neither a config nor such a text.
        """
        if isinstance(value, CacheConfig):
            return value
        if not isinstance(value, (str, os.PathLike)):
            raise ConfigError(f"cache={value!r} is neither a CacheConfig nor PATH:SIZE", hint=_HINT)
        text = os.fspath(value)
        path, colon, size = text.rpartition(":")
        if not colon or not path:
            raise ConfigError(f"cache={text!r} does not say how large the cache may become", hint=_HINT)
        size, comma, rest = size.partition(",")
        bytes_max = parse_bytes(size, option=f"cache={text!r}:")
        if not comma:
            return cls(path, bytes_max)
        name, _, ratio = rest.partition("=")
        try:
            if name.strip() == "free_ratio_min":
                return cls(path, bytes_max, free_ratio_min=float(ratio))
        except ConfigError:  # a ValueError, too: it says which value is out of bounds
            raise
        except ValueError:
            pass
        raise ConfigError(f"cache={text!r}: after the size, {rest!r} is not free_ratio_min=NUMBER", hint=_HINT)

    def whole_blocks(self, part_bytes: int) -> int:
        """Return a size of read-ahead parts that fits the blocks.

        Parts of this size are whole numbers of blocks, or a half, a quarter, ... of a block, so they end where blocks end. A
        part that ends elsewhere in a block must be copied once more.

        Args:
            part_bytes: The largest size wanted, in bytes.
        """
        grain_bytes = self.block_bytes
        while grain_bytes > part_bytes and grain_bytes % 2 == 0:
            grain_bytes //= 2
        return part_bytes - part_bytes % grain_bytes if grain_bytes <= part_bytes else part_bytes
