"""The formats in which shards are written: their writers, what they preserve, and how many bytes a sample takes.

Also how a sample of one format becomes a sample of another, and what a conversion between two formats loses.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.checksums.crc32c import sample_crc
from penstock.config import MIB
from penstock.errors import ConfigError, DataError
from penstock.formats import JsonLinesWriter, RecordIOWriter, TarWriter, TFRecordWriter, without_content
from penstock.formats.compression import COMPRESSORS
from penstock.formats.mds import Encoded, MdsWriter
from penstock.formats.parquet import CODECS, COPIES, ROW_GROUP_BYTES, ParquetWriter
from penstock.formats.sample import is_bytes
from penstock.formats.tar_header import BLOCK_BYTES, headers
from penstock.pack.fields import as_bytes, numbers_of
from penstock.text.json_text import parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.formats import Sample
    from penstock.formats.mds import Column
    from penstock.types import Buffer

KEY = "__key__"
"""As the name of the key field, this stores the keys where the reader finds them again as the samples' keys."""


class FormatFeatures(NamedTuple):
    """Properties of a format: what it stores of a sample besides the bytes of its fields.

    Attributes:
        keys: Whether it stores the key; otherwise the offset of the sample serves as its key.
        names: Whether it stores field names, and so any number of fields.
        numbers: Whether it stores numbers as numbers.
        arrays: Whether it stores the shapes of arrays, and float64.
    """

    keys: bool
    names: bool
    numbers: bool
    arrays: bool


FORMAT_FEATURES: dict[str, FormatFeatures] = {
    "tar": FormatFeatures(keys=True, names=True, numbers=False, arrays=False),
    "zip": FormatFeatures(keys=True, names=True, numbers=False, arrays=False),
    "tfrecord": FormatFeatures(keys=False, names=True, numbers=True, arrays=False),
    "recordio": FormatFeatures(keys=False, names=False, numbers=False, arrays=False),
    "jsonl": FormatFeatures(keys=True, names=False, numbers=True, arrays=False),
    "mds": FormatFeatures(keys=False, names=True, numbers=True, arrays=True),
    "parquet": FormatFeatures(keys=True, names=True, numbers=True, arrays=True),
}
"""Features by format; compression does not change them. A line of JSON counts as one value; it has its own numbers and
names."""


class WrittenFormat(NamedTuple):
    """A format as it is written.

    Attributes:
        writer: ``writer(write)`` returns an object with ``add(sample)`` and ``finish()``. It also has ``head()`` if the
            first bytes of a shard depend on everything after them.
        suffix: Suffix of the shards' names.
        read_as: Name of the format that reads the shards.
        features: Fields of a sample that it stores; numbers that it does not store become text.
        has_offsets: Whether each sample occupies one byte range, which the index records; otherwise the index has only
            the number of samples.
        compression: Compression of the whole shard, a key of ``COMPRESSORS``; None if there is none.
        held_bytes: Bytes that one open shard holds in memory: the parts of ``store.writer``, and what the format
            collects.
    """

    writer: Callable[[Callable[[Buffer], object]], Any]
    suffix: str
    read_as: str
    features: FormatFeatures
    has_offsets: bool = True
    compression: str | None = None
    held_bytes: int = 5 * 8 * MIB


_PLAIN = {
    "tar": WrittenFormat(TarWriter, ".tar", "tar", FORMAT_FEATURES["tar"]),
    "tfrecord": WrittenFormat(TFRecordWriter, ".tfrecord", "tfrecord", FORMAT_FEATURES["tfrecord"]),
    "recordio": WrittenFormat(RecordIOWriter, ".rec", "recordio", FORMAT_FEATURES["recordio"]),
    "jsonl": WrittenFormat(JsonLinesWriter, ".jsonl", "jsonl", FORMAT_FEATURES["jsonl"]),
    "mds": WrittenFormat(MdsWriter, ".mds", "mds", FORMAT_FEATURES["mds"]),
}
_PARQUET = WrittenFormat(
    ParquetWriter, ".parquet", "parquet", FORMAT_FEATURES["parquet"], has_offsets=False,
    held_bytes=5 * 8 * MIB + COPIES * ROW_GROUP_BYTES,
)  # fmt: skip


