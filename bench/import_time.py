"""How long do `import penstock` and `from penstock import Loader` take beyond a bare interpreter? And the peers' imports?

`first batch` imports `Loader` and reads one batch of 64 samples from a local tar file: what the import of `Loader` leaves
to the first loader has to be paid there, so this number shows whether something was saved or only moved.
"""

from __future__ import annotations

import io
import statistics
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from clients import HERE, Function, ran
from harness import arguments

from penstock.bench.turns import Row, Run

IMPORTS = {"boto3": "boto3", "connector": "s3torchconnector", "obstore": "obstore", "s3fs": "s3fs"}
METRICS = {"ms": lambda answer: answer["seconds"] * 1e3}


def started(python: Path | str, code: str) -> dict[str, Any]:
    start_s = time.perf_counter()
    ran(python, "-c", code)
    return {"seconds": time.perf_counter() - start_s}


FIRST_BATCH = """
from penstock import Integer, Loader, shards
with Loader(shards({folder!r}).shuffle(window=64).decode(Integer("cls")).batch(64), index="stream") as loader:
    next(iter(loader))
"""


def write_shard(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(64):
            for field, data in (("cls", b"%d" % number), ("bin", bytes(5000))):
                member = tarfile.TarInfo(f"{number:02d}.{field}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def main(options: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_shard(Path(folder) / "0.tar")
        measure(options, folder)


def measure(options: Any, folder: str) -> None:
    clients = [
        Function("bare", started, sys.executable, "pass"),
        Function("penstock", started, sys.executable, "import penstock"),
        Function("with connect", started, sys.executable, "import penstock; penstock.connect"),
        Function("Loader", started, sys.executable, "from penstock import Loader"),
        Function("first batch", started, sys.executable, FIRST_BATCH.format(folder=folder)),
    ]
    for name, module in IMPORTS.items():
        python = HERE / ".venvs" / IMPORTS[name] / "bin" / "python"
        if python.exists():
            clients += [
                Function(f"{name}: bare", started, python, "pass"),
                Function(name, started, python, f"import {module}"),
            ]
    run = Run("import time", None, options.select(clients), METRICS, options.turns(15, 5))
    with run:
        run.turns(lambda client: client.measure(), warm=lambda client: client.measure())
    beyond = run.differences("ms", "penstock", "bare")
    peers = {
        f"{name}_beyond_ms": round(statistics.median(run.differences("ms", name, f"{name}: bare")), 1)
        for name in IMPORTS
        if name in run.answers
    }
    rows = [Row("import penstock beyond bare, ms", beyond, 60, 40, less=True)]
    if "Loader" in run.answers:
        loader = run.differences("ms", "Loader", "bare")
        rows.append(Row("from penstock import Loader beyond bare, ms", loader, 240, 120, less=True))
    if "first batch" in run.answers:
        first = run.differences("ms", "first batch", "bare")
        peers["first_batch_beyond_ms"] = round(statistics.median(first), 1)
    run.report(rows, **peers)


if __name__ == "__main__":
    main(arguments(__doc__))
