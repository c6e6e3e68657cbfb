"""Compressed shards: gzip and zstd around any streamed format, decompressed in bounded pieces.

A parser of a compressed shard hands out at most 16 times the chunk that it was fed (and 1 MiB) per call; what is left
of the chunk is ``pending``, and ``feed(b"")`` goes on with it. So a bomb, which grows a thousand times and more, never
lies in memory whole, while what people store, which grows 2 to 10 times, comes out in one call. Whoever ignores
``pending`` still gets every sample: the chunks wait their turn, and ``finish`` gives the rest.

There is no entry but the head: offsets of samples are those of the decompressed bytes, and say nothing of the object's.

zstd decompresses without a bound on what comes out, in the package that Python 3.11 has to use, but its blocks are at
most 128 KiB each, and say in three bytes how long they are; so frames are cut at blocks (`_ZstdCutter`). One block at a
time is no slower than eight at a time, and gives all blocks before a damaged one; of gzip the same is had by going back
to a copy of the state and on in smaller steps (`_before_damage`). So what comes out of a damaged shard depends on its
bytes and not on where chunks are cut.

A sample can be as long as its shard decompressed, so there is a bound on that too, ``HELD_BYTES_MAX``.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from penstock.errors import ConfigError, CorruptShardError, UnsupportedFormatError
from penstock.formats.parsing import OnCorrupt, ShardParser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.formats.sample import Parser, Sample

PIECE_BYTES = 1 << 20
"""Decompressed at a time, about: small enough to stay in the cache, large enough that few samples span two."""

GROWTH_MAX = 16
INPUT_BYTES = 64 << 10  # of compressed bytes that zlib is given at a time: it copies what it did not use

_GZIP = 31  # zlib's word for a gzip wrapper

ZSTD_WINDOW_BYTES_MAX = 128 << 20
"""Of memory that a frame may ask for: what ``zstd --long`` takes, and readers must be ready for without being asked."""

_ZSTD_MAGIC = 0xFD2FB528
_ZSTD_BLOCKS = 8  # of at most 128 KiB, handed on as one piece

HELD_BYTES_MAX = 256 << 20
"""Decompressed bytes that an incomplete sample may hold, unless what was fed of the shard is a 64th of them or more."""

HELD_GROWTH_MAX = 64


class Decompressor(Protocol):
    """Compressed bytes in, decompressed pieces of bounded size out.

    Raises ``ValueError`` with a sentence where they are corrupt, ``UnsupportedFormatError`` where they are not supported.
    """

    def pieces(self, data: memoryview) -> Iterator[bytes]:
        """What `data`, the next bytes of the object, decompresses to."""

    def end(self) -> None:
        """The object ended; ``ValueError`` where it ended inside a stream."""


class Gunzip:
    """gzip, of several members too; zeros after the last are padding, as for ``gzip`` itself."""

    def __init__(self) -> None:
        self._member: Any = None
        self._members_count = 0

    def pieces(self, data: memoryview) -> Iterator[bytes]:
        """See ``Decompressor``."""
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
                if not rest and len(piece) < PIECE_BYTES:  # else more may come out, although nothing is left to go in
                    break

    def end(self) -> None:
        """See ``Decompressor``."""
        if self._member is not None:
            raise ValueError("the gzip stream is cut off")


def _before_damage(member: Any, data: bytes | memoryview) -> bytes:
    """What `data`, which holds an error within the next ``PIECE_BYTES`` of output, decompresses to before that."""
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
    """Where in a run of zstd frames one may stop: after each block. Holds the few bytes of a head that is cut."""

    def __init__(self) -> None:
        self._head = bytearray()  # of a frame, block or skippable frame, not yet whole
        self._rest_bytes = 0  # of what the last head announced
        self._state = "frame"
        self._checked = False  # whether the frame ends with a checksum
        self.content_bytes: int | None = None  # that the last frame says it decompresses to
        self._is_first_frame = True

    @property
    def inside(self) -> bool:
        """Whether more must come."""
        return self._state != "frame" or bool(self._head) or self._rest_bytes > 0

    def cut(self, data: memoryview) -> Iterator[tuple[memoryview | bytes, str]]:
        """(bytes, what they complete): ``""`` nothing, ``block``, ``frame``; ``skip`` is of a skippable frame."""
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
        """The body that the last head announced is whole."""
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
        """Of the head that comes, as far as its first bytes say."""
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
        """Of the field that says how long the content is: the last of a frame's head."""
        return (head[4] >> 5 & 1, 2, 4, 8)[head[4] >> 6]

    def _read_head(self, head: bytes) -> str:
        if self._state == "frame":
            if head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50:
                self._rest_bytes = int.from_bytes(head[4:8], "little")
                self._state = "skippable" if self._rest_bytes else "frame"
                return "skip"
            if int.from_bytes(head[:4], "little") != _ZSTD_MAGIC:
                raise ValueError(f"the zstd stream is corrupt: no frame begins with {head[:4]!r}")
            if self._is_first_frame:  # in a later one it is more likely to be damage: heads have no checksum
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
    """Refuse a frame, by its head, that asks for more than is given.

    Raises:
        UnsupportedFormatError: It does.
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
    """zstd, of several frames too, skippable ones passed over; its content checksums are verified.

    Raises:
        ConfigError: The package ``zstandard`` is not there.
    """

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError:
            raise ConfigError("reading zstd needs the package zstandard", hint="pip install 'penstock[zstd]'") from None
        self._error: type[Exception] = zstandard.ZstdError
        self._context = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES_MAX)
        self._frame: Any = None
        self._frame_bytes = 0  # that it gave
        self._cutter = _ZstdCutter()

    def pieces(self, data: memoryview) -> Iterator[bytes]:
        """See ``Decompressor``."""
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
        promised_bytes = self._cutter.content_bytes  # libzstd does not always compare it when it is fed by pieces
        if promised_bytes not in {None, self._frame_bytes}:
            raise ValueError(f"the zstd stream is corrupt: {self._frame_bytes} bytes, not {promised_bytes}, in a frame")
        self._frame, self._frame_bytes = None, 0

    def end(self) -> None:
        """See ``Decompressor``."""
        if self._cutter.inside:
            raise ValueError("the zstd stream is cut off")


class CompressedParser(ShardParser):
    """Samples of a compressed shard.

    Args:
        shard: URL or key, for errors.
        inner: Makes the parser of what is inside, as in ``Format.parser``.
        decompressor: Makes a ``Decompressor``.
        start_offset_bytes: 0; there is no other entry.
        on_corrupt: See ``parsing.py``. A corrupt stream is the end of the shard under every policy that does not raise.

    Raises:
        UnsupportedFormatError: A frame of zstd needs a dictionary or a larger window than is given, or a sample is
            larger than ``HELD_BYTES_MAX`` and takes ``HELD_GROWTH_MAX`` times its compressed bytes; under every policy.

    Cost: holds a piece of 1 MiB, what ``inner`` holds, and the chunk that is pending.
    """

    def __init__(
        self,
        shard: str,
        *,
        inner: Callable[..., Parser],
        decompressor: Callable[[], Decompressor],
        start_offset_bytes: int = 0,
        on_corrupt: OnCorrupt = "raise",
    ) -> None:
        if start_offset_bytes:
            raise ConfigError(
                f"{shard} is compressed: reading cannot start at byte {start_offset_bytes}, only at 0",
                hint="repack it uncompressed, with the values compressed, to start anywhere",
            )
        super().__init__(shard, on_corrupt=on_corrupt)
        self._inner = inner(shard, on_corrupt=on_corrupt)
        self._decompressor = decompressor()
        self._waiting: deque[memoryview] = deque()
        self._pieces: Iterator[bytes] | None = None
        self._chunk_bytes = 0  # of the last chunk
        self._taken_bytes = 0  # of the chunks since a sample was complete, those in which that was included

    @property
    def inner(self) -> Parser:
        """Of what is inside."""
        return self._inner

    @property
    def pending(self) -> bool:
        """Whether bytes of the last chunks wait for ``feed(b"")``."""
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
        """Decompress and parse one piece; its length in bytes."""
        if self._pieces is None:
            self._pieces = self._decompressor.pieces(self._waiting.popleft())
        try:
            piece = next(self._pieces, None)
        except UnsupportedFormatError as error:
            raise self._unsupported(error.what, self._offset_bytes, hint="decompress the shard") from None
        except ValueError as error:
            raise self._corrupt(f"{error}, after {self._inner.offset_bytes} decompressed bytes", None) from None
        if piece is None:
            self._pieces = None
            return 0
        count = len(samples)
        self._hand_on(self._inner.feed, piece, samples)
        if len(samples) > count:
            self._taken_bytes = self._chunk_bytes
        held_bytes = self._inner.held_bytes
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
            raise self._corrupt(f"{error}, after {self._inner.offset_bytes} decompressed bytes", None) from None
        self._hand_on(lambda _: self._inner.finish(), b"", samples)

    def _hand_on(self, call: Callable[[bytes], list[Sample]], piece: bytes, samples: list[Sample]) -> None:
        try:
            samples += call(piece)
        except (CorruptShardError, UnsupportedFormatError) as error:
            error.what += " (offset in the decompressed bytes)"
            raise
        finally:
            inner = self._inner
            self.skipped_samples, self.skipped_bytes = inner.skipped_samples, inner.skipped_bytes
            self.skipped_error = inner.skipped_error

    def _drop(self) -> None:
        self._waiting.clear()
        self._pieces = None

    def _corrupt(self, what: str, offset_bytes: int | None, *, hint: str | None = None) -> CorruptShardError:
        return super()._corrupt(what, self._offset_bytes if offset_bytes is None else offset_bytes, hint=hint)
