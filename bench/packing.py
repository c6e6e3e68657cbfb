"""How many files of 20 KB a second are packed from S3 to S3, into four tars?

A store with 30 ms to the first byte, whose writes are read and dropped. All list the source with boto3, or with what
they have, and the clock runs from the first request of that to the last shard's commit; imports are not counted.

- webdataset's ShardWriter is fed by boto3 in threads, in order, writes its tars to memory, and boto3 uploads each when
  it is complete.
- MosaicML's MDSWriter is fed the same way, and uploads by itself.
- litdata.optimize has one process per core; each takes batches of 64 keys and reads them with 32 boto3 threads. It
  writes to memory, and boto3 uploads what it wrote, four files at a time: its own upload reads back from the store what
  this one drops.

Each peer has its interpreter in bench/.venvs (bench/setup.sh).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from one_turn import OneTurn, be_client

HERE = Path(__file__).resolve().parent
ACCESS_KEY, SECRET_KEY, REGION = "AKBENCHBENCHBENCH000", "bench/secret/bench/secret/bench/secret00", "us-east-1"
SHARDS = 4
FILES = 50_000
QUICK_FILES = 4_000


def shard_bytes(count: int) -> int:
    return count * 21_504 // SHARDS + 1_000_000


# ── what is measured: each in a process of its own, which prints one line ────────────────────────────────────────────


def run_penstock(endpoint_url: str, bucket: str, files: str, _at_a_time: str) -> dict[str, Any]:
    import penstock as ps
    from penstock.pack import pack

    credentials = ps.Credentials(access_key=ACCESS_KEY, secret_key=SECRET_KEY)
    start_s = time.monotonic()
    packed = pack(
        f"s3://{bucket}/src/",
        f"s3://{bucket}/dst/train-%06d.tar",
        bytes_max=shard_bytes(int(files)),
        endpoint_url=endpoint_url,
        credentials=credentials,
        region=REGION,
    )
    seconds = time.monotonic() - start_s
    return {"seconds": seconds, "samples": packed.samples_count, "versions": {"penstock": ps.__version__}}


def _client(endpoint_url: str, threads: int) -> Any:
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name=REGION,
        config=Config(max_pool_connections=threads + 8, s3={"addressing_style": "path"}),
    )


def _keys(client: Any, bucket: str) -> list[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix="src/")
    return [item["Key"] for page in pages for item in page["Contents"]]


def _read_in_order(client: Any, bucket: str, keys: list[str], threads: int) -> Iterator[tuple[str, bytes]]:
    """Each object in the order of the keys, so many threads reading ahead."""
    from collections import deque
    from concurrent.futures import Future, ThreadPoolExecutor

    def read(key: str) -> bytes:
        return client.get_object(Bucket=bucket, Key=key)["Body"].read()  # type: ignore[no-any-return]

    waiting: deque[tuple[str, Future[bytes]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        todo = iter(keys)
        while True:
            while len(waiting) < 4 * threads and (key := next(todo, None)) is not None:
                waiting.append((key, pool.submit(read, key)))
            if not waiting:
                return
            key, future = waiting.popleft()
            yield key.removeprefix("src/").partition(".")[0], future.result()


def run_webdataset(endpoint_url: str, bucket: str, files: str, at_a_time: str) -> dict[str, Any]:
    count, threads = int(files), int(at_a_time)
    import boto3
    import webdataset

    client = _client(endpoint_url, threads)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))

    def upload(path: str) -> None:
        client.upload_file(path, bucket, f"dst/{Path(path).name}")
        Path(path).unlink()

    start_s = time.monotonic()
    keys = _keys(client, bucket)
    samples = 0
    with webdataset.ShardWriter(
        str(folder / "train-%06d.tar"), maxsize=shard_bytes(count), maxcount=count + 1, post=upload, verbose=0
    ) as sink:
        for key, data in _read_in_order(client, bucket, keys, threads):
            sink.write({"__key__": key, "bin": data})
            samples += 1
    seconds = time.monotonic() - start_s
    folder.rmdir()
    versions = {"webdataset": webdataset.__version__, "boto3": boto3.__version__}
    return {"seconds": seconds, "samples": samples, "versions": versions}


def run_mosaicml(endpoint_url: str, bucket: str, files: str, at_a_time: str) -> dict[str, Any]:
    count, threads = int(files), int(at_a_time)
    sys.path.insert(0, str(HERE / "peers"))
    import boto3
    import streaming

    import penstock.bench.clients.without_torchvision  # noqa: F401 - before streaming

    os.environ |= {
        "S3_ENDPOINT_URL": endpoint_url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    }
    os.environ["AWS_DEFAULT_REGION"] = REGION
    client = _client(endpoint_url, threads)
    folder = tempfile.mkdtemp(dir="/dev/shm")
    start_s = time.monotonic()
    keys = _keys(client, bucket)
    samples = 0
    with streaming.MDSWriter(
        out=(folder, f"s3://{bucket}/dst"), columns={"bin": "bytes"}, size_limit=shard_bytes(count), progress_bar=False
    ) as out:
        for _, data in _read_in_order(client, bucket, keys, threads):
            out.write({"bin": data})
            samples += 1
    seconds = time.monotonic() - start_s
    shutil.rmtree(folder, ignore_errors=True)
    versions = {"mosaicml-streaming": streaming.__version__, "boto3": boto3.__version__}
    return {"seconds": seconds, "samples": samples, "versions": versions}


_litdata_clients: dict[str, Any] = {}


def _litdata_read(keys: list[str], *, endpoint_url: str, bucket: str, threads: int) -> Iterator[dict[str, bytes]]:
    """What litdata's workers call, each with a client of its own."""
    if endpoint_url not in _litdata_clients:
        _litdata_clients[endpoint_url] = _client(endpoint_url, threads)
    for _, data in _read_in_order(_litdata_clients[endpoint_url], bucket, keys, threads):
        yield {"bin": data}


