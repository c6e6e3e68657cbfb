"""Parses tar shards into samples without copying their values.

``tarfile`` reads 19 000 two-member samples a second, and this parser over 200 000. One ``struct`` call reads a header, the
parts that are the same for all members of a shard are compared instead of parsed, and checksums are verified with the help
of Adler-32, whose low half is a sum of bytes. The hot loop, `_scan`, handles only what nearly every member needs, which
includes PAX headers, since WebDataset's writer puts one before every member. `_unusual` handles everything else and is
written for clarity. If columns are wanted, `tar_columns.py` handles the regular parts.

Three things can span two chunks: a header, of which less than 512 bytes are kept; a value, whose pieces are copied as they
arrive, because pinning the chunks would deadlock a reader whose budget is smaller than the value; and bytes to skip, which
are counted.

The parser raises errors rather than lose data silently. A nonzero byte after the end-of-archive mark is an error, because
otherwise ``cat a.tar b.tar`` would lose b, as it does with ``tarfile``. Sparse members, members that continue in another
volume, and global PAX headers that name or size all later members are valid but not supported, and raise an error under
every policy. An archive may end without the mark at the boundary of a member, as all tar readers accept; 0 bytes are thus
an archive without members.

With ``skip_sample``, parsing continues at the next valid header. A header only contains the length of its member, so after a
corrupt one the parser searches for the next: a block at a multiple of 512 bytes that contains ``ustar`` and a correct
checksum. It skips both the sample before the corrupt bytes and the first sample after them, because each may lack a member,
and half a sample is worse than none. Old archives (v7) do not contain ``ustar``, so the rest of such an archive is skipped. A
tar stored inside a tar looks like a part of it; such a shard is better read with ``skip_shard``.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from penstock.errors import CorruptShardError
from penstock.formats.parsing import OnCorrupt, Parser
from penstock.formats.sample import RESERVED_FIELDS, Sample, decode_name, is_metadata
from penstock.formats.tar_header import (
    BLOCK_BYTES,
    KINDS_META,
    KINDS_REGULAR,
    KINDS_WITHOUT_DATA,
    UNPACK,
    ZERO_BLOCK,
    Header,
    byte_sum,
    is_harmless,
    is_header,
    pax_records,
    read_header,
    read_sum,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.errors import UnsupportedFormatError

META_BYTES_MAX = 1 << 20
"""Largest long-name or PAX header. Paths have at most 4 KiB, so this is generous, yet it bounds what garbage can claim."""

SIZE_DIGITS_MAX = 19
"""Most digits of a size in a PAX header, enough for every 63-bit number."""

SPARSE = "a sparse member, whose bytes are stored without their zeros, is not supported"
KINDS_UNSUPPORTED = {b"S": SPARSE, b"M": "a member that another volume of the archive begins is not supported"}
HINT_UNSUPPORTED = "unpack the archive, and pack it again with plain members"

FIELDS_KNOWN_MAX = (
    4096  # remembered field names; a shard has a handful, but one with numbered fields must not grow the table
)
SUMS_KNOWN_MAX = 16384  # remembered checksums; a shard has a few hundred distinct ones


class TarParser(Parser):
    """Samples of one tar shard.

    Args:
        shard: URL or key, for error messages.
        start_offset_bytes: Offset in the shard at which the first chunk begins: 0, or a ``Sample.offset_bytes``.
        on_corrupt: Policy for corrupt bytes, as ``parsing.py`` describes.

    Cost: holds one incomplete sample. Slices of a chunk keep that chunk alive.
    """

    def __init__(self, shard: str, *, start_offset_bytes: int = 0, on_corrupt: OnCorrupt = "raise") -> None:
        super().__init__(shard, start_offset_bytes=start_offset_bytes, on_corrupt=on_corrupt)
        self._ended = False  # the end-of-archive mark was seen
        # the sample being collected
        self._sample: Sample | None = None
        self._fields: dict[str, memoryview] = {}
        self._key = b""
        self._prefix = b"\0"  # that sample's key and a dot; initially NUL, which no name contains
        # values that the hot loop has checked before
        self._rest_plain, self._rest_plain_sum = b"", 0
        self._rest_pax, self._rest_pax_sum = b"", 0
        self._sums_known: dict[bytes, int] = {}  # stored checksum field -> number
        self._fields_known: dict[bytes, str] = {}  # stored field name without a slash -> field name
        # what spans chunks
        self._tail = b""
        self._skip_bytes = 0
        self._joined: bytearray | None = None
        self._missing_bytes = 0
        self._field = (
            ""  # field whose value is being joined; "" if it is a long-name or PAX header, whose kind is _meta_kind
        )
        self._meta_kind = b""
        # what long-name and PAX headers state about the next member
        self._long_name: bytes | None = None
        self._pax: dict[bytes, bytes] | None = None
        self._member_offset_bytes: int | None = None  # offset of the first of them
        # the search for a header after corrupt bytes
        self._lost_offset_bytes: int | None = None  # offset from which no header has been found yet
        self._partial = False  # whether the next sample may lack a member
        self._after_bytes = 0  # offset in the shard at which the headers that caused the last error end

    @property
    def held_bytes(self) -> int:
        """Bytes held of the incomplete sample: its members and the bytes between them."""
        if self._sample is not None:
            return self._offset_bytes - self._sample.offset_bytes
        return 0 if self._joined is None else len(self._joined)

    def _parse(self, view: memoryview, samples: list[Sample]) -> None:
        at = 0
        while True:
            if self._lost_offset_bytes is not None:
                at = self._seek(view, at)
                if self._lost_offset_bytes is not None:
                    return
            count = len(samples)
            try:
                self._parse_rest(view, at, samples)
            except CorruptShardError as error:
                self._drop_partial(samples, count)
                if self._on_corrupt != "skip_sample" or error.offset_bytes is None:
                    raise
                at = self._lose(error, error.offset_bytes)
            else:
                self._drop_partial(samples, count)
                return

    def _drop_partial(self, samples: list[Sample], count: int) -> None:
        """Remove the first sample after corrupt bytes; `count` is the number of samples before this round."""
        if self._partial and len(samples) > count:
            self._partial = False
            sample = samples.pop(count)
            self.skipped_samples += 1
            self.skipped_bytes += sample.size_bytes or 0

    def _lose(self, error: CorruptShardError, offset_bytes: int) -> int:
        """Note the error. Returns where in the chunk to search for a header: at the first block after the corrupt ones.

        It is not the first block after the offset of the error. That may lie in an earlier chunk, and then the result would
        depend on how the shard is cut into chunks.
        """
        begin_bytes = self._drop()
        self._note(error, 0)
        self._lost_offset_bytes = offset_bytes if begin_bytes is None else min(begin_bytes, offset_bytes)
        self._partial = True
        return self._after_bytes - self._offset_bytes

    def _seek(self, view: memoryview, at: int) -> int:
        """Find the next header in view[at:]; if there is none, skip all of it."""
        tail, self._tail = self._tail, b""
        if tail:
            at = BLOCK_BYTES - len(tail)
            block = tail + view[:at]
            if len(block) < BLOCK_BYTES:
                self._tail = block
                return at
            if block[257:262] == b"ustar" and is_header(block):
                self._tail = tail  # treat it like an ordinary tail
                return self._found(0, len(tail))
        else:
            at += -(self._offset_bytes + at - self._start_offset_bytes) % BLOCK_BYTES
        while at + BLOCK_BYTES <= len(view):
            if bytes(view[at + 257 : at + 262]) == b"ustar" and is_header(bytes(view[at : at + BLOCK_BYTES])):
                return self._found(at, 0)
            at += BLOCK_BYTES
        self._tail = bytes(view[at:])
        return at

    def _found(self, at: int, tail_bytes: int) -> int:
        assert self._lost_offset_bytes is not None
        self.skipped_bytes += self._offset_bytes + at - tail_bytes - self._lost_offset_bytes
        self._lost_offset_bytes = None
        return at

    def _parse_rest(self, view: memoryview, at: int, samples: list[Sample]) -> None:
        """Parse view[at:]. If `at` is 0, first finish the incomplete part of the last chunk."""
        if not at:
            at = self._resume(view, samples)
        if not self._ended and self._groups is not None and not self._partial:
            at = self._scan_columns(view, at, samples)
        if not self._ended:
            at = self._scan(view, at, samples)
        if self._ended:
            self._check_zeros(view, at)
        elif at < len(view):
            self._tail = bytes(view[at:])
        else:
            self._skip_bytes = at - len(view)

    def _end(self, samples: list[Sample]) -> None:
        if self._lost_offset_bytes is not None:
            self.skipped_bytes += self._offset_bytes - self._lost_offset_bytes
            return
        cut_bytes = self._missing_bytes or self._skip_bytes or (BLOCK_BYTES - len(self._tail) if self._tail else 0)
        if cut_bytes or self._member_offset_bytes is not None:
            missing = f"{cut_bytes} bytes" if cut_bytes else "the member that a long-name or PAX header describes"
            raise self._corrupt(f"the shard is cut off: {missing} missing", self._offset_bytes)
        self._close_sample(samples, self._offset_bytes)
        self._drop_partial(samples, 0)

    def _drop(self) -> int | None:
        begin_bytes = self._sample.offset_bytes if self._sample is not None else None
        self._sample, self._fields, self._key, self._prefix = None, {}, b"", b"\0"
        self._tail, self._skip_bytes, self._joined, self._missing_bytes = b"", 0, None, 0
        self._field, self._meta_kind, self._long_name, self._pax = "", b"", None, None
        self._member_offset_bytes, self._ended = None, False
        return begin_bytes

    def _scan_columns(self, view: memoryview, at: int, samples: list[Sample]) -> int:
        """Parse a long run of regular samples at once if view[at:] begins with one. Returns where the rest begins."""
        if self._member_offset_bytes is not None:
            at = self._scan_slowly(view, at, samples)
        if self._ended or (self._sample is not None and self._key.startswith(b"__")):
            return at
        from penstock.formats.tar_columns import find_regular_samples

        found = find_regular_samples(view, at, self._prefix)
        if found is not None and found.begin > at:
            at = self._scan(view, at, samples, found.begin)  # the rest of the sample that began in the last chunk
        if found is None or at != found.begin or found.heads.names[found.first].startswith(self._prefix):
            return at
        self._close_sample(samples, self._offset_bytes + at)
        columns, at = found.cut(view, self._offset_bytes)
        self._add_columns(columns, samples)
        return at

    def _scan(self, view: memoryview, at: int, samples: list[Sample], until: int | None = None) -> int:  # noqa: C901
        """Parse from view[at] to `until` while headers are complete.

        Returns where it stopped, which lies past the end of `view` if bytes of the next chunk are to be skipped. The
        function is long because each call that it made would add a tenth to the cost of a member (1 µs).
        """
        if self._member_offset_bytes is not None:
            at = self._scan_slowly(view, at, samples)
        origin = at  # offset of the member, or of the PAX header before it
        length = len(view)
        last = length - BLOCK_BYTES if until is None else until - BLOCK_BYTES
        known, sums, adler = self._fields_known, self._sums_known, zlib.adler32
        plain, plain_sum = self._rest_plain, self._rest_plain_sum
        fields, prefix, prefix_length = self._fields, self._prefix, len(self._prefix)
        while at <= last:
            head, stored, rest = UNPACK(view, at)
            start = at + BLOCK_BYTES
            end = -1
            if rest == plain:
                rest_sum = plain_sum
            elif rest == self._rest_pax:
                rest_sum = self._rest_pax_sum
            else:
                rest_sum = self._learn(rest)
                plain, plain_sum = self._rest_plain, self._rest_plain_sum
            # the low half of Adler-32 is 1 + the sum of this many bytes; head[135] is the last byte of the size
            if (adler(head) & 0xFFFF) + rest_sum == (sums.get(stored) or self._learn_sum(stored)) and head[
                135
            ] in b"\0 ":
                try:
                    end = start + int(head[124:135], 8)
                except ValueError:
                    end = -1
            if not start <= end <= length:
                pass
            elif rest == plain:
                name = head[: head.find(0)] if not head[99] else head[:100].split(b"\0", 1)[0]
                if name.startswith(prefix) and (field := known.get(name[prefix_length:])) is not None:
                    if field in fields:
                        raise self._duplicate(field, self._offset_bytes + origin, self._offset_bytes + start)
                    fields[field] = view[start:end]
                elif (field := self._place(name, origin, start, samples)) is not None:
                    fields, prefix, prefix_length = self._fields, self._prefix, len(self._prefix)
                    fields[field] = view[start:end]
                at = origin = end + (start - end) % BLOCK_BYTES
                continue
            elif end - start <= META_BYTES_MAX and is_harmless(bytes(view[start:end])):
                at = end + (start - end) % BLOCK_BYTES
                continue
            if origin != at:
                self._member_offset_bytes = self._offset_bytes + origin
            at = origin = self._scan_slowly(view, at, samples)
            if self._ended:
                return at
            fields, prefix, prefix_length = self._fields, self._prefix, len(self._prefix)
        if origin != at:
            self._member_offset_bytes = self._offset_bytes + origin
        return at

    def _learn(self, rest: bytes) -> int:
        """Remember the last 356 bytes of a header, which are equal for nearly all members of a shard, and for all PAX headers.

        Returns:
            The part of the checksum that these bytes account for, or a number that matches no header unless this is the
            header of a regular file without a prefix, or a PAX header.
        """
        rest_sum = byte_sum(rest) + 8 * 0x20 - 1
        if rest[0] == 0x30 and not rest[189]:  # "0"; 189: the first byte of the prefix
            self._rest_plain, self._rest_plain_sum = rest, rest_sum
        elif rest[0] == 0x78:  # "x"
            self._rest_pax, self._rest_pax_sum = rest, rest_sum
        else:
            return -1 << 20
        return rest_sum

    def _learn_sum(self, stored: bytes) -> int:
        value = read_sum(stored)
        if len(self._sums_known) < SUMS_KNOWN_MAX:
            self._sums_known[stored] = value
        return value

    def _scan_slowly(self, view: memoryview, at: int, samples: list[Sample]) -> int:
        """Parse one member of any kind with all headers that describe it, as `_scan` does for regular ones."""
        while True:
            start = at + BLOCK_BYTES
            if start > len(view):
                return at
            at = self._unusual(bytes(view[at:start]), view, start, samples)
            if self._member_offset_bytes is None:
                return at

    def _place(self, name: bytes, origin: int, start: int, samples: list[Sample]) -> str | None:
        """Open or continue the sample of a member. Returns the member's field, or None if it belongs to no sample.

        Args:
            name: Name of the member, as stored.
            origin: Position in the chunk of the first of its headers; negative if that lay in an earlier chunk.
            start: Position in the chunk at which its last header ends.
            samples: List to which the previous sample is appended if the member begins another one.
        """
        slash = name.rfind(b"/") + 1
        dot = name.find(b".", slash)
        if dot <= slash or (name.startswith(b"__") and is_metadata(name)):
            return None
        key = name[:dot]
        suffix = name[dot + 1 :]
        field = self._fields_known.get(suffix)
        offset_bytes = self._offset_bytes + origin
        if field is None:
            field = self._read_field(suffix, offset_bytes, self._offset_bytes + start)
        if self._sample is None:
            pass
        elif key == self._key:
            if field in self._fields:
                raise self._duplicate(field, offset_bytes, self._offset_bytes + start)
            return field
        else:
            self._sample.size_bytes = offset_bytes - self._sample.offset_bytes
            samples.append(self._sample)
        self._fields = {}
        self._sample = Sample(decode_name(key), self._fields, offset_bytes)
        self._key = key
        # after "__" the whole name matters ("__a.b" is a sample, "__a.b__" metadata), so split_name decides
        self._prefix = b"\0" if key.startswith(b"__") else key + b"."
        return field

    def _read_field(self, suffix: bytes, offset_bytes: int, after_bytes: int) -> str:
        field = decode_name(suffix).lower()
        if field in RESERVED_FIELDS:
            what = f"a member's field is {field!r}, a name that penstock adds itself"
            raise self._corrupt_until(after_bytes, what, offset_bytes)
        if len(self._fields_known) < FIELDS_KNOWN_MAX:
            self._fields_known[suffix] = field
        return field

    def _close_sample(self, samples: list[Sample], end_bytes: int) -> None:
        if self._sample is not None:
            self._sample.size_bytes = end_bytes - self._sample.offset_bytes
            samples.append(self._sample)
            self._sample = None
            self._prefix = b"\0"

    def _unusual(self, block: bytes, view: memoryview, start: int, samples: list[Sample]) -> int:
        """Handle a header of any kind whose data begins at view[start].

        Returns where the next header begins, which may lie past the end of `view`.
        """
        after_bytes = self._offset_bytes + start
        offset_bytes = after_bytes - BLOCK_BYTES
        if block == ZERO_BLOCK:
            if self._member_offset_bytes is not None:
                what = "the archive ends where a described member should begin"
                raise self._corrupt_until(after_bytes, what, offset_bytes)
            self._ended = True
            self._close_sample(samples, offset_bytes)
            return start
        try:
            header = read_header(block)
        except ValueError as error:
            hint = self._start_hint(block, offset_bytes)
            raise self._corrupt_until(after_bytes, str(error), offset_bytes, hint=hint) from None
        if self._member_offset_bytes is None:
            self._member_offset_bytes = offset_bytes
        if header.kind in KINDS_META:
            if header.size_bytes > META_BYTES_MAX:
                what = f"a long-name or PAX header claims {header.size_bytes} bytes, more than {META_BYTES_MAX}"
                raise self._corrupt_until(after_bytes, what, offset_bytes)
            self._meta_kind = header.kind
            return self._value(view, start, header.size_bytes)
        header = self._described(header, offset_bytes)
        field = None
        if header.kind in KINDS_REGULAR:
            field = self._place(header.name, self._member_offset_bytes - self._offset_bytes, start, samples)
        self._member_offset_bytes = self._long_name = self._pax = None
        if field is None:
            return start + (header.size_bytes + 511 & -512)
        self._field = field
        return self._value(view, start, header.size_bytes)

    def _described(self, header: Header, offset_bytes: int) -> Header:
        """Return `header` with the name and size from the long-name and PAX headers before it; PAX takes precedence."""
        if header.kind in KINDS_UNSUPPORTED:
            raise self._unsupported_member(KINDS_UNSUPPORTED[header.kind])
        name = self._long_name if self._long_name is not None else header.name
        size_bytes = header.size_bytes
        if self._pax:
            name = self._pax.get(b"path") or name
            size = self._pax.get(b"size")
            if size is not None and header.kind not in KINDS_WITHOUT_DATA:
                if not size.isdigit() or len(size) > SIZE_DIGITS_MAX:
                    what = f"a PAX header gives a size of {size[:40]!r}, not a number of up to {SIZE_DIGITS_MAX} digits"
                    raise self._corrupt_until(offset_bytes + BLOCK_BYTES, what, offset_bytes)
                size_bytes = int(size)
        return Header(name, header.kind, size_bytes)

    def _value(self, view: memoryview, start: int, size_bytes: int) -> int:
        """Take the value at view[start:], or as much of it as is present. Returns where the next header begins."""
        end = start + size_bytes
        if end <= len(view):
            self._take(view[start:end], self._offset_bytes + end)
            return start + (size_bytes + 511 & -512)
        self._joined = bytearray(view[start:])
        self._missing_bytes = end - len(view)
        return len(view)

    def _take(self, value: memoryview, after_bytes: int) -> None:
        """Use a value that spanned chunks: that of a field, or of a header that describes the next member."""
        kind, self._meta_kind = self._meta_kind, b""
        if not kind:
            self._fields[self._field] = value
        elif kind == b"L":
            self._long_name = bytes(value).split(b"\0", 1)[0]
        elif kind != b"K" and not (kind == b"x" and is_harmless(bytes(value))):
            try:
                records = pax_records(bytes(value))
            except ValueError as error:
                raise self._corrupt_until(after_bytes, str(error), self._member_offset_bytes) from None
            self._apply_pax(kind, records)

    def _apply_pax(self, kind: bytes, records: dict[bytes, bytes]) -> None:
        if any(keyword.startswith(b"GNU.sparse.") for keyword in records):
            raise self._unsupported_member(SPARSE)
        if kind != b"g":
            self._pax = records
        elif b"path" in records or b"size" in records:
            raise self._unsupported_member("a global PAX header sets path or size for every later member")
        elif self._pax is None and self._long_name is None:
            self._member_offset_bytes = None  # a global header describes no member in particular

    def _resume(self, view: memoryview, samples: list[Sample]) -> int:
        """Finish the incomplete part of the last chunk.

        Returns where in `view` to continue, which lies past its end if nothing of it is left.
        """
        if self._joined is not None:
            piece = view[: self._missing_bytes]
            self._joined += piece
            self._missing_bytes -= len(piece)
            if self._missing_bytes:
                return len(view)
            value, self._joined = self._joined, None
            self._take(memoryview(value), self._offset_bytes + len(piece))
            return len(piece) + -len(value) % BLOCK_BYTES
        if self._tail:
            start = BLOCK_BYTES - len(self._tail)
            block = self._tail + view[:start]
            if len(block) < BLOCK_BYTES:
                self._tail = block
                return len(view)
            self._tail = b""
            return self._unusual(block, view, start, samples)
        at, self._skip_bytes = self._skip_bytes, 0
        return at

    def _check_zeros(self, view: memoryview, at: int) -> None:
        rest = bytes(view[at:])
        zeros_bytes = len(rest) - len(rest.lstrip(b"\0"))
        if zeros_bytes < len(rest):
            found_bytes = self._offset_bytes + at + zeros_bytes
            raise self._corrupt_until(
                found_bytes + 1,
                "data after the end-of-archive mark",
                found_bytes,
                hint="tar archives cannot be joined by cat; repack them, or join them with tar --concatenate",
            )

    def _duplicate(self, field: str, offset_bytes: int, after_bytes: int) -> CorruptShardError:
        what = f"a second field {field!r} in one sample (names in lower case)"
        return self._corrupt_until(after_bytes, what, offset_bytes)

    def _unsupported_member(self, what: str) -> UnsupportedFormatError:
        key = self._sample.key if self._sample is not None else None
        return self._unsupported(what, self._member_offset_bytes, hint=HINT_UNSUPPORTED, sample_key=key)

    def _corrupt(self, what: str, offset_bytes: int | None, *, hint: str | None = None) -> CorruptShardError:
        error = super()._corrupt(what, offset_bytes, hint=hint)
        error.sample_key = self._sample.key if self._sample is not None else None
        return error

    def _corrupt_until(
        self, after_bytes: int, what: str, offset_bytes: int | None, *, hint: str | None = None
    ) -> CorruptShardError:
        """Return the error of ``_corrupt`` where parsing may continue at the first block from `after_bytes` on."""
        self._after_bytes = after_bytes
        return self._corrupt(what, offset_bytes, hint=hint)


class ArchiveSplitter:
    """Cuts a stream of archives, one behind the other as a pipe carries them, into the archives.

    The parser takes data after an end-of-archive mark for damage, and in an object it is. The splitter walks from header to
    header and cuts the stream where an archive begins behind the mark of another one, so that each gets its own parser.
    Members of more than 8 GiB must state their size in the header itself.

    Cost: holds less than a header.
    """

    def __init__(self) -> None:
        self._held = b""  # the first bytes of a header
        self._skip_bytes = 0  # to the next header
        self._has_ended = False
        self._is_passing = False  # after a block that is no header, which the parser reports

    def feed(self, data: bytes) -> Iterator[tuple[memoryview, bool]]:
        """Yield the next pieces of the stream, and for each whether another archive begins behind it."""
        view = memoryview(self._held + data if self._held else data)
        start = at = 0
        while not self._is_passing:
            step = min(self._skip_bytes, len(view) - at)
            at, self._skip_bytes = at + step, self._skip_bytes - step
            if self._skip_bytes or len(view) - at < BLOCK_BYTES:
                break
            block = bytes(view[at : at + BLOCK_BYTES])
            if block == ZERO_BLOCK:
                self._has_ended = True
            else:
                if self._has_ended:
                    yield view[start:at], True
                    start, self._has_ended = at, False
                self._read(block)
            at += BLOCK_BYTES
        at = len(view) if self._is_passing else at
        self._held = bytes(view[at:])
        if at > start:
            yield view[start:at], False

    def finish(self) -> bytes:
        """Return the held bytes: an incomplete header, if the stream was cut off."""
        held, self._held = self._held, b""
        return held

    def _read(self, block: bytes) -> None:
        try:
            size_bytes = read_header(block).size_bytes
        except ValueError:
            self._is_passing = True
        else:
            self._skip_bytes = size_bytes + -size_bytes % BLOCK_BYTES
