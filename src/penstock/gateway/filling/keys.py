"""Which results are made: those of all sources of an access point, or of those that a pattern or a manifest names."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.compose import connect, split
from penstock.errors import ConfigError
from penstock.gateway.buckets.transformed import is_beside_shards
from penstock.index import read_manifest
from penstock.text.patterns import is_pattern, matcher, split_glob

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from penstock.gateway.config import AccessPoint
    from penstock.store.base import Store
    from penstock.types import ObjectInfo


class FillKey(NamedTuple):
    """A source whose result is to be made.

    Attributes:
        point: Name of the access point.
        key: Key of the source.
        size_bytes: Size of the source; 0 if it is not known.
    """

    point: str
    key: str
    size_bytes: int


def listed_keys(point: AccessPoint, store: Store, patterns: Iterable[str]) -> Iterator[FillKey]:
    """Iterate over the sources of an access point, each once.

    Args:
        point: The access point.
        store: Store of the upstream.
        patterns: Keys of sources, prefixes that end with a slash, or patterns such as ``train/**/*.tar``; empty for all.

    Raises:
        ConfigError: A pattern is not valid.
        StoreError: The store cannot be listed.

    Cost: one listing for each pattern.
    """
    seen: set[str] = set()
    for pattern in list(patterns) or [""]:
        for info in _matching(store, pattern):
            if info.key not in seen and not _is_left_out(info.key):
                seen.add(info.key)
                yield FillKey(point.name, info.key, info.size_bytes)


def _matching(store: Store, pattern: str) -> Iterator[ObjectInfo]:
    if not is_pattern(pattern):
        if pattern and not pattern.endswith("/"):
            yield store.stat(pattern)
        else:
            yield from store.list(pattern)
        return
    head, below = split_glob(pattern)
    head = "" if head == "./" else head
    matches = matcher(below)
    for info in store.list(head):
        if matches(info.key[len(head) :]):
            yield info


def manifest_keys(point: AccessPoint, url: str) -> Iterator[FillKey]:
    """Iterate over the sources that a manifest names, each once.

    Raises:
        ConfigError: The manifest names an object that does not lie in the upstream of the access point.
        DataError: It is not a manifest.
        StoreError: It cannot be read.
    """
    folder, name = split(url)
    options = point.upstream_options if url.startswith("s3://") else {}
    with connect(folder, **options) as store:  # type: ignore[arg-type]
        entries = read_manifest(store.read(name).data, url=url)
    root = f"{point.upstream.rstrip('/')}/"
    seen: set[str] = set()
    for entry in entries:
        key = entry.url.removeprefix("file://").removeprefix(root)
        if key == entry.url or key.startswith("/"):
            raise ConfigError(f"the manifest {url} names {entry.url}, which does not lie in {point.upstream}")
        if key not in seen and not _is_left_out(key):
            seen.add(key)
            yield FillKey(point.name, key, entry.size_bytes or 0)


def _is_left_out(key: str) -> bool:
    """Whether an object is not a source, such as a folder marker or a file that penstock keeps beside shards."""
    return key.endswith("/") or is_beside_shards(key)
