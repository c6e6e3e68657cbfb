"""Does a gateway bear a thousand clients at once?

1 000 connections to one gateway of two worker processes for ``--minutes``: small and large GETs, ranges, HEAD, listings,
transformed objects, cold and warm, slow readers, and clients that leave halfway. The origin is nginx with files in memory.

Every byte that arrives is compared with what it must be. There must be no error, and the processes of the gateway together
may hold the byte budget and 200 MB (PSS). The clients are one process with asyncio on uvloop; on two cores they take more
time than the gateway, so the rates are no measure of its speed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from clients import BUCKET
from gateway import gateway
from harness import arguments, keys_of, memory_folder

from penstock.bench.origin.server import Origin
from penstock.bench.process import BenchError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

MIB = 1 << 20
CLIENTS = 1000
SMALL_COUNT, SMALL_BYTES = 2000, 100_000
LARGE_COUNT, LARGE_BYTES = 8, 100_000_000
TEXT_COUNT, TEXT_BYTES = 400, 300_000
MEMORY_OVER_BUDGET_BYTES = 200_000_000
ANSWER_S_MAX = 120.0
SLOW_PIECE_BYTES, SLOW_PAUSE_S = 65536, 0.5  # 128 KB/s, above what the gateway demands
SETTLE_S = 12.0
DESCRIPTORS_LEFT_MAX = 32

TRANSFORM = """
from penstock.gateway.transforms.authoring import transform


@transform(version="1")
def invert(reader, request, *, salt: int = 0):
    table = bytes(255 - byte for byte in range(256))
    for piece in reader:
        yield bytes(piece).translate(table)
