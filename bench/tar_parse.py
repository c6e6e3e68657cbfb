"""How many two-member samples a second does one core parse from a tar in memory, beside tarfile and webdataset?"""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

from clients import HERE, Function, ran
from harness import arguments, memory_folder

from penstock.bench.process import BenchError
from penstock.bench.turns import Row, Run

METRICS = {
    "samples/s": lambda answer: answer["samples"] / answer["cpu_s"],
    "us/sample": lambda answer: answer["cpu_s"] / answer["samples"] * 1e6,
}
SAMPLES = 20_000
COLUMNS = "penstock_columns"


def write_shard(path: Path, samples: int, image_bytes: int) -> int:
    """A WebDataset shard of pairs (jpg, cls), in GNU format as tarfile and webdataset write it; the bytes of values."""
    image = bytes(range(256)) * (image_bytes // 256 + 1)
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        for index in range(samples):
            for suffix, value in (("jpg", image[:image_bytes]), ("cls", b"%03d" % (index % 1000))):
                member = tarfile.TarInfo(f"{index:08d}.{suffix}")
                member.size = len(value)
                archive.addfile(member, io.BytesIO(value))
    return samples * (image_bytes + 3)


def parsed(python: Path | str, library: str, path: Path, seconds: float, expected_bytes: int) -> dict[str, Any]:
    answer = json.loads(ran(python, HERE / "peers" / "parse_tar.py", library, path, seconds))
    if answer["bytes"] * SAMPLES != answer["samples"] * expected_bytes:
        raise BenchError(f"{library} gave {answer['bytes']} bytes in {answer['samples']} samples")
    return answer


def main(options: Any) -> None:
    with memory_folder() as folder:
        path, seconds = folder / "bench.tar", 0.5 if options.quick else 2.0
        expected_bytes = write_shard(path, SAMPLES, 2048)
        interpreters = dict.fromkeys(("penstock", COLUMNS, "tarfile"), sys.executable)
        interpreters["webdataset"] = HERE / ".venvs" / "webdataset" / "bin" / "python"
        clients = [
            Function(library, parsed, python, library, path, seconds, expected_bytes)
            for library, python in interpreters.items()
        ]
        run = Run(f"tar of {SAMPLES} pairs, from memory", None, options.select(clients), METRICS, options.turns(5, 2))
        with run:
            run.turns(lambda client: client.measure())
        rates = {name: run.values(name, "samples/s") for name in ("penstock", COLUMNS) if name in run.answers}
        run.report(
            [
                Row("samples/s", rates.get("penstock", []), 200_000, 340_000),
                Row("samples/s, in columns", rates.get(COLUMNS, []), 200_000, 340_000),
            ]
        )


if __name__ == "__main__":
    main(arguments(__doc__))
