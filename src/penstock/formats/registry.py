"""The table of formats, and the detection of a shard's format from its first bytes or its name."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from penstock.errors import ConfigError, CorruptShardError, UnsupportedFormatError
from penstock.formats.parsing import look
from penstock.formats.tar import TarParser
from penstock.formats.tar_header import BLOCK_BYTES, ZERO_BLOCK, is_header
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator

    from penstock.formats.parsing import OnCorrupt, Parser
    from penstock.formats.ranged import RangedReader
    from penstock.types import Buffer

K = TypeVar("K", str, str | None)

HEAD_BYTES = BLOCK_BYTES
"""Number of bytes from the start of an object that ``detect`` needs to be certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format of shards.

    Attributes:
        name: Name of the format, as ``detect`` returns it.
        suffixes: Suffixes of object names in lower case; empty if users must name the format.
        unit: The smallest part at which reading can start. Starting inside a unit requires reading it from its start.
        recognise: Function that tells whether the first ``HEAD_BYTES`` of an object, or all bytes of a shorter one, are of
            this format.
        parser: ``parser(shard, start_offset_bytes=, on_corrupt=)``. If there is also ``ranged``, this parser collects the
            whole shard first.
        ranged: ``ranged(shard, size_bytes=, fields=, on_corrupt=)``, for formats whose directory is at the end.
        head: Generator that obtains the ``head=`` needed to start inside a shard: it yields spans of the shard, receives
            their bytes by ``send``, and returns the head. None if nothing is needed.
        decide: For a format in which the first record determines the content of all: a generator that asks for the start of
            a shard as ``head`` does, and returns the more specific format, which is needed to start inside such a shard.
            None for all other formats.
    """

    name: str
    suffixes: tuple[str, ...] = ()
    unit: Literal["sample", "block", "shard"]
    recognise: Callable[[bytes], bool] | None = None
    parser: Callable[..., Parser]
    ranged: Callable[..., RangedReader] | None = None
    head: Callable[[], Generator[ByteRange, Buffer, Buffer]] | None = None
    decide: Callable[[], Generator[ByteRange, Buffer, str]] | None = None


def _of(module: str, name: str) -> Callable[..., Any]:
    """Return a function that calls `name` of a module in this package, which is imported at the first call.

    A job that reads only tars therefore imports no other format. Cost: 1 µs for each call, a few times per shard.
    """

    def call(*args: Any, **options: Any) -> Any:
        return getattr(import_module(f"penstock.formats.{module}"), name)(*args, **options)

    return call


def _is_tar(head: bytes) -> bool:
    block = head[:BLOCK_BYTES]
    return block == ZERO_BLOCK or (len(block) == BLOCK_BYTES and is_header(block))


_DECIDE_BYTES = 64 << 10
"""Size of the first read that looks for a shard's first record. Each further read is 16 times as long."""


def _decide(format_name: str) -> Generator[ByteRange, Buffer, str]:
    size_bytes, found = _DECIDE_BYTES, None
    while found is None:
        head = yield ByteRange(0, size_bytes)
        found = decided_format(format_name, head, is_all=len(head) < size_bytes)
        size_bytes *= 16
    return found


def decided_format(format_name: str, head: Buffer, *, is_all: bool = False) -> str | None:
    """Return the format to read a shard as, which its first valid record determines.

    Args:
        format_name: A key of ``FORMATS``.
        head: The first bytes of the shard.
        is_all: Whether `head` is the whole shard.

    Returns:
        The more specific format, such as ``tfrecord-example`` for ``tfrecord``, or `format_name` if there is none. None if
        `head` does not contain the whole first record.
    """
    if FORMATS[format_name].decide is None:
        return format_name
    parser = parser_of(format_name, shard="", on_corrupt="skip_sample")
    parser.feed(head)
    return parser.decided_format or (f"{format_name}-raw" if is_all else None)


_CONTENT = re.compile("-[a-z]+")  # the suffix of tfrecord-raw, tfrecord-example.gz, recordio-mxnet and so on


def without_content(format_name: str) -> str:
    """Return a format's name without the content of its records: ``tfrecord`` for ``tfrecord-raw``."""
    return _CONTENT.sub("", format_name)


def undecoded(format_name: str) -> str:
    """Return the format that gives records as they are stored if there is one, otherwise `format_name`."""
    name, dot, compression = format_name.partition(".")
    raw = f"{without_content(name)}-raw{dot}{compression}"
    return raw if raw in FORMATS else format_name


def with_fields(format_name: str, fields: Collection[str] | None) -> str:
    """Return the format as which to parse a shard of which only `fields` are wanted; None: all.

    A line of JSON is one field, ``json``. If only others are wanted, they are the names of the object in it.
    """
    kind, dot, compression = format_name.partition(".")
    is_named = kind == "jsonl" and fields is not None and "json" not in fields
    return f"jsonl-columns{dot}{compression}" if is_named else format_name


def narrowed(said: str | None, known: K) -> str | K:
    """Return the format as which to read a shard.

    Args:
        said: The format that the pipeline names, or None. It takes precedence, but may not state the content of records.
        known: The format according to an index, a state or the shard itself. It may state the content of records.
    """
    return known if said is None or (known is not None and without_content(known) == said) else said


