"""Parses TFRecord shards and verifies both checksums of each record.

A record, in little endian, is ``uint64 length, uint32 masked CRC32C of the length, uint8[length], uint32 masked CRC32C of the
bytes``. It holds a ``tf.train.Example``, whose features become fields, or anything else, and then the sample has one field,
``record``. The shard does not state which. With ``auto`` the first valid record decides, so reading can only begin inside
a shard once that is known. A sample's key is its feature ``__key__``. Without one it is the offset of the record in twelve
digits, which does not depend on where reading began.

A wrong CRC of the bytes loses that record. A wrong CRC of the length loses the rest of the shard, because the position of
the next record is unknown.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from penstock.checksums.crc32c import crc32c
from penstock.formats.example import key_of, parse_example
from penstock.formats.parsing import RECORD_BYTES_MAX, OnCorrupt, RecordParser
from penstock.formats.sample import Sample

if TYPE_CHECKING:
    from penstock.types import Buffer

HEAD_BYTES = 12
FOOT_BYTES = 4
_UNPACK = struct.Struct("<QI").unpack_from
_UNPACK_CRC = struct.Struct("<I").unpack_from

HEADS_KNOWN_MAX = 16384
"""Number of verified record headers to remember. The records of a shard have a few thousand distinct lengths."""


def masked_crc(data: Buffer) -> int:
    """Compute a CRC32C as TFRecord stores it: rotated and offset, so that a CRC of data that contains CRCs stays effective."""
    return masked(crc32c(data))


def masked(crc: int) -> int:
    """Convert a CRC32C to the form in which TFRecord stores it."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def is_tfrecord(head: bytes) -> bool:
    """Whether `head` begins with a length and its CRC, which other data does once in four billion times."""
    return len(head) >= HEAD_BYTES and _UNPACK(head)[1] == masked_crc(head[:8])


class TFRecordParser(RecordParser):
    """Samples of one TFRecord shard.

    The contents are ``example`` for features as fields, and ``raw`` for one field, ``record``.

    Cost: holds one incomplete record. Slices of a chunk keep that chunk alive.
    """

    FORMATS = ("tfrecord-example", "tfrecord-raw")

    def __init__(
        self, shard: str, *, start_offset_bytes: int = 0, on_corrupt: OnCorrupt = "raise", content: str = "auto"
    ) -> None:
        super().__init__(shard, start_offset_bytes=start_offset_bytes, on_corrupt=on_corrupt, content=content)
        self._heads_known: dict[bytes, int] = {}  # stored header -> size of the whole record

    @staticmethod
    def format_of(record: memoryview) -> str:
        """Return the format that `record`, the first of a shard, determines.

        An Example must have at least one feature, and its ``__key__``, if it has one, must be a valid key.
        """
        try:
            fields = parse_example(record)
            if "__key__" in fields:
                key_of(fields["__key__"])
        except ValueError:
            return "tfrecord-raw"
        return "tfrecord-example" if fields else "tfrecord-raw"

    def _scan(self, view: memoryview, at: int, samples: list[Sample]) -> tuple[int, int]:
        if self._groups is not None and self._content != "raw":
            at = self._scan_columns(view, at, samples)
        base, length = self._view_offset_bytes, len(view)
        known, content = self._heads_known, "first" if self._is_first else self._content
        while at + HEAD_BYTES + FOOT_BYTES <= length:
            head = bytes(view[at : at + HEAD_BYTES])
            size_bytes = known.get(head) or self._read_head(head, base + at)
            end = at + size_bytes
            if end > length:
                return at, size_bytes
            offset_bytes = base + at
            record = view[at + HEAD_BYTES : end - FOOT_BYTES]
            crc = crc32c(record)
            if ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF != _UNPACK_CRC(view, end - FOOT_BYTES)[0]:
                what = f"a record of {len(record)} bytes does not have its CRC32C"
                self._skip_sample(what, offset_bytes, size_bytes)
            elif content == "raw":
                samples.append(Sample(f"{offset_bytes:012d}", {"record": record}, offset_bytes, size_bytes))
            elif content == "first":
                content = self._decide(record)
                continue
            else:
                try:
                    fields = parse_example(record)
                    stored = fields.pop("__key__", None)
                    key = f"{offset_bytes:012d}" if stored is None else key_of(stored)
                    samples.append(Sample(key, fields, offset_bytes, size_bytes))
                except ValueError as error:
                    hint = "format='tfrecord-raw' gives the bytes of each record"
                    self._skip_sample(str(error), offset_bytes, size_bytes, hint=hint)
            at = end
        return at, HEAD_BYTES + FOOT_BYTES

    def _scan_columns(self, view: memoryview, at: int, samples: list[Sample]) -> int:
        """Parse the records from view[at:] on at once if they are valid and alike. Returns where the rest begins."""
        from penstock.formats.tfrecord_columns import read_examples, read_frames

        frames = read_frames(view, at)
        if frames is not None and self._is_first:
            self._decide(view[int(frames.starts[0]) : int(frames.ends[0])])
            if self._content == "raw":
                return at
        found = frames and read_examples(view, frames, self._view_offset_bytes)
        if frames is None or found is None:
            return at
        self._add_columns(found, samples)
        return int(frames.ends[-1]) + FOOT_BYTES

    def _read_head(self, head: bytes, offset_bytes: int) -> int:
        size_bytes, crc = _UNPACK(head)
        if masked_crc(head[:8]) != crc:
            raise self._corrupt(
                f"not a TFRecord shard: the length of a record ({size_bytes}) does not have its CRC32C",
                offset_bytes,
                hint=self._start_hint(head, offset_bytes),
            )
        if size_bytes > RECORD_BYTES_MAX:
            raise self._corrupt(f"a record claims {size_bytes} bytes, more than {RECORD_BYTES_MAX}", offset_bytes)
        whole_bytes: int = size_bytes + HEAD_BYTES + FOOT_BYTES
        if len(self._heads_known) < HEADS_KNOWN_MAX:
            self._heads_known[head] = whole_bytes
        return whole_bytes
