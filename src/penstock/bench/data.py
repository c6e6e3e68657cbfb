"""``DataFacts``: what lies at a URL, found out before anything is measured."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import ConfigError, ObjectMissingError, UnsupportedFormatError
from penstock.formats.registry import detect, format_of_name
from penstock.formats.tar_header import BLOCK_BYTES
from penstock.loader.preview import peek
from penstock.pipeline import objects, shards
from penstock.pipeline.source import Objects, Shards
from penstock.redaction import public_url
from penstock.sources.shards import ShardFinder
from penstock.store.base import innermost
from penstock.store.inflight import perform
from penstock.store.s3 import S3Store
from penstock.types import ByteRange, Get

if TYPE_CHECKING:
    from penstock.pipeline.factories import ConnectionOptions
    from penstock.sources.shards import Shard

SAMPLES_LOOKED_AT = 8
KEYS_MAX = 20_000
"""Objects that clients are told of; of more, the first ones are measured, and the record says so."""
PROBES_COUNT = 10
HEAD_BYTES = 1024
_LABELS = ("cls", "label", "labels", "target", "class", "json", "txt")
_KINDS = {"i": "int64", "u": "int64", "f": "float32"}
_PICTURES = ("jpg", "jpeg", "png", "webp", "ppm", "pgm")
_HEADS = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"RIFF")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Facts of a data set.

    Attributes:
        url: URL that was given, without secrets.
        endpoint_url: The S3 endpoint; None: Amazon.
        region: Region of the bucket.
        bucket: Name of the bucket.
        prefix: The folder that all keys have in common, without the slash at its end.
        keys: Keys that clients read, in order.
        objects_count: Number of objects at the URL.
        total_bytes: Bytes of all objects at the URL.
        format: ``objects`` if each object is a sample, otherwise the format of the shards, e.g. ``tar``.
        image: Name of the field with the most bytes.
        label: Name of the field that looks like the label; None if there is none.
        label_kind: TensorFlow's name for the type of the label: ``int64``, ``float32`` or ``string``.
        is_picture: Whether `image` holds pictures that can be decoded.
        sample_bytes: Mean bytes of `image` in the first samples.
        stored_bytes: Mean bytes that these samples take with all their fields, in a tar with headers and padding.
        first_byte_s: Median seconds until the first byte of an object arrives.
    """

    url: str
    endpoint_url: str | None
    region: str
    bucket: str
    prefix: str
    keys: tuple[str, ...]
    objects_count: int
    total_bytes: int
    format: str
    image: str
    label: str | None
    label_kind: str
    is_picture: bool
    sample_bytes: float
    stored_bytes: float
    first_byte_s: float

    def record(self) -> dict[str, Any]:
        """Return the facts for a record, in which the number of keys stands for the keys."""
        endpoint_url = self.endpoint_url and public_url(self.endpoint_url)
        return {**asdict(self), "keys": len(self.keys), "endpoint_url": endpoint_url}


def look_at(url: str, connection: ConnectionOptions) -> DataFacts:
    """Find out what lies at `url`.

    Raises:
        ConfigError: It is not on S3, or its samples have no field of bytes.
        ObjectMissingError: Nothing lies there.
        StoreError: It cannot be listed or read.

    Cost: the listing, the first samples, and ten GETs of one byte.
    """
    if not url.startswith("s3://"):
        raise ConfigError(f"{url!r}: benchmarks read S3, as other libraries do", hint="s3://bucket/prefix/")
    pipeline = shards(url, **connection)
    is_sharded = True
    try:
        samples = peek(pipeline, SAMPLES_LOOKED_AT)
    except (ObjectMissingError, UnsupportedFormatError):
        is_sharded, pipeline = False, objects(url, **connection)
        samples = peek(pipeline, SAMPLES_LOOKED_AT)
    if not samples:
        raise ObjectMissingError(f"{url} holds no samples")
    source = pipeline.source
    assert isinstance(source, Shards | Objects)
    finder = ShardFinder(source, fetch=None)
    try:
        found = finder.find()
        return _facts(url, found, samples, is_sharded=is_sharded)
    finally:
        finder.close()


def _facts(url: str, found: list[Shard], samples: list[dict[str, Any]], *, is_sharded: bool) -> DataFacts:
    core = innermost(found[0].store)
    assert isinstance(core, S3Store)
    keys = [f"{core.endpoint.prefix}{shard.key}" for shard in found]
    sizes = {
        name: statistics.mean(len(sample[name]) for sample in samples if name in sample)
        for name in samples[0]
        if not name.startswith("__") and isinstance(samples[0][name], bytes)
    }
    if not sizes:
        raise ConfigError(f"the samples of {url} have no field of bytes: {', '.join(samples[0])}")
    image = max(sizes, key=lambda name: sizes[name])
    format_name = "objects"
    if is_sharded:
        key = found[0].key
        format_name = format_of_name(key) or detect(key, bytes(found[0].store.read(key, ByteRange(0, HEAD_BYTES)).data))
    label = next((each for each in _LABELS if each in samples[0] and each != image), None)
    return DataFacts(
        url=public_url(url),
        endpoint_url=core.endpoint.endpoint_url,
        region=core.endpoint.region,
        bucket=core.endpoint.bucket,
        prefix=os.path.commonprefix(keys).rpartition("/")[0],  # noqa: RUF071 - a key is no path: it may have "//"
        keys=tuple(keys[:KEYS_MAX]),
        objects_count=len(keys),
        total_bytes=sum(shard.size_bytes or 0 for shard in found),
        format=format_name,
        image=image,
        label=label,
        label_kind=_KINDS.get(np.asarray(samples[0].get(label or "")).dtype.kind, "string"),
        is_picture=image.lower() in _PICTURES or samples[0][image].startswith(_HEADS),
        sample_bytes=sizes[image],
        stored_bytes=statistics.mean(_stored_bytes(sample, format_name) for sample in samples),
        first_byte_s=_first_byte_s(found[0]),
    )


def _stored_bytes(sample: dict[str, Any], format_name: str) -> int:
    lengths = [len(value) for name, value in sample.items() if isinstance(value, bytes) and not name.startswith("__")]
    if format_name == "tar":
        return sum(BLOCK_BYTES + -(-length // BLOCK_BYTES) * BLOCK_BYTES for length in lengths)
    return sum(lengths)


def _first_byte_s(shard: Shard) -> float:
    times_s = []
    for _ in range(PROBES_COUNT + 1):
        begun_s = time.perf_counter()
        with suppress(ObjectMissingError):
            perform(shard.store, Get(shard.key, ByteRange(0, 1)))
        times_s.append(time.perf_counter() - begun_s)
    return statistics.median(times_s[1:])  # the first one opens the connection
