"""How many milliseconds does one call of a Lambda handler in the gateway take, beyond what the handler itself does?

`returns` calls a handler that returns at once: event, worker process, result. `answers` calls one that sends 1 KB by boto3, as
on AWS: a signed request to the internal endpoint, verified and taken into memory. `answers 1 MB` sends more. Calls follow one
another; the handlers are imported before the clock starts. Most of an answer is boto3's own work.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web
from clients import Function
from harness import arguments

from penstock.bench.turns import Row, Run
from penstock.gateway.aws_lambda import PATH, InternalEndpoint, LambdaTransform, WriteGetObjectResponse
from penstock.gateway.config import AccessPoint, LambdaConfig
from penstock.gateway.objects import Caller, GatewayRequest

HANDLERS = """
import boto3
s3 = boto3.client("s3")

def returns(event, context):
    return {}

def answers(event, context):
    where = event["getObjectContext"]
    body = bytes(int(event["configuration"]["payload"]))
    s3.write_get_object_response(Body=body, RequestRoute=where["outputRoute"], RequestToken=where["outputToken"])
"""
SIZES_BYTES = {"returns": 0, "answers": 1000, "answers 1 MB": 10**6}
METRICS = {"ms": lambda answer: answer["seconds"] / answer["calls"] * 1e3}


class NoSource:
    """A source that no handler reads."""

    key, head = "key", None

    def signed_url(self, headers: Mapping[str, str]) -> str:
        return "http://127.0.0.1/"


class Counted:
    """A result of which only the length is kept."""

    length_bytes = 0

    def begin(self, headers: Mapping[str, str], *, size_bytes: int | None = None) -> None:
        self.length_bytes = 0

    async def write(self, data: bytes) -> None:
        self.length_bytes += len(data)


class Gateway:
    """The internal endpoint and three handlers, on an event loop in a thread."""

    def __init__(self, folder: str) -> None:
        self.loop = uvloop.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.transforms: dict[str, LambdaTransform] = {}
        self.wait(self.start(folder))

    def wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def start(self, folder: str) -> None:
        self.runner = web.ServerRunner(web.Server(self.route, access_log=None))
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.endpoint = InternalEndpoint(self.runner.addresses[0][1])
        self.write = WriteGetObjectResponse(self.endpoint)
        for name, size_bytes in SIZES_BYTES.items():
            function = name.partition(" ")[0]
            payload = str(size_bytes)
            handler = LambdaConfig(handler=f"app.{function}", code_dir=folder, payload=payload, memory_bytes_max=0)
            point = AccessPoint(name="bench", upstream="memory://", handler=handler, processes=1)
            self.transforms[name] = LambdaTransform(point, self.endpoint)
            await self.transforms[name].start()

    async def route(self, request: web.BaseRequest) -> web.StreamResponse:
        assert request.path == PATH
        return await self.write(request)

    def close(self) -> None:
        for transform in self.transforms.values():
            self.wait(transform.close())
        self.wait(self.runner.cleanup())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    def measure(self, name: str, calls: int) -> dict[str, Any]:
        return self.wait(self.calls(name, calls))

    async def calls(self, name: str, calls: int) -> dict[str, Any]:
        transform, result = self.transforms[name], Counted()
        wanted = SIZES_BYTES[name]
        start_s = time.perf_counter()
        for number in range(calls):
            request = GatewayRequest(
                method="GET", bucket="bench", key="key", query={}, headers={"Host": "bench"}, caller=Caller("AK", False),
                url="http://bench/key", remote="127.0.0.1", request_id=f"R{number}",
            )  # fmt: skip
            if name == "returns":
                await transform.invoke("HeadObject", request, "http://127.0.0.1/")
            else:
                await transform.run(NoSource(), request, {}, result)  # type: ignore[arg-type]
                assert result.length_bytes == wanted
        return {"seconds": time.perf_counter() - start_s, "calls": calls}


def main(options: Any) -> None:
    calls = 50 if options.quick else 500
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "app.py").write_text(HANDLERS)
        gateway = Gateway(folder)
        try:
            clients = [Function(name, gateway.measure, name, calls) for name in gateway.transforms]
            run = Run("a call of a Lambda handler", None, options.select(clients), METRICS, options.turns(9, 3))
            with run:
                run.turns(lambda client: client.measure(), warm=lambda client: client.measure())
            rows = [Row("answers, ms per call", run.values("answers", "ms"), 15, 3, less=True)]
            run.report(rows)
        finally:
            gateway.close()


if __name__ == "__main__":
    main(arguments(__doc__))
