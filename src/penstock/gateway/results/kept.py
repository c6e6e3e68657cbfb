"""Results in a cache directory, for ``penstock gateway ls`` and ``penstock gateway gc``.

The functions work while gateways use the directory: a reader whose block is removed has the result produced again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache.config import CacheConfig
from penstock.cache.directory import folders
from penstock.cache.entry import RESULT, SUFFIXES
from penstock.cache.maintenance import open_directory
from penstock.gateway.results.held import is_pointer
from penstock.gateway.results.record import BadRecordError, ResultRecord, decode_record
from penstock.gateway.results.storage import DirectoryStorage

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Iterator

    from penstock.cache.directory import CacheDirectory
    from penstock.cache.entry import EntryName

_LIMITLESS_BYTES = 1 << 62


class KeptResult(NamedTuple):
    """A result in a cache directory.

    Attributes:
        record: Record of the result, whose size is None if it was never completed and not announced.
        used_s: Time of its last use, in seconds since 1970, known to 10 minutes.
        namespace: ``CacheConfig.namespace`` of its entries.
    """

    record: ResultRecord
    used_s: float
    namespace: str

    @property
    def unused_s(self) -> float:
        """Time since its last use, in seconds."""
        return max(0.0, time.time() - self.used_s)


def iter_kept(path: str | os.PathLike[str]) -> Iterator[KeptResult]:
    """Iterate over the results that a cache directory keeps, complete or not, in no order.

    Args:
        path: The cache directory.

    Raises:
        ConfigError: `path` is not a cache directory.

    Cost: one scan of the directory, and four system calls for each result.
    """
    return _iter_kept(open_directory(path))


def _iter_kept(directory: CacheDirectory) -> Iterator[KeptResult]:
    try:
        for folder in folders():
            for used_s, _, name in directory.scan(folder):
                found = _kept(directory, name, used_s)
                if found is not None:
                    yield found
    finally:
        directory.close()


def _kept(directory: CacheDirectory, name: EntryName, used_s: float) -> KeptResult | None:
    if not name.file.endswith(f".{SUFFIXES[RESULT]}"):
        return None
    found = directory.read_entry(name)
    if found is None or found[0].kind != RESULT:
        return None
    try:
        record = decode_record(found[1])
    except BadRecordError:
        return None
    if is_pointer(record):
        return None
    return KeptResult(record, used_s, found[0].identity.partition(b"\0")[0].decode())


def remove_kept(path: str | os.PathLike[str], results: Iterable[KeptResult]) -> int:
    """Remove results with their blocks.

    Args:
        path: The cache directory.
        results: Results that ``iter_kept`` returned.

    Returns:
        The number of bytes of the results that were removed, as far as their sizes are known.

    Raises:
        ConfigError: `path` is not a cache directory.

    Cost: two system calls for each block.
    """
    directory = open_directory(path)
    removed_bytes = 0
    try:
        for each in results:
            config = CacheConfig(path, _LIMITLESS_BYTES, block_bytes=each.record.block_bytes, namespace=each.namespace)
            DirectoryStorage(directory, config).remove(each.record)
            removed_bytes += each.record.size_bytes or 0
    finally:
        directory.close()
    return removed_bytes
