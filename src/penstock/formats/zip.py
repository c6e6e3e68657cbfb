"""Reads zip shards: first the central directory, then members by range.

Members form samples by the rules of WebDataset (see ``sample.py``) across the whole archive. The directory names all of
them, so ``images/7.jpg`` and, a gigabyte later, ``images/7.txt`` are one sample with two spans. Samples come in the order of
their first members. Stored members are slices. Members compressed by deflate, bzip2, LZMA or zstd are decompressed up to
the length in the directory and no further. The CRC-32 of every member is verified. Members that are encrypted or compressed
in another way, and archives of several files, raise an ``UnsupportedFormatError``.

An archive ends with a record that contains the offset of its directory. The signature of that record may also occur in
the comment after it. The right record is therefore the one whose comment extends to the end of the archive, and whose
directory exists and has the stated number of entries.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, NamedTuple

from penstock.checksums.crc32 import crc32
from penstock.errors import ConfigError, CorruptShardError, UnsupportedFormatError
from penstock.formats.compression import Unzstd
from penstock.formats.parsing import RECORD_BYTES_MAX
from penstock.formats.ranged import TAIL_BYTES, DecodedPiece, RangedReader, Unit
from penstock.formats.sample import RESERVED_FIELDS, Sample, split_name
from penstock.memory.ranges import merged_spans
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from penstock.types import Buffer

DIRECTORY_BYTES_MAX = 1 << 30
"""Largest central directory, enough for ten million members. It also bounds what garbage can make the reader request."""

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
_ENDS_MAX = 64  # signatures of the end record to examine, because a comment may contain thousands
_STORED, _DEFLATED, _BZIP2, _LZMA, _ZSTD = 0, 8, 12, 14, 93
_LZMA_HEAD_BYTES = 9  # version, length of the properties, properties
_LZMA_DICTIONARY_BYTES_MIN = 4096
_ENCRYPTED, _ENDS_BY_MARK = 1, 2  # flags
_NAMES_SHOWN = 20
_GROWTH_MAX = 1032
"""Most that deflate can expand data. A directory that announces more is treated as corrupt."""

_GROWTH_BYTES = 64 << 20
"""Bytes that other methods may expand beyond that, because they store constants in next to nothing."""


class Member(NamedTuple):
    """One file in the archive according to its directory; ``end_bytes`` is where the next file or the directory begins."""

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


class ZipReader(RangedReader):
    """Reads the samples of one zip shard with the interface of ``ranged.py``. Each sample is a unit.

    Cost: two or three reads for the directory, and about 550 bytes of memory per member.
    """

    _samples: list[tuple[str, dict[str, Member], int]]  # key, wanted members, offset of the first of all members

    def _pieces(self, unit_index: int, views: list[memoryview], first: int) -> Iterator[DecodedPiece]:
        if first:
            return
        key, members, offset_bytes = self._samples[unit_index]
        spans = self.units[unit_index].spans
        fields = {field: _value(member, spans, views) for field, member in members.items()}
        is_one = len(spans) == 1 and spans[0].length_bytes == self.units[unit_index].size_bytes
        size_bytes = sum(map(len, views))
        yield DecodedPiece([Sample(key, fields, offset_bytes, spans[0].length_bytes if is_one else None)], size_bytes)

    def _look(self) -> Generator[ByteRange, Buffer, None]:
        if not self._size_bytes:
            raise self._corrupt("not a zip archive: it has 0 bytes", 0)
        start = max(0, self._size_bytes - TAIL_BYTES - _END.size)
        tail = bytes((yield ByteRange(start, self._size_bytes)))
        refusal, ends = None, _ends(tail)
        for at in ends:
            try:
                members = yield from self._directory(tail, start, at)
            except CorruptShardError as error:
                refusal = refusal or error
            else:
                self._group(members)
                return
        if refusal is not None and any(_END.unpack_from(tail, ends[0])[1:3]):  # the disk numbers of the archive
            raise self._unsupported("the zip archive is spread over several files", self._size_bytes - _END.size)
        raise refusal or self._corrupt("not a zip archive: it has no end of a central directory", start)

    def _directory(self, tail: bytes, start: int, at: int) -> Generator[ByteRange, Buffer, list[Member]]:
        """Read the directory to which the end record at byte `at` of `tail` points; `tail` begins at byte `start`."""
        *_, count, directory_bytes, offset_bytes, _ = _END.unpack_from(tail, at)
        end_bytes, count_bits = start + at, 16
        if at >= _LOCATOR.size and tail.startswith(_LOCATOR_SIGNATURE, at - _LOCATOR.size):
            _, _, told_bytes, _ = _LOCATOR.unpack_from(tail, at - _LOCATOR.size)
            end_bytes, record = yield from self._zip64_record(told_bytes, end_bytes - _LOCATOR.size)
            *_, count, directory_bytes, offset_bytes = _END64.unpack(record)
            count_bits = 64
        shift_bytes = end_bytes - directory_bytes - offset_bytes  # the archive may follow other data, such as a program
        if shift_bytes < 0 or directory_bytes > DIRECTORY_BYTES_MAX:
            what = f"not a zip archive: a central directory of {directory_bytes} bytes at byte {offset_bytes}"
            raise self._corrupt(what, end_bytes)
        begin_bytes = offset_bytes + shift_bytes
        if begin_bytes >= start:
            directory = tail[begin_bytes - start : end_bytes - start]
        else:
            directory = bytes((yield ByteRange(begin_bytes, end_bytes)))
        members = self._members(directory, begin_bytes, shift_bytes)
        if len(members) % (1 << count_bits) != count:  # some writers drop the upper bits and write no zip64 record
            what = f"the central directory has {len(members)} entries, and its end says {count}"
            raise self._corrupt(what, begin_bytes)
        return members

    def _zip64_record(self, told_bytes: int, locator_bytes: int) -> Generator[ByteRange, Buffer, tuple[int, bytes]]:
        """Return the offset of the zip64 record and the record.

        It lies where the locator says or, if other data precedes the archive, directly before the locator.
        """
        for begin_bytes in (told_bytes, locator_bytes - _END64.size):
            if not 0 <= begin_bytes <= locator_bytes - _END64.size:
                continue
            record = bytes((yield ByteRange(begin_bytes, begin_bytes + _END64.size)))
            if record.startswith(_END64_SIGNATURE):
                return begin_bytes, record
        raise self._corrupt("not a zip archive: it has no zip64 record at the stated offset", locator_bytes)

    def _members(self, directory: bytes, begin_bytes: int, shift_bytes: int) -> list[Member]:
        """Parse the members, in the order of their offsets."""
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
        self._samples = []
        for key, fields in samples.items():
            if key not in refused:
                extents = {name: ByteRange(m.offset_bytes, m.end_bytes) for name, m in fields.items()}
                wanted = [name for name in fields if self._fields is None or name in self._fields]
                self._samples.append((key, {name: fields[name] for name in wanted}, min(extents.values()).start))
                size_bytes = sum(extent.length_bytes for extent in extents.values())
                units.append(Unit(merged_spans([extents[name] for name in wanted], gap_bytes=0), 1, size_bytes))
        if units and not any(unit.spans for unit in units):
            names = sorted({name for fields in samples.values() for name in fields})
            some = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
            raise ConfigError(
                f"{self._shard} has none of the fields {sorted(self._fields or ())}", hint=f"it has {some}"
            )
        self.units = tuple(units)


def _ends(tail: bytes) -> list[int]:
    """Return the offsets in `tail` at which the end record may begin, the most probable first."""
    found: list[int] = []
    at = tail.rfind(_END_SIGNATURE)
    while at >= 0 and len(found) < _ENDS_MAX:
        if len(tail) - at >= _END.size:
            found.append(at)
        at = tail.rfind(_END_SIGNATURE, 0, at)
    ends = {at: _END.unpack_from(tail, at) for at in found}
    exact = [at for at in found if at + _END.size + ends[at][-1] == len(tail)]
    if not exact:
        return found[:1]  # other data follows the archive, or the end of its comment is missing
    # The least probable is a record without entries, which may occur anywhere.
    return sorted(exact, key=lambda at: (ends[at][4] == 0, -at))


def _read_entry(directory: bytes, at: int) -> tuple[Member, int]:
    """Parse the entry of the directory at `at`. Returns it and where the next entry begins."""
    (_, _, _, flags, method, _, _, crc, stored, size, name_bytes, extra_bytes, comment_bytes, _, _, _, offset) = (
        _ENTRY.unpack_from(directory, at)
    )
    name_start = at + _ENTRY.size
    extra_start = name_start + name_bytes
    extra = directory[extra_start : extra_start + extra_bytes]
    name = directory[name_start:extra_start]
    sizes = [size, stored, offset]  # in the order in which zip64 stores those that do not fit
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
    """Decompress and verify the bytes of a member.

    Raises:
        UnsupportedFormatError: The member is encrypted or compressed by an unsupported method.
        ValueError: The bytes do not match the directory.
    """
    span, view = next(pair for pair in zip(spans, views, strict=True) if pair[0].end > member.offset_bytes)
    local = view[member.offset_bytes - span.start : member.end_bytes - span.start]
    if len(local) < _LOCAL.size or bytes(local[:4]) != _LOCAL_SIGNATURE:
        raise ValueError(f"no member begins at byte {member.offset_bytes}, where {member.name!r} should")
    _, _, flags, method, _, _, _, _, _, name_bytes, extra_bytes = _LOCAL.unpack_from(local)
    if method != member.method or (flags ^ member.flags) & _ENCRYPTED:
        raise ValueError(f"{member.name!r} is stored in another way than the directory says")
    if flags & _ENCRYPTED or method not in _METHODS:
        what = "encrypted" if flags & _ENCRYPTED else f"compressed by method {method}"
        raise UnsupportedFormatError(
            f"{member.name!r} is {what}",
            hint="stored, deflate, bzip2, LZMA and zstd are read, not encrypted",
            offset_bytes=member.offset_bytes,
        )
    start = _LOCAL.size + name_bytes + extra_bytes
    data = local[start : start + member.stored_bytes]
    if len(data) != member.stored_bytes:
        raise ValueError(f"{member.name!r} of {member.stored_bytes} bytes does not fit into {len(local)}")
    value = _decompress(member, data)
    if len(value) != member.size_bytes or crc32(value) != member.crc:
        raise ValueError(f"{member.name!r} of {len(value)} bytes does not have its length or its CRC-32")
    return value


def _decompress(member: Member, data: memoryview) -> memoryview:
    slack_bytes = _GROWTH_BYTES if member.method in {_BZIP2, _LZMA, _ZSTD} else 64
    if member.size_bytes > min(RECORD_BYTES_MAX, _GROWTH_MAX * member.stored_bytes + slack_bytes):
        raise ValueError(f"{member.name!r} claims to grow from {member.stored_bytes} to {member.size_bytes} bytes")
    try:
        return memoryview(_METHODS[member.method](member, data))
    except (zlib.error, OSError, EOFError, ValueError) as error:
        raise ValueError(f"{member.name!r} does not decompress: {error}") from None


def _bunzip2(member: Member, data: memoryview) -> bytes:
    import bz2

    return bz2.BZ2Decompressor().decompress(data, member.size_bytes + 1)


def _unlzma(member: Member, data: memoryview) -> bytes:
    """Decompress LZMA as stored in zip: liblzma needs its properties and the length before the stream."""
    import lzma

    if len(data) < _LZMA_HEAD_BYTES or data[2] != 5:
        raise ValueError("it has no properties of LZMA")
    dictionary_bytes = int.from_bytes(data[5:9], "little")
    # A larger dictionary is never used.
    dictionary_bytes = min(dictionary_bytes, max(_LZMA_DICTIONARY_BYTES_MIN, member.size_bytes))
    length = (1 << 64) - 1 if member.flags & _ENDS_BY_MARK else member.size_bytes
    head = bytes(data[4:5]) + dictionary_bytes.to_bytes(4, "little") + length.to_bytes(8, "little")
    try:
        decompressor = lzma.LZMADecompressor(lzma.FORMAT_ALONE)
        value = decompressor.decompress(head, 1)
        return value + decompressor.decompress(data[_LZMA_HEAD_BYTES:], member.size_bytes + 1)
    except lzma.LZMAError as error:
        raise ValueError(str(error)) from None


def _unzstd(member: Member, data: memoryview) -> bytearray:
    value = bytearray()
    for piece in Unzstd().pieces(data):
        value += piece
        if len(value) > member.size_bytes:
            break
    return value


_METHODS: dict[int, Callable[[Member, memoryview], bytes | bytearray | memoryview]] = {
    _STORED: lambda _, data: data,
    _DEFLATED: lambda member, data: zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.size_bytes + 1),
    _BZIP2: _bunzip2, _LZMA: _unlzma, _ZSTD: _unzstd,
}  # fmt: skip
