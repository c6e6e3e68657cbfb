"""zip shards: the central directory first, then members by range.

Members are grouped to samples by WebDataset's rules (see ``sample.py``), over the whole archive: the directory names
them all, so ``images/7.jpg`` and, a gigabyte later, ``images/7.txt`` are one sample, of two spans. Samples come in the
order of their first members' bytes. Stored members are slices; deflated and zstd ones are decompressed to the length that
the directory says, not further. The CRC-32 of every member is verified.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import ConfigError
from penstock.formats.compression import Unzstd
from penstock.formats.parsing import RECORD_BYTES_MAX, OnCorrupt
from penstock.formats.ranged import TAIL_BYTES, Piece, ShardReader, Unit, merged
from penstock.formats.sample import RESERVED_FIELDS, Sample, split_name
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator, Sequence

    from penstock.types import Buffer

DIRECTORY_BYTES_MAX = 1 << 30
"""Of a central directory: ten million members, and what garbage can make us ask for."""

_END = struct.Struct("<4s4H2IH")  # signature, disks, counts, size, offset, length of the comment
_END_SIGNATURE = b"PK\x05\x06"
_LOCATOR = struct.Struct("<4sIQI")
_LOCATOR_SIGNATURE = b"PK\x06\x07"
_END64 = struct.Struct("<4sQ2H2I4Q")
_END64_SIGNATURE = b"PK\x06\x06"
_ENTRY = struct.Struct("<4s6H3I5H2I")
_ENTRY_SIGNATURE = b"PK\x01\x02"
_LOCAL = struct.Struct("<4s5H3I2H")
_LOCAL_SIGNATURE = b"PK\x03\x04"
_STORED, _DEFLATED, _ZSTD = 0, 8, 93
_NAMES_SHOWN = 20
_GROWTH_MAX = 1032
"""Of deflate; a directory that promises more is not believed."""


class Member(NamedTuple):
    """One file in the archive, as its directory says; ``end_bytes``: where the next one, or the directory, begins."""

    name: str
    method: int
    flags: int
    crc: int
    stored_bytes: int
    size_bytes: int
    offset_bytes: int
    end_bytes: int = 0


def is_zip(head: bytes) -> bool:
    """Whether `head` begins with a member, or is an empty archive."""
    return head.startswith((_LOCAL_SIGNATURE, _END_SIGNATURE))


class ZipReader(ShardReader):
    """Samples of one zip shard, each a unit; see ``ranged.py``.

    Cost: two or three reads for the directory; about 550 bytes of memory per member.
    """

    def __init__(
        self,
        shard: str,
        *,
        size_bytes: int,
        fields: Collection[str] | None = None,
        on_corrupt: OnCorrupt = "raise",
    ) -> None:
        super().__init__(shard, size_bytes=size_bytes, fields=fields, on_corrupt=on_corrupt)
        self._samples: list[tuple[str, dict[str, Member], int]] = []  # key, wanted members, where the first of all lies

    def _pieces(self, unit_index: int, views: list[memoryview], first: int) -> Iterator[Piece]:
        if first:
            return
        key, members, offset_bytes = self._samples[unit_index]
        spans = self.units[unit_index].spans
        fields = {field: _value(member, spans, views) for field, member in members.items()}
        is_one = len(spans) == 1 and spans[0].length_bytes == self.units[unit_index].size_bytes
        size_bytes = sum(map(len, views))
        yield Piece([Sample(key, fields, offset_bytes, spans[0].length_bytes if is_one else None)], size_bytes)

    def _look(self) -> Generator[ByteRange, Buffer, None]:
        start = max(0, self._size_bytes - TAIL_BYTES - _END.size)
        tail = bytes((yield ByteRange(start, self._size_bytes)))
        at = tail.rfind(_END_SIGNATURE)
        if at < 0 or len(tail) - at < _END.size:
            raise self._corrupt("no zip: it has no end of a central directory", start)
        _, _, _, _, _, directory_bytes, offset_bytes, _ = _END.unpack_from(tail, at)
        end_bytes = start + at
        if at >= _LOCATOR.size and tail.startswith(_LOCATOR_SIGNATURE, at - _LOCATOR.size):
            _, _, end64_bytes, _ = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
            if not end64_bytes <= self._size_bytes - _END64.size:
                raise self._corrupt("no zip: its zip64 record lies after its end", end_bytes)
            record = bytes((yield ByteRange(end64_bytes, end64_bytes + _END64.size)))
            if not record.startswith(_END64_SIGNATURE) or len(record) < _END64.size:
                raise self._corrupt("no zip: it has no zip64 record where it says", end64_bytes)
            *_, directory_bytes, offset_bytes = _END64.unpack(record)
            end_bytes = end64_bytes
        shift_bytes = end_bytes - directory_bytes - offset_bytes  # of an archive behind something else, a program
        if shift_bytes < 0 or directory_bytes > DIRECTORY_BYTES_MAX:
            what = f"no zip: a central directory of {directory_bytes} bytes at byte {offset_bytes}"
            raise self._corrupt(what, end_bytes)
        begin_bytes = offset_bytes + shift_bytes
        if begin_bytes >= start:
            directory = tail[begin_bytes - start : end_bytes - start]
        else:
            directory = bytes((yield ByteRange(begin_bytes, end_bytes)))
        self._group(self._members(directory, begin_bytes, shift_bytes))

    def _members(self, directory: bytes, begin_bytes: int, shift_bytes: int) -> list[Member]:
        """In the order of their bytes."""
        members, at = [], 0
        while at < len(directory):
            if not directory.startswith(_ENTRY_SIGNATURE, at) or len(directory) - at < _ENTRY.size:
                raise self._corrupt("the central directory is corrupt", begin_bytes + at)
            member, at = _read_entry(directory, at)
            if at > len(directory):
                raise self._corrupt("the central directory is cut off", begin_bytes + len(directory))
            member = member._replace(offset_bytes=member.offset_bytes + shift_bytes)
            if member.offset_bytes + _LOCAL.size + member.stored_bytes > begin_bytes:
                what = f"{member.name!r} lies outside of the archive, or is larger"
                raise self._corrupt(what, member.offset_bytes)
            members.append(member)
        members.sort(key=lambda member: member.offset_bytes)
        ends = [*(member.offset_bytes for member in members), begin_bytes][1:]
        return [member._replace(end_bytes=end) for member, end in zip(members, ends, strict=True)]

    def _group(self, members: list[Member]) -> None:
        samples: dict[str, dict[str, Member]] = {}
        refused: set[str] = set()
        for member in members:
            split = split_name(member.name)
            if split is None:
                continue
            key, field = split
            fields = samples.setdefault(key, {})
            extent_bytes = member.end_bytes - member.offset_bytes
            if extent_bytes < _LOCAL.size + member.stored_bytes:
                what = f"{member.name!r} of {member.stored_bytes} bytes overlaps with the member after it"
            elif field in fields:
                what = f"{key!r} has a second field {field!r} (in lower case)"
            elif field in RESERVED_FIELDS:
                what = f"a member's field is {field!r}, a name that penstock adds itself"
            else:
                fields[field] = member
                continue
            self._skip_sample(what, member.offset_bytes, extent_bytes)
            refused.add(key)
        units = []
        for key, fields in samples.items():
            if key not in refused:
                extents = {name: ByteRange(m.offset_bytes, m.end_bytes) for name, m in fields.items()}
                wanted = [name for name in fields if self._fields is None or name in self._fields]
                self._samples.append((key, {name: fields[name] for name in wanted}, min(extents.values()).start))
                size_bytes = sum(extent.length_bytes for extent in extents.values())
                units.append(Unit(merged([extents[name] for name in wanted], 0), 1, size_bytes))
        if units and not any(unit.spans for unit in units):
            names = sorted({name for fields in samples.values() for name in fields})
            some = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
            raise ConfigError(
                f"{self._shard} has none of the fields {sorted(self._fields or ())}", hint=f"it has {some}"
            )
        self.units = tuple(units)


def _read_entry(directory: bytes, at: int) -> tuple[Member, int]:
    """The directory's entry at `at`, and where the next begins."""
    (_, _, _, flags, method, _, _, crc, stored, size, name_bytes, extra_bytes, comment_bytes, _, _, _, offset) = (
        _ENTRY.unpack_from(directory, at)
    )
    name_start = at + _ENTRY.size
    extra_start = name_start + name_bytes
    extra = directory[extra_start : extra_start + extra_bytes]
    name = directory[name_start:extra_start]
    sizes = [size, stored, offset]  # in the order in which zip64 has those that do not fit
    if 0xFFFFFFFF in sizes:
        wide = iter(_zip64(extra))
        sizes = [next(wide, value) if value == 0xFFFFFFFF else value for value in sizes]
    text = name.decode("utf-8", "surrogateescape") if flags & 0x800 else name.decode("cp437")
    member = Member(text, method, flags, crc, sizes[1], sizes[0], sizes[2])
    return member, extra_start + extra_bytes + comment_bytes


