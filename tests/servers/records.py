"""The records between the misbehaving server's socket and its S3: versions of objects, requests, answers."""

from __future__ import annotations

import base64
import hashlib
import mmap
import re
import time
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import crc32c

MAP_NORESERVE = 0x4000
"""Of Linux; Python names it from 3.13 on."""

PROLOGUE = '<?xml version="1.0" encoding="UTF-8"?>\n'


class Stored(NamedTuple):
    """One version of an object."""

    data: bytes
    etag: str
    modified_s: float
    crc32c: str


class Objects(dict[str, bytes]):
    """The bucket: key to bytes. Each assignment makes a new version with its ETag and checksum, a second or more later."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__()
        self.versions: dict[str, Stored] = {}
        self._ordered: list[bytes] | None = None
        for key, data in objects.items():
            self[key] = data

    def __setitem__(self, key: str, data: bytes) -> None:
        self.store(key, data, etag=f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"')

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        del self.versions[key]
        self._ordered = None

    def store(self, key: str, data: bytes, *, etag: str) -> Stored:
        """A version with this ETag; multipart's differ from the MD5."""
        if key not in self:
            self._ordered = None
        super().__setitem__(key, data)
        before = self.versions.get(key)
        modified_s = max(time.time(), before.modified_s + 1.0) if before is not None else time.time()
        version = self.versions[key] = Stored(data, etag, modified_s, checksum(data))
        return version

    def store_zeros(self, key: str, size_bytes: int) -> None:
        """An object of zeros that costs no memory until it is sent, e.g. of 5 GB; it has no checksum."""
        zeros = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        self._ordered = None
        super().__setitem__(key, zeros)  # type: ignore[assignment]
        self.versions[key] = Stored(zeros, f'"zeros-{size_bytes}"', time.time(), "")  # type: ignore[arg-type]

    def ordered(self) -> list[bytes]:
        """Keys as UTF-8, in the order in which S3 lists them."""
        if self._ordered is None:
            self._ordered = sorted(key.encode() for key in self)
        return self._ordered


class Request(NamedTuple):
    """One request as it came."""

    method: str
    path: str
    """Path and query, as sent."""
    key: str
    """Key in the bucket, decoded; empty where the bucket itself is meant."""
    bucket: str
    query: dict[str, str]
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    span: tuple[int, int | None] | None
    """Of a ``Range`` header: start and end, half-open; end None where open; start negative for a suffix."""
    attempt: int
    """How many times the same method, path and span came before."""
    fault: str | None = None
    """The kind of misbehaviour that answered it."""

    @property
    def is_list(self) -> bool:
        """Whether it is a ListObjectsV2."""
        return self.method == "GET" and not self.key and "list-type" in self.query

    @property
    def is_read(self) -> bool:
        """Whether it asks for the bytes of an object."""
        return self.method == "GET" and bool(self.key)

    @property
    def is_complete(self) -> bool:
        """Whether it is a CompleteMultipartUpload."""
        return self.method == "POST" and "uploadId" in self.query


@dataclass(slots=True)
class Response:
    """An answer; faults change it before it is sent."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | memoryview = b""
    head_length_bytes: int | None = None
    """Of a HEAD: the length that it announces without sending it."""
    is_s3: bool = True
    """False for what something between us and the store says: no request id."""


def checksum(data: bytes) -> str:
    """CRC32C as S3 writes it: big-endian, base64."""
    return base64.b64encode(crc32c.crc32c(data).to_bytes(4, "big")).decode()


def parse_request(head: bytes) -> tuple[str, str, dict[str, str]]:
    """Method, target and headers of a request's head."""
    lines = head.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ", 2)
    headers = {}
    for line in lines[1:]:
        if line:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
    return method, target, headers


def build_request(method: str, target: str, headers: dict[str, str], body: bytes, attempt: int) -> Request:
    """The request's meaning: bucket, key, query, span."""
    path, _, query_text = target.partition("?")
    if path.startswith("http"):
        path = urlsplit(path).path
    bucket, _, key = path[1:].partition("/")
    query = {}
    if query_text:
        query = {name: values[0] for name, values in parse_qs(query_text, keep_blank_values=True).items()}
    if "aws-chunked" in headers.get("content-encoding", ""):
        body = decode_aws_chunked(body)
    return Request(
        method, target, unquote(key), unquote(bucket), query, headers, body, parse_span(headers.get("range")), attempt
    )


def parse_span(text: str | None) -> tuple[int, int | None] | None:
    """``bytes=a-b`` as half-open ``(a, b + 1)``; ``bytes=-n`` as ``(-n, None)``."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", text or "")
    if not found or found[0] == "bytes=-":
        return None
    if not found[1]:
        return -int(found[2]), None
    return int(found[1]), int(found[2]) + 1 if found[2] else None


def decode_aws_chunked(body: bytes) -> bytes:
    """The payload of ``Content-Encoding: aws-chunked``; signatures and trailers are skipped."""
    parts: list[bytes] = []
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end].split(b";")[0], 16)
        if size == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2


def error(status: int, code: str, message: str = "", **extra: str) -> Response:
    """S3's XML error."""
    fields = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in extra.items())
    text = f"{PROLOGUE}<Error><Code>{code}</Code><Message>{escape(message or code)}</Message>{fields}</Error>"
    return Response(status, {"Content-Type": "application/xml"}, text.encode())
