"""What does it cost to read through the gateway, as it is and transformed?

All clients take turns within one run. `nginx` serves the files from memory; it is also the gateway's upstream. The gateway has
one worker process, and its cache is in memory too. wrk discards what it reads, so it costs little beside the servers.

The first part reads objects of 100 MB on 4 connections. The second reads objects of 100 KB on 64 connections; its requests to
the gateway are signed in headers (SigV4), those to nginx are not, because it would not verify them. The third reads objects of
100 KB through a cold cache from an origin that answers after 30 ms, with penstock's `read_many` on both sides. The fourth
reads one shard with one GET by a client that discards: the tar as it is from the origin, and the TFRecords that the gateway
makes of it.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from clients import BUCKET, Function, Wrk
from harness import arguments, keys_of, memory_folder, objects
from peers._driver import ACCESS_KEY, REGION, SECRET_KEY

from penstock.bench.origin.server import Origin, ends_with_us
from penstock.bench.process import BenchError
from penstock.bench.turns import Row, Run

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
LARGE_BYTES, LARGE_COUNT = 100_000_000, 4
SMALL_BYTES, SMALL_COUNT = 100_000, 1000
COLD_COUNT = 1500
SHARD_SAMPLES, SAMPLE_BYTES = 2000, 100_000
DELAYED = {"ttfb_ms": 30.0, "rate_bytes_per_s": 90_000_000}
READY_S_MAX = 30.0


class Gateway:
    """A ``penstock gateway`` in a process of its own.

    Args:
        upstream: URL of the origin; None if the flags say what is served.
        flags: Further options of the command.
        keys: Whether requests must be signed.
    """

    def __init__(self, upstream: str | None, *flags: str, keys: bool = False) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-bench-", dir="/dev/shm"))
        environment = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
        environment |= {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
        if keys:
            environment["PENSTOCK_GATEWAY_KEYS"] = f"{ACCESS_KEY}:{SECRET_KEY}:ro"
        self._log = (self._folder / "log").open("w+")
        served = [] if upstream is None else ["--upstream", f"s3://{BUCKET}", "--endpoint-url", upstream]
        command = [
            *ends_with_us("TERM"), sys.executable, "-m", "penstock", "gateway", *served,
            "--cache", f"{self._folder / 'cache'}:32GB", "--metadata-ttl", "3600", "--port", "0",
            *flags,
        ]  # fmt: skip
        self._process = subprocess.Popen(command, env=environment, stderr=self._log)
        self.url = self._wait_ready()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait_ready(self) -> str:
        until_s = time.monotonic() + READY_S_MAX
        while time.monotonic() < until_s and self._process.poll() is None:
            self._log.seek(0)
            if found := re.search(r"at (http://[\d.]+:\d+)", self._log.read()):
                return found[1]
            time.sleep(0.05)
        self._log.seek(0)
        raise BenchError(f"the gateway did not start:\n{self._log.read()[-2000:]}")

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def gateway(upstream: str | None, *flags: str, keys: bool = False) -> Iterator[Gateway]:
    process = Gateway(upstream, *flags, keys=keys)
    try:
        yield process
    finally:
        process.close()


class WrkAt(Wrk):
    """wrk against a server of its own, whatever the run's origin is."""

    def __init__(self, name: str, url: str, **options: Any) -> None:
        super().__init__(**options)
        self.name, self._own_url = name, url

    def start(self, origin: Any) -> None:
        super().start(origin)
        self._url = self._own_url


def requests_script(url: str, keys: list[str], *, signed: bool) -> str:
    """Return the wrk script that reads keys in turn, with the headers that sign them if `signed`; they hold for 15 minutes."""
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    signer = S3SigV4Auth(Credentials(ACCESS_KEY, SECRET_KEY), "s3", REGION)
    lines = ["requests = {}"]
    for index, key in enumerate(keys):
        request = AWSRequest("GET", f"{url}/{BUCKET}/{key}")
        if signed:
            signer.add_auth(request)
        headers = ", ".join(f'["{name}"]="{value}"' for name, value in request.headers.items())
        lines.append(f'requests[{index + 1}] = wrk.format("GET", "/{BUCKET}/{key}", {{{headers}}})')
    lines += [
        "position = 0",
        "request = function()",
        f"  position = position % {len(keys)} + 1",
        "  return requests[position]",
        "end",
    ]
    # in init, because wrk knows the Host header only then
    body = "\n  ".join(lines[: len(keys) + 1])
    return f"init = function(args)\n  {body}\nend\n" + "\n".join(lines[len(keys) + 1 :])