def _streamed(
    name: str, parser: str, *suffixes: str, contents: tuple[str, ...] = (), has_head: bool = False
) -> list[Format]:
    """Return the rows of a streamed format, whose module has its name: also one for each content that records may have."""
    of_module = _of(name, parser)
    row = Format(
        name=name,
        suffixes=suffixes,
        unit="sample",
        recognise=_of(name, f"is_{name}"),
        parser=of_module,
        head=_of(name, "look_head") if has_head else None,
        decide=partial(_decide, name) if contents else None,
    )
    return [
        row,
        *(Format(name=f"{name}-{each}", unit="sample", parser=partial(of_module, content=each)) for each in contents),
    ]


def _ranged(name: str, reader: str, *suffixes: str, unit: Literal["sample", "block"]) -> Format:
    """Return the row of a format that is read by ranges, whose module has its name."""
    of_module = _of(name, reader)
    whole = partial(_of("ranged", "WholeShardParser"), reader=of_module)
    is_format = _of(name, f"is_{name}")
    return Format(name=name, suffixes=suffixes, unit=unit, recognise=is_format, parser=whole, ranged=of_module)


_SHORT_SUFFIXES = {"tar.gz": (".tgz",), "tar.zst": (".tzst",), "jsonl.gz": (".json.gz",), "jsonl.zst": (".json.zst",)}


def _compressed(inner: Format) -> list[Format]:
    """Return the rows for `inner` when the whole shard is compressed."""
    parser = partial(_of("compression", "CompressedParser"), inner=inner.parser)
    rows = []
    for kind, endings in (("gz", (".gz",)), ("zst", (".zst", ".zstd"))):
        name = f"{inner.name}.{kind}"
        suffixes = [suffix + ending for suffix in inner.suffixes for ending in endings]
        suffixes += _SHORT_SUFFIXES.get(name, ())
        parser_of_kind = partial(parser, compression=kind)
        rows.append(Format(name=name, suffixes=tuple(suffixes), unit="shard", parser=parser_of_kind))
    return rows


_STREAMED = [
    Format(name="tar", suffixes=(".tar",), unit="sample", recognise=_is_tar, parser=TarParser),
    *_streamed("recordio", "RecordIOParser", ".rec", ".recordio", contents=("raw", "mxnet")),
    *_streamed("tfrecord", "TFRecordParser", ".tfrecord", ".tfrecords", ".tfrec", contents=("raw", "example")),
    *_streamed("jsonl", "JsonLinesParser", ".jsonl", ".ndjson", ".jsonlines"),
    Format(name="jsonl-columns", unit="sample", parser=_of("jsonl", "JsonColumnsParser")),
    *_streamed("mds", "MdsParser", ".mds", has_head=True),
]
_RANGED = [
    _ranged("zip", "ZipReader", ".zip", unit="sample"),
    _ranged("parquet", "ParquetReader", ".parquet", ".pq", unit="block"),
]

FORMATS: dict[str, Format] = {
    row.name: row
    for row in (*_STREAMED[:-1], *_RANGED, _STREAMED[-1], *(row for inner in _STREAMED for row in _compressed(inner)))
}
"""All formats by name, in the order in which `detect` tries them: MDS, which has no magic number, after all others."""

_KNOWN = f"{', '.join(name for name in FORMATS if not {'-', '.'} & set(name))}, some of them also as .gz and .zst"

_CONTAINERS = frozenset({"bzip2", "xz", "lz4", "HDF5"})
"""Containers that may hold what the object's name says, in a way that is not supported."""

CHECKSUM_HEAD_BYTES = 64 * 1024
"""Bytes from the start of a shard that are enough for ``has_checksums``.

The header of a Parquet page can be long because it holds the smallest and the largest value.
"""

_LITDATA = re.compile(r"(?:^|/)chunk-\d+-\d+(?:\.\w+)?\.bin$").search
_OF = re.compile(r"-\d+-of-\d+(?=\.[a-z0-9]+$|$)")
"""The shard number, as in ``data.tfrecord-00003-of-00100``, that writers of TensorFlow and Beam put next to the suffix."""


def format_of_name(name: str) -> str | None:
    """Return the format that an object called `name` should have, or None if its name is not that of a shard."""
    lowered = _OF.sub("", name.lower())
    return next((row.name for row in FORMATS.values() if row.suffixes and lowered.endswith(row.suffixes)), None)


def detect(name: str, head: Buffer = b"") -> str:
    """Return the format of the shard called `name` that begins with `head`. The content takes precedence over the name.

    Args:
        name: URL or key of the object.
        head: The first bytes of the object, uint8[up to 512]. If it is empty, the name decides.

    Returns:
        A key of ``FORMATS``.

    Raises:
        CorruptShardError: The name is that of a shard, but the content is of no format.
        UnsupportedFormatError: The object is of no supported format. The message says what it seems to be.
    """
    start = bytes(head[:HEAD_BYTES])
    found = _of_head(name, start) if start else format_of_name(name)
    if found is not None:
        return found
    hint = f"supported: {_KNOWN}"
    seems = look(start) if start else None
    what = f"it seems to be {seems}, which is not supported" if seems else "its format is not known"
    if seems in {"gzip", "zstd"}:
        what = f"it is {seems}, and neither its name nor its first bytes say of what"
    if format_of_name(name) is not None and seems not in _CONTAINERS:
        raise CorruptShardError(what, hint=f"{hint}; is its name right?", shard=name, offset_bytes=0)
    hint = conversion_hint(name) or f"{hint}; give it the suffix of one, or say shards(url, format='tar')"
    raise UnsupportedFormatError(what, hint=hint, shard=name)


