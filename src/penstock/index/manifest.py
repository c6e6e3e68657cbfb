"""Manifests: stored listings, so that a job needs no listing.

A manifest is written as JSON lines or Parquet, with ``key``, ``size_bytes`` and ``etag`` of each object; JSON lines begin
with a header that has the URL to which the keys are relative. Manifests of other tools can be read too: JSON lines and
Parquet (``url``, ``key`` or ``path``; ``size`` or ``size_bytes``; ``etag``), SageMaker's manifests
(``[{"prefix": ...}, "relative", ...]``), and its augmented manifests (JSON lines whose ``NAME-ref`` attributes are URLs).
"""

from __future__ import annotations

import io
import json
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.compose import check_reach, folder_of, reach_of
from penstock.errors import ConfigError, DataError
from penstock.redaction import public_url
from penstock.text.json_text import parse_json
from penstock.types import SIZE_DIGITS_MAX, strong_etag
from penstock.version import install_hint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import BinaryIO

    from penstock.types import Buffer, ObjectInfo

VERSION = 1
PARQUET_MAGIC = b"PAR1"
ROWS_PER_GROUP = 100_000

_URL_NAMES = ("url", "key", "path", "uri", "file")
_SIZE_NAMES = ("size_bytes", "size", "filesize")
_ETAG_NAMES = ("etag", "ETag", "e_tag")
_REF = "-ref"
_HEAD_BYTES = 4096  # of which spaces may be the first

_SIZE_END = 10**SIZE_DIGITS_MAX
_OWN_FIELDS = ("key", "size_bytes", "etag")  # of the lines that write_manifest writes
_decoded = json.JSONDecoder().decode


class ManifestEntry(NamedTuple):
    """One object of a manifest.

    Attributes:
        url: URL of the object.
        size_bytes: Size of the object in bytes; None if the manifest does not have it.
        etag: ETag of the object, so that a job reads this version or fails; None if the manifest does not have it.
        attributes: Attributes in a line of an augmented manifest that are not references; otherwise None.
    """

    url: str
    size_bytes: int | None = None
    etag: str | None = None
    attributes: Mapping[str, Any] | None = None


def write_manifest(
    infos: Iterable[ObjectInfo],
    file: BinaryIO,
    *,
    base_url: str,
    format: str = "jsonl",  # noqa: A002
) -> int:
    """Write a manifest of `infos`; return their number.

    Args:
        infos: Listed objects, with keys relative to `base_url`.
        file: File open for writing bytes; it stays open.
        base_url: URL that the keys are relative to; ends with a slash.
        format: ``"jsonl"`` or ``"parquet"`` (needs pyarrow).

    Raises:
        ConfigError: The format is unknown, or it is Parquet and pyarrow is not installed.
    """
    if format not in ("jsonl", "parquet"):
        raise ConfigError(f"format {format!r} must be 'jsonl' or 'parquet'")
    if format == "parquet":
        return _write_parquet(infos, file, base_url)
    count = 0
    file.write(_line({"penstock_manifest": VERSION, "base_url": base_url}))
    for count, info in enumerate(infos, 1):  # noqa: B007 - the last one is the number of objects
        file.write(_line({"key": info.key, "size_bytes": info.size_bytes, "etag": info.etag}))
    return count


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _write_parquet(infos: Iterable[ObjectInfo], file: BinaryIO, base_url: str) -> int:
    pyarrow, parquet = _pyarrow()
    schema = pyarrow.schema(
        [("key", pyarrow.string()), ("size_bytes", pyarrow.int64()), ("etag", pyarrow.string())],
        metadata={b"penstock_manifest": b"%d" % VERSION, b"base_url": base_url.encode()},
    )
    writer, rows, count = parquet.ParquetWriter(file, schema, compression="zstd"), iter(infos), 0
    while True:
        columns: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        for info in islice(rows, ROWS_PER_GROUP):
            for column, value in zip(columns, (info.key, info.size_bytes, info.etag), strict=True):
                column.append(value)
        writer.write_table(pyarrow.table(list(columns), schema=schema))
        count += len(columns[0])
        if len(columns[0]) < ROWS_PER_GROUP:
            writer.close()
            return count


def read_manifest(data: Buffer, *, url: str, refs: Iterable[str] | None = None) -> list[ManifestEntry]:
    """Return the objects of a manifest in its order; its bytes show which kind of manifest it is.

    Args:
        data: uint8[n], the manifest.
        url: URL of the manifest, for errors; keys are relative to its folder if the manifest names no URL.
        refs: Attributes of an augmented manifest whose objects are wanted (``["image-ref"]``); None takes all, in the
            order of each line.

    Raises:
        DataError: The manifest is not of a kind that this module describes, and the message names the line; or it lies in a
            store, and names URLs that it must not name there: see ``penstock.compose.reach_of``.
        ConfigError: The manifest is Parquet, and pyarrow is not installed.
    """
    return list(iter_manifest(data, url=url, refs=refs))


def iter_manifest(data: Buffer, *, url: str, refs: Iterable[str] | None = None) -> Iterator[ManifestEntry]:
    """Return an iterator over the objects of a manifest, which reads the lines of a manifest while it is used.

    Args:
        data: uint8[n], the manifest.
        url: URL of the manifest; see ``read_manifest``.
        refs: Attributes of an augmented manifest whose objects are wanted; see ``read_manifest``.

    Raises:
        DataError: While iterating, for the reasons that ``read_manifest`` names.
        ConfigError: While iterating: the manifest is Parquet, and pyarrow is not installed.

    Cost: 2 µs for each line that penstock wrote; the kinds that are not lines are parsed before the first object.
    """
    raw = bytes(data)
    base = folder_of(url)
    if raw[:4] == PARQUET_MAGIC:
        entries = _read_parquet(raw, base, url)
    elif is_sagemaker_manifest(raw):
        entries = _read_sagemaker(raw, url)
    else:
        entries = _read_lines(raw, base, url, tuple(refs) if refs is not None else None)
    return _within_reach(entries, url)


