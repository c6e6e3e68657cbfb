"""Compressed shards: gzip and zstd around any streamed format, decompressed in bounded pieces.

One call to a parser of a compressed shard gives at most 16 times the chunk that it was fed, plus 1 MiB. The rest of the
chunk stays ``pending``, and ``feed(b"")`` continues with it. A decompression bomb, which grows a thousandfold or more, is
therefore never in memory as a whole, while ordinary data, which grows 2 to 10 times, is returned by one call. A caller
that ignores ``pending`` still gets every sample: chunks are queued, and ``finish`` returns the rest.

Reading can only start at the beginning. Offsets of samples count decompressed bytes and cannot be used to seek.

The zstd package for Python 3.11 cannot bound its output. But a zstd block is at most 128 KiB long and starts with its
length in three bytes, so `_ZstdCutter` splits frames at block boundaries. Decompressing one block at a time is no slower
than eight at a time, and it returns every block before a damaged one. For gzip, `_before_damage` achieves the same by
returning to a copy of the state and continuing in smaller steps. The samples recovered from a damaged shard thus depend
only on its bytes, not on how it was cut into chunks.

A single sample can be as long as the decompressed shard, so its size has a bound too: ``HELD_BYTES_MAX``.

Shards are compressed without timestamps or names, so the same samples give the same bytes. This holds for one version of
zlib or libzstd; another version may choose other bytes. Both formats end with a checksum of their content, which every
reader verifies.
"""

from __future__ import annotations

import zlib
from collections import deque
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import ConfigError, CorruptShardError, UnsupportedFormatError
from penstock.formats.parsing import OnCorrupt, Parser
from penstock.version import install_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.formats.sample import Sample
    from penstock.types import Buffer

PIECE_BYTES = 1 << 20
"""Approximate number of bytes decompressed at a time.

It is small enough to stay in the processor's cache, and large enough that few samples span two pieces.
"""

GROWTH_MAX = 16
INPUT_BYTES = 64 << 10  # compressed bytes given to zlib at a time, because it copies those that it did not use

GZIP_LEVEL = 6
ZSTD_LEVEL = 3
_GZIP = 31  # zlib's value for a gzip wrapper, whose header, when it is written, has no name and a time of 0

ZSTD_WINDOW_BYTES_MAX = 128 << 20
"""Largest window that a frame may require: what ``zstd --long`` uses, and what every reader must support by default."""

_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_BLOCKS = 8  # blocks of at most 128 KiB each that are returned as one piece

HELD_BYTES_MAX = 256 << 20
"""Decompressed bytes that an incomplete sample may take, unless they grew from at least a 64th as many stored bytes."""

HELD_GROWTH_MAX = 64


class Decompressor(Protocol):
    """Turns compressed bytes into decompressed pieces of bounded size.

    Raises ``ValueError`` if the data is corrupt and ``UnsupportedFormatError`` if it is not supported.
    """

    def pieces(self, data: memoryview) -> Iterator[bytes]:
        """Decompress `data`, the next bytes of the object."""

    def end(self) -> None:
        """Note the end of the object. Raises ``ValueError`` if it ended inside a stream."""


class Gunzip:
    """Decompresses gzip, including several members. As with ``gzip`` itself, zeros after the last member are padding."""

    def __init__(self) -> None:
        self._member: Any = None
        self._members_count = 0

    def pieces(self, data: memoryview) -> Iterator[bytes]:
        """Decompress the next bytes of the object."""
        for at in range(0, len(data), INPUT_BYTES):
            rest: bytes | memoryview = data[at : at + INPUT_BYTES]
            while True:
                if self._member is None:
                    if self._members_count:
                        rest = bytes(rest).lstrip(b"\0")
                    if not rest:
                        break
                    self._member = zlib.decompressobj(_GZIP)
                before = self._member.copy()
                try:
                    piece = self._member.decompress(rest, PIECE_BYTES)
                except zlib.error as error:
                    if good := _before_damage(before, rest):
                        yield good
                    raise ValueError(f"the gzip stream is corrupt: {error}") from None
                if piece:
                    yield piece
                if self._member.eof:
                    rest, self._member = self._member.unused_data, None
                    self._members_count += 1
                    continue
                rest = self._member.unconsumed_tail
                # Otherwise there may be more output although no input is left.
                if not rest and len(piece) < PIECE_BYTES:
                    break

    def end(self) -> None:
        """Check that the stream is complete."""
        if self._member is not None:
            raise ValueError("the gzip stream is cut off")


