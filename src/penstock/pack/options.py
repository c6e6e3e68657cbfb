"""``PackOptions``: the options of a packing, checked once; and the identity of a job, which follows from them and its source.

The identity is a digest of the source and of everything else that decides which bytes are written. Two runs with the same
identity are one job, so the second continues the first. The digest covers whole URLs without their signatures. Only the
digest is written down at the destination, never the URL.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit, urlunsplit

from penstock import compose
from penstock.config import SEED_MAX, check_whole
from penstock.errors import ConfigError
from penstock.formats import RESERVED_FIELDS, format_of_name
from penstock.pack.fields import FieldSpec, parse_fields
from penstock.pack.fingerprint import digest_of, function_digest, value_digest
from penstock.pack.written_formats import FORMATS_WRITTEN, KEY, PLAIN_FORMATS, written_format
from penstock.pipeline import Objects, Pipeline, Shards
from penstock.redaction import public_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BYTES_MAX = 256_000_000
"""Default size of a shard in bytes."""

ADVISED_BYTES = (100_000_000, 1_000_000_000)
"""Usual range of shard sizes in bytes. Smaller shards cost requests and listing time; larger ones are hard to balance over
ranks, and a corrupt one costs more."""

PLAN_VERSION = 1
"""Version of the rules by which samples are cut into shards; other rules make another packing."""

TABLE_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")

DIGESTS = ("source", "transform", "labels")
"""Parts of a job that are digests, because URLs may hold secrets, and code does not fit into one line."""

_CLOUD = ("algorithm", "credential", "date", "expires", "security-token", "signature", "signedheaders")
_SIGNING = {
    "x-amz-signature": {f"x-amz-{name}" for name in _CLOUD},
    "x-goog-signature": {f"x-goog-{name}" for name in _CLOUD},
    "signature": {"signature", "expires", "policy", "key-pair-id", "awsaccesskeyid", "googleaccessid"},
    "sig": {
        "sig", "sv", "ss", "srt", "sp", "se", "st", "spr", "sip", "sr", "skoid", "sktid", "skt", "ske", "sks", "skv",
    },
}  # fmt: skip
"""Query parameters, in lower case, that belong to a signature of S3, Google, CloudFront or Azure, by the signature's name."""

_NUMBER = re.compile(r"%0?\d*d")
_SPLIT = "{split}"
_NO_BYTES = ("transform_version", "allow_loss")  # options that do not affect the bytes that are written