def warm(url: str, keys: list[str]) -> None:
    """Read every object once, so that the gateway's cache has it."""
    import penstock

    credentials = penstock.Credentials(access_key=ACCESS_KEY, secret_key=SECRET_KEY)
    with penstock.connect(f"s3://{BUCKET}", endpoint_url=url, region=REGION, credentials=credentials) as store:
        for key in keys:
            for _ in store.read_parts([key]):
                pass


def rate(answer: dict[str, Any]) -> float:
    return float(answer["bytes"] / answer["seconds"] / 1e6)


def per_s(answer: dict[str, Any]) -> float:
    return float(answer["objects"] / answer["seconds"])


def large_objects(options: Any) -> None:
    """Objects of 100 MB, unsigned, 4 connections."""
    seconds = 2.0 if options.quick else 5.0
    keys = keys_of("large", LARGE_COUNT)
    with objects({"large": (LARGE_COUNT, LARGE_BYTES)}) as root, Origin(root) as origin, gateway(origin.url) as served:
        warm(served.url, keys)
        clients = [
            WrkAt(name, url, connections=4, seconds=seconds, script=requests_script(url, keys, signed=False))
            for name, url in (("nginx", origin.url), ("gateway", served.url))
        ]
        with Run("gateway: large objects", origin, clients, {"MB/s": rate}, options.turns(5, 1)) as run:
            run.turns(lambda client: client.measure())
            run.report([Row("100 MB, warm : nginx", run.ratios("MB/s", "gateway", "nginx"), 0.5, 0.8)])


def small_objects(options: Any) -> None:
    """Objects of 100 KB, signed, 64 connections."""
    seconds = 2.0 if options.quick else 5.0
    keys = keys_of("small", SMALL_COUNT)
    with (
        objects({"small": (SMALL_COUNT, SMALL_BYTES)}) as root,
        Origin(root) as origin,
        gateway(origin.url, keys=True) as served,
    ):
        warm(served.url, keys)
        clients = [
            WrkAt("nginx", origin.url, connections=64, seconds=seconds,
                  script=requests_script(origin.url, keys, signed=False)),
            WrkAt("gateway", served.url, connections=64, seconds=seconds,
                  script=requests_script(served.url, keys, signed=True)),
        ]  # fmt: skip
        with Run("gateway: small objects", origin, clients, {"requests/s": per_s}, options.turns(5, 1)) as run:
            run.turns(lambda client: client.measure())
            run.report(
                [
                    Row("100 KB, signed, warm, requests/s", run.values("gateway", "requests/s"), 5000, 9000),
                    # a machine on which nginx answers 27 000 requests/s
                    Row("100 KB, signed, warm : nginx", run.ratios("requests/s", "gateway", "nginx"), 5 / 27, 9 / 27),
                ]
            )


def read_all(url: str, keys: list[str]) -> dict[str, Any]:
    import penstock

    credentials = penstock.Credentials(access_key=ACCESS_KEY, secret_key=SECRET_KEY)
    with penstock.connect(f"s3://{BUCKET}", endpoint_url=url, region=REGION, credentials=credentials) as store:
        begun_s = time.perf_counter()
        size_bytes = sum(len(blob.data) for blob in store.read_many(keys))
        return {"objects": len(keys), "bytes": size_bytes, "seconds": time.perf_counter() - begun_s}