def _compressed() -> dict[str, WrittenFormat]:
    table = {}
    for name, written in _PLAIN.items():
        for kind in COMPRESSORS:
            suffix = ".zstd" if (name, kind) == ("mds", "zst") else f".{kind}"  # MosaicML's own suffix
            table[f"{name}.{kind}"] = written._replace(
                suffix=written.suffix + suffix, read_as=f"{name}.{kind}", has_offsets=False, compression=kind
            )
    for kind, codec in CODECS.items():  # Parquet compresses its pages, not the file
        table[f"parquet.{kind}"] = _PARQUET._replace(writer=partial(ParquetWriter, codec=codec))
    return table


FORMATS_WRITTEN: dict[str, WrittenFormat] = {**_PLAIN, "parquet": _PARQUET, **_compressed()}
"""All formats that can be written, by name; ``tar.gz`` and similar names are compressed."""

PLAIN_FORMATS = (*_PLAIN, "parquet")
"""Names of the formats without compression."""


def written_format(format_name: str, key_field: str | None) -> WrittenFormat:
    """Return the format as it is written if `key_field` takes the samples' keys.

    Raises:
        ConfigError: `key_field` is ``__key__``, and the format has no place for keys.
    """
    written = FORMATS_WRITTEN[format_name]
    if key_field != KEY or written.features.keys:
        return written
    if written.writer is not TFRecordWriter:
        raise ConfigError(
            f"key_field={KEY!r}: {format_name} cannot store a key that is read back", hint="--key-field id"
        )
    return written._replace(
        writer=partial(TFRecordWriter, keeps_key=True), features=written.features._replace(keys=True)
    )


def with_key_field(sample: Mapping[str, Any], key_field: str | None) -> Mapping[str, Any]:
    """Return `sample` with its key also stored in `key_field`.

    Raises:
        DataError: The sample already has a field of this name.
    """
    if key_field in (None, KEY):
        return sample
    if key_field in sample:
        raise DataError(f"the sample already has a field {key_field!r}", sample_key=sample[KEY], field=key_field)
    return {**sample, key_field: sample[KEY]}


def prepare(sample: Mapping[str, Any], written: WrittenFormat) -> dict[str, Any]:
    """Return the sample as the format's writer takes it: bytes, or numbers if the format holds numbers."""
    key = sample["__key__"]
    if not written.features.numbers:
        return {name: value if name == "__key__" else as_bytes(name, value, key) for name, value in sample.items()}
    if written.writer is JsonLinesWriter:
        return {name: _for_json(name, value, key) for name, value in sample.items()}
    return dict(sample)


def _for_json(name: str, value: Any, key: str) -> Any:
    if hasattr(value, "dtype") or (isinstance(value, memoryview) and not is_bytes(value)):
        return numbers_of(value)
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            raise DataError("JSON holds text, and these bytes are not UTF-8", sample_key=key, field=name) from None
    return value


def checksum(sample: Mapping[str, Any], written: WrittenFormat) -> int:
    """Return the CRC32C of the bytes that `sample` takes in a shard; it does not depend on where they lie."""
    crc = 0

    def put(data: Buffer) -> None:
        nonlocal crc
        crc = sample_crc(data, crc)

    written.writer(put).add(prepare(sample, written))
    return crc


def stored_bytes(key: str, sizes: Mapping[str, int], format_name: str) -> int:
    """Return how many bytes a sample takes in a shard before compression: exact for tar, otherwise an estimate.

    Args:
        key: Key of the sample.
        sizes: Size in bytes of each field, by name.
        format_name: A key of ``FORMATS_WRITTEN``.
    """
    plain = format_name.partition(".")[0]
    if plain == "tar":
        return sum(_member_bytes(f"{key}.{name}", size) for name, size in sizes.items())
    if plain == "tfrecord":
        return 16 + sum(size + len(name) + 16 for name, size in sizes.items())
    return 16 + sum(sizes.values())


def tail_bytes(format_name: str) -> int:
    """Return how many bytes follow the last sample of a shard: the end mark of a tar, otherwise 0."""
    return 2 * BLOCK_BYTES if format_name.partition(".")[0] == "tar" else 0


def _member_bytes(name: str, size_bytes: int) -> int:
    head = BLOCK_BYTES if len(name) <= 100 and name.isascii() else len(headers(name, size_bytes))
    return head + -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


# ── from one format to another ──────────────────────────────────────────────────────────────────────────────────────


def base_format(format_name: str) -> str:
    """Return the format without its compression and without the content of its records: a key of ``FORMAT_FEATURES``."""
    return without_content(format_name.partition(".")[0])