@dataclass(frozen=True, slots=True, kw_only=True)
class PackOptions:
    """The options by which samples become shards.

    Attributes:
        format: A key of ``FORMATS_WRITTEN``; None takes the format of `name`'s suffix, or tar.
        name: Pattern of the shards' names, with one number such as ``%06d``, and ``{split}`` if there are splits.
        bytes_max: Size limit of a shard in bytes; a shard ends before the sample that would exceed it.
        samples_max: Largest number of samples in a shard; None sets no limit.
        group_by: ``stem`` makes files with the same name up to the first dot one sample; ``file`` makes each file one.
        fields: Fields that are taken, and how: ``"image=png,label=cls:int"``; None takes all unchanged.
        labels: ``"folders"``, or the URL of a table of names and labels; None adds no labels.
        label_field: Name of the field that takes the label.
        split: Shares by name, ``{"train": 0.9, "val": 0.1}``; a hash of each sample's key decides. None: no splits.
        shuffle: Whether samples are permuted before they are cut into shards.
        seed: Seed of the permutation and of the split.
        key_field: Name of a field that takes the samples' keys; ``__key__`` stores them in TFRecord so that they are
            read back as keys.
        allow_loss: Whether to pack into a format that stores no keys, although no field takes them.
        skip_unnamed: Whether files whose names are not sample keys are passed over; otherwise they are an error.
        transform: ``fn(sample) -> sample``, on dicts of bytes with ``__key__``; None if there is none.
        transform_version: Identifies the transform, in place of its code and the values that it uses.
    """

    format: str | None = None
    name: str | None = None
    bytes_max: int = BYTES_MAX
    samples_max: int | None = None
    group_by: Literal["stem", "file"] = "stem"
    fields: str | None = None
    labels: str | None = None
    label_field: str = "cls"
    split: Mapping[str, float] | None = None
    shuffle: bool = False
    seed: int = 0
    key_field: str | None = None
    allow_loss: bool = False
    skip_unnamed: bool = False
    transform: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None
    transform_version: str | None = None

    def __post_init__(self) -> None:
        if self.format is not None:
            check_format(self.format, "format")
        for name in ("name", "fields", "labels", "label_field", "key_field", "transform_version"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ConfigError(f"{name}={value!r} must be a str")
        check_whole("bytes_max", self.bytes_max, 1)
        if self.samples_max is not None:
            check_whole("samples_max", self.samples_max, 1)
        if self.group_by not in ("stem", "file"):
            raise ConfigError(f"group_by={self.group_by!r} must be 'stem' or 'file'")
        check_whole("seed", self.seed, 0, SEED_MAX)
        if self.transform is not None and not callable(self.transform):
            raise ConfigError(f"transform={self.transform!r} must be a function of a sample")
        if self.transform_version is not None and self.transform is None:
            raise ConfigError(f"transform_version={self.transform_version!r} needs a transform=")
        if self.labels is not None and self.labels != "folders" and not is_table_name(self.labels):
            raise ConfigError(
                f"labels={self.labels!r} is neither 'folders' nor the name of a table",
                hint=f"the name of a table ends with one of {', '.join(TABLE_SUFFIXES)}",
            )
        self._check_split()
        parse_fields(self.fields)
        check_key_field(self.key_field, self.format_name)
        if self.name is not None:
            check_pattern(self.name)
            self._check_suffix(self.name)
            if (_SPLIT in self.name) != bool(self.split):
                raise ConfigError(
                    f"name={self.name!r} does not fit split={dict(self.split or {})!r}",
                    hint="a name must contain {split} if split= is used, and only then",
                )

    def _check_suffix(self, name: str) -> None:
        """Refuse a name with an unknown suffix; a name that ends with its number gets the format's suffix."""
        base = name.rpartition("/")[2]
        tail = _NUMBER.split(base)[-1] if _NUMBER.search(base) else base
        if "." in tail and format_of_name(name) is None:
            extension = tail[tail.index(".") :]
            raise ConfigError(
                f"name={name!r} ends with {extension!r}, which is not the suffix of a shard format",
                hint=f"{name.removesuffix(extension)}.tar; inside the shards, files keep their own extension",
            )

    def _check_split(self) -> None:
        if self.split is None:
            return
        if not isinstance(self.split, Mapping):
            raise ConfigError(
                f"split={self.split!r} must be a dict of names and shares", hint='{"train": 0.9, "val": 0.1}'
            )
        if not self.split or any(not re.fullmatch(r"[A-Za-z0-9_-]+", name) for name in self.split):
            raise ConfigError(f"split={dict(self.split)!r} must name at least one split, with letters, digits, - and _")
        if self.name is not None and self.is_mds and _SPLIT not in self.name.rpartition("/")[0]:
            raise ConfigError(
                f"name={self.name!r} puts MDS shards of all splits into one folder, which can have only one index.json",
                hint="{split}/shard.%05d.mds",
            )
        total = sum(self.split.values())
        if any(share <= 0 for share in self.split.values()) or abs(total - 1) > 1e-6:
            raise ConfigError(
                f"split={dict(self.split)!r} has shares that sum to {total:g}, not 1, or are not positive"
            )

    @property
    def specs(self) -> tuple[FieldSpec, ...] | None:
        """The parsed `fields`."""
        return parse_fields(self.fields)

    @property
    def format_name(self) -> str:
        """Name of the format that is written.

        Raises:
            ConfigError: The name's suffix belongs to another format, or to one that cannot be written.
        """
        by_name = format_of_name(self.name) if self.name is not None else None
        if self.format is None:
            return check_format(by_name or "tar", "name")
        if by_name is not None and by_name != FORMATS_WRITTEN[self.format].read_as:
            raise ConfigError(f"name={self.name!r} has the suffix of {by_name}, not of format={self.format!r}")
        return self.format

    @property
    def pattern(self) -> str:
        """Pattern of the shards' names; a default if `name` is None."""
        if self.name is not None:
            return self.name if format_of_name(self.name) is not None else self.name + self.suffix
        if self.is_mds:
            return f"{_SPLIT + '/' if self.split else ''}shard.%05d{self.suffix}"
        return f"{_SPLIT if self.split else 'shard'}-%06d{self.suffix}"

    @property
    def is_mds(self) -> bool:
        """Whether the shards are MDS, whose folder has an ``index.json``."""
        return FORMATS_WRITTEN[self.format_name].read_as.startswith("mds")

    @property
    def suffix(self) -> str:
        """Suffix of the shards' names."""
        return FORMATS_WRITTEN[self.format_name].suffix

    @property
    def patterns(self) -> dict[str, str]:
        """Pattern of the shards' names for each split; without splits, the only key is ``""``."""
        pattern = self.pattern
        return {name: pattern.replace(_SPLIT, name) for name in self.split} if self.split else {"": pattern}

    def refuse_lost_key(self, key: str) -> None:
        """Refuse to drop a key that the source gave.

        Raises:
            ConfigError: The format stores no keys, no field takes them, and `allow_loss` is not set.
        """
        if not (self.allow_loss or self.key_field or FORMATS_WRITTEN[self.format_name].features.keys):
            field = KEY if self.format_name.startswith("tfrecord") else "id"
            raise ConfigError(
                f"{self.format_name} would lose the samples' keys, such as {key!r}",
                hint=f"--key-field {field} (key_field=) stores them, --allow-loss (allow_loss=True) does without",
            )

    def job(self, source: str) -> dict[str, Any]:
        """Return everything that decides which bytes are written, as JSON values. Packings with equal jobs are one job.

        Args:
            source: Digest of the source.

        Raises:
            ConfigError: The transform uses a value that cannot be compared, and has no version.
        """
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name not in _NO_BYTES}
        labels, transform = self.labels, self.transform
        return values | {
            "plan_version": PLAN_VERSION,
            "source": source,
            "split": [[name, share] for name, share in self.split.items()] if self.split else None,
            "format": self.format_name,
            "name": self.pattern,
            "labels": labels if labels in (None, "folders") else digest_of(unsigned_url(labels).encode()).hex(),
            "transform": transform and function_digest(transform, version=self.transform_version),
        }

    def identity_before(self, source: str) -> str:
        """Return the identity that earlier versions gave to a packing of the URL `source` without a transform."""
        values: dict[str, Any] = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        for name in ("transform_version", "allow_loss", "key_field"):  # options that earlier versions did not have
            del values[name]
        values["split"] = list(self.split.items()) if self.split else None
        values["format"], values["name"] = self.format_name, self.pattern
        text = json.dumps([PLAN_VERSION, source, values], sort_keys=True)
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def advice(bytes_max: int) -> str | None:
    """Return a warning about a shard size outside the usual range; None inside it."""
    low, high = ADVISED_BYTES
    if low <= bytes_max <= high:
        return None
    why = (
        "many small shards cost requests, listing time and seeks"
        if bytes_max < low
        else "large shards are hard to balance over ranks, and a corrupt one costs more"
    )
    return f"shards of {bytes_max} bytes: {why}; {low} to {high} bytes are usual"


