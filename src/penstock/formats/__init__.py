"""Formats of shards: bytes in, samples out, and back. Pure: no I/O, no threads, no clock.

A format is a row of ``FORMATS``: a name, the suffixes and first bytes it goes by, its *unit* (where one may start
reading: at a sample, at a block, or at the shard's head only), and its parser. A new format is a module with a
``Parser`` (see ``parsing.py``) and a row in ``registry.py``; nothing else in the package names it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.formats.columnar import Samples, as_columns, interleaved, joined, reordered
from penstock.formats.parsing import OnCorrupt, Parser, feed_in_columns, feed_in_pieces
from penstock.formats.registry import (
    FORMATS,
    HEAD_BYTES,
    Format,
    conversion_hint,
    decided_format,
    detect,
    format_of_name,
    narrowed,
    parser_of,
    ranged_of,
    undecoded,
    with_fields,
    without_content,
)
from penstock.formats.sample import LOST, RESERVED_FIELDS, ObjectGroup, Sample, group_objects
from penstock.formats.tar import TarParser
from penstock.system.lazy import lazy_getattr

if TYPE_CHECKING:
    from penstock.formats.ranged import RangedReader, Unit, look_into, samples_of
    from penstock.formats.writers import JsonLinesWriter, RecordIOWriter, TarWriter, TFRecordWriter

__all__ = [
    "FORMATS", "HEAD_BYTES", "LOST", "RESERVED_FIELDS", "Format", "JsonLinesWriter", "ObjectGroup", "OnCorrupt", "Parser",
    "RangedReader", "RecordIOWriter", "Sample", "Samples", "TFRecordWriter", "TarParser", "TarWriter", "Unit",
    "as_columns", "conversion_hint", "decided_format", "detect", "feed_in_columns", "feed_in_pieces", "format_of_name",
    "group_objects", "interleaved", "joined", "look_into", "narrowed", "parser_of", "ranged_of", "reordered", "samples_of",
    "undecoded", "with_fields", "without_content",
]  # fmt: skip

if not TYPE_CHECKING:  # a type checker that saw it would accept every name
    __getattr__ = lazy_getattr(
        __name__,
        {
            **dict.fromkeys(("RangedReader", "Unit", "look_into", "samples_of"), "ranged"),
            **dict.fromkeys(("JsonLinesWriter", "RecordIOWriter", "TarWriter", "TFRecordWriter"), "writers"),
        },
    )
