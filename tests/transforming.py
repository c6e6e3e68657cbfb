"""Transforms in worker processes without the rest of the gateway: sources in a folder, results in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.gateway.config import AccessPoint
from penstock.gateway.objects import Caller, GatewayRequest, ObjectHead
from penstock.gateway.transforms.worker_transform import WorkerTransform, make_transform
from penstock.types import ByteRange

AUTHORED = Path(__file__).parent / "integration" / "gateway" / "authored.py"


class MemoryOutput:
    """Takes a result into memory, as ``ResultWriter``.

    ``takes`` may be cleared to let the worker wait, ``length_bytes`` counts also what is not kept.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self.headers: Mapping[str, str] | None = None
        self.size_bytes: int | None = None
        self.data = bytearray()
        self.length_bytes = 0
        self.arrived = asyncio.Event()
        self.takes = asyncio.Event()
        self.takes.set()
        self._keeps = keeps
        self._memory = memoryview(bytearray(1 << 20))

    def begin(self, headers: Mapping[str, str], *, size_bytes: int | None = None) -> None:
        self.headers, self.size_bytes = dict(headers), size_bytes

    def buffer(self) -> memoryview:
        return self._memory

    async def filled(self, length_bytes: int) -> None:
        await self.write(self._memory[:length_bytes])

    async def write(self, data: Any) -> None:
        self.length_bytes += len(data)
        if self._keeps:
            self.data += data
        self.arrived.set()
        await self.takes.wait()


class FolderSource:
    """One version of a file in a folder, as ``Source``."""

    def __init__(self, folder: Path, key: str) -> None:
        info = ps.connect(folder).stat(key)
        self.key = key
        self.head = ObjectHead(
            key=key,
            size_bytes=info.size_bytes,
            etag=info.etag or "",
            last_modified_s=0.0,
            headers={"Content-Type": "text/x-source"},
        )
        self._folder = folder

    def worker_url(self) -> tuple[str, str]:
        return str(self._folder), self.key

    def signed_url(self, headers: Mapping[str, str]) -> str:
        raise AssertionError(f"workers read the folder themselves: {headers}")

    async def read(self, span: ByteRange | None = None) -> AsyncIterator[bytes]:
        yield (self._folder / self.key).read_bytes()


def get_request(**changes: Any) -> GatewayRequest:
    """A GET of an object."""
    fields: dict[str, Any] = {
        "method": "GET",
        "bucket": "train",
        "key": "key",
        "query": {},
        "headers": {},
        "caller": Caller("AK", False),
        "url": "http://gateway/train/key",
        "remote": "127.0.0.1",
        "request_id": "REQ1",
    }
    return GatewayRequest(**(fields | changes))


class RunningTransform:
    """A transform of ``authored.py`` and a folder of sources."""

    def __init__(self, transform: WorkerTransform, folder: Path) -> None:
        self.transform = transform
        self.folder = folder

    async def run(
        self,
        output: MemoryOutput | None = None,
        *,
        key: str = "key",
        span: ByteRange | None = None,
        source: Any = None,
        **request: Any,
    ) -> MemoryOutput:
        """Produce a result."""
        output = MemoryOutput() if output is None else output
        made = get_request(key=key, **request)
        source = source or FolderSource(self.folder, key)
        await self.transform.run(source, made, self.transform.arguments(made), output, span)
        return output

    async def text(self, **request: Any) -> str:
        """Produce a result that is text."""
        return (await self.run(**request)).data.decode()


@asynccontextmanager
async def running(
    name: str, folder: Path, /, *, processes: int = 1, **settings: Any
) -> AsyncIterator[RunningTransform]:
    """Start a transform; further settings are those of access points, or else arguments of the transform."""
    if not (folder / "key").exists():
        (folder / "key").write_bytes(b"hello world")
    fields = {field: settings.pop(field) for field in list(settings) if field in AccessPoint.__dataclass_fields__}
    fields.setdefault("arguments", {field: str(value) for field, value in settings.items()})
    spelled = name if ":" in name or "(" in name else f"{AUTHORED}:{name}"
    point = AccessPoint(name="train", upstream=str(folder), transform=spelled, processes=processes, **fields)
    transform = make_transform(point, folder=AUTHORED.parent)
    try:
        await transform.start()
        yield RunningTransform(transform, folder)
    finally:
        await transform.close()