def check_format(name: str, what: str) -> str:
    """Return `name` if it is a format that can be written.

    Args:
        name: Name of a format.
        what: Name of the argument, for the error.

    Raises:
        ConfigError: `name` is not a format that can be written.
    """
    if name not in FORMATS_WRITTEN:
        raise ConfigError(
            f"{what}={name!r} is not one of {', '.join(PLAIN_FORMATS)}",
            hint="compressed formats are tar.gz, tar.zst, parquet.zst and so on",
        )
    return name


def check_key_field(name: str | None, format_name: str) -> None:
    """Refuse a field that cannot take the keys.

    Raises:
        ConfigError: The name is reserved, or the format cannot read keys back from it.
    """
    if name is not None and (not name or (name in RESERVED_FIELDS and name != KEY)):
        raise ConfigError(f"key_field={name!r} is not a valid field name", hint="--key-field id")
    written_format(format_name, name)


def check_pattern(pattern: str) -> str:
    """Return `pattern` if it gives a name for every number.

    Raises:
        ConfigError: The pattern does not have exactly one number such as ``%06d``, or leads out of its folder.
    """
    if len(_NUMBER.findall(pattern)) != 1 or pattern.count("%") != 1:
        raise ConfigError(f"name={pattern!r} must have exactly one number, like %06d", hint="train-%06d.tar")
    if pattern.startswith(("/", ".penstock/")) or any(part in ("", ".", "..") for part in pattern.split("/")):
        raise ConfigError(f"name={pattern!r} must be a plain relative path")
    return pattern


