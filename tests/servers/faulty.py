"""An S3 on loopback that misbehaves on command: the weather for retry, resume, hedge and error messages.

::

    with FaultyServer(objects={"a": b"..."}) as server:
        server.fail("close", times=1, match="a", after_bytes=10)      # one specific failure
        server.random_faults(["503", "reset"], ratio=0.05, seed=0)    # 5% of requests
        store = ps.connect(server.url, endpoint_url=server.endpoint_url, anonymous=True)

The bucket is called ``bucket``. The right answers come from ``shape.py``; one asyncio thread serves about 4 000 small
GETs/s. What is random is decided by a hash of (seed, method, path, span, attempt number), never by the order of
arrival: two runs with the same requests meet the same faults, whatever the threads do.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import socket
import ssl
import struct
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from email.utils import formatdate
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Self

import trustme

from servers.faults import KINDS, STATUSES, WIRE_KINDS, Fault, Match, applies, garbage, time_skewed, wrong_region
from servers.records import Objects, Request, Response, build_request, error, parse_request
from servers.shape import Shape


class FaultyServer:
    """Serves `objects` over HTTP on a free port of 127.0.0.1 until closed.

    Args:
        objects: Key to bytes; ``server.objects`` may be changed at any time.
        tls: Serve HTTPS, with a certificate of an authority of its own (``server.ca_bundle``).
        page_keys_max: Keys per page of a listing.
        etags: One of ``servers.shape.ETAGS``: how ETags look, and where.

    Attributes:
        objects: The bucket.
        requests: Every request so far, in the order of arrival, with the fault that answered it.
        clock_offset_s: What the server's clock is ahead; requests signed 900 s off are refused as S3 refuses them.
        region: If set, requests signed for another region are refused as S3 refuses them.
        access_keys: If set, requests of other access keys get 403 InvalidAccessKeyId; anonymous ones AccessDenied.
        tokens: If set, requests with another session token get 400 ExpiredToken.
        connections_count: Open connections.
        connections_total: Connections ever accepted.
    """

    bucket = "bucket"

    def __init__(
        self,
        objects: dict[str, bytes] | None = None,
        *,
        tls: bool = False,
        page_keys_max: int = 1000,
        etags: str = "quoted",
        port: int = 0,
    ) -> None:
        self.objects = Objects(objects or {})
        self.requests: list[Request] = []
        self.clock_offset_s = 0.0
        self.region: str | None = None
        self.access_keys: set[str] | None = None
        self.tokens: set[str] | None = None
        self.connections_count = 0
        self.connections_total = 0
        self._shape = Shape(self.objects, bucket=self.bucket, page_keys_max=page_keys_max, etags=etags)
        self._faults: list[Fault] = []
        self._random: tuple[Sequence[str], float, int, float] = ((), 0.0, 0, 0.0)
        self._attempts: Counter[tuple[object, ...]] = Counter()
        self._lock = threading.Lock()
        self._tls = tls
        self._port = port
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.ca_bundle: str | None = None
        self._handlers: set[asyncio.Task[None]] = set()
        self._transports: weakref.WeakSet[asyncio.WriteTransport] = weakref.WeakSet()

    # ── life ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def __enter__(self) -> Self:
        context = self._tls_context() if self._tls else None
        self._loop = asyncio.new_event_loop()
        self._listener = socket.create_server(("127.0.0.1", self._port), backlog=1024)
        self.port: int = self._listener.getsockname()[1]
        self._server = self._loop.run_until_complete(
            asyncio.start_server(self._serve, sock=self._listener, ssl=context, limit=256 * 1024)
        )
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-server", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every connection and the thread."""
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        if self._folder is not None:
            self._folder.cleanup()

    async def _shut(self) -> None:
        self._loop.remove_reader(self._listener)  # closing the server at once would leak a connection accepted just now
        for transport in self._transports:  # one that still had bytes to send would be closed after the loop, or never
            transport.abort()
        for turn in range(100):  # asyncio's own tasks, which accept connections and shake hands, first get time to end
            await asyncio.sleep(0.002)
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks if turn >= 10 else self._handlers:
                task.cancel()
            if not tasks and turn >= 2:  # aborted transports close their sockets in a later turn
                break
        self._server.close()

    def _tls_context(self) -> ssl.SSLContext:
        authority = trustme.CA()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-faulty-")
        self.ca_bundle = str(Path(self._folder.name) / "ca.pem")
        authority.cert_pem.write_to_path(self.ca_bundle)
        return context

    @property
    def endpoint_url(self) -> str:
        """``http(s)://127.0.0.1:port``."""
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """``s3://bucket``."""
        return f"s3://{self.bucket}"

    @property
    def uploads(self) -> dict[str, object]:
        """Multipart uploads that are neither completed nor aborted, by upload id."""
        return dict(self._shape.uploads)

    # ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────

    def fail(
        self,
        kind: str,
        *,
        times: int | None = 1,
        match: Match = None,
        after_bytes: int | None = None,
        seconds: float = 3600.0,
        bytes_per_s: int = 100,
        location: str = "",
        region: str = "eu-central-1",
    ) -> Fault:
        """Misbehave.

        Args:
            kind: One of ``KINDS``.
            times: How often; None: always.
            match: Part of the key, or a function of the request; None: every request for which `kind` makes sense.
            after_bytes: Bytes of the body sent rightly before; None: half.
            seconds: How long to stall or delay, or what ``Retry-After`` says.
            bytes_per_s: Of ``drip``.
            location: Of ``redirect``: scheme, host and port.
            region: Of ``wrong_region_*``.
        """
        if kind not in KINDS:
            raise ValueError(f"no fault {kind!r}; there are {sorted(KINDS)}")
        fault = Fault(kind, times, match, after_bytes, seconds, bytes_per_s, location, region)
        with self._lock:
            self._faults.append(fault)
        return fault

    def random_faults(
        self, kinds: Sequence[str], *, ratio: float = 0.05, seed: int = 0, seconds: float = 3600.0
    ) -> None:
        """Let `ratio` of all requests meet one of `kinds`, chosen by `seed`, path, span and attempt number.

        Args:
            kinds: Of ``KINDS``; one that makes no sense for a request is left out for it.
            ratio: Share of requests.
            seed: Another seed, other requests.
            seconds: How long a stall lasts.
        """
        if unknown := set(kinds) - set(KINDS):
            raise ValueError(f"no fault {sorted(unknown)}")
        self._random = (tuple(kinds), ratio, seed, seconds)

    def heal(self) -> None:
        """Behave from now on."""
        with self._lock:
            self._faults.clear()
        self._random = ((), 0.0, 0, 0.0)

    def _choose(self, request: Request) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.wants(request):
                    if fault.times is not None:
                        fault.times -= 1
                    return fault
        kinds, ratio, seed, seconds = self._random
        if not kinds:
            return None
        name = f"{seed} {request.method} {request.path} {request.span} {request.attempt}"
        digest = hashlib.blake2b(name.encode(), digest_size=24).digest()
        chance, choice, cut = struct.unpack("<QQQ", digest)
        fitting = [kind for kind in kinds if applies(kind, request)]
        if chance >= ratio * 2**64 or not fitting:
            return None
        return Fault(fitting[choice % len(fitting)], after_bytes=cut % 2**20, seconds=seconds)

    # ── serving ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._handlers.add(task)
        self._transports.add(writer.transport)
        self.connections_count += 1
        self.connections_total += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError, ssl.SSLError):
            writer.transport.abort()
        finally:
            self.connections_count -= 1
            self._handlers.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether the connection lives on."""
        method, target, headers = parse_request((await reader.readuntil(b"\r\n\r\n"))[:-4])
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await self._read_body(reader, headers)
        identity = (method, target, headers.get("range"))
        request = build_request(method, target, headers, body, self._attempts[identity])
        self._attempts[identity] += 1
        fault = self._choose(request)
        self.requests.append(request._replace(fault=fault.kind if fault else None))
        if fault is None:
            await self._send(writer, request, self._refusal(request) or self._shape.answer(request))
        elif fault.kind in WIRE_KINDS:
            return await self._spoil(reader, writer, request, fault)
        else:
            if fault.kind == "delay":
                await asyncio.sleep(fault.seconds)
            elif fault.kind.startswith("garbage"):
                writer.write(garbage(fault.kind))
                return False
            await self._send(writer, request, self._falsify(request, fault))
        return headers.get("connection", "").lower() != "close"

    async def _read_body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            parts = []
            while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
                parts.append((await reader.readexactly(size + 2))[:-2])
            await reader.readuntil(b"\r\n")
            return b"".join(parts)
        return await reader.readexactly(int(headers.get("content-length", 0)))

    def _refusal(self, request: Request) -> Response | None:
        """What S3 would say against the request's signature, as far as ``region``, ``access_keys``... ask."""
        authorization = request.headers.get("authorization", "")
        scope = authorization.partition("Credential=")[2].partition(",")[0].split("/")
        if self.access_keys is not None:
            if not authorization:
                return error(403, "AccessDenied", "Access Denied")
            if scope[0] not in self.access_keys:
                return error(403, "InvalidAccessKeyId", "There is no such access key.")
        if not authorization:
            return None
        if self.tokens is not None and request.headers.get("x-amz-security-token") not in self.tokens:
            return error(400, "ExpiredToken", "The provided token has expired.")
        if self.region is not None and scope[2] != self.region:
            return wrong_region(400, self.region)
        if signed := request.headers.get("x-amz-date"):
            moment = datetime.strptime(signed, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
            if abs(moment - time.time() - self.clock_offset_s) > 900:
                return time_skewed()
        return None

    def _falsify(self, request: Request, fault: Fault) -> Response:
        """An answer that is wrong, or the right one after which the world is another."""
        if (status := STATUSES.get(fault.kind)) is not None:
            return status(fault)
        match fault.kind:
            case "redirect_self":
                return Response(307, {"Location": self.endpoint_url + request.path})
            case "redirect":
                return Response(307, {"Location": fault.location + request.path})
            case "ignore_range":
                return self._shape.answer(request._replace(span=None))
            case "wrong_range" | "short_range":
                assert request.span is not None
                start, end = request.span
                shift = (1, 1) if fault.kind == "wrong_range" else (0, -1)
                span = (start + shift[0], end + shift[1] if end is not None else None)
                return self._shape.answer(request._replace(span=span))
        response = self._shape.answer(request)
        match fault.kind:
            case "change" if request.key in self.objects:
                old = self.objects[request.key]
                self.objects[request.key] = bytes(byte ^ 0xFF for byte in old[:16]) + old[16:]
            case "wrong_checksum":
                response.headers |= {"x-amz-checksum-crc32c": "AAAAAA==", "x-amz-checksum-type": "FULL_OBJECT"}
            case "corrupt" if response.body:
                body = bytearray(response.body)
                body[len(body) // 2] ^= 1
                response.body = bytes(body)
            case "truncated_listing":
                response.body = response.body[: len(response.body) // 2]
            case "reversed_listing" | "incomplete_listing":
                rows = re.findall(rb"<Contents>.*?</Contents>", response.body)
                listed = rows[::-1] if fault.kind == "reversed_listing" else rows[len(rows) // 2 :]
                response.body = response.body.replace(b"".join(rows), b"".join(listed))
        return response

    def _head(self, response: Response, length: int | None, *, chunked: bool = True) -> bytes:
        try:
            reason = HTTPStatus(response.status).phrase
        except ValueError:
            reason = "Unknown"
        date = response.headers.pop("Date", None) or formatdate(time.time() + self.clock_offset_s, usegmt=True)
        lines = [
            f"HTTP/1.1 {response.status} {reason}",
            f"Date: {date}",
            "Server: faulty",
        ]
        if response.is_s3:
            lines.append(f"x-amz-request-id: REQ{len(self.requests):08d}")
        lines += [f"{name}: {value}" for name, value in response.headers.items()]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        elif chunked:
            lines.append("Transfer-Encoding: chunked")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    async def _send(self, writer: asyncio.StreamWriter, request: Request, response: Response) -> None:
        if request.method == "HEAD":
            length = response.head_length_bytes if response.head_length_bytes is not None else len(response.body)
            writer.write(self._head(response, length))
        elif len(response.body) < 256 * 1024:
            writer.write(b"".join((self._head(response, len(response.body)), response.body)))
        else:
            writer.write(self._head(response, len(response.body)))
            body = memoryview(response.body)
            for at in range(0, len(body), 1 << 20):  # asyncio copies what the socket does not take at once
                writer.write(body[at : at + (1 << 20)])
                await writer.drain()
        await writer.drain()

    async def _spoil(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Request, fault: Fault
    ) -> bool:
        """Send the right answer wrongly; whether the connection lives on."""
        kind = fault.kind
        if kind == "stall_head":
            await _wait_or_gone(reader, fault.seconds)
            return False
        if kind in ("reset_head", "close_head"):
            if kind == "reset_head":
                _reset(writer)
            return False
        response = self._shape.answer(request._replace(span=None) if kind == "chunked_whole" else request)
        body = bytes(response.body)
        cut = len(body) // 2 if fault.after_bytes is None else fault.after_bytes % max(1, len(body))
        if kind == "promise_more":
            writer.write(self._head(response, len(body) + 100))
            writer.write(body)
        elif kind == "unsized":
            writer.write(self._head(response, None, chunked=False))
            writer.write(body)
        elif kind in ("chunked", "chunked_cut", "chunked_whole"):
            writer.write(self._head(response, None))
            if cut:
                writer.write(b"%x\r\n%b\r\n" % (cut, body[:cut]))
            if kind != "chunked_cut":
                writer.write(b"%x\r\n%b\r\n" % (len(body) - cut, body[cut:]) if cut < len(body) else b"")
                writer.write(b"0\r\n\r\n")
                await writer.drain()
                return True
        elif kind == "drip":
            writer.write(self._head(response, len(body)))
            for at in range(0, len(body), fault.bytes_per_s):
                writer.write(body[at : at + fault.bytes_per_s])
                await writer.drain()
                await asyncio.sleep(1.0)
            return True
        else:
            writer.write(self._head(response, len(body)))
            writer.write(body[:cut])
        await writer.drain()
        if kind == "stall":
            await _wait_or_gone(reader, fault.seconds)
        elif kind == "reset":
            _reset(writer)
        return False


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a TCP reset: what the client has not read yet is lost."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _wait_or_gone(reader: asyncio.StreamReader, seconds: float) -> None:
    """Wait, or until the client has closed the connection."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(reader.read(1), seconds)