"""


@dataclass
class Tally:
    """What the clients saw."""

    requests: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    received_bytes: int = 0

    def fail(self, what: str) -> None:
        self.errors[what] += 1


class Expected:
    """The bytes of every object: 64 bytes of its own, and then a block that is the same for all."""

    def __init__(self) -> None:
        self.block = random.Random(0).randbytes(4 * MIB)
        self.inverted = self.block.translate(bytes(255 - byte for byte in range(256)))
        self._views = memoryview(self.block), memoryview(self.inverted)

    def write(self, path: Path, size_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for start in range(0, size_bytes, len(self.block)):
                file.write(self.block[: min(len(self.block), size_bytes - start)])
            file.seek(0)
            file.write(self._own(path.name))

    def _own(self, name: str) -> bytes:
        return f"{zlib.crc32(name.encode()):08x}{name:<56}"[:64].encode()

    def matches(self, data: bytes, name: str, start: int, *, inverted: bool) -> bool:
        """Whether bytes that arrived are those of an object from an offset on."""
        at = 0
        if start < 64:
            own = self._own(name)
            if inverted:
                own = own.translate(bytes(255 - byte for byte in range(256)))
            at = min(64 - start, len(data))
            if data[:at] != own[start : start + at]:
                return False
        view, block = memoryview(data), self._views[inverted]
        while at < len(data):
            offset = (start + at) % len(block)
            count = min(len(data) - at, len(block) - offset)
            if view[at : at + count] != block[offset : offset + count]:
                return False
            at += count
        return True


class Client:
    """One client with one connection at a time, which speaks HTTP itself so that a thousand of them cost little."""

    def __init__(self, number: int, port: int, expected: Expected, tally: Tally) -> None:
        self.random = random.Random(number)
        self._port, self._expected, self._tally = port, expected, tally
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def run(self, kind: str, until_s: float) -> None:
        """Ask again and again until the time is over."""
        actions: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "small": self.small, "range": self.range, "head": self.head, "list": self.list, "large": self.large,
            "slow": self.slow, "leave": self.leave, "transformed": self.transformed,
        }  # fmt: skip
        await asyncio.sleep(self.random.random() * 2)
        while time.monotonic() < until_s:
            chosen = kind if kind != "mixed" else self.random.choice(["small", "range", "head", "list", "transformed"])
            try:
                async with asyncio.timeout(ANSWER_S_MAX):
                    await actions[chosen]()
                self._tally.requests[chosen] += 1
            except (OSError, EOFError, asyncio.IncompleteReadError, TimeoutError, ValueError, AssertionError) as error:
                self._tally.fail(f"{chosen}: {type(error).__name__} {str(error)[:120]}")
                self.drop()
                await asyncio.sleep(0.5)
            await asyncio.sleep(self.random.random() * (0.2 if chosen != "list" else 2))
        self.drop()

    def drop(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def _ask(self, method: str, path: str, **headers: str) -> tuple[int, dict[str, str]]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port, limit=128 * 1024)
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        self._writer.write(f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\n{lines}\r\n".encode())
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        found = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        return int(head[0].split()[1]), found

    async def _body(
        self, found: dict[str, str], *, name: str, start: int, inverted: bool, pause_s: float = 0.0, most: int = 1 << 62
    ) -> int:
        """Read and compare a body, or its beginning; return its length."""
        assert self._reader is not None
        total = 0
        is_chunked = "content-length" not in found
        left = 0 if is_chunked else int(found["content-length"])
        while total < most:
            if left == 0 and is_chunked:
                left = int((await self._reader.readline()) or b"", 16)
                if left == 0:
                    await self._reader.readline()
                    break
            elif left == 0:
                break
            piece = await self._reader.read(min(left, SLOW_PIECE_BYTES if pause_s else MIB))
            if not piece:
                raise EOFError("the body ended early")
            if not self._expected.matches(piece, name, start + total, inverted=inverted):
                raise AssertionError(f"wrong bytes of {name} after {start + total}")
            left, total = left - len(piece), total + len(piece)
            self._tally.received_bytes += len(piece)
            if left == 0 and is_chunked:
                await self._reader.readline()
            if pause_s:
                await asyncio.sleep(pause_s)
        return total

    async def _get(self, key: str, size_bytes: int, *, bucket: str = BUCKET, query: str = "", **options: Any) -> None:
        status, found = await self._ask("GET", f"/{bucket}/{key}{query}")
        if status != 200:
            raise ValueError(f"status {status} of GET {bucket}/{key.split('/', maxsplit=1)[0]}")
        inverted = bucket != BUCKET
        length = await self._body(found, name=key.rsplit("/", maxsplit=1)[-1], start=0, inverted=inverted, **options)
        if length != size_bytes and "most" not in options:
            raise ValueError(f"{length} of {size_bytes} bytes")

    async def small(self) -> None:
        await self._get(f"small/{self.random.randrange(SMALL_COUNT):06d}", SMALL_BYTES)

    async def range(self) -> None:
        name = f"{self.random.randrange(LARGE_COUNT):06d}"
        start = self.random.randrange(LARGE_BYTES - MIB)
        status, found = await self._ask(
            "GET", f"/{BUCKET}/large/{name}", Range=f"bytes={start}-{start + self.random.randrange(MIB)}"
        )
        if status != 206:
            raise ValueError(f"status {status} of a range")
        await self._body(found, name=name, start=start, inverted=False)

    async def head(self) -> None:
        status, found = await self._ask("HEAD", f"/{BUCKET}/small/{self.random.randrange(SMALL_COUNT):06d}")
        if status != 200 or found["content-length"] != str(SMALL_BYTES):
            raise ValueError(f"status {status} of HEAD")

    async def list(self) -> None:
        status, found = await self._ask("GET", f"/{BUCKET}?list-type=2&prefix=small/&max-keys=100")
        assert self._reader is not None
        body = await self._reader.readexactly(int(found["content-length"]))
        if status != 200 or body.count(b"<Contents>") != 100:
            raise ValueError(f"status {status} of a listing")

    async def large(self) -> None:
        await self._get(f"large/{self.random.randrange(LARGE_COUNT):06d}", LARGE_BYTES)

    async def transformed(self) -> None:
        key = f"text/{self.random.randrange(TEXT_COUNT):06d}"
        kind = self.random.random()
        if kind < 0.6:
            await self._get(key, TEXT_BYTES, bucket="inverted")
            return
        start = self.random.randrange(TEXT_BYTES - 1000)
        status, found = await self._ask("GET", f"/inverted/{key}", Range=f"bytes={start}-{start + 999}")
        if status != 206:
            raise ValueError(f"status {status} of a range of a result")
        await self._body(found, name=key.rsplit("/", maxsplit=1)[-1], start=start, inverted=True)

    async def slow(self) -> None:
        await self._get(
            f"large/{self.random.randrange(LARGE_COUNT):06d}", LARGE_BYTES, pause_s=SLOW_PAUSE_S, most=4 * MIB
        )
        self.drop()

    async def leave(self) -> None:
        bucket, key = self.random.choice([(BUCKET, "large/000000"), ("inverted", "text/000000")])
        await self._get(key, LARGE_BYTES, bucket=bucket, most=self.random.randrange(200_000))
        self.drop()


MIX = {"mixed": 740, "small": 120, "large": 20, "slow": 60, "leave": 60}


def processes_of(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for each in found:
        try:
            for task in Path(f"/proc/{each}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def pss_bytes(pids: list[int]) -> int:
    """Return what processes hold, shared pages by their share; memory of files in /dev/shm that are mapped is the cache's."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        anonymous = re.search(r"^Pss_Anon:\s+(\d+)", text, re.MULTILINE)
        files = re.search(r"^Pss_File:\s+(\d+)", text, re.MULTILINE)
        total += 1024 * sum(int(each[1]) for each in (anonymous, files) if each)
    return total


def descriptors(pids: list[int]) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids if Path(f"/proc/{pid}/fd").exists())


