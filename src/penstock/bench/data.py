"""``DataFacts``: what lies at a URL, found out before anything is measured."""

from __future__ import annotations

import json
import os
import statistics
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.advise.probes import first_bytes
from penstock.errors import ConfigError, ObjectMissingError
from penstock.formats.registry import conversion_hint
from penstock.loader.inspection import OBJECTS_MAX, list_url, look_into
from penstock.redaction import public_url
from penstock.store.base import innermost
from penstock.store.s3 import S3Store
from penstock.text.patterns import is_pattern

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.loader.inspection import Inspection, Listing
    from penstock.pipeline.factories import ConnectionOptions
    from penstock.types import ObjectInfo

KEYS_MAX = 20_000
"""Objects of which libraries are told by their keys; of more, they read the first ones, and the record says so."""
FIRST_BYTES_S = 0.5
"""Seconds in which the time to the first byte is measured."""
_LABELS = ("cls", "label", "labels", "target", "class", "json", "txt")
_KINDS = {"i": "int64", "u": "int64", "f": "float32"}
_PICTURES = ("jpg", "jpeg", "png", "webp", "ppm", "pgm")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Facts of a data set.

    Attributes:
        url: URL that was given, without secrets.
        endpoint_url: The S3 endpoint; None: Amazon.
        region: Region of the bucket.
        is_anonymous: Whether it is read without credentials.
        bucket: Name of the bucket.
        prefix: The folder that all keys have in common, without the slash at its end.
        source: The prefix, pattern or key in the bucket that names these objects; their keys if the URL names others, too.
        keys: Keys that clients read, in order.
        objects_count: Number of objects at the URL, in the format that has the most bytes.
        total_bytes: Bytes of these objects.
        is_estimated: Whether these two are estimated, because not all objects were listed.
        left_out: A note on objects in other formats, which are not read; empty if there are none.
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
    is_anonymous: bool
    bucket: str
    prefix: str
    source: str | tuple[str, ...]
    keys: tuple[str, ...]
    objects_count: int
    total_bytes: int
    is_estimated: bool
    left_out: str
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
        source = self.source if isinstance(self.source, str) else len(self.source)
        return {**asdict(self), "keys": len(self.keys), "source": source, "endpoint_url": endpoint_url}


def look_at(url: str, connection: ConnectionOptions) -> DataFacts:
    """Find out what lies at `url`.

    Raises:
        ConfigError: It is not on S3, or its samples have no field of bytes.
        ObjectMissingError: Nothing lies there.
        StoreError: It cannot be listed or read.

    Cost: the listing, or a sample of it, the first samples, and some GETs of a KiB.
    """
    if not url.startswith("s3://"):
        raise ConfigError(f"{url!r}: benchmarks read S3, as other libraries do", hint="s3://bucket/prefix/")
    listing = list_url(url, objects_max=OBJECTS_MAX, **connection)
    with closing(listing.store):
        if chunks := [info for info in listing.infos if conversion_hint(info.key)]:
            return _facts(url, listing, chunks, **_litdata_facts(listing, chunks))
        found = look_into(listing, has_groups=False)
        if not found.samples:
            raise ObjectMissingError(f"{url} holds no samples")
        return _facts(url, listing, found.infos, **_sample_facts(url, found))


def _facts(url: str, listing: Listing, infos: list[ObjectInfo], **facts: Any) -> DataFacts:
    core = innermost(listing.store)
    assert isinstance(core, S3Store)
    keys = [f"{core.endpoint.prefix}{info.key}" for info in infos]
    return DataFacts(
        url=public_url(url),
        endpoint_url=core.endpoint.endpoint_url,
        region=core.endpoint.region,
        is_anonymous=bool((listing.options or {}).get("anonymous")),
        bucket=core.endpoint.bucket,
        prefix=os.path.commonprefix(keys).rpartition("/")[0],  # noqa: RUF071 - a key is no path: it may have "//"
        source=tuple(keys[:KEYS_MAX]) if facts["left_out"] else _name_in_bucket(url, keys),
        keys=tuple(keys[:KEYS_MAX]),
        is_estimated=listing.is_estimated,
        first_byte_s=statistics.median(first_bytes(listing.store, infos[0], FIRST_BYTES_S)),
        **facts,
    )


def _name_in_bucket(url: str, keys: list[str]) -> str:
    name = url.removeprefix("s3://").partition("/")[2]
    is_folder = name and keys != [name] and not is_pattern(name)
    return f"{name.rstrip('/')}/" if is_folder else name


def _sample_facts(url: str, found: Inspection) -> dict[str, Any]:
    first = found.samples[0]
    sizes = {name: size for name, size in found.member_bytes.items() if isinstance(first.get(name), bytes)}
    if not sizes:
        raise ConfigError(f"the samples of {url} have no field of bytes: {', '.join(first)}")
    image = max(sizes, key=lambda name: sizes[name])
    label = _label(first, image)
    return {
        "objects_count": found.objects_count,
        "total_bytes": found.size_bytes,
        "left_out": found.left_out,
        "format": found.format,
        "image": image,
        "label": label,
        "label_kind": _KINDS.get(np.asarray(first.get(label or "")).dtype.kind, "string"),
        "is_picture": image.lower() in _PICTURES or image in found.pictures,
        "sample_bytes": sizes[image],
        "stored_bytes": found.stored_bytes,
    }


def _litdata_facts(listing: Listing, chunks: list[ObjectInfo]) -> dict[str, Any]:
    """Return the same of chunks of LitData, which only LitData reads, from the file beside them that lists them."""
    key = chunks[0].key
    index = json.loads(bytes(listing.store.read(f"{key.rpartition('/')[0]}/index.json".lstrip("/")).data))
    kinds, spec = index["config"]["data_format"], json.loads(index["config"]["data_spec"])[1]
    names = json.loads(spec["context"]) if spec["type"] == "builtins.dict" else []
    fields = dict(zip(names, kinds, strict=True)) if names else {}
    image = next((name for name, kind in fields.items() if kind not in ("int", "float", "bool", "str")), None)
    if image is None:
        raise ConfigError(f"the samples of {key} are no dicts with a field of bytes: {', '.join(kinds)}")
    total_bytes, samples_count = (sum(each[name] for each in index["chunks"]) for name in ("chunk_bytes", "chunk_size"))
    return {
        "objects_count": len(chunks),
        "total_bytes": sum(info.size_bytes for info in chunks),
        "left_out": "",
        "format": "litdata",
        "image": image,
        "label": _label(fields, image),
        "label_kind": "int64",
        "is_picture": image.lower() in _PICTURES,
        "sample_bytes": total_bytes / samples_count,
        "stored_bytes": total_bytes / samples_count,
    }


def _label(fields: Mapping[str, Any], image: str) -> str | None:
    return next((each for each in _LABELS if each in fields and each != image), None)