def conversion_hint(name: str) -> str | None:
    """Return how to convert the object called `name` if it is a shard that only another library reads, else None."""
    if _LITDATA(name) is None:
        return None
    url = name.rpartition("/")[0]
    return (
        'these are chunks of LitData, which only LitData reads. This converts them: python -c "import litdata, penstock; '
        f"penstock.pack(litdata.StreamingDataset('{url}/'), 's3://bucket/packed/')\""
    )


def _of_head(name: str, start: bytes) -> str | None:
    if start.startswith(b"\x1f\x8b"):
        suffix = ".gz"
        try:
            inside = zlib.decompressobj(31).decompress(start, HEAD_BYTES)
        except zlib.error:
            inside = b""
        inner = _of_head("", inside) if inside and inside[:2] != b"\x1f\x8b" else None
        if inner is not None and inner + suffix in FORMATS:
            return inner + suffix
    elif start.startswith(b"\x28\xb5\x2f\xfd"):
        suffix = ".zst"  # the start of a compressed block reveals nothing until the whole block is there
    else:
        return next((row.name for row in FORMATS.values() if row.recognise and row.recognise(start)), None)
    by_name = format_of_name(name)
    return by_name if by_name is not None and by_name.endswith(suffix) else None


def parser_of(
    format_name: str,
    *,
    shard: str,
    start_offset_bytes: int = 0,
    on_corrupt: OnCorrupt = "raise",
    head: Buffer | None = None,
) -> Parser:
    """Create a parser for one shard.

    Args:
        format_name: A key of ``FORMATS``.
        shard: URL or key, for error messages.
        start_offset_bytes: Offset in the shard at which the first chunk begins: 0, or a ``Sample.offset_bytes``.
        on_corrupt: ``raise`` to raise an error, ``skip_sample`` to skip the sample, or ``skip_shard`` to skip the rest of the
            shard.
        head: The first bytes of the shard, up to its first sample. Formats whose row has ``head`` need it to start inside
            a shard.

    Raises:
        ConfigError: The format does not exist, or cannot be read from that offset.
        CorruptShardError: `head` is invalid.
    """
    row = _row(format_name)
    options = {"head": head} if row.head else {}
    return row.parser(shard, start_offset_bytes=start_offset_bytes, on_corrupt=on_corrupt, **options)


def ranged_of(
    format_name: str,
    *,
    shard: str,
    size_bytes: int,
    fields: Collection[str] | None = None,
    on_corrupt: OnCorrupt = "raise",
    in_columns: bool = False,
) -> RangedReader:
    """Create a ranged reader, as ``ranged.py`` describes, for one shard.

    Args:
        format_name: A key of ``FORMATS`` whose row has ``ranged``.
        shard: URL or key, for error messages.
        size_bytes: Size of the shard.
        fields: Names of the fields to read; None reads all.
        on_corrupt: Policy for corrupt bytes, as for ``parser_of``.
        in_columns: Whether to give ``Samples`` where the format and the types allow it.

    Raises:
        ConfigError: The format does not exist, or has no ranged reader.
    """
    row = _row(format_name)
    if row.ranged is None:
        raise ConfigError(f"format {format_name!r} is not read by ranges", hint="parser_of() gives its parser")
    return row.ranged(shard, size_bytes=size_bytes, fields=fields, on_corrupt=on_corrupt, in_columns=in_columns)


def _row(format_name: str) -> Format:
    if format_name not in FORMATS:
        from difflib import get_close_matches

        near = get_close_matches(format_name, FORMATS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"supported: {_KNOWN}"
        raise ConfigError(f"format {format_name!r} does not exist", hint=hint)
    return FORMATS[format_name]


def has_checksums(format_name: str, head: Buffer) -> bool:
    """Whether every value of a shard is covered by a checksum that its parser verifies.

    Args:
        format_name: A key of ``FORMATS``.
        head: uint8[up to CHECKSUM_HEAD_BYTES], the shard's first bytes. Only the first zstd frame, or the first page of a
            Parquet file, is examined.
    """
    if format_name.endswith(".gz") or format_name.startswith(("tfrecord", "zip")):
        return True
    if format_name.endswith(".zst"):
        return len(head) > 4 and bool(head[4] & 0b100)  # the flags of a frame, and the one for a checksum
    if format_name.startswith("parquet"):
        from penstock.formats.parquet_headers import read_struct

        try:
            return 4 in read_struct(
                bytes(head[4:])
            )  # the field ``crc`` of the first page, which follows the magic string
        except ValueError:
            return False
    return False
