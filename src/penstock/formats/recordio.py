"""RecordIO shards as MXNet and SageMaker write them. The format has no checksum.

A record, in little endian, is ``uint32 0xced7230a, uint32 flag << 29 | length, uint8[length]``, padded with zeros to a
multiple of four bytes. A record that contains the magic number at a multiple of four bytes is split there into parts, whose
flags are 1 for the first, 2 for a middle and 3 for the last part (0 is a whole record). Those four bytes are not stored;
readers restore them. The magic number at a multiple of four bytes therefore always begins a record or a part, and
``skip_sample`` can continue at the next one.

A record is the field ``record``. If MXNet's ``IRHeader`` precedes the data, the fields are ``label`` (float32[count], one or
as many as the header's flag says), ``id`` (uint64[2]) and ``data``. The shard does not state which of the two it holds.
With ``auto``, the first record is taken to have a header if the data after it would begin like an image or an array;
reading can only begin inside a shard once that is known. SageMaker's protobuf records stay unparsed in ``record``. A
sample's key is the offset of its record in twelve digits.
"""

from __future__ import annotations

import re
import struct

from penstock.formats.parsing import RECORD_BYTES_MAX, RecordParser
from penstock.formats.sample import Sample, typed

MAGIC = b"\x0a\x23\xd7\xce"
HEAD_BYTES = 8
PART_BYTES_MAX = (1 << 29) - 1
WHOLE, FIRST, MIDDLE, LAST = range(4)

_UNPACK = struct.Struct("<4sI").unpack_from
_UNPACK_IR = struct.Struct("<I4sQQ").unpack_from  # flag, label, id, id2
_IR_BYTES = 24
_DATA = re.compile(rb"\xff\xd8\xff|\x89PNG|RIFF....WEBP|\x93NUMPY|BM|GIF8", re.DOTALL).match
_FIND = re.compile(re.escape(MAGIC)).finditer


def is_recordio(head: bytes) -> bool:
    """Whether `head` begins with a record or with the first part of one."""
    return len(head) >= HEAD_BYTES and head.startswith(MAGIC) and head[7] >> 5 in {WHOLE, FIRST}