def _zip64(extra: bytes) -> tuple[int, ...]:
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            data = extra[at + 4 : at + 4 + length]
            return struct.unpack_from(f"<{len(data) // 8}Q", data)
        at += 4 + length
    return ()


def _value(member: Member, spans: Sequence[ByteRange], views: Sequence[memoryview]) -> memoryview:
    """The member's bytes, decompressed and verified.

    Raises:
        ValueError: They are not what the directory says.
    """
    span, view = next(pair for pair in zip(spans, views, strict=True) if pair[0].end > member.offset_bytes)
    local = view[member.offset_bytes - span.start : member.end_bytes - span.start]
    if len(local) < _LOCAL.size or bytes(local[:4]) != _LOCAL_SIGNATURE:
        raise ValueError(f"no member begins at byte {member.offset_bytes}, where {member.name!r} should")
    if member.flags & 1:
        raise ValueError(f"{member.name!r} is encrypted")
    name_bytes, extra_bytes = _LOCAL.unpack_from(local)[-2:]
    start = _LOCAL.size + name_bytes + extra_bytes
    data = local[start : start + member.stored_bytes]
    if len(data) != member.stored_bytes:
        raise ValueError(f"{member.name!r} of {member.stored_bytes} bytes does not fit into {len(local)}")
    value = _decompress(member, data)
    if len(value) != member.size_bytes or zlib.crc32(value) != member.crc:
        raise ValueError(f"{member.name!r} of {len(value)} bytes does not have its length or its CRC-32")
    return value


def _decompress(member: Member, data: memoryview) -> memoryview:
    if member.method == _STORED:
        return data
    if member.size_bytes > min(RECORD_BYTES_MAX, _GROWTH_MAX * member.stored_bytes + 64):
        raise ValueError(f"{member.name!r} claims to grow from {member.stored_bytes} to {member.size_bytes} bytes")
    if member.method == _DEFLATED:
        try:
            return memoryview(zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.size_bytes + 1))
        except zlib.error as error:
            raise ValueError(f"{member.name!r} does not decompress: {error}") from None
    if member.method != _ZSTD:
        raise ValueError(f"{member.name!r} is compressed by method {member.method}; stored, deflate and zstd are read")
    value = bytearray()
    for piece in Unzstd().pieces(data):
        value += piece
        if len(value) > member.size_bytes:
            break
    return memoryview(value)
