"""The table of formats, and how a shard's format is found: from its first bytes, else from its name."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from penstock.errors import ConfigError, CorruptShardError, UnsupportedFormatError
from penstock.formats.magic import CONTAINERS, look
from penstock.formats.tar import TarParser
from penstock.formats.tar_header import BLOCK_BYTES, ZERO_BLOCK, read_header
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator

    from penstock.formats.parsing import OnCorrupt
    from penstock.formats.ranged import RangedReader
    from penstock.formats.sample import Parser
    from penstock.types import Buffer

K = TypeVar("K", str, str | None)

HEAD_BYTES = BLOCK_BYTES
"""First bytes of an object that ``detect`` needs to be certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format of shards.

    Attributes:
        name: As in ``detect``'s answer.
        suffixes: Of object names, lower case; none where the format has to be said.
        unit: The smallest entry; starting inside it costs reading it from its start.
        recognise: Whether the first ``HEAD_BYTES`` (fewer, where the object is shorter) are of this format.
        parser: ``parser(shard, start_offset_bytes=, on_corrupt=)``; collects the shard whole where ``ranged`` is there.
        ranged: ``ranged(shard, size_bytes=, fields=, on_corrupt=)``, for formats that say at their end what they hold.
        head: Asks for what entering it inside takes as ``head=``: yields spans of the shard, is sent their bytes, returns
            it. None: nothing is needed.
        decide: For a format whose shards differ in what records hold, which the first record decides: asks for the
            beginning of a shard as ``head`` does, and returns the format that leaves nothing open. Entering such a
            shard inside takes that one. None: nothing is open.
        extra: The optional dependency of penstock that it needs, if any.
    """

    name: str
    suffixes: tuple[str, ...] = ()
    unit: Literal["sample", "block", "shard"]
    recognise: Callable[[bytes], bool] | None = None
    parser: Callable[..., Parser]
    ranged: Callable[..., RangedReader] | None = None
    head: Callable[[], Generator[ByteRange, Buffer, Buffer]] | None = None
    decide: Callable[[], Generator[ByteRange, Buffer, str]] | None = None
    extra: str | None = None


def _of(module: str, name: str) -> Callable[..., Any]:
    """The function or class `name` of a module of this package, which is imported when it is first called.

    So a run over tars imports no other format. Cost: 1 µs for each call; a shard makes a few.
    """

    def call(*args: Any, **options: Any) -> Any:
        return getattr(import_module(f"penstock.formats.{module}"), name)(*args, **options)

    return call


def _is_tar(head: bytes) -> bool:
    block = head[:BLOCK_BYTES]
    if block == ZERO_BLOCK:
        return True
    try:
        read_header(block)
    except ValueError:
        return False
    return len(block) == BLOCK_BYTES


_DECIDE_BYTES = 64 << 10
"""Of the first look for a shard's first record; the next looks are 16 times as long each."""


def _decide(format_name: str) -> Generator[ByteRange, Buffer, str]:
    size_bytes, found = _DECIDE_BYTES, None
    while found is None:
        head = yield ByteRange(0, size_bytes)
        found = decided_format(format_name, head, is_all=len(head) < size_bytes)
        size_bytes *= 16
    return found


def decided_format(format_name: str, head: Buffer, *, is_all: bool = False) -> str | None:
    """What a shard's first sound record decides about the others.

    Args:
        format_name: A key of ``FORMATS``.
        head: The first bytes of the shard.
        is_all: Whether more bytes would not help.

    Returns:
        The format that leaves nothing open, e.g. ``tfrecord-example`` for ``tfrecord``; the same format where nothing was
        open; None where `head` does not hold the first record whole.
    """
    if FORMATS[format_name].decide is None:
        return format_name
    parser = parser_of(format_name, shard="", on_corrupt="skip_sample")
    parser.feed(head)
    return parser.decided_format or (f"{format_name}-raw" if is_all else None)


_CONTENT = re.compile("-[a-z]+")  # of tfrecord-raw, tfrecord-example.gz, recordio-mxnet, ...


def without_content(format_name: str) -> str:
    """A format without what its name says about the content of records: ``tfrecord`` for ``tfrecord-raw``."""
    return _CONTENT.sub("", format_name)


def narrowed(said: str | None, known: K) -> str | K:
    """The format to read a shard as.

    Args:
        said: As the job says it; it counts, but may leave open what records hold.
        known: As an index, a state or the shard itself says it; may say what records hold.
    """
    return known if said is None or (known is not None and without_content(known) == said) else said


def _compressed(inner: Format) -> list[Format]:
    """`inner`, compressed whole."""
    gz, zst = [suffix + ".gz" for suffix in inner.suffixes], []
    for suffix in inner.suffixes:
        zst += [suffix + ".zst", suffix + ".zstd"]
    gz += {"tar": [".tgz"], "jsonl": [".json.gz"]}.get(inner.name, [])
    zst += {"tar": [".tzst"], "jsonl": [".json.zst"]}.get(inner.name, [])
    parser = partial(_of("compression", "CompressedParser"), inner=inner.parser)
    return [
        Format(
            name=f"{inner.name}.gz",
            suffixes=tuple(gz),
            unit="shard",
            parser=partial(parser, decompressor=_of("compression", "Gunzip")),
        ),
        Format(
            name=f"{inner.name}.zst",
            suffixes=tuple(zst),
            unit="shard",
            parser=partial(parser, decompressor=_of("compression", "Unzstd")),
            extra="zstd",
        ),
    ]  # fmt: skip