def connections_to(port: int) -> int:
    """Return how many connections to a port of loopback are open: those that the gateway keeps for its next requests."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[2].endswith(f":{port:04X}") and line.split()[3] == "01" for line in lines)


def targets(pids: list[int]) -> list[str]:
    """Return what the open descriptors of processes are."""
    found = []
    for pid in pids:
        for each in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found.append(str(each.readlink()))
            except OSError:
                continue
    return found


async def watch(pid: int, peaks: dict[str, int], until_s: float) -> None:
    while time.monotonic() < until_s:
        pids = processes_of(pid)
        peaks["pss_bytes"] = max(peaks.get("pss_bytes", 0), await asyncio.to_thread(pss_bytes, pids))
        peaks["processes"] = max(peaks.get("processes", 0), len(pids))
        peaks["descriptors"] = max(peaks.get("descriptors", 0), descriptors(pids))
        await asyncio.sleep(1)


async def crowd(port: int, pid: int, expected: Expected, seconds: float) -> tuple[Tally, dict[str, int]]:
    tally, peaks = Tally(), {}
    until_s = time.monotonic() + seconds
    kinds = [kind for kind, count in MIX.items() for _ in range(count)]
    runs = [Client(number, port, expected, tally).run(kind, until_s) for number, kind in enumerate(kinds)]
    await asyncio.gather(watch(pid, peaks, until_s), *runs)
    return tally, peaks


def budget_bytes(port: int) -> int:
    """Return the memory that all processes of the gateway may take for reading and sending."""
    import urllib.request

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/metrics") as answer:
        text = answer.read().decode()
    found = re.search(r"^penstock_gateway_memory_max_bytes(?:\{\})? (\S+)", text, re.MULTILINE)
    if found is None:
        raise BenchError("the metrics tell no limit of the memory")
    return int(float(found[1]))


def config(root: Path, origin: str, folder: Path) -> Path:
    """Write a configuration: the bucket as it is, and inverted by a transform."""
    (folder / "inverting.py").write_text(TRANSFORM)
    text = f"""
workers = 2
[access_points.{BUCKET}]
upstream = "s3://{BUCKET}"
upstream_options = {{ endpoint_url = "{origin}" }}
[access_points.inverted]
upstream = "s3://{BUCKET}"
upstream_options = {{ endpoint_url = "{origin}" }}
transform = "inverting:invert"
folder = "{folder}"
processes = 2
"""
    path = folder / "gateway.toml"
    path.write_text(text)
    return path


def main() -> None:
    options = arguments(
        __doc__ or "",
        minutes={"type": float, "default": 10.0, "help": "how long"},
        descriptors={"action": "store_true", "help": "print what the open descriptors are at the end"},
    )
    expected = Expected()
    with memory_folder() as root, memory_folder() as folder:
        for prefix, count, size_bytes in (
            ("small", SMALL_COUNT, SMALL_BYTES), ("large", LARGE_COUNT, LARGE_BYTES), ("text", TEXT_COUNT, TEXT_BYTES)
        ):  # fmt: skip
            for key in keys_of(prefix, count):
                expected.write(root / BUCKET / key, size_bytes)
        with Origin(root) as origin, gateway(None, "--config", str(config(root, origin.url, folder))) as served:
            port = int(served.url.rpartition(":")[2])
            budget = budget_bytes(port)
            before = processes_of(served.pid)
            before_descriptors = descriptors(before)
            seconds = 20.0 if options.quick else options.minutes * 60
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                tally, peaks = runner.run(crowd(port, served.pid, expected, seconds))
            time.sleep(SETTLE_S)
            after = processes_of(served.pid)
            held = descriptors(after) - before_descriptors - connections_to(origin.port)
            left = held, len(after) - len(before)
            if options.descriptors:
                print(Counter(re.sub(r"[0-9a-f]{6,}|[0-9]+", "#", target) for target in targets(after)).most_common(12))
            report(tally, peaks, seconds, budget=budget, left=left)


def report(tally: Tally, peaks: dict[str, int], seconds: float, *, budget: int, left: tuple[int, int]) -> None:
    allowed = budget + MEMORY_OVER_BUDGET_BYTES
    rows = {
        "clients": CLIENTS,
        "seconds": seconds,
        "requests_per_s": round(sum(tally.requests.values()) / seconds, 1),
        "MB_per_s": round(tally.received_bytes / seconds / 1e6, 1),
        "requests": dict(tally.requests),
        "errors": dict(tally.errors.most_common(12)),
        "memory_peak_MB": round(peaks["pss_bytes"] / 1e6, 1),
        "memory_allowed_MB": round(allowed / 1e6, 1),
        "descriptors_peak": peaks["descriptors"],
        "descriptors_left": left[0],
        "processes_left": left[1],
    }
    for name, value in rows.items():
        print(f"{name:20} {value}")
    print(json.dumps({"bench": "gateway_clients", **rows}))
    if tally.errors or peaks["pss_bytes"] > allowed or left[0] > DESCRIPTORS_LEFT_MAX or left[1] > 0:
        sys.exit(1)


if __name__ == "__main__":
    main()