def _before_damage(member: Any, data: bytes | memoryview) -> bytes:
    """Decompress `data` up to an error, which lies within the next ``PIECE_BYTES`` of output."""
    pieces = []
    while len(data):
        half = data[: (len(data) + 1) // 2]
        trial = member.copy()
        try:
            pieces.append(trial.decompress(half))
        except zlib.error:
            if len(half) == 1:
                break
            data = half
        else:
            member, data = trial, data[len(half) :]
    return b"".join(pieces)


class _ZstdCutter:
    """Splits zstd frames at block boundaries. It holds at most the few bytes of an incomplete header."""

    def __init__(self) -> None:
        self._head = bytearray()  # incomplete header of a frame, block or skippable frame
        self._rest_bytes = 0  # remaining bytes of those that the last header announced
        self._state = "frame"
        self._checked = False  # whether the frame ends with a checksum
        self.content_bytes: int | None = None  # decompressed size that the last frame announces
        self._is_first_frame = True

    @property
    def inside(self) -> bool:
        """Whether the stream is incomplete so far."""
        return self._state != "frame" or bool(self._head) or self._rest_bytes > 0

    def cut(self, data: memoryview) -> Iterator[tuple[memoryview | bytes, str]]:
        """Yield (bytes, what they complete): ``""`` for nothing, ``block``, ``frame``, or ``skip`` inside a skippable frame."""
        at = 0
        while at < len(data):
            if self._rest_bytes:
                piece = data[at : at + self._rest_bytes]
                self._rest_bytes -= len(piece)
                at += len(piece)
                yield piece, self._completed() if not self._rest_bytes else self._inside()
                continue
            need_bytes = self._head_bytes()
            take = data[at : at + need_bytes - len(self._head)]
            self._head += take
            at += len(take)
            if len(self._head) < need_bytes or self._head_bytes() > len(self._head):
                continue
            head, self._head = bytes(self._head), bytearray()
            yield head, self._read_head(head)

    def _inside(self) -> str:
        return "skip" if self._state == "skippable" else ""

    def _completed(self) -> str:
        """Advance the state after the body that the last header announced."""
        if self._state == "skippable":
            self._state = "frame"
            return "skip"
        if self._state == "last":
            self._state = "checksum" if self._checked else "frame"
            self._rest_bytes = 4 if self._checked else 0
            return "block" if self._checked else "frame"
        if self._state == "checksum":
            self._state = "frame"
            return "frame"
        return "block"

    def _head_bytes(self) -> int:
        """Length of the header being read, as far as its first bytes tell."""
        head = self._head
        if self._state != "frame":
            return 3
        if len(head) < 5:
            return 5
        if head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50:
            return 8
        single = head[4] >> 5 & 1
        return 5 + (not single) + (0, 1, 2, 4)[head[4] & 3] + self._content_size_bytes(head)

    def _content_size_bytes(self, head: bytes | bytearray) -> int:
        """Length of the content-size field, the last field of a frame header."""
        return (head[4] >> 5 & 1, 2, 4, 8)[head[4] >> 6]

    def _read_head(self, head: bytes) -> str:
        if self._state == "frame":
            if head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50:
                self._rest_bytes = int.from_bytes(head[4:8], "little")
                self._state = "skippable" if self._rest_bytes else "frame"
                return "skip"
            if int.from_bytes(head[:4], "little") != _ZSTD_MAGIC:
                raise ValueError(f"the zstd stream is corrupt: no frame begins with {head[:4]!r}")
            if self._is_first_frame:  # in a later frame it is probably damage, because headers have no checksum
                _check_frame(head)
                self._is_first_frame = False
            self._checked = bool(head[4] & 4)
            size = self._content_size_bytes(head)
            self.content_bytes = int.from_bytes(head[-size:], "little") + 256 * (size == 2) if size else None
            self._state = "block"
            return ""
        word = int.from_bytes(head, "little")
        kind, size_bytes = word >> 1 & 3, word >> 3
        if kind == 3 or size_bytes > 128 << 10:
            raise ValueError(f"the zstd stream is corrupt: a block of kind {kind} and {size_bytes} bytes")
        self._state = "last" if word & 1 else "block"
        self._rest_bytes = 1 if kind == 1 else size_bytes
        return "" if self._rest_bytes else self._completed()


def _check_frame(head: bytes) -> None:
    """Check from its header that a frame needs neither too much memory nor a dictionary.

    Raises:
        UnsupportedFormatError: The frame needs too much memory, or a dictionary.
    """
    is_single = head[4] >> 5 & 1
    if not is_single:
        base_bytes = 1 << 10 + (head[5] >> 3)
        window_bytes = base_bytes + base_bytes // 8 * (head[5] & 7)
        if window_bytes > ZSTD_WINDOW_BYTES_MAX:
            raise UnsupportedFormatError(
                f"a zstd frame asks for a window of {window_bytes} bytes, more than {ZSTD_WINDOW_BYTES_MAX}"
            )
    at = 5 + (not is_single)
    if any(head[at : at + (0, 1, 2, 4)[head[4] & 3]]):
        raise UnsupportedFormatError("a zstd frame needs a dictionary")


class Unzstd:
    """Decompresses zstd, including several frames. It ignores skippable frames and verifies content checksums.

    Raises:
        ConfigError: The package ``zstandard`` is not installed.
    """

    def __init__(self) -> None:
        zstandard = _zstandard("reading zstd needs the package zstandard")
        self._error: type[Exception] = zstandard.ZstdError
        self._context = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES_MAX)
        self._frame: Any = None
        self._frame_bytes = 0  # decompressed bytes of the frame so far
        self._cutter = _ZstdCutter()

    def pieces(self, data: memoryview) -> Iterator[bytes]:
        """Decompress the next bytes of the object."""
        blocks: list[bytes] = []
        try:
            for block in self._blocks(data):
                blocks.append(block)
                if len(blocks) == _ZSTD_BLOCKS:
                    yield b"".join(blocks)
                    blocks = []
        except ValueError:
            if blocks:
                yield b"".join(blocks)
            raise
        if blocks:
            yield b"".join(blocks)

    def _blocks(self, data: memoryview) -> Iterator[bytes]:
        waiting: list[memoryview | bytes] = []
        for piece, completes in self._cutter.cut(data):
            if completes == "skip":
                continue
            waiting.append(piece)
            if completes:
                yield self._decompress(waiting)
                waiting = []
            if completes == "frame":
                self._end_frame()
        if waiting:
            yield self._decompress(waiting)

    def _decompress(self, waiting: list[memoryview | bytes]) -> bytes:
        if self._frame is None:
            self._frame = self._context.decompressobj()
        try:
            block: bytes = self._frame.decompress(b"".join(waiting))
        except self._error as error:
            raise ValueError(f"the zstd stream is corrupt: {error}") from None
        self._frame_bytes += len(block)
        return block

    def _end_frame(self) -> None:
        promised_bytes = self._cutter.content_bytes  # libzstd does not always check it when it is fed in pieces
        if promised_bytes not in {None, self._frame_bytes}:
            raise ValueError(f"the zstd stream is corrupt: {self._frame_bytes} bytes, not {promised_bytes}, in a frame")
        self._frame, self._frame_bytes = None, 0

    def end(self) -> None:
        """Check that the stream is complete."""
        if self._cutter.inside:
            raise ValueError("the zstd stream is cut off")