def _within_reach(entries: Iterator[ManifestEntry], name: str) -> Iterator[ManifestEntry]:
    reach = reach_of(name)
    for entry in entries:
        if not entry.url.startswith(reach) or "::" in entry.url:
            check_reach(entry.url, named_by=name)
        yield entry


def is_sagemaker_manifest(data: bytes) -> bool:
    """Return whether a manifest is of SageMaker's kind, ``[{"prefix": ...}, "relative", ...]``."""
    return data[:_HEAD_BYTES].lstrip()[:1] == b"["


def is_manifest_name(name: str) -> bool:
    """Return whether an object of this name is a manifest, not a shard: ``manifest`` is in it, before a known suffix."""
    lowered = public_url(name).rpartition("/")[2].lower()
    return "manifest" in lowered and lowered.endswith((".jsonl", ".json", ".parquet", ".manifest"))


def _joined(base: str, key: str) -> str:
    return key if "://" in key or key.startswith("/") else base + key


def _read_lines(raw: bytes, base: str, name: str, refs: tuple[str, ...] | None) -> Iterator[ManifestEntry]:
    for number, line in enumerate(io.BytesIO(raw), 1):
        try:
            row = _decoded(line.decode())
        except (ValueError, RecursionError):
            if not line.strip():
                continue
            row = _decoded_anyhow(line, number, name)
        if not isinstance(row, dict):
            raise DataError(f"line {number} of the manifest is a {type(row).__name__}, not an object", shard=name)
        if "penstock_manifest" in row:
            if row["penstock_manifest"] != VERSION:
                raise DataError(f"the manifest's version is {row['penstock_manifest']}, not {VERSION}", shard=name)
            base = row.get("base_url", base)
            continue
        if tuple(row) == _OWN_FIELDS and refs is None:
            key, size, etag = row.values()
            if type(key) is str and key and type(size) is int and 0 <= size < _SIZE_END and type(etag) is str:
                yield ManifestEntry(_joined(base, key), size, strong_etag(etag))
                continue
        yield from _of_row(row, base, f"line {number} of the manifest", name, refs)


def _decoded_anyhow(line: bytes, number: int, name: str) -> Any:
    """Return the row of a line that may have another encoding than UTF-8, or begin with a byte order mark."""
    try:
        return parse_json(line)
    except ValueError as error:
        raise DataError(f"line {number} of the manifest is not JSON ({error})", shard=name) from error


def _of_row(
    row: dict[str, Any], base: str, where: str, name: str, refs: tuple[str, ...] | None
) -> Iterator[ManifestEntry]:
    references = [field for field in row if field.endswith(_REF)] if refs is None else list(refs)
    url = _first(row, _URL_NAMES)
    if refs is None and isinstance(url, str) and url:
        size, etag = _first(row, _SIZE_NAMES), _first(row, _ETAG_NAMES)
        if size is not None and (not isinstance(size, int) or not 0 <= size < _SIZE_END):
            raise DataError(f"{where} has the size {size!r:.40}", shard=name)
        if etag is not None and not isinstance(etag, str):
            raise DataError(f"{where} has the ETag {etag!r}, which is not text", shard=name)
        yield ManifestEntry(_joined(base, url), size, strong_etag(etag))
        return
    attributes = {field: value for field, value in row.items() if not field.endswith(_REF)}
    for field in references:
        if not isinstance(row.get(field), str):
            raise DataError(f"{where} has no URL in {field!r}", shard=name, field=field)
        yield ManifestEntry(_joined(base, row[field]), attributes=attributes)
    if not references:
        hint = f"one of {', '.join(_URL_NAMES)}, or an attribute that ends with {_REF}"
        raise DataError(f"{where} names no object", hint=hint, shard=name)


def _first(row: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _read_sagemaker(text: bytes, name: str) -> Iterator[ManifestEntry]:
    try:
        entries = parse_json(text)
    except ValueError as error:
        raise DataError(f"the manifest is not JSON ({error})", shard=name) from error
    prefix = entries[0].get("prefix") if entries and isinstance(entries[0], dict) else None
    if not isinstance(prefix, str) or not prefix:
        raise DataError('the manifest does not begin with {"prefix": "s3://..."}', shard=name)
    for index, entry in enumerate(entries[1:], 1):
        if not isinstance(entry, str):
            raise DataError(f"entry {index} of the manifest is a {type(entry).__name__}, not a name", shard=name)
        yield ManifestEntry(prefix + entry)  # plain concatenation, as SageMaker does


def _read_parquet(raw: bytes, base: str, name: str) -> Iterator[ManifestEntry]:
    pyarrow, parquet = _pyarrow()
    try:
        file = parquet.ParquetFile(io.BytesIO(raw))
        stored = file.schema_arrow.metadata or {}
        base = stored.get(b"base_url", base.encode()).decode()
        wanted = [*_URL_NAMES, *_SIZE_NAMES, *_ETAG_NAMES]
        columns = [column for column in file.schema_arrow.names if column in wanted]
        rows = file.read(columns=columns).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"the manifest is not a Parquet file ({error})", shard=name) from error
    for number, row in enumerate(rows):
        yield from _of_row(row, base, f"row {number} of the manifest", name, None)


def _pyarrow() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow", hint=f"{install_hint('parquet')}, or write JSON lines") from error
