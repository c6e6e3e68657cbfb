"""An S3 that takes writes and keeps only what a listing needs: where uploads go in benchmarks of saving.

``python sink.py --ttfb-ms 30 --rate 90000000`` prints its port and serves until its standard input ends. Bodies longer than
1 MB are received and dropped, and read as zeros; each connection is received at most at ``--rate`` bytes per second.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

KEPT_BYTES_MAX = 1_000_000
PIECE_BYTES = 1 << 20


class Sink:
    """The objects and uploads, and how requests are answered."""

    def __init__(self, *, ttfb_s: float, rate_bytes_per_s: int) -> None:
        self.ttfb_s, self.rate_bytes_per_s = ttfb_s, rate_bytes_per_s
        self.objects: dict[str, tuple[int, bytes | None]] = {}
        self.uploads: dict[str, dict[int, int]] = {}
        self.lock = threading.Lock()

    def serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, connection.makefile("rb", buffering=65536) as stream:
            while line := stream.readline():
                method, target, _ = line.decode().split(" ", 2)
                headers = {}
                while (field := stream.readline()) not in (b"\r\n", b""):
                    name, _, value = field.decode("latin-1").partition(":")
                    headers[name.lower()] = value.strip()
                if "100-continue" in headers.get("expect", ""):
                    connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                size, body = self._receive(stream, headers)
                if self.ttfb_s:
                    time.sleep(self.ttfb_s)
                status, fields, answer = self.answer(method, target, size, body, headers)
                head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
                head += f"Content-Length: {len(answer)}\r\nDate: {formatdate(usegmt=True)}\r\n"
                connection.sendall(f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + (b"" if method == "HEAD" else answer))

    def _receive(self, stream: object, headers: dict[str, str]) -> tuple[int, bytes | None]:
        """Receive a body; its size as an object, and its bytes if they are few and not in chunks."""
        left = length = int(headers.get("content-length", 0))
        start, kept, memory = time.perf_counter(), bytearray(), memoryview(bytearray(PIECE_BYTES))
        while left:
            count = stream.readinto(memory[: min(left, PIECE_BYTES)])  # type: ignore[attr-defined]
            if not count:
                break
            left -= count
            if length <= KEPT_BYTES_MAX:
                kept += memory[:count]
            if self.rate_bytes_per_s:
                due = start + (length - left) / self.rate_bytes_per_s
                time.sleep(max(0.0, due - time.perf_counter()))
        decoded = headers.get("x-amz-decoded-content-length")
        return int(decoded or length), bytes(kept) if length <= KEPT_BYTES_MAX and decoded is None else None

    def answer(
        self, method: str, target: str, size: int, body: bytes | None, headers: dict[str, str]
    ) -> tuple[str, dict[str, str], bytes]:
        parts = urlsplit(target)
        key = unquote(parts.path).lstrip("/").partition("/")[2]
        query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        etag = {"ETag": f'"{size:032x}"'}
        with self.lock:
            if method == "POST" and "uploads" in query:
                number = f"{len(self.uploads) + 1:032x}"
                self.uploads[number] = {}
                return "200 OK", {}, _document("InitiateMultipartUploadResult", Key=key, UploadId=number)
            if method == "PUT" and "uploadId" in query:
                self.uploads[query["uploadId"]][int(query["partNumber"])] = size
                return "200 OK", etag, b""
            if method == "POST" and "uploadId" in query:
                self.objects[key] = sum(self.uploads.pop(query["uploadId"]).values()), None
                return "200 OK", {}, _document("CompleteMultipartUploadResult", Key=key, ETag='"0"')
            if method == "PUT":
                self.objects[key] = size, body
                return "200 OK", etag, b""
            if method == "POST":  # DeleteObjects
                names = [each.partition("</Key>")[0] for each in (body or b"").decode().split("<Key>")[1:]]
                for name in names:
                    self.objects.pop(name, None)
                return "200 OK", {}, _document("DeleteResult")
            if method == "DELETE":
                self.uploads.pop(query.get("uploadId", ""), None) if "uploadId" in query else self.objects.pop(
                    key, None
                )
                return "204 No Content", {}, b""
            if not key:
                return "200 OK", {}, self._listing(query.get("prefix", ""), query.get("delimiter", ""))
            if key not in self.objects:
                return "404 Not Found", {}, _document("Error", Code="NoSuchKey", Message="not here")
            size, data = self.objects[key]
        return _ranged(data if data is not None else bytes(size), headers.get("range", ""), f'"{size:032x}"')

    def _listing(self, prefix: str, delimiter: str) -> bytes:
        keys, prefixes = [], set()
        for key, (size, _) in sorted(self.objects.items()):
            if not key.startswith(prefix):
                continue
            if delimiter and delimiter in key[len(prefix) :]:
                prefixes.add(prefix + key[len(prefix) :].partition(delimiter)[0] + delimiter)
                continue
            moment = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
            keys.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><LastModified>{moment}</LastModified>"
                f'<ETag>"{size:032x}"</ETag><StorageClass>STANDARD</StorageClass></Contents>'
            )
        common = [f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in sorted(prefixes)]
        fields = f"<Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated><KeyCount>{len(keys)}</KeyCount>"
        return f"<ListBucketResult>{fields}{''.join(keys)}{''.join(common)}</ListBucketResult>".encode()


def _ranged(data: bytes, asked: str, etag: str) -> tuple[str, dict[str, str], bytes]:
    fields = {"ETag": etag, "Accept-Ranges": "bytes", "Last-Modified": formatdate(usegmt=True)}
    if not asked:
        return "200 OK", fields, data
    first, _, last = asked.removeprefix("bytes=").partition("-")
    start, end = int(first), min(int(last or len(data) - 1) + 1, len(data))
    return "206 Partial Content", {**fields, "Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}, data[start:end]


def _document(name: str, **fields: str) -> bytes:
    inner = "".join(f"<{field}>{escape(value)}</{field}>" for field, value in fields.items())
    return f'<?xml version="1.0"?><{name}>{inner}</{name}>'.encode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ttfb-ms", type=float, default=0)
    parser.add_argument("--rate", type=int, default=0, help="bytes per second of each connection; 0 is unlimited")
    options = parser.parse_args()
    sink = Sink(ttfb_s=options.ttfb_ms / 1000, rate_bytes_per_s=options.rate)
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(listener.getsockname()[1], flush=True)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=sink.serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
