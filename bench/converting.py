"""How fast do tars become TFRecords, from S3 to S3, beside the machine's limit of reading and writing the same bytes?

A store that answers at once, and whose writes are read and dropped. The limit is `curl | curl -T -` for each shard, as
many at a time as penstock has shards at work: the same bytes read and written by two processes of C, and nothing else
done with them. Neither signs: over plain HTTP that hashes every byte, over TLS it does not. Samples are a picture of
100 KB and a label; penstock parses the tars, builds tf.train.Examples, and sums every record for TFRecord, for the
index, and for the store.
"""

from __future__ import annotations

import io
import json
import random
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
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


CLIENTS = {"penstock": run_penstock, "curl": run_curl}


def be_client(name: str, endpoint_url: str, bucket: str) -> None:
    answer = CLIENTS[name](endpoint_url, bucket)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    answer["cpu_s"] = sum(each.ru_utime + each.ru_stime for each in used)
    answer["memory_bytes"] = used[0].ru_maxrss * 1024
    print(json.dumps(answer))


class Converts:
    """One client: a new process each turn."""

    def __init__(self, name: str, kind: str, samples_count: int) -> None:
        self.name, self.kind, self.samples_count = name, kind, samples_count
        self.options: dict[str, Any] = {"jobs": JOBS}
        self.versions: dict[str, str] = {}
        self._origin: Any = None

    def start(self, origin: Any) -> None:
        self._origin = origin

    def close(self) -> None:
        """Nothing stays open between turns."""

    def measure(self) -> dict[str, Any]:
        from clients import BUCKET, BenchError

        command = [sys.executable, str(HERE / "converting.py"), "--client", self.kind, self._origin.url, BUCKET]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=1800)
        if ended.returncode:
            raise BenchError(f"{self.name}: {ended.stderr.strip()}")
        answer: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        if answer["samples"] not in (None, self.samples_count):
            raise BenchError(f"{self.name} converted {answer['samples']} samples, not {self.samples_count}")
        self.versions = answer["versions"]
        return answer


def fill(folder: Path, samples_count: int) -> int:
    """Tars of samples of 100 KB; their bytes together."""
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
    from harness import Row, Run, arguments, memory_folder
    from origin.origin import Origin

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
        clients = [Converts("penstock", "penstock", SHARDS * count), Converts("curl | curl", "curl", SHARDS * count)]
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
            ratios = run.ratios("MB/s", "penstock", "curl | curl")
            run.report([Row("MB/s : reading and writing alone", ratios, 0.8, 0.95)], ttfb_ms=options.ttfb_ms)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        be_client(*sys.argv[2:])
    else:
        main()