def losses(source: str, target: str, *, key_field: str | None = None) -> tuple[str, ...]:
    """Describe the parts of a sample that a conversion from one format to another loses; () if it loses nothing.

    Args:
        source: Name of the format that is read.
        target: A key of ``FORMATS_WRITTEN``.
        key_field: Field of the target that takes the samples' keys; None if there is none.

    Raises:
        ConfigError: One of the formats is unknown.
    """
    source, wanted, target = base_format(source), target, base_format(target)
    if source not in FORMAT_FEATURES or wanted not in FORMATS_WRITTEN:
        raise ConfigError(
            f"{source!r} cannot be converted to {wanted!r}", hint=f"choose one of {', '.join(PLAIN_FORMATS)}"
        )
    if {source, target} == {"tfrecord", "recordio"} or source == target:
        return ()  # records are copied unchanged
    have, get = FORMAT_FEATURES[source], FORMAT_FEATURES[target]
    lost = []
    if have.keys and not get.keys and key_field is None:
        lost.append("the samples' keys (--key-field NAME stores them)")
    if have.names and not get.names and target != "jsonl":
        lost.append("the names of fields, and all fields but one")
    if have.numbers and not get.numbers and source != "jsonl":
        lost.append("the types of numbers: single ones become text, others .npy")
    if have.arrays and target == "parquet":
        lost.append("shapes of arrays, and the widths of numbers")
    elif have.arrays and not get.arrays and get.numbers:
        lost.append("shapes of arrays, and float64")
    return tuple(lost)


def loss_table() -> str:
    """Return a Markdown table of the losses from each row's format to each column's."""
    targets = list(PLAIN_FORMATS)
    lines = ["| from | " + " | ".join(f"to {name}" for name in targets) + " |", "|---" * (len(targets) + 1) + "|"]
    for source in FORMAT_FEATURES:
        cells = []
        for target in targets:
            words = [
                text.partition(" (")[0].partition(":")[0].partition(", and all")[0] for text in losses(source, target)
            ]
            cells.append("; ".join(words) or "keeps all")
        lines.append(f"| {source} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def convert_sample(sample: Sample, source: str, target: str, *, key_field: str | None) -> dict[str, Any]:
    """Return a sample of the `source` format as the writer of the `target` format takes it.

    Raises:
        DataError: The target cannot hold it.
    """
    fields: dict[str, Any] = {"__key__": sample.key}
    if key_field is not None:
        if key_field in sample.fields:
            raise DataError(f"the sample already has a field {key_field!r}", sample_key=sample.key, field=key_field)
        fields[key_field] = sample.key
    for name, value in sample.fields.items():
        if is_bytes(value) and value.ndim == 1:
            fields[name] = value
        elif FORMAT_FEATURES[target].numbers:
            fields[name] = _numbers(value)
        elif value.nbytes == value.itemsize:
            fields[name] = repr(value.tolist() if not value.ndim else value.tolist()[0])
        else:
            fields[f"{name}.npy"] = _numbers(value)
    if target == "recordio":
        return _one_record(fields)
    if target == "jsonl" and set(fields) == {"__key__", "json"} and FORMAT_FEATURES[source].keys and source != "jsonl":
        return _json_with_key(fields)
    return fields


def convert_mds_sample(sample: Sample, columns: tuple[Column, ...], *, key_field: str | None) -> dict[str, Any]:
    """Return an MDS sample as the MDS writer takes it, with its shard's own encodings, so that MosaicML reads equal values."""
    fields = convert_sample(sample, "mds", "mds", key_field=key_field)
    for column in columns:
        if not column.encoding.startswith("ndarray"):
            data = sample.fields[column.name].tobytes()
            fields[column.name] = Encoded(column.encoding, column.size_bytes, data)
    return fields


def _numbers(value: memoryview) -> Any:
    import numpy as np

    return np.asarray(value)


def _one_record(fields: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in fields if name != "__key__"]
    if len(names) != 1:
        raise DataError(
            f"a record holds one field, not {names}",
            hint="--fields selects one of them",
            sample_key=fields["__key__"],
        )
    return {"__key__": fields["__key__"], "record": fields[names[0]]}


def _json_with_key(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a sample that is one JSON object, with its key as a name of that object."""
    try:
        value = parse_json(bytes(fields["json"]))
    except ValueError as error:
        raise DataError(f"it is not JSON ({error})", sample_key=fields["__key__"], field="json") from error
    return {**value, "__key__": fields["__key__"]} if isinstance(value, dict) else fields
