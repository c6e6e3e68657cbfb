"""Transforms that the tests run in worker processes, by the path of this file."""

import ctypes
import io
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from penstock.gateway import Response, S3Error, SourceReader, TransformRequest, transform


def copy(reader, request):
    yield from reader


def upper(reader: SourceReader, request: TransformRequest, *, times: int = 1, suffix: str = "") -> bytes:
    return reader.read().upper() * times + suffix.encode()


def process_id(reader, request):
    return str(os.getpid()).encode()


def small_pieces(reader, request, *, count: int, size: int = 200):
    piece = b"x" * size
    for _ in range(count):
        yield piece


def large_pieces(reader, request, *, count: int, size: int = 1 << 20):
    piece = memoryview(bytearray(size))
    for _ in range(count):
        yield piece


def reused_buffer(reader, request):
    buffer = bytearray(100)
    for number in range(100):
        buffer[:] = bytes([number]) * 100
        yield memoryview(buffer)


def first_then_wait(reader, request, *, until: str):
    """Yield one piece, and go on only when a file exists."""
    yield b"first"
    while not Path(until).exists():
        time.sleep(0.005)
    yield b"last"


def half(reader, request):
    yield b"half of it"
    raise ValueError("the secret file /etc/hidden is broken")


def fails_at_once(reader, request):
    raise ValueError("no")


def hang(reader, request):
    while True:
        time.sleep(0.01)


def hang_deaf(reader, request):
    """Hang without a line of Python between."""
    ctypes.CDLL(None).sleep(1000)
    yield b""


def flood(reader, request):
    piece = bytes(1 << 20)
    while True:
        yield piece


def gobble(reader, request):
    kept = []
    while True:
        kept.append(bytearray(16 << 20))
        yield b"."


def segfault(reader, request):
    yield b"before"
    ctypes.string_at(0)


def exits(reader, request):
    os._exit(7)


def kills(reader, request):
    os.kill(os.getpid(), signal.SIGKILL)


def system_exit(reader, request):
    sys.exit(3)


def cleans_up(reader, request, *, scratch: str):
    """Leave no temporary file behind, however the call ends."""
    with tempfile.NamedTemporaryFile(dir=scratch):
        while True:
            time.sleep(0.005)
            yield b"x" * 1000


def text(reader, request):
    yield "text"


def nothing(reader, request):
    return None


def refuses(reader, request):
    raise S3Error("InvalidRequest", "This is not a picture.", status=415)


def with_headers(reader, request):
    return Response(
        iter([b"abc", b"def"]), headers={"Content-Type": "text/x-test", "x-amz-meta-key": request.key}, size_bytes=6
    )


def wrong_size(reader, request):
    return Response(iter([b"abc"]), size_bytes=6)


def bad_header(reader, request):
    return Response(b"", headers={"x-amz-meta-a": "b\r\nSet-Cookie: c"})


def prints(reader, request):
    print("hello from a transform")
    print("and a warning", file=sys.stderr)
    return b""


def environment(reader, request):
    return "\n".join(f"{name}={value}" for name, value in os.environ.items()).encode()


def child(reader, request):
    """Start a process that outlives the call."""
    started = subprocess.Popen(["sleep", "1000"])
    yield str(started.pid).encode()
    os._exit(1)


def seeks(reader, request):
    end = reader.seek(-4, io.SEEK_END)
    tail = reader.read(4)
    reader.seek(0)
    head = bytearray(4)
    reader.readinto(head)
    middle = bytes(reader.read_range(4, 8))
    rest = b"".join(bytes(piece) for piece in reader)
    return f"{end} {tail!r} {bytes(head)!r} {middle!r} {len(rest)} {reader.tell()}".encode()


def facts(reader, request):
    return f"{reader.key} {reader.size_bytes} {reader.etag} {reader.headers.get('content-type')}".encode()


def slow_copy(reader, request, *, started: str, until: str):
    """Read a first piece, and the rest only when a file exists."""
    pieces = iter(reader)
    yield next(pieces)
    Path(started).touch()
    while not Path(until).exists():
        time.sleep(0.005)
    yield from pieces


@transform(deterministic=False)
def random_bytes(reader, request):
    return request.rng.randbytes(16)


@transform(uses_epoch=True)
def augmented(reader, request):
    return f"{request.epoch} {request.seed} {request.rng.random()}".encode()


def sees_no_epoch(reader, request):
    return f"{dict(request.query)} {dict(request.headers)}".encode()


def _check(arguments: Mapping[str, Any]) -> None:
    if arguments["width"] * arguments["height"] > 10_000:
        raise ValueError("the picture would be too large")


@transform(query=("width", "mode"), headers=("Accept",), check=_check)
def sized(
    reader: SourceReader,
    request: TransformRequest,
    *,
    width: int,
    height: int = 8,
    fit: Literal["crop", "pad"] = "crop",
    names: tuple[str, ...] = (),
    scale: float | None = None,
    box: Annotated[list[int], lambda text: [int(part) for part in text.split("x")]] | None = None,
) -> bytes:
    return repr((width, height, fit, names, scale, box, dict(request.query), dict(request.headers))).encode()


@transform(rest="extensions")
def selecting(reader, request, *, extensions: tuple[str, ...], invert: bool = False) -> bytes:
    return repr((extensions, invert)).encode()


def _doubled_size(info, arguments):
    return info.size_bytes * arguments["times"] if not info.key.endswith(".unknown") else None


@transform(version="2", content_type="text/plain", size=_doubled_size)
def repeated(reader, request, *, times: int = 2) -> Iterator[bytes]:
    for _ in range(times):
        reader.seek(0)
        yield from reader


def _swapped_range(reader, request, start, end):
    yield bytes(reader.read_range(start, end)).swapcase()


@transform(size=lambda info, arguments: info.size_bytes, ranges=_swapped_range)
def swapped(reader, request):
    yield reader.read().swapcase()


def _broken_size(info, arguments):
    raise RuntimeError("no size")


@transform(size=_broken_size)
def broken_size(reader, request):
    return b""


class Unstable:
    """An object without content to compare."""

    def __reduce__(self):
        raise TypeError("no")


UNSTABLE = Unstable()


def undigestible(reader, request):
    return repr(UNSTABLE).encode()


@transform(version="1")
def versioned(reader, request):
    return repr(UNSTABLE).encode()


def forked_child_holds_socket(reader, request):
    """Die while a forked child still has all descriptors."""
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(5)


def forges(reader, request, *, payload: str, kind: int = 5):
    """Write a frame of its own to the gateway's socket."""
    for descriptor in range(3, 64):
        try:
            end = socket.socket(fileno=os.dup(descriptor))
            if end.family == socket.AF_UNIX:
                end.sendall(struct.pack("<II", kind, len(payload)) + payload.encode())
        except OSError:
            continue
    yield b"x"


def floods_the_log(reader, request):
    for _ in range(1000):
        print("x" * 1000)
    print("y" * 100_000)
    return b"done"
