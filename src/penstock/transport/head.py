"""Heads of HTTP/1 answers, and bodies in chunks: bytes to records, no socket."""

from __future__ import annotations

import re

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEXADECIMAL = re.compile(rb"[0-9A-Fa-f]{1,15}")
_CHUNK_LINE_BYTES_MAX = 8192
_names: dict[bytes, bytes] = {}
"""Header names as they came, checked, to lower case. A store uses some twenty."""
_NAMES_MAX = 256


def parse_head(lines: list[bytes]) -> tuple[int, dict[bytes, bytes]]:
    """Status and headers of the last answer among header lines; names in lower case.

    1xx answers, and those that libcurl followed, come first and are dropped.

    Raises:
        ValueError: a line that is none of a head; libcurl refuses such an answer by itself.
    """
    status = 0
    headers: dict[bytes, bytes] = {}
    for line in lines:
        raw, colon, value = line.partition(b":")
        name = _names.get(raw)
        if name is None:
            if line[:5] == b"HTTP/":
                status = _status(line)
                headers = {}
                continue
            if not colon and not line.strip():  # the end of a head, as libcurl tells it
                continue
            name = _checked_name(raw, line)
        value = value.strip()
        if name in headers and name == b"content-length" and headers[name] != value:
            raise ValueError("the head has two content lengths")
        headers[name] = value
    return status, headers


def _checked_name(raw: bytes, line: bytes) -> bytes:
    if len(raw) == len(line) or not _NAME.fullmatch(raw):
        raise ValueError(f"not a header line: {line[:80]!r}")
    name = raw.lower()
    if len(_names) < _NAMES_MAX:
        _names[raw] = name
    return name


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
