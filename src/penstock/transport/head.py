"""Heads of HTTP/1 answers, and bodies in chunks. Pure: bytes in, records out."""

from __future__ import annotations

import re

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEXADECIMAL = re.compile(rb"[0-9A-Fa-f]{1,15}")
_CHUNK_LINE_BYTES_MAX = 8192
_names: dict[bytes, bytes] = {}
"""Header names as they were received, to the checked name in lower case. A store uses about twenty."""
_NAMES_MAX = 256


def parse_head(lines: list[bytes]) -> tuple[int, dict[bytes, bytes]]:
    """Return status and headers of the last answer among header lines, by lower-case name.

    1xx answers, and redirects that libcurl followed, come first and are dropped.

    Raises:
        ValueError: A line cannot be part of a head; libcurl refuses such an answer as well.
    """
    status = 0
    headers: dict[bytes, bytes] = {}
    within = False
    for line in lines:
        raw, colon, value = line.partition(b":")
        name = _names.get(raw)
        if name is None:
            if line[:5] == b"HTTP/" and not within:
                status, headers, within = _status(line), {}, True
                continue
            if not colon and not line.strip():  # libcurl passes an empty line at the end of a head
                within = False
                continue
            name = _checked_name(raw, line)
        value = value.strip()
        if name in headers:
            value = _repeated(name, headers[name], value)
        headers[name] = value
    return status, headers


def keeps(status_line: bytes, headers: dict[bytes, bytes]) -> bool:
    """Whether the connection stays open after an answer with this head."""
    options = headers.get(b"connection", b"").lower()
    tokens = [token.strip() for token in options.split(b",")] if b"," in options else (options,)
    return b"close" not in tokens and (status_line[:8] != b"HTTP/1.0" or b"keep-alive" in tokens)


def _repeated(name: bytes, before: bytes, value: bytes) -> bytes:
    """Return the value of a header that occurs twice: the last one, except for headers that decide where a body ends."""
    if name == b"content-length" and before != value:
        raise ValueError("the head has two content lengths")
    return before + b", " + value if name in (b"connection", b"transfer-encoding") else value


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
    """Decodes a body in chunks (RFC 9112, 7.1) that arrives in pieces, cut at any byte.

    Attributes:
        done: Whether the body has ended.
    """

    __slots__ = ("_between", "_in_trailers", "_left", "_line", "done")

    def __init__(self) -> None:
        self._between = False  # whether only the line break of a chunk is still to come
        self._in_trailers = False
        self._left = 0
        self._line = b""
        self.done = False

    def feed(self, data: bytes) -> tuple[list[bytes], int]:
        """Decode `data`.

        Returns:
            The pieces of the body in it, and the number of bytes that follow the body's end.

        Raises:
            ValueError: `data` is not encoded in chunks.
        """
        pieces = []
        at = 0
        while at < len(data) and not self.done:
            if self._left:
                piece = data[at : at + self._left]
                at += len(piece)
                pieces.append(piece)
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
                self._on_line(self._line)
                self._line = b""
        return pieces, len(data) - at

    def _on_line(self, line: bytes) -> None:
        if self._between:
            if line.strip():
                raise ValueError(f"a chunk is longer than its size: {line[:80]!r}")
            self._between = False
        elif self._in_trailers:
            self.done = not line.strip()
        else:
            text = line.partition(b";")[0].strip()
            if not _HEXADECIMAL.fullmatch(text):
                raise ValueError(f"not a chunk's size: {line[:80]!r}")
            self._left = int(text, 16)
            self._between = self._left > 0
            self._in_trailers = not self._left
