"""Formats of shards: bytes in, samples out, and back. Pure: no I/O, no threads, no clock.

A format is a row of ``FORMATS``: a name, the suffixes and first bytes it goes by, its *unit* (where one may start
reading: at a sample, at a block, or at the shard's head only), and its parser. A new format is a module with a
``Parser`` (see ``sample.py``) and a row here; nothing else in the package names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from penstock.errors import ConfigError, DataError
from penstock.formats.magic import look
from penstock.formats.sample import RESERVED_FIELDS, Parser, Sample
from penstock.formats.tar import TarParser
from penstock.formats.tar_header import BLOCK_BYTES, ZERO_BLOCK, read_header
from penstock.formats.tar_writer import TarWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.types import Buffer

__all__ = [
    "FORMATS", "HEAD_BYTES", "RESERVED_FIELDS", "Format", "Parser", "Sample", "TarParser", "TarWriter", "detect",
    "format_of_name", "parser_of",
]  # fmt: skip

HEAD_BYTES = BLOCK_BYTES
"""First bytes of an object that ``detect`` needs to be certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format of shards.

    Attributes:
        name: As in ``detect``'s answer.
        suffixes: Of object names, lower case.
        unit: The smallest entry; starting inside it costs reading it from its start.
        recognise: Whether the first ``HEAD_BYTES`` (fewer, where the object is shorter) are of this format.
        parser: ``parser(shard, start_offset_bytes=)``.
    """

    name: str
    suffixes: tuple[str, ...]
    unit: Literal["sample", "block", "shard"]
    recognise: Callable[[bytes], bool]
    parser: Callable[..., Parser]


def _is_tar(head: bytes) -> bool:
    block = head[:BLOCK_BYTES]
    if block == ZERO_BLOCK:
        return True
    try:
        read_header(block)
    except ValueError:
        return False
    return len(block) == BLOCK_BYTES


FORMATS = {"tar": Format(name="tar", suffixes=(".tar",), unit="sample", recognise=_is_tar, parser=TarParser)}


def format_of_name(name: str) -> str | None:
    """The format that an object of this `name` should have; None: no shard, by its name (``README.md``)."""
    lowered = name.lower()
    return next((row.name for row in FORMATS.values() if lowered.endswith(row.suffixes)), None)


def detect(name: str, head: Buffer = b"") -> str:
    """The format of the shard called `name` that begins with `head`; the content decides where it is given.

    Args:
        name: URL or key.
        head: uint8[up to 512], the object's first bytes; empty: go by the name.

    Returns:
        A key of ``FORMATS``.

    Raises:
        DataError: It is of no supported format; says what it seems to be.
    """
    start = bytes(head[:HEAD_BYTES])
    found = (
        next((row.name for row in FORMATS.values() if row.recognise(start)), None) if start else format_of_name(name)
    )
    if found is not None:
        return found
    supported = ", ".join(f"{row.name} ({', '.join(row.suffixes)})" for row in FORMATS.values())
    seems = look(start) if start else None
    what = f"it seems to be {seems}, which is not supported" if seems else "its format is not known"
    raise DataError(what, hint=f"supported: {supported}", shard=name)


def parser_of(format_name: str, *, shard: str, start_offset_bytes: int = 0) -> Parser:
    """A parser for one shard.

    Raises:
        ConfigError: There is no such format.
    """
    if format_name not in FORMATS:
        raise ConfigError(f"format {format_name!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[format_name].parser(shard, start_offset_bytes=start_offset_bytes)
