"""How long do saving and loading a checkpoint of 1.7 GB take: at once, and 30 ms and 90 MB/s per connection away?

The peers are the S3 Connector for PyTorch (``S3Checkpoint``) and boto3 (``upload_fileobj`` and ``download_fileobj`` of a
file in memory). All of them call ``torch.save`` and ``torch.load``, in one process, on the same state. For saving, the
rate of a connection is set where its client sends, because a receiver cannot pace a sender. A case is a function that
returns its clients, and one that returns its rows.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from clients import BUCKET, Client, Function
from harness import arguments, memory_folder

from penstock.bench.origin.server import HERE as ORIGIN
from penstock.bench.origin.server import Origin
from penstock.bench.turns import Row, Run

TENSORS, TENSOR_BYTES = 120, 14_155_776  # 1.7 GB: 3 x 1024 x 1152 float32, about what a layer of a small model has
QUICK_TENSORS = 10
PACED = {"ttfb_ms": 30, "rate_bytes_per_s": 90_000_000}
KEY = "checkpoint.pt"
METRICS = {
    "s": lambda answer: answer["seconds"],
    "MB/s": lambda answer: answer["bytes"] / answer["seconds"] / 1e6,
    "CPU s/GB": lambda answer: answer["cpu_s"] / answer["bytes"] * 1e9,
}
PENSTOCK, MAPPED, ONE, MANY, BOTO3 = "penstock", "penstock mmap", "connector", "connector 200 Gbps", "boto3"


class CheckpointClient(Client):
    """A driver of ``peers/checkpoint_*.py``."""

    script = "checkpoint"


class Case(NamedTuple):
    """A question, and how it is answered."""

    clients: Callable[[dict[str, Any], Path], list[Any]]
    rows: Callable[[Run], list[Row]]
    turn: Callable[[Any], dict[str, Any]]


def clients(state: dict[str, Any], path: Path) -> list[Any]:
    """The clients of saving."""
    return [
        CheckpointClient(PENSTOCK, "penstock", **state),
        CheckpointClient(ONE, "s3torchconnector", **state),
        CheckpointClient(MANY, "s3torchconnector", throughput_target_gbps=200, **state),
        CheckpointClient(BOTO3, "boto3_torch", **state),
    ]


def loading_clients(state: dict[str, Any], path: Path) -> list[Any]:
    """Those of loading: also ``mmap=True`` and, as a limit, the file on the local disk, in the page cache."""
    mapped = CheckpointClient(MAPPED, "penstock", mmap=True, **state)
    return [*clients(state, path), mapped, Function("local file", local_load, path)]


def local_load(path: Path) -> dict[str, Any]:
    """``torch.load`` of a local file whose pages are in memory."""
    import time

    import torch

    cpu_s, start_s = time.process_time(), time.perf_counter()
    found = torch.load(path, weights_only=True)
    total = sum(tensor.nbytes for tensor in found.values())
    return {"seconds": time.perf_counter() - start_s, "cpu_s": time.process_time() - cpu_s, "bytes": total}


def loading_rows(run: Run) -> list[Row]:
    fast = run.best("MB/s", ONE, MANY)
    return [
        Row("load, MB/s : connector", run.ratios("MB/s", PENSTOCK, fast), 2, 4),
        Row("load, MB/s : local file", run.ratios("MB/s", PENSTOCK, "local file"), 0, 1),
    ]


def saving_rows(run: Run) -> list[Row]:
    fast = run.best("MB/s", ONE, MANY)
    return [
        Row("save, MB/s : connector", run.ratios("MB/s", PENSTOCK, fast), 1, 1.5),
        Row("save, MB/s : boto3", run.ratios("MB/s", PENSTOCK, BOTO3), 1.5, 1.5),
    ]


def asks(what: str) -> Callable[[Any], dict[str, Any]]:
    def turn(client: Any) -> dict[str, Any]:
        return client.measure() if isinstance(client, Function) else client.ask({"do": what, "key": KEY})

    return turn


CASES = {
    "load": Case(loading_clients, loading_rows, asks("load")),
    "save": Case(clients, saving_rows, asks("save")),
}


def write_checkpoint(path: Path, tensors: int) -> None:
    """Write what is loaded, in a process of its own, whose memory is then free."""
    import sys

    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import _checkpoints, torch; "
        "torch.save(_checkpoints.make_state(int(sys.argv[3]), int(sys.argv[4])), sys.argv[2])"
    )
    peers = str(Path(__file__).parent / "peers")
    subprocess.run([sys.executable, "-c", program, peers, str(path), str(tensors), str(TENSOR_BYTES)], check=True)


def pacing(folder: Path) -> dict[str, str]:
    """The environment that paces what a client sends."""
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", folder / "pace.so", ORIGIN / "pace.c", "-ldl"], check=True)
    rate = str(PACED["rate_bytes_per_s"])
    return {"LD_PRELOAD": str(folder / "pace.so"), "PACE_CC": "cubic", "PACE_RATE": rate}


def measure(options: Any, name: str, network: str) -> None:
    case, settings = CASES[name], PACED if network == "paced" else {}
    tensors = QUICK_TENSORS if options.quick else TENSORS
    with ExitStack() as stack:
        root = stack.enter_context(memory_folder())
        (root / BUCKET).mkdir()
        if name == "load":
            write_checkpoint(root / BUCKET / KEY, tensors)
        CheckpointClient.environment = pacing(root) if (name, network) == ("save", "paced") else {}
        origin = stack.enter_context(Origin(root, **settings))
        state = {"tensors": tensors, "tensor_bytes": TENSOR_BYTES}
        taking_part = options.select(case.clients(state, root / BUCKET / KEY))
        question = f"{name} of {tensors * TENSOR_BYTES / 1e9:.1f} GB, {network}"
        run = Run(question, origin, taking_part, METRICS, options.turns(5, 1))
        with run:
            run.turns(case.turn, warm=case.turn, touched_bytes=2 * tensors * TENSOR_BYTES)
        run.report(case.rows(run), case=name, network=network, cores=os.cpu_count(), **settings)


if __name__ == "__main__":
    chosen = arguments(
        __doc__,
        case={"choices": [*CASES, "all"], "default": "all"},
        network={"choices": ["plain", "paced", "all"], "default": "all"},
    )
    for one in CASES:
        for where in ("plain", "paced"):
            if chosen.case in (one, "all") and chosen.network in (where, "all"):
                measure(chosen, one, where)