_STREAMED = (
    Format(name="tar", suffixes=(".tar",), unit="sample", recognise=_is_tar, parser=TarParser),
    Format(
        name="recordio",
        suffixes=(".rec", ".recordio"),
        unit="sample",
        recognise=_of("recordio", "is_recordio"),
        parser=_of("recordio", "RecordIOParser"),
        decide=partial(_decide, "recordio"),
    ),
    Format(
        name="tfrecord",
        suffixes=(".tfrecord", ".tfrecords", ".tfrec"),
        unit="sample",
        recognise=_of("tfrecord", "is_tfrecord"),
        parser=_of("tfrecord", "TFRecordParser"),
        decide=partial(_decide, "tfrecord"),
    ),
    Format(
        name="jsonl",
        suffixes=(".jsonl", ".ndjson", ".jsonlines"),
        unit="sample",
        recognise=_of("jsonl", "is_jsonl"),
        parser=_of("jsonl", "JsonLinesParser"),
    ),
    Format(
        name="mds",
        suffixes=(".mds",),
        unit="sample",
        recognise=_of("mds", "is_mds"),
        parser=_of("mds", "MdsParser"),
        head=_of("mds", "look_head"),
    ),
    Format(name="recordio-raw", unit="sample", parser=partial(_of("recordio", "RecordIOParser"), content="record")),
    Format(name="recordio-mxnet", unit="sample", parser=partial(_of("recordio", "RecordIOParser"), content="mxnet")),
    Format(name="tfrecord-raw", unit="sample", parser=partial(_of("tfrecord", "TFRecordParser"), content="record")),
    Format(name="jsonl-columns", unit="sample", parser=_of("jsonl_columns", "JsonColumnsParser")),
    Format(
        name="tfrecord-example", unit="sample", parser=partial(_of("tfrecord", "TFRecordParser"), content="example")
    ),
)

_RANGED = (
    Format(
        name="zip",
        suffixes=(".zip",),
        unit="sample",
        recognise=_of("zip", "is_zip"),
        parser=partial(_of("ranged", "WholeShardParser"), reader=_of("zip", "ZipReader")),
        ranged=_of("zip", "ZipReader"),
    ),
    Format(
        name="parquet",
        suffixes=(".parquet", ".pq"),
        unit="block",
        recognise=_of("parquet", "is_parquet"),
        parser=partial(_of("ranged", "WholeShardParser"), reader=_of("parquet", "ParquetReader")),
        ranged=_of("parquet", "ParquetReader"),
        extra="parquet",
    ),
)

_COMPRESSED = [row for inner in _STREAMED for row in _compressed(inner)]

FORMATS: dict[str, Format] = {row.name: row for row in (*_STREAMED[:4], *_RANGED, *_STREAMED[4:], *_COMPRESSED)}
"""Every format by name, in the order in which `detect` tries them."""

_KNOWN = f"{', '.join(name for name in FORMATS if not {'-', '.'} & set(name))}, some of them also as .gz and .zst"

_OF = re.compile(r"-\d+-of-\d+(?=\.[a-z0-9]+$|$)")
"""``data.tfrecord-00003-of-00100``: what TensorFlow's and Beam's writers put after or before the suffix."""


def format_of_name(name: str) -> str | None:
    """The format that an object of this `name` should have; None: no shard, by its name (``README.md``)."""
    lowered = _OF.sub("", name.lower())
    return next((row.name for row in FORMATS.values() if row.suffixes and lowered.endswith(row.suffixes)), None)


def detect(name: str, head: Buffer = b"") -> str:
    """The format of the shard called `name` that begins with `head`; the content decides where it is given.

    Args:
        name: URL or key.
        head: uint8[up to 512], the object's first bytes; empty: go by the name.

    Returns:
        A key of ``FORMATS``.

    Raises:
        CorruptShardError: It is called a shard of one, but does not begin as any.
        UnsupportedFormatError: It is of no supported format; says what it seems to be.
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
    if format_of_name(name) is not None and seems not in CONTAINERS:
        raise CorruptShardError(what, hint=f"{hint}; is its name right?", shard=name, offset_bytes=0)
    hint = f"{hint}; give it the suffix of one, or say shards(url, format='tar')"
    raise UnsupportedFormatError(what, hint=hint, shard=name)


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
        suffix = ".zst"  # the head of a block says nothing until all of it is there
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
    """A parser for one shard.

    Args:
        format_name: A key of ``FORMATS``.
        shard: URL or key, for errors.
        start_offset_bytes: Where in the shard the first chunk begins: 0, or a ``Sample.offset_bytes``.
        on_corrupt: ``raise``; ``skip_sample``: leave out the sample; ``skip_shard``: leave out the rest of the shard.
        head: The shard's first bytes, up to its first sample; for formats whose row says so, to start inside.

    Raises:
        ConfigError: There is no such format, or it cannot be read from there.
        CorruptShardError: `head` is none.
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
) -> RangedReader:
    """A ranged reader for one shard; see ``ranged.py``.

    Args:
        format_name: A key of ``FORMATS`` whose row has ``ranged``.
        shard: URL or key, for errors.
        size_bytes: Of the shard.
        fields: Only these are read; None: all.
        on_corrupt: As in ``parser_of``.

    Raises:
        ConfigError: There is no such format, or it is read from its head on.
    """
    row = _row(format_name)
    if row.ranged is None:
        raise ConfigError(f"format {format_name!r} is not read by ranges", hint="parser_of() gives its parser")
    return row.ranged(shard, size_bytes=size_bytes, fields=fields, on_corrupt=on_corrupt)


def _row(format_name: str) -> Format:
    if format_name not in FORMATS:
        from difflib import get_close_matches

        near = get_close_matches(format_name, FORMATS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"supported: {_KNOWN}"
        raise ConfigError(f"format {format_name!r} does not exist", hint=hint)
    return FORMATS[format_name]
