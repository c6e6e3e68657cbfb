r"""Decodes ``aws-chunked`` bodies piece by piece, wherever the pieces are cut. Everything but the data itself is bounded.

A chunk is ``SIZE[;chunk-signature=SIGNATURE]\r\nDATA\r\n``; after the one of size 0 come trailers and an empty line.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from penstock.gateway.authentication.chunk_signatures import ChunkRules

HEADER_BYTES_MAX = 128
"""Longest header of a chunk in bytes: 16 digits, ``;chunk-signature=``, 64 digits and the line break have 99."""

TRAILER_BYTES_MAX = 2048
"""Largest trailer in bytes; a SHA-256 and a signature have less than 200."""

_HEADER = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;chunk-signature=([0-9a-f]{64}))?")
_TRAILER = re.compile(r"(x-amz-[a-z0-9-]{1,64}):[ \t]*([!-~]{1,256})[ \t\n]*", re.IGNORECASE)
_TRAILER_SIGNATURE = "x-amz-trailer-signature"


class ChunkDecoder:
    """Takes an encoded body in pieces, and returns its data.

    Args:
        rules: Checks the chunks' signatures.
        length_bytes: Length of the decoded body, which the request's head promised.
        may_trail: Names of the trailers that the request's head announced, in lower case.

    Attributes:
        trailers: Values of the trailers by name, complete after ``end``.
    """

    __slots__ = ("_expects_break", "_is_ended", "_left_bytes", "_line", "_may_trail", "_open_bytes", "_rules",
                 "_trailer_bytes", "_trailing", "trailers")  # fmt: skip

    def __init__(self, rules: ChunkRules, *, length_bytes: int, may_trail: frozenset[str] = frozenset()) -> None:
        self.trailers: dict[str, str] = {}
        self._rules = rules
        self._may_trail = may_trail
        self._open_bytes = length_bytes  # of the body that no chunk has announced yet
        self._left_bytes = 0  # of the current chunk
        self._expects_break = False
        self._trailing = False
        self._is_ended = False
        self._line = b""
        self._trailer_bytes = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data in the next piece of the body.

        Raises:
            S3Error: The encoding or a signature is wrong, or the body is longer than promised.
        """
        found, position, length = [], 0, len(piece)
        while position < length:
            if self._left_bytes:
                end = min(length, position + self._left_bytes)
                data = piece[position:end]  # the piece itself if it is all data
                self._rules.update(data)
                self._left_bytes -= end - position
                found.append(data)
                position = end
                self._expects_break = not self._left_bytes
            else:
                position = self._take_line(piece, position)
        return found

    def end(self) -> None:
        """Take the end of the body.

        Raises:
            S3Error: The last chunk is missing, or the body is shorter than promised.
        """
        if not self._is_ended or self._open_bytes:
            message = "The body ended before its last chunk, or is shorter than x-amz-decoded-content-length."
            raise S3Error("IncompleteBody", message, status=400)

    def _take_line(self, piece: bytes, position: int) -> int:
        if self._is_ended:
            raise _malformed("there is data after the last chunk")
        bound = TRAILER_BYTES_MAX - self._trailer_bytes if self._trailing else HEADER_BYTES_MAX
        room = bound - len(self._line)
        end = piece.find(b"\n", position, position + room) + 1
        if not end:
            self._line += piece[position : position + room]
            if len(self._line) >= bound:
                raise _malformed(f"a line has more than {bound} bytes")
            return min(len(piece), position + room)
        line, self._line = self._line + piece[position:end], b""
        if not line.endswith(b"\r\n"):
            raise _malformed("a line does not end with CR LF")
        self._end_line(line[:-2])
        return end

    def _end_line(self, line: bytes) -> None:
        if self._expects_break:
            if line:
                raise _malformed("a chunk is longer than its header says")
            self._expects_break = False
            self._rules.end()
        elif not self._trailing:
            self._begin_chunk(line)
        elif line:
            self._trailer_bytes += len(line)
            self._add_trailer(line)
        else:
            self._end_trailer()

    def _begin_chunk(self, line: bytes) -> None:
        match = _HEADER.fullmatch(line)
        if match is None:
            raise _malformed("the header of a chunk cannot be read")
        size_bytes = int(match[1], 16)
        if size_bytes > self._open_bytes:
            message = "The body is longer than x-amz-decoded-content-length says."
            raise S3Error("IncompleteBody", message, status=400)
        self._rules.begin(match[2].decode() if match[2] is not None else None)
        self._open_bytes -= size_bytes
        self._left_bytes = size_bytes
        if not size_bytes:
            self._rules.end()
            self._trailing = True

    def _add_trailer(self, line: bytes) -> None:
        match = _TRAILER.fullmatch(line.decode("latin-1"))
        name = match[1].lower() if match is not None else ""
        if match is None or name in self.trailers or (name not in self._may_trail and name != _TRAILER_SIGNATURE):
            raise _bad_trailer("it has a line that was not announced, or cannot be read")
        if _TRAILER_SIGNATURE in self.trailers:
            raise _bad_trailer("there is a line after its signature")
        self.trailers[name] = match[2]

    def _end_trailer(self) -> None:
        signature = self.trailers.pop(_TRAILER_SIGNATURE, None)
        if missing := self._may_trail - self.trailers.keys():
            raise _bad_trailer(f"{min(missing)} was announced and is missing")
        if self._may_trail or signature is not None:
            lines = "".join(f"{name}:{value}\n" for name, value in self.trailers.items())
            self._rules.trailer(lines, signature)
        self._is_ended = True


def _malformed(what: str) -> S3Error:
    return S3Error("InvalidRequest", f"The body is not encoded as aws-chunked: {what}.", status=400)


def _bad_trailer(what: str) -> S3Error:
    return S3Error("MalformedTrailerError", f"The trailer of the body is not as it was announced: {what}.", status=400)
