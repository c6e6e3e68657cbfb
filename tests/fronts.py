"""A gateway's front on loopback, in a thread with an event loop of its own, for tests with real clients."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import TYPE_CHECKING, Any

import uvloop

from penstock.gateway.authentication import OpenAuthenticator
from penstock.gateway.buckets.upstream import UpstreamBucket
from penstock.gateway.http import Front

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Coroutine, Iterable
    from typing import Self

    from penstock.gateway.http import AccessRecord
    from penstock.gateway.objects import Authenticator, Bucket, CachedBucket, Caller


class FixedBuckets:
    """A table of buckets that never changes."""

    def __init__(self, buckets: Iterable[Bucket]) -> None:
        self._buckets = {bucket.name: bucket for bucket in buckets}

    async def get(self, name: str, caller: Caller) -> Bucket | None:
        """Return a bucket."""
        return self._buckets.get(name)

    def get_nowait(self, name: str) -> CachedBucket | None:
        """Return a bucket of a store."""
        found = self._buckets.get(name)
        return found if isinstance(found, UpstreamBucket) else None

    async def names(self, caller: Caller) -> list[Bucket]:
        """Return all buckets."""
        return [self._buckets[name] for name in sorted(self._buckets)]

    async def create(self, name: str, caller: Caller, *, region: str) -> None:
        """Refuse."""
        raise AssertionError("no test of this table creates buckets")

    async def delete(self, name: str, caller: Caller) -> None:
        """Refuse."""
        raise AssertionError("no test of this table deletes buckets")

    async def close(self) -> None:
        """Close all buckets."""
        for bucket in self._buckets.values():
            await bucket.close()


class RunningFront:
    """A front that serves buckets until the block ends.

    Attributes:
        records: The access log.
        front: The front; only its own thread may use it.
    """

    def __init__(
        self,
        *buckets: Bucket,
        authenticator: Authenticator | None = None,
        table: Any = None,
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        self.records: list[AccessRecord] = []
        self._table = table or FixedBuckets(buckets)
        options.setdefault("log", self.records.append)
        self._make = lambda: Front(self._table, authenticator or OpenAuthenticator(), **options)
        self._tls = tls
        self._loop = uvloop.new_event_loop()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="front")
        self.front: Front

    @property
    def url(self) -> str:
        """URL of the gateway."""
        return f"http://127.0.0.1:{self.port}"

    def call(self, function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine on the front's loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(function(), self._loop).result(60)

    def __enter__(self) -> Self:
        self._thread.start()
        self.call(self._start)
        return self

    async def _start(self) -> None:
        self.front = self._make()
        await self.front.start([self._socket], tls=self._tls)
        self._socket.close()

    def __exit__(self, *_: object) -> None:
        try:
            self.call(self._stop)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    async def _stop(self) -> None:
        await self.front.close()
        await self._table.close()
        current = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not current]
        if others:
            await asyncio.wait(others, timeout=5)
            assert not [task for task in others if not task.done()], "tasks are left"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()


def s3_client(url: str, **options: Any) -> Any:
    """Return a boto3 client for a gateway."""
    import boto3
    from botocore.config import Config

    more = options.pop("config", {})
    more = {"signature_version": "s3v4", "read_timeout": 20, "retries": {"total_max_attempts": 1}} | more
    config = Config(s3={"addressing_style": "path"}, **more)
    options = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"} | options
    return boto3.client("s3", endpoint_url=url, config=config, **options)


def raw_exchange(port: int, request: bytes, *, timeout_s: float = 10.0) -> bytes:
    """Send bytes to a port, and return all that comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
        connection.sendall(request)
        found = bytearray()
        while piece := connection.recv(1 << 16):
            found += piece
        return bytes(found)
