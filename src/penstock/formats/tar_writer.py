"""Writes tar shards. The same samples always give the same bytes.

Owners and times are zero, modes are 0644, and fields are sorted. Two runs of one packer therefore give equal shards, whose
checksums and ETags can be compared, and a repeated upload is recognised. Headers are ustar. A name that is long or not
ASCII, or a size beyond 8 GiB, goes into a PAX header, which every tar since 2001 reads. ustar could also split a long name
into a prefix and a name, but that is limited to 255 bytes and needs a slash in the right place, so it is not used.

A sample that would not read back equal is refused before any of its bytes are written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.formats.sample import RESERVED_FIELDS, check_field, check_key
from penstock.formats.tar_header import BLOCK_BYTES
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.types import Buffer

_NAME_BYTES_MAX = 100
_SIZE_BYTES_MAX = 8**11 - 1  # 11 octal digits

_HEAD = b"%-100b0000644\0" + b"0000000\0" * 2 + b"%011o\0" + b"%011o\0" % 0
_TAIL = b"%b" + bytes(100) + b"ustar\x0000" + bytes(64) + b"0000000\0" * 2 + bytes(167)
_TAILS = {kind: (_TAIL % kind, sum(_TAIL % kind) + 8 * 0x20) for kind in (b"0", b"x")}
"""For each kind of member: the bytes after the checksum, and their contribution to it."""


class TarWriter:
    """Writes samples as a tar shard.

    Args:
        write: Function that takes the next bytes of the shard, such as ``store.writer(key).write`` or ``file.write``. The
            bytes are valid only during the call. If the function raises, the shard is broken.

    Cost: holds nothing. Each field takes one call for the header, one for the value, and one for its padding.
    """

    def __init__(self, write: Callable[[Buffer], object]) -> None:
        self._write = write
        self._offset_bytes = 0
        self._key_last: str | None = None
        self._finished = False

    @property
    def offset_bytes(self) -> int:
        """Number of bytes written so far, at which the next sample will begin."""
        return self._offset_bytes

    def add(self, sample: Mapping[str, Buffer | str]) -> ByteRange:
        """Append one sample: ``{"__key__": "train/000007", "png": <bytes>, "cls": "3"}``.

        Strings are stored as UTF-8. ``__shard__``, ``__position__`` and ``__valid__`` are ignored, so that samples from a
        loader can be written again.

        Returns:
            The sample's span in the shard, including headers and padding; a parser can start at its first byte.

        Raises:
            ConfigError: The sample would not read back equal, or the shard is finished. Nothing was written.
        """
        if self._finished:
            raise ConfigError("the shard is finished", hint="one TarWriter writes one shard")
        key = check_key(sample.get("__key__"))
        if key == self._key_last:
            raise ConfigError(f"__key__ {key!r} twice in a row: the two would be read as one sample")
        values = [
            (f"{key}.{check_field(field)}", bytes_of(field, value))
            for field, value in sorted(sample.items())
            if field not in RESERVED_FIELDS
        ]
        if not values:
            raise ConfigError(f"sample {key!r} has no field")
        start = self._offset_bytes
        for name, data in values:
            self._put(headers(name, len(data)))
            if len(data):
                self._put(data)
                self._put(bytes(-len(data) % BLOCK_BYTES))
        self._key_last = key
        return ByteRange(start, self._offset_bytes)

    def finish(self) -> int:
        """Write the end-of-archive mark, once. Returns the shard's length in bytes."""
        if not self._finished:
            self._put(bytes(2 * BLOCK_BYTES))
            self._finished = True
        return self._offset_bytes

    def _put(self, data: Buffer) -> None:
        if len(data):
            self._write(data)
            self._offset_bytes += len(data)


def headers(name: str, size_bytes: int) -> bytes:
    """Return the header of a member, preceded by a PAX header if ustar cannot represent it; a multiple of 512 bytes."""
    raw = name.encode("utf-8")
    records = b""
    if len(raw) > _NAME_BYTES_MAX or not raw.isascii():
        records += _record(b"path", raw)
        raw = name.encode("ascii", "replace")[:_NAME_BYTES_MAX]
    if size_bytes > _SIZE_BYTES_MAX:
        records += _record(b"size", b"%d" % size_bytes)
        size_bytes = 0
    header = _header(raw, b"0", size_bytes)
    if not records:
        return header
    padding = bytes(-len(records) % BLOCK_BYTES)
    return _header(b"././@PaxHeader", b"x", len(records)) + records + padding + header


def _header(name: bytes, kind: bytes, size_bytes: int) -> bytes:
    head = _HEAD % (name.ljust(_NAME_BYTES_MAX, b"\0"), size_bytes)
    tail, tail_sum = _TAILS[kind]
    return head + b"%06o\0 " % (sum(head) + tail_sum) + tail


def _record(keyword: bytes, value: bytes) -> bytes:
    r"""Return the PAX record ``b"<length> <keyword>=<value>\n"``, whose length includes its own digits."""
    body = b" %b=%b\n" % (keyword, value)
    length = len(body)
    while len(b"%d" % length) + len(body) != length:
        length = len(b"%d" % length) + len(body)
    return b"%d" % length + body


def bytes_of(field: str, value: object) -> Buffer:
    """Return `value` as bytes, with strings encoded as UTF-8.

    Raises:
        ConfigError: The value is neither bytes nor a string.
    """
    if isinstance(value, str):
        return value.encode("utf-8")
    if isinstance(value, bytes | bytearray):
        return value
    if isinstance(value, memoryview) and value.c_contiguous:
        return value.cast("B")
    raise ConfigError(f"field {field!r} must be bytes, a contiguous memoryview or str, not {type(value).__name__}")