def run_litdata(endpoint_url: str, bucket: str, files: str, at_a_time: str) -> dict[str, Any]:
    count, threads = int(files), int(at_a_time)
    from concurrent.futures import ThreadPoolExecutor

    import boto3
    import litdata

    client = _client(endpoint_url, threads)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    start_s = time.monotonic()
    keys = _keys(client, bucket)
    litdata.optimize(
        fn=partial(_litdata_read, endpoint_url=endpoint_url, bucket=bucket, threads=threads),
        inputs=[keys[first : first + 64] for first in range(0, len(keys), 64)],
        output_dir=str(folder),
        chunk_bytes=shard_bytes(count),
        num_workers=os.cpu_count(),
        keep_data_ordered=False,
        verbose=False,
    )
    with ThreadPoolExecutor(SHARDS) as pool:
        list(pool.map(lambda path: client.upload_file(str(path), bucket, f"dst/{path.name}"), folder.iterdir()))
    seconds = time.monotonic() - start_s
    samples = sum(chunk["chunk_size"] for chunk in json.loads((folder / "index.json").read_text())["chunks"])
    shutil.rmtree(folder, ignore_errors=True)
    versions = {"litdata": litdata.__version__, "boto3": boto3.__version__}
    return {"seconds": seconds, "samples": samples, "versions": versions}


CLIENTS = {"penstock": run_penstock, "webdataset": run_webdataset, "mosaicml": run_mosaicml, "litdata": run_litdata}


# ── the comparison ───────────────────────────────────────────────────────────────────────────────────────────────────


def _client_of(name: str, kind: str, count: int, *, threads: int = 0) -> OneTurn:
    python = sys.executable if kind == "penstock" else str(HERE / f".venvs/{kind}/bin/python")
    made = {"python": python, "words": (count, threads), "options": {"threads": threads}}
    return OneTurn(name, kind, script=__file__, samples_count=count, **made)


def main() -> None:
    from clients import BUCKET
    from harness import arguments, memory_folder

    from penstock.bench.origin.server import Origin
    from penstock.bench.turns import Row, Run

    options = arguments(
        __doc__ or "",
        count={"type": int, "default": None, "help": f"files; default {FILES}, quick {QUICK_FILES}"},
        ttfb_ms={"type": float, "default": 30.0, "help": "milliseconds to the first byte"},
    )
    count = options.count or (QUICK_FILES if options.quick else FILES)
    with memory_folder() as root:
        folder = root / BUCKET / "src"
        folder.mkdir(parents=True)
        block = bytes(range(256)) * 79  # 20 224 bytes
        for number in range(count):
            (folder / f"{number:06d}.bin").write_bytes(b"%016d" % number + block[16:])
        clients = [
            _client_of("penstock", "penstock", count),
            _client_of("webdataset, 64 threads", "webdataset", count, threads=64),
            _client_of("MDSWriter, 64 threads", "mosaicml", count, threads=64),
            _client_of("litdata.optimize, 32 threads each", "litdata", count, threads=32),
        ]
        if options.quick:  # 16 are slower in every turn, and three minutes for 50 000 files
            clients.append(_client_of("webdataset, 16 threads", "webdataset", count, threads=16))
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
            best = run.best("files/s", *[client.name for client in clients if client.kind == "webdataset"])
            rows = [Row(f"files/s : {best}", run.ratios("files/s", "penstock", best), 3, 6)]
            for name in [client.name for client in clients if client.kind in ("mosaicml", "litdata")]:
                if ratios := run.ratios("files/s", "penstock", name):
                    rows.append(Row(f"files/s : {name}", ratios, 1, 3))
            run.report(rows, ttfb_ms=options.ttfb_ms)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        be_client(CLIENTS, *sys.argv[2:])
    else:
        main()