def cold_objects(options: Any) -> None:
    """Objects of 100 KB that no cache has, from a delayed origin."""
    turns = options.turns(5, 1)
    names = [f"cold{turn}" for turn in range(turns + 1)]
    with (
        objects(dict.fromkeys(names, (COLD_COUNT, SMALL_BYTES))) as root,
        Origin(root, **DELAYED) as origin,
        gateway(origin.url, keys=True) as served,
    ):
        turn = iter(range(turns + 1))
        clients = [
            Function("read_many", lambda: read_all(origin.url, keys_of(names[-1], COLD_COUNT))),
            Function("gateway", lambda: read_all(served.url, keys_of(names[next(turn)], COLD_COUNT))),
        ]
        with Run("gateway: cold objects", origin, clients, {"objects/s": per_s}, turns) as run:
            run.turns(lambda client: client.measure(), warm=lambda client: client.measure())
            run.report([Row("100 KB, cold : read_many", run.ratios("objects/s", "gateway", "read_many"), 0.6, 0.85)])


def discarded(url: str, key: str, buffer: bytearray) -> dict[str, Any]:
    """Read one object with one GET, and note when its first byte came."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
    try:
        begun_s = time.perf_counter()
        connection.request("GET", f"/{BUCKET}/{key}")
        answer = connection.getresponse()
        if answer.status != 200:
            raise BenchError(f"{url}: status {answer.status}")
        size_bytes, first_s = 0, 0.0
        while count := answer.readinto(buffer):
            first_s = first_s or time.perf_counter() - begun_s
            size_bytes += count
        return {"bytes": size_bytes, "first_s": first_s, "seconds": time.perf_counter() - begun_s}
    finally:
        connection.close()


def write_shards(root: Path, count: int) -> list[str]:
    """Write tars of 200 MB with 100 KB samples, and return their keys."""
    import io
    import random
    import tarfile

    folder = root / BUCKET / "tar"
    folder.mkdir(parents=True)
    data = random.Random(0).randbytes(SAMPLE_BYTES + 4096)
    for number in range(count):
        with tarfile.open(folder / f"{number:06d}.tar", "w") as tar:
            for sample in range(SHARD_SAMPLES):
                for name, body in (("jpg", data[sample : sample + SAMPLE_BYTES]), ("cls", b"[6]")):
                    member = tarfile.TarInfo(f"{number:06d}{sample:06d}.{name}")
                    member.size = len(body)
                    tar.addfile(member, io.BytesIO(body))
    return [f"tar/{number:06d}.tar" for number in range(count)]


def transformed(options: Any) -> None:
    """A tar as it is, and the TFRecords made of it."""
    turns = options.turns(5, 1)
    buffer = bytearray(MIB)
    for about, settings in (("a network that costs nothing", {}), ("30 ms, 90 MB/s a connection", DELAYED)):
        with memory_folder() as root:
            keys = write_shards(root, turns + 1)
            with Origin(root, **settings) as origin, gateway(origin.url, "--transform", "tar2tfrecord") as served:
                turn = iter(keys)
                clients = [
                    Function("tar", lambda: discarded(origin.url, keys[0], buffer)),  # noqa: B023 - used in this turn
                    Function("tfrecord, cold", lambda: discarded(served.url, next(turn), buffer)),  # noqa: B023
                    Function("tfrecord, warm", lambda: discarded(served.url, keys[0], buffer)),  # noqa: B023
                ]
                metrics = {"MB/s": rate, "first byte ms": lambda answer: answer["first_s"] * 1e3}
                with Run(f"gateway: tar to TFRecord, {about}", origin, clients, metrics, turns) as run:
                    run.turns(lambda client: client.measure(), warm=lambda client: client.measure())
                    ratios = run.ratios("MB/s", "tfrecord, cold", "tar")
                    whole_ms = [answer["seconds"] * 1e3 for answer in run.answers["tar"]]
                    first_ms = run.values("tfrecord, cold", "first byte ms")
                    shares = [a / b for a, b in zip(first_ms, whole_ms, strict=True)]
                    run.report(
                        [
                            Row("tar to TFRecord, cold : tar", ratios, 0.6, 0.9),
                            Row("first byte : reading the tar", shares, 1, 0.3, less=True),
                        ]
                    )


PARTS = {"large": large_objects, "small": small_objects, "cold": cold_objects, "transform": transformed}


def main() -> None:
    options = arguments(__doc__ or "", part={"choices": PARTS, "help": "only this part"})
    for name, part in PARTS.items():
        if options.part in (None, name):
            part(options)


if __name__ == "__main__":
    main()
