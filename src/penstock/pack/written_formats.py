"""The formats in which shards are written: their writers, what they preserve, and how many bytes a sample takes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.checksums.crc32c import sample_crc
from penstock.config import MIB
from penstock.errors import ConfigError, DataError
from penstock.formats import JsonLinesWriter, RecordIOWriter, TarWriter, TFRecordWriter
from penstock.formats.compressors import COMPRESSORS
from penstock.formats.mds_writer import MdsWriter
from penstock.formats.parquet_writer import CODECS, COPIES, ROW_GROUP_BYTES, ParquetWriter
from penstock.formats.tar_header import BLOCK_BYTES
from penstock.formats.tar_writer import headers
from penstock.pack.fields import as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.types import Buffer

KEY = "__key__"
"""As the name of the key field, this stores the keys where the reader finds them again as the samples' keys."""


class WrittenFormat(NamedTuple):
    """A format as it is written.

    Attributes:
        writer: ``writer(write)`` returns an object with ``add(sample)`` and ``finish()``. It also has ``head()`` if the
            first bytes of a shard depend on everything after them.
        suffix: Suffix of the shards' names.
        read_as: Name of the format that reads the shards.
        holds_numbers: Whether numbers stay numbers; otherwise they become text.
        holds_keys: Whether the samples' keys are stored.
        has_offsets: Whether each sample occupies one byte range, which the index records; otherwise the index has only
            the number of samples.
        compression: Compression of the whole shard, a key of ``COMPRESSORS``; None if there is none.
        held_bytes: Bytes that one open shard holds in memory: the parts of ``store.writer``, and what the format
            collects.
    """

    writer: Callable[[Callable[[Buffer], object]], Any]
    suffix: str
    read_as: str
    holds_numbers: bool
    holds_keys: bool
    has_offsets: bool = True
    compression: str | None = None
    held_bytes: int = 5 * 8 * MIB


_PLAIN = {
    "tar": WrittenFormat(TarWriter, ".tar", "tar", holds_numbers=False, holds_keys=True),
    "tfrecord": WrittenFormat(TFRecordWriter, ".tfrecord", "tfrecord", holds_numbers=True, holds_keys=False),
    "recordio": WrittenFormat(RecordIOWriter, ".rec", "recordio", holds_numbers=False, holds_keys=False),
    "jsonl": WrittenFormat(JsonLinesWriter, ".jsonl", "jsonl", holds_numbers=True, holds_keys=True),
    "mds": WrittenFormat(MdsWriter, ".mds", "mds", holds_numbers=True, holds_keys=False),
}
_PARQUET = WrittenFormat(
    ParquetWriter, ".parquet", "parquet", holds_numbers=True, holds_keys=True, has_offsets=False,
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
    if key_field != KEY or written.holds_keys:
        return written
    if written.writer is not TFRecordWriter:
        raise ConfigError(
            f"key_field={KEY!r}: {format_name} cannot store a key that is read back", hint="--key-field id"
        )
    return written._replace(writer=partial(TFRecordWriter, keeps_key=True), holds_keys=True)


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
    if not written.holds_numbers:
        return {name: value if name == "__key__" else as_bytes(name, value, key) for name, value in sample.items()}
    if written.writer is JsonLinesWriter:
        return {name: _for_json(name, value, key) for name, value in sample.items()}
    return dict(sample)


def _for_json(name: str, value: Any, key: str) -> Any:
    if hasattr(value, "dtype") or (isinstance(value, memoryview) and value.format not in {"B", "b", "c"}):
        numbers = value.tolist()
        return numbers[0] if isinstance(numbers, list) and len(numbers) == 1 else numbers
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