DECOMPRESSORS: dict[str, type[Gunzip | Unzstd]] = {"gz": Gunzip, "zst": Unzstd}
"""The decompressor for each suffix of compressed objects."""


class CompressedParser(Parser):
    """Samples of a compressed shard.

    Args:
        shard: URL or key, for error messages.
        inner: Creates the parser of the decompressed bytes, as ``Format.parser`` does.
        compression: A key of ``DECOMPRESSORS``.
        start_offset_bytes: Must be 0, because a compressed shard can only be read from its start.
        on_corrupt: Policy for corrupt bytes, as ``parsing.py`` describes. A corrupt stream ends the shard under every
            policy that does not raise.

    Raises:
        UnsupportedFormatError: Under every policy, if a zstd frame needs a dictionary or too large a window, or if a sample
            exceeds both ``HELD_BYTES_MAX`` and ``HELD_GROWTH_MAX`` times its compressed size.

    Cost: holds a piece of 1 MiB, whatever ``inner`` holds, and the pending chunk.
    """

    def __init__(
        self,
        shard: str,
        *,
        inner: Callable[..., Parser],
        compression: str,
        start_offset_bytes: int = 0,
        on_corrupt: OnCorrupt = "raise",
    ) -> None:
        if start_offset_bytes:
            raise ConfigError(
                f"{shard} is compressed: reading cannot start at byte {start_offset_bytes}, only at 0",
                hint="repack it uncompressed, with the values compressed, to start anywhere",
            )
        super().__init__(shard, on_corrupt=on_corrupt)
        self.inner = inner(shard, on_corrupt=on_corrupt)
        self._decompressor = DECOMPRESSORS[compression]()
        self._waiting: deque[memoryview] = deque()
        self._pieces: Iterator[bytes] | None = None
        self._chunk_bytes = 0  # size of the last chunk
        self._taken_bytes = 0  # size of the chunks since the one in which the last sample was completed

    @property
    def pending(self) -> bool:
        """Whether bytes of the last chunks are waiting for ``feed(b"")``."""
        return self._pieces is not None or bool(self._waiting)

    def _parse(self, view: memoryview, samples: list[Sample]) -> None:
        if len(view):
            self._waiting.append(view)
            self._chunk_bytes = len(view)
            self._taken_bytes += len(view)
        left_bytes = GROWTH_MAX * len(view) + PIECE_BYTES
        while self.pending and left_bytes > 0:
            left_bytes -= self._step(samples)

    def _step(self, samples: list[Sample]) -> int:
        """Decompress and parse one piece. Returns its length in bytes."""
        if self._pieces is None:
            self._pieces = self._decompressor.pieces(self._waiting.popleft())
        try:
            piece = next(self._pieces, None)
        except UnsupportedFormatError as error:
            raise self._unsupported(error.what, self._offset_bytes, hint="decompress the shard") from None
        except ValueError as error:
            raise self._corrupt(f"{error}, after {self.inner.offset_bytes} decompressed bytes", None) from None
        if piece is None:
            self._pieces = None
            return 0
        count = len(samples)
        self._hand_on(self.inner.feed, piece, samples)
        if len(samples) > count:
            self._taken_bytes = self._chunk_bytes
        held_bytes = self.inner.held_bytes
        if held_bytes > max(HELD_BYTES_MAX, HELD_GROWTH_MAX * self._taken_bytes):
            raise self._unsupported(
                f"a sample takes more than {held_bytes} bytes decompressed, from {self._taken_bytes} bytes of the shard: the "
                f"most is {HELD_BYTES_MAX} bytes, or {HELD_GROWTH_MAX} times the compressed ones",
                self._offset_bytes,
                hint="decompress the shard: plain ones have no such bound",
            )
        return len(piece)

    def _end(self, samples: list[Sample]) -> None:
        while self.pending:
            self._step(samples)
        try:
            self._decompressor.end()
        except ValueError as error:
            raise self._corrupt(f"{error}, after {self.inner.offset_bytes} decompressed bytes", None) from None
        self._hand_on(lambda _: self.inner.finish(), b"", samples)

    def _hand_on(self, call: Callable[[bytes], list[Sample]], piece: bytes, samples: list[Sample]) -> None:
        try:
            samples += call(piece)
        except (CorruptShardError, UnsupportedFormatError) as error:
            error.what += " (offset in the decompressed bytes)"
            raise
        finally:
            inner = self.inner
            self.skipped_samples, self.skipped_bytes = inner.skipped_samples, inner.skipped_bytes
            self.skipped_error = inner.skipped_error

    def _drop(self) -> None:
        self._waiting.clear()
        self._pieces = None

    def _corrupt(self, what: str, offset_bytes: int | None, *, hint: str | None = None) -> CorruptShardError:
        return super()._corrupt(what, self._offset_bytes if offset_bytes is None else offset_bytes, hint=hint)