def number_in(pattern: str, name: str) -> int | None:
    """Return the number for which `pattern` gives `name`; None if there is none."""
    head, tail = _NUMBER.split(pattern)
    match = re.fullmatch(re.escape(head) + r"(\d+)" + re.escape(tail), name)
    return int(match[1]) if match is not None and pattern % int(match[1]) == name else None


def is_table_name(url: str) -> bool:
    """Return whether an object of this name is a table."""
    return public_url(url).lower().endswith(TABLE_SUFFIXES)


# ── identity ────────────────────────────────────────────────────────────────────────────────────────────────────────


def unsigned_url(url: str) -> str:
    """Return `url` without user name, password and the parameters of a signature; a path is made absolute.

    A URL that was signed again names the same object, so it is the same source. All other parameters are kept.
    """
    if "://" not in url or url.startswith("file:"):
        return str(compose.local_path(url))
    if not url.startswith(("http://", "https://")):
        return url
    parts = urlsplit(url)
    given = {pair.partition("=")[0].lower() for pair in parts.query.split("&")}
    signing = set().union(*(names for name, names in _SIGNING.items() if name in given))
    kept = [pair for pair in parts.query.split("&") if pair.partition("=")[0].lower() not in signing]
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "&".join(kept), parts.fragment))


def source_digest(source: object, connection: Mapping[str, Any]) -> str:
    """Return 32 hexadecimal digits that two sources share only if they are the same source.

    For URLs, the digest covers all of them (see ``unsigned_url``), their endpoint, and the options that select objects
    below them; it does not cover these objects, which are in the plan. It covers the stages of a pipeline. For lists and
    tuples it covers all items, as far as ``value_digest`` can compare them. For data sets with ``len`` and ``[]`` it covers
    the type, the length and the first sample. For other iterables it covers only the type, because they are replayed and
    compared with what was written.

    Args:
        source: A source that ``pack`` or ``convert`` takes.
        connection: Connection options of the source.
    """
    described = getattr(source, "source", source)
    if isinstance(source, str | os.PathLike):
        parts: list[object] = ["url", *_located([os.fspath(source)], connection)]
    elif isinstance(described, Shards | Objects):
        names = ("is_list", "format", "on_corrupt", "group_by")
        options = [(name, getattr(described, name, None)) for name in names]
        urls = described.urls if described.manifest is None else ("manifest", described.manifest)
        parts = [type(described).__name__, options, *_located(urls, connection)]
        if isinstance(source, Pipeline) and source.stages:
            parts.append(value_digest(source.stages))
    else:
        parts = ["python", f"{type(source).__module__}.{type(source).__qualname__}"]
        if isinstance(source, list | tuple):
            parts += [len(source), value_digest(source)]
        elif hasattr(source, "__getitem__") and hasattr(source, "__len__"):
            parts += [len(source), value_digest(source[0]) if len(source) else None]
    return digest_of(*(repr(part).encode("utf-8", "surrogatepass") for part in parts)).hex()


def _located(urls: Iterable[str], connection: Mapping[str, Any]) -> list[str]:
    """Return the URLs without signatures, and the endpoint of those that are on S3."""
    located = [unsigned_url(url) for url in urls]
    if any(url.startswith("s3://") for url in located):
        from penstock.store.credentials import setting_endpoint_url

        located.append(str(connection.get("endpoint_url") or setting_endpoint_url(connection.get("profile"))))
    return located


def job_identity(job: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that two jobs share only if they do the same with the same source."""
    return hashlib.blake2b(json.dumps(job, sort_keys=True).encode(), digest_size=8).hexdigest()


def differences(job: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Describe how two jobs differ, for people: with values if they are readable, otherwise by name."""
    found = []
    for name in sorted(job.keys() | other.keys()):
        here, there = job.get(name), other.get(name)
        if here != there:
            is_digest = name in DIGESTS or isinstance(here, list) or isinstance(there, list)
            found.append(f"another {name}" if is_digest else f"{name}={there!r} instead of {here!r}")
    return found
