"""Heads of HTTP/1 answers, and bodies in chunks: bytes to records, no socket."""

from __future__ import annotations

import re

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEXADECIMAL = re.compile(rb"[0-9A-Fa-f]{1,15}")
_CHUNK_LINE_BYTES_MAX = 8192
_known_lines: dict[bytes, tuple[bytes, bytes]] = {}
"""Header lines seen first in this process, parsed: half of the lines of every answer of a store are always the same."""
_KNOWN_LINES_MAX = 256


def parse_head(lines: list[bytes]) -> tuple[int, dict[bytes, bytes]]:
    """Status and headers of the last answer among header lines; names in lower case.

    1xx answers, and those that libcurl followed, come first and are dropped.

    Raises:
        ValueError: a line that is none of a head; libcurl refuses such an answer by itself.
    """
    status = 0
    headers: dict[bytes, bytes] = {}
    for line in lines:
        known = _known_lines.get(line)
        if known is not None:
            headers[known[0]] = known[1]
            continue
        name, colon, value = line.partition(b":")
        if line[:5] == b"HTTP/":
            status = _status(line)
            headers = {}
        elif colon and _NAME.fullmatch(name):
            name, value = name.lower(), value.strip()
            if name == b"content-length":
                if headers.get(name, value) != value:
                    raise ValueError("the head has two content lengths")
            elif len(_known_lines) < _KNOWN_LINES_MAX:
                _known_lines[line] = (name, value)
            headers[name] = value
        elif line.strip():
            raise ValueError(f"not a header line: {line[:80]!r}")
    return status, headers


def _status(line: bytes) -> int:
    parts = line.split(None, 2)
    if len(parts) < 2 or not parts[1].isdigit():
        raise ValueError(f"not a status line: {line[:80]!r}")
    return int(parts[1])


class Chunked:
    """Decodes a body in chunks (RFC 9112, 7.1), cut at any byte."""

    __slots__ = ("_in_trailers", "_left", "_line", "done")

    def __init__(self) -> None:
        self._in_trailers = False
        self._left = 0  # of the chunk, its final line break included
        self._line = b""
        self.done = False

    def feed(self, data: bytes) -> tuple[list[bytes], int]:
        """The pieces of the body in `data`, and how many bytes follow its end.

        Raises:
            ValueError: it is not encoded like that.
        """
        pieces = []
        at = 0
        while at < len(data) and not self.done:
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                pieces.append(piece[: max(0, self._left - 2)])
                self._left -= len(piece)
                continue
            end = data.find(b"\n", at)
            if end < 0:
                end = len(data) - 1
            self._line += data[at : end + 1]
            at = end + 1
            if len(self._line) > _CHUNK_LINE_BYTES_MAX:
                raise ValueError("a chunk's size does not end")
            if self._line.endswith(b"\n"):
                self._size(self._line)
                self._line = b""
        return [piece for piece in pieces if piece], len(data) - at

    def _size(self, line: bytes) -> None:
        if self._in_trailers:
            self.done = not line.strip()
            return
        text = line.partition(b";")[0].strip()
        if not _HEXADECIMAL.fullmatch(text):
            raise ValueError(f"not a chunk's size: {line[:80]!r}")
        size = int(text, 16)
        self._left = size + 2 if size else 0
        self._in_trailers = not size
