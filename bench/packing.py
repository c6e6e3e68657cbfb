"""How many files of 20 KB a second are packed from S3 to S3, into four tars?

A store with 30 ms to the first byte, whose writes are read and dropped. webdataset's ShardWriter is fed by boto3 in
threads, in order, writes its tars to memory, and boto3 uploads each when it is complete. The clock runs from the first
request of the listing to the last shard's commit; what was imported before is not counted.

The peer's interpreter needs webdataset and boto3 (bench/peers/webdataset.txt and boto3.txt); --peer-python names it.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ACCESS_KEY, SECRET_KEY, REGION = "AKBENCHBENCHBENCH000", "bench/secret/bench/secret/bench/secret00", "us-east-1"
SHARDS = 4
FILES = 12_000
"""The origin keeps every file open that it served, and may open 16 384: the issue's 50 000 need a larger limit there."""


def shard_bytes(count: int) -> int:
    return count * 21_504 // SHARDS + 1_000_000


# ── what is measured: each in a process of its own, which prints one line ────────────────────────────────────────────


def run_penstock(endpoint_url: str, bucket: str, count: int, threads: int) -> dict[str, Any]:
    import penstock as ps
    from penstock.pack import pack

    del threads
    credentials = ps.Credentials(access_key=ACCESS_KEY, secret_key=SECRET_KEY)
    start_s = time.monotonic()
    packed = pack(
        f"s3://{bucket}/src/",
        f"s3://{bucket}/dst/train-%06d.tar",
        bytes_max=shard_bytes(count),
        endpoint_url=endpoint_url,
        credentials=credentials,
        region=REGION,
    )
    seconds = time.monotonic() - start_s
    return {"seconds": seconds, "samples": packed.samples_count, "versions": {"penstock": ps.__version__}}


def run_webdataset(endpoint_url: str, bucket: str, count: int, threads: int) -> dict[str, Any]:
    import tempfile
    from collections import deque
    from concurrent.futures import Future, ThreadPoolExecutor

    import boto3
    import webdataset
    from botocore.config import Config

    config = Config(max_pool_connections=threads + 8, s3={"addressing_style": "path"})
    client = boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name=REGION,
        config=config,
    )
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))

    def upload(path: str) -> None:
        client.upload_file(path, bucket, f"dst/{Path(path).name}")
        Path(path).unlink()

    def read(key: str) -> bytes:
        return client.get_object(Bucket=bucket, Key=key)["Body"].read()  # type: ignore[no-any-return]

    start_s = time.monotonic()
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix="src/")
    keys = [item["Key"] for page in pages for item in page["Contents"]]
    samples = 0
    waiting: deque[tuple[str, Future[bytes]]] = deque()
    with (
        ThreadPoolExecutor(threads) as pool,
        webdataset.ShardWriter(
            str(folder / "train-%06d.tar"), maxsize=shard_bytes(count), maxcount=count + 1, post=upload, verbose=0
        ) as sink,
    ):
        todo = iter(keys)
        while True:
            while len(waiting) < 4 * threads and (key := next(todo, None)) is not None:
                waiting.append((key, pool.submit(read, key)))
            if not waiting:
                break
            key, future = waiting.popleft()
            sink.write({"__key__": key.removeprefix("src/").partition(".")[0], "bin": future.result()})
            samples += 1
    seconds = time.monotonic() - start_s
    folder.rmdir()
    versions = {"webdataset": webdataset.__version__, "boto3": boto3.__version__}
    return {"seconds": seconds, "samples": samples, "versions": versions}


CLIENTS = {"penstock": run_penstock, "webdataset": run_webdataset}


def be_client(name: str, endpoint_url: str, bucket: str, count: str, threads: str) -> None:
    answer = CLIENTS[name](endpoint_url, bucket, int(count), int(threads))
    used = resource.getrusage(resource.RUSAGE_SELF)
    answer |= {"cpu_s": used.ru_utime + used.ru_stime, "memory_bytes": used.ru_maxrss * 1024}
    print(json.dumps(answer))


# ── the comparison ───────────────────────────────────────────────────────────────────────────────────────────────────


class Packs:
    """One client: a new process each turn."""

    def __init__(self, name: str, kind: str, python: str, count: int, **options: Any) -> None:
        self.name, self.kind, self.python, self.count, self.options = name, kind, python, count, options
        self.versions: dict[str, str] = {}
        self._origin: Any = None

    def start(self, origin: Any) -> None:
        self._origin = origin

    def close(self) -> None:
        """Nothing stays open between turns."""

    def measure(self) -> dict[str, Any]:
        from clients import BUCKET, BenchError

        words = [self.kind, self._origin.url, BUCKET, str(self.count), str(self.options.get("threads", 0))]
        ended = subprocess.run(
            [self.python, str(HERE / "packing.py"), "--client", *words], capture_output=True, text=True, timeout=1800
        )
        if ended.returncode:
            raise BenchError(f"{self.name}: {ended.stderr.strip()}")
        answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        if answer["samples"] != self.count:
            raise BenchError(f"{self.name} packed {answer['samples']} samples, not {self.count}")
        self.versions = answer["versions"]
        return answer


def main() -> None:
    from clients import BUCKET
    from harness import Row, Run, arguments, memory_folder
    from origin.origin import Origin

    options = arguments(
        __doc__ or "",
        count={"type": int, "default": None, "help": "files; default 12 000, quick 4 000"},
        ttfb_ms={"type": float, "default": 30.0, "help": "milliseconds to the first byte"},
        peer_python={"default": str(HERE / ".venvs/webdataset/bin/python"), "help": "with webdataset and boto3"},
    )
    count = options.count or (4_000 if options.quick else FILES)
    with memory_folder() as root:
        folder = root / BUCKET / "src"
        folder.mkdir(parents=True)
        block = bytes(range(256)) * 79  # 20 224 bytes
        for number in range(count):
            (folder / f"{number:06d}.bin").write_bytes(b"%016d" % number + block[16:])
        clients = [
            Packs("penstock", "penstock", sys.executable, count),
            Packs("webdataset, 16 threads", "webdataset", options.peer_python, count, threads=16),
            Packs("webdataset, 64 threads", "webdataset", options.peer_python, count, threads=64),
        ]
        metrics = {
            "files/s": lambda answer: answer["samples"] / answer["seconds"],
            "CPU ms/file": lambda answer: answer["cpu_s"] / answer["samples"] * 1e3,
            "RSS MB": lambda answer: answer["memory_bytes"] / 1e6,
        }
        question = f"{count} files of 20 KB packed from S3 to S3"
        with Origin(root, ttfb_ms=options.ttfb_ms) as origin:
            run = Run(question, origin, options.select(clients), metrics, options.turns(3, 1))
            with run:
                run.turns(lambda client: client.measure())
            peers = ("webdataset, 16 threads", "webdataset, 64 threads")
            best = run.best("files/s", *peers)
            ratios = run.ratios("files/s", "penstock", best)
            run.report([Row(f"files/s : {best}", ratios, 3, 6)], ttfb_ms=options.ttfb_ms)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        be_client(*sys.argv[2:])
    else:
        main()
