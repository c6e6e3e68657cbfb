"""TFRecord shards: length, CRC of the length, bytes, CRC of the bytes; both verified.

Little endian: ``uint64 length, uint32 masked CRC32C of it, uint8[length], uint32 masked CRC32C of those``. A record is a
``tf.train.Example``, whose features become fields, or anything, then the sample has one field, ``record``. Nothing in
the shard says which: ``auto`` goes by the shard's first sound record, so reading can only begin inside a shard once that
is known. A sample's key is the text of its feature ``__key__``; without one it is where the record begins, twelve digits,
so that it does not depend on where reading began.

A shard whose bytes do not have their CRC loses that record; one whose length does not have it, the rest: nobody knows
where the next begins.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal, TypeAlias

from penstock.crc import crc32c
from penstock.formats.example import key_of, parse_example
from penstock.formats.magic import look
from penstock.formats.parsing import RECORD_BYTES_MAX, FramedParser, OnCorrupt
from penstock.formats.sample import Sample

if TYPE_CHECKING:
    from penstock.types import Buffer

Content: TypeAlias = Literal["auto", "example", "record"]

DECIDED: dict[Content, str] = {"example": "tfrecord-example", "record": "tfrecord-raw"}
"""The format of a shard, by the content of its first record."""

HEAD_BYTES = 12
FOOT_BYTES = 4
_UNPACK = struct.Struct("<QI").unpack_from
_UNPACK_CRC = struct.Struct("<I").unpack_from

HEADS_KNOWN_MAX = 16384
"""Heads kept verified; the lengths of a shard's records lie in a few thousand numbers."""


def masked_crc(data: Buffer) -> int:
    """CRC32C as TFRecord stores it: rotated and offset, so that a CRC of data that holds CRCs stays a good one."""
    return masked(crc32c(data))


def masked(crc: int) -> int:
    """A CRC32C that is known already, as TFRecord stores it."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def is_tfrecord(head: bytes) -> bool:
    """Whether `head` begins with a length and its CRC: wrong once in four billion."""
    return len(head) >= HEAD_BYTES and _UNPACK(head)[1] == masked_crc(head[:8])


class TFRecordParser(FramedParser):
    """Samples of one TFRecord shard.

    Args:
        shard: URL or key, for errors.
        start_offset_bytes: Where in the shard the first chunk begins: 0, or a ``Sample.offset_bytes``.
        on_corrupt: See ``parsing.py``.
        content: ``example``: features as fields; ``record``: one field of that name; ``auto``: as the first record is.

    Raises:
        ConfigError: Reading begins inside the shard and `content` is ``auto``.

    Cost: holds one incomplete record; slices of a chunk keep that chunk alive.
    """

    MAY_BE_EMPTY = True

    def __init__(
        self,
        shard: str,
        *,
        start_offset_bytes: int = 0,
        on_corrupt: OnCorrupt = "raise",
        content: Content = "auto",
    ) -> None:
        super().__init__(shard, start_offset_bytes=start_offset_bytes, on_corrupt=on_corrupt)
        self._content = content
        self._check_entry(content, "tfrecord-example or tfrecord-raw")
        self._is_first = not start_offset_bytes  # whether the next sound record is the shard's first
        self._heads_known: dict[bytes, int] = {}  # as stored: the record's whole size

    def _scan(self, view: memoryview, at: int, samples: list[Sample]) -> tuple[int, int]:
        if self._groups is not None and self._content != "record":
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
            elif content == "record":
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
        """Take in the records from view[at:] on at once, where they are sound and alike; where the rest begins."""
        from penstock.formats.tfrecord_columns import read_examples, read_frames

        frames = read_frames(view, at)
        if frames is not None and self._is_first:
            self._decide(view[int(frames.starts[0]) : int(frames.ends[0])])
            if self._content == "record":
                return at
        found = frames and read_examples(view, frames, self._view_offset_bytes)
        if frames is None or found is None:
            return at
        self._add_columns(found, samples)
        return int(frames.ends[-1]) + FOOT_BYTES

    def _decide(self, record: memoryview) -> Content:
        """Note what the shard's first record says of all; as what they are to be read."""
        found = content_of(record)
        self.decided_format = DECIDED[found]
        self._is_first = False
        if self._content == "auto":
            self._content = found
        return self._content

    def _read_head(self, head: bytes, offset_bytes: int) -> int:
        size_bytes, crc = _UNPACK(head)
        if masked_crc(head[:8]) != crc:
            raise self._corrupt(
                f"no TFRecord: the length of a record ({size_bytes}) does not have its CRC32C",
                offset_bytes,
                hint=self._hint(head, offset_bytes),
            )
        if size_bytes > RECORD_BYTES_MAX:
            raise self._corrupt(f"a record claims {size_bytes} bytes, more than {RECORD_BYTES_MAX}", offset_bytes)
        whole_bytes: int = size_bytes + HEAD_BYTES + FOOT_BYTES
        if len(self._heads_known) < HEADS_KNOWN_MAX:
            self._heads_known[head] = whole_bytes
        return whole_bytes

    def _hint(self, head: bytes, offset_bytes: int) -> str | None:
        seems = None if offset_bytes else look(head)
        return f"the object seems to be {seems}" if seems else self._start_hint(offset_bytes)


def content_of(record: memoryview) -> Content:
    """What `record`, a shard's first, says of all of them: an Example has a feature, and ``__key__`` is a key if it is one."""
    try:
        fields = parse_example(record)
        if "__key__" in fields:
            key_of(fields["__key__"])
    except ValueError:
        return "record"
    return "example" if fields else "record"