class RecordIOParser(RecordParser):
    """Samples of one RecordIO shard. The contents are ``mxnet`` for records with an ``IRHeader``, and ``raw`` for all others.

    A damaged length can hide records, because the format has no checksum.

    Cost: holds one incomplete record. Slices of a chunk keep that chunk alive. Records in several parts are copied.
    """

    FORMATS = ("recordio-mxnet", "recordio-raw")

    _parts: bytearray | None = None  # parts of the incomplete record
    _record_offset_bytes = 0  # offset of its first part
    _lost_offset_bytes: int | None = None  # offset from which no record has been found yet

    @staticmethod
    def format_of(record: memoryview) -> str:
        """Return the format that `record`, the first of a shard, determines."""
        try:
            fields = read_ir(record)
        except ValueError:
            return "recordio-raw"
        return "recordio-mxnet" if _DATA(fields["data"]) else "recordio-raw"

    @property
    def held_bytes(self) -> int:
        """Bytes that are held because their sample is not complete yet."""
        return super().held_bytes + (0 if self._parts is None else len(self._parts))

    def _scan(self, view: memoryview, at: int, samples: list[Sample]) -> tuple[int, int]:
        base, length = self._view_offset_bytes, len(view)
        while at + HEAD_BYTES <= length:
            if self._lost_offset_bytes is not None:
                at = self._search(view, at)
                continue
            magic, word = _UNPACK(view, at)
            flag, size_bytes = word >> 29, word & PART_BYTES_MAX
            expected = flag in {WHOLE, FIRST} if self._parts is None else flag in {MIDDLE, LAST}
            if magic != MAGIC or not expected:
                self._lose(bytes(view[at : at + HEAD_BYTES]), base + at)
                continue
            end = at + HEAD_BYTES + size_bytes + -size_bytes % 4
            if end > length:
                return at, end - at
            part = view[at + HEAD_BYTES : at + HEAD_BYTES + size_bytes]
            if flag == WHOLE:
                self._give(part, base + at, end - at, samples)
            elif flag == FIRST:
                self._parts, self._record_offset_bytes = bytearray(part), base + at
            else:
                self._join(part, flag, base + end, samples)
            at = end
        return at, HEAD_BYTES

    def _join(self, part: memoryview, flag: int, end_bytes: int, samples: list[Sample]) -> None:
        assert self._parts is not None
        if len(self._parts) + len(part) > RECORD_BYTES_MAX:
            what = f"a record of several parts of more than {RECORD_BYTES_MAX} bytes"
            raise self._corrupt(what, self._record_offset_bytes)
        self._parts += MAGIC
        self._parts += part
        if flag == LAST:
            record, self._parts = memoryview(self._parts), None
            self._give(record, self._record_offset_bytes, end_bytes - self._record_offset_bytes, samples)

    def _give(self, record: memoryview, offset_bytes: int, size_bytes: int, samples: list[Sample]) -> None:
        if self._is_first:
            self._decide(record)
        if self._content == "raw":
            fields = {"record": record}
        else:
            try:
                fields = read_ir(record)
            except ValueError as error:
                hint = "format='recordio-raw' gives the bytes of each record"
                self._skip_sample(str(error), offset_bytes, size_bytes, hint=hint)
                return
        samples.append(Sample(f"{offset_bytes:012d}", fields, offset_bytes, size_bytes))

    def _lose(self, found: bytes, offset_bytes: int) -> None:
        """Return the error for a missing record, or a missing further part of one."""
        if self._parts is not None:
            self._parts = None
            size_bytes = offset_bytes - self._record_offset_bytes
            self._skip_sample("a record of several parts lacks its last", self._record_offset_bytes, size_bytes)
            return
        hint = self._start_hint(found, offset_bytes)
        self._skip_sample(f"not a RecordIO shard: {found!r} does not begin a record", offset_bytes, 0, hint=hint)
        self._lost_offset_bytes = offset_bytes

    def _search(self, view: memoryview, at: int) -> int:
        """Return the offset of the next record in view[at:], or, if there is none, from where to search further."""
        assert self._lost_offset_bytes is not None
        for match in _FIND(view, at):
            start = match.start()
            if start + HEAD_BYTES > len(view):
                break
            if (start - at) % 4 == 0 and view[start + 7] >> 5 in {WHOLE, FIRST}:
                self.skipped_bytes += self._view_offset_bytes + start - self._lost_offset_bytes
                self._lost_offset_bytes = None
                return start
        return at + (len(view) - at - HEAD_BYTES) // 4 * 4 + 4

    def _end(self, samples: list[Sample]) -> None:
        if self._lost_offset_bytes is not None:
            self.skipped_bytes += self._offset_bytes - self._lost_offset_bytes
            return
        super()._end(samples)
        if self._parts is not None:
            raise self._corrupt("the shard is cut off inside a record of several parts", self._record_offset_bytes)

    def _drop(self) -> int | None:
        begin_bytes = super()._drop()
        if self._parts is not None:
            self._parts, begin_bytes = None, self._record_offset_bytes
        return begin_bytes


def read_ir(record: memoryview) -> dict[str, memoryview]:
    """Return ``label`` (float32[count]), ``id`` (uint64[2]) and ``data`` of a record with MXNet's ``IRHeader``.

    Raises:
        ValueError: The record is too short for the header.
    """
    if len(record) < _IR_BYTES:
        raise ValueError(f"a record of {len(record)} bytes is too short for an IRHeader, {_IR_BYTES} bytes")
    count, label, _, _ = _UNPACK_IR(record)
    data = record[_IR_BYTES:]
    labels = memoryview(label)
    if count:
        labels, data = data[: 4 * count], data[4 * count :]
        if len(labels) < 4 * count:
            raise ValueError(f"an IRHeader claims {count} labels, more than the record holds")
    return {"label": typed(labels, "f"), "id": typed(record[8:_IR_BYTES], "Q"), "data": data}