def _zstandard(refusal: str) -> Any:
    try:
        return import_module("zstandard")
    except ImportError:
        raise ConfigError(refusal, hint=install_hint("zstd")) from None


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Compressor(Protocol):
    """Compresses a stream of bytes."""

    def compress(self, data: Buffer, /) -> bytes:
        """Add the next bytes. Returns the compressed bytes that are ready."""

    def flush(self) -> bytes:
        """End the stream. Returns the rest of its bytes."""


def gzip_compressor(level: int = GZIP_LEVEL) -> Compressor:
    """Return a compressor that writes one gzip member; `level` is from 0 (none) to 9."""
    return zlib.compressobj(level, zlib.DEFLATED, _GZIP)


def zstd_compressor(level: int = ZSTD_LEVEL) -> Compressor:
    """Return a compressor that writes one zstd frame with a checksum; `level` is from 1 to 22.

    Raises:
        ConfigError: zstandard is not installed.
    """
    zstandard = _zstandard("zstd needs zstandard")
    compressor: Compressor = zstandard.ZstdCompressor(level=level, write_checksum=True).compressobj()
    return compressor


COMPRESSORS: dict[str, Callable[..., Compressor]] = {"gz": gzip_compressor, "zst": zstd_compressor}
"""The compressor for each suffix of compressed objects."""
