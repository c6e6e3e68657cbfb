"""How fast do tars become TFRecords, from S3 to S3, beside the machine's limit of reading and writing the same bytes?

The store answers at once, and reads and drops what is written. The limit is the faster of two programs that only read and
write, as many shards at a time as penstock:

- `curl | curl -T -` for each shard, which is two C processes and a pipe;
- penstock's own reader and writer, without the conversion between them.

No client signs, because over plain HTTP a signature hashes every byte, which it does not over TLS. Samples are a picture of
100 KB and a label. penstock parses the tars, builds tf.train.Examples, and computes the checksum of every record three times:
for TFRecord, for the index, and for the store.
"""

from __future__ import annotations

import io
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from one_turn import OneTurn, be_client

SHARDS = 8
SAMPLE_BYTES = 100_000
JOBS = 4


def run_penstock(endpoint_url: str, bucket: str) -> dict[str, Any]:
    import penstock as ps
    from penstock.pack import convert

    start_s = time.monotonic()
    packed = convert(
        f"s3://{bucket}/src/",
        f"s3://{bucket}/dst/",
        to="tfrecord",
        allow_loss=True,
        jobs=JOBS,
        endpoint_url=endpoint_url,
        anonymous=True,
    )
    seconds = time.monotonic() - start_s
    return {"seconds": seconds, "samples": packed.samples_count, "versions": {"penstock": ps.__version__}}


def run_curl(endpoint_url: str, bucket: str) -> dict[str, Any]:
    def copy(number: int) -> None:
        source, target = (f"{endpoint_url}/{bucket}/{folder}/{number:03d}.tar" for folder in ("src", "dst"))
        subprocess.run(f"curl -sfN {source} | curl -sf -T - {target} -o /dev/null", shell=True, check=True)

    start_s = time.monotonic()
    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(copy, range(SHARDS)))
    return {"seconds": time.monotonic() - start_s, "samples": None, "versions": {}}


def run_raw(endpoint_url: str, bucket: str) -> dict[str, Any]:
    import penstock as ps
    from penstock.pack.recipes import READ_PART_BYTES, READ_REQUESTS_MAX

    def copy(key: str) -> None:
        with target.writer(key) as out:
            for chunk in source.read_parts([key], part_bytes=READ_PART_BYTES, requests_max=READ_REQUESTS_MAX):
                out.write(chunk.data)

    start_s = time.monotonic()
    with (
        ps.connect(f"s3://{bucket}/src/", endpoint_url=endpoint_url, anonymous=True) as source,
        ps.connect(f"s3://{bucket}/dst/", endpoint_url=endpoint_url, anonymous=True) as target,
        ThreadPoolExecutor(JOBS) as pool,
    ):
        list(pool.map(copy, [info.key for info in source.list()]))
    seconds = time.monotonic() - start_s
    return {"seconds": seconds, "samples": None, "versions": {"penstock": ps.__version__}}


CLIENTS = {"penstock": run_penstock, "curl": run_curl, "raw": run_raw}


def fill(folder: Path, samples_count: int) -> int:
    """Write tars of samples of 100 KB. Returns their total size in bytes."""
    from penstock.formats import TarWriter

    picture = random.Random(0).randbytes(SAMPLE_BYTES)
    size_bytes = 0
    for number in range(SHARDS):
        out = io.BytesIO()
        archive = TarWriter(out.write)
        for sample in range(samples_count):
            key = f"{number:03d}/{sample:06d}"
            archive.add({"__key__": key, "cls": str(sample), "jpg": key.encode() + picture[len(key) :]})
        size_bytes += archive.finish()
        (folder / f"{number:03d}.tar").write_bytes(out.getvalue())
    return size_bytes


def main() -> None:
    from clients import BUCKET
    from harness import arguments, memory_folder

    from penstock.bench.origin.server import Origin
    from penstock.bench.turns import Row, Run

    options = arguments(
        __doc__ or "",
        samples={"type": int, "default": None, "help": "in each of 8 shards; default 2 500, quick 300"},
        ttfb_ms={"type": float, "default": 0.0, "help": "milliseconds to the first byte"},
    )
    count = options.samples or (300 if options.quick else 2_500)
    with memory_folder() as root:
        folder = root / BUCKET / "src"
        folder.mkdir(parents=True)
        size_bytes = fill(folder, count)
        kinds = {"penstock": "penstock", "curl | curl": "curl", "reading and writing": "raw"}
        made = {"script": __file__, "samples_count": SHARDS * count, "options": {"jobs": JOBS}}
        clients = [OneTurn(name, kind, **made) for name, kind in kinds.items()]
        metrics = {
            "MB/s": lambda answer: size_bytes / answer["seconds"] / 1e6,
            "CPU ms/GB": lambda answer: answer["cpu_s"] / size_bytes * 1e12,
            "RSS MB": lambda answer: answer["memory_bytes"] / 1e6,
        }
        question = f"{SHARDS} tars of {size_bytes / SHARDS / 1e6:.0f} MB to TFRecord from S3 to S3"
        with Origin(root, ttfb_ms=options.ttfb_ms) as origin:
            run = Run(question, origin, options.select(clients), metrics, options.turns(5, 1))
            with run:
                run.turns(lambda client: client.measure())
            limit = run.best("MB/s", "curl | curl", "reading and writing")
            ratios = run.ratios("MB/s", "penstock", limit)
            run.report([Row(f"MB/s : the limit, {limit}", ratios, 0.8, 0.95)], ttfb_ms=options.ttfb_ms)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        be_client(CLIENTS, *sys.argv[2:])
    else:
        main()
