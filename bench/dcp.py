"""Distributed checkpoints of two ranks: MB/s to save and to load, beside the S3 Connector's storage writer and reader.

The state has 1.7 GB in 40 sharded tensors (``DTensor``), half of each on each rank, and the ranks talk by gloo. Both clients
load the same files, which penstock wrote. What is saved is dropped by the server, which lists its name and size: penstock asks
for these before it commits. Each turn has a new process for each rank. It does the work once without being measured, for the
memory, and then once from barrier to barrier.

The network has 30 ms to the first byte and 90 MB/s per connection; that is the rate of answers, and the server does not slow
uploads down. With ``--without-delay`` it has neither. The connector has no argument for an endpoint here, so
``AWS_ENDPOINT_URL`` tells it.
"""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from one_turn import OneTurn, be_client

HERE = Path(__file__).resolve().parent
KEYS = {
    "AWS_ACCESS_KEY_ID": "AKBENCHBENCHBENCH000",
    "AWS_SECRET_ACCESS_KEY": "bench/secret/bench/secret/bench/secret00",
}
REGION = "us-east-1"
RANKS = 2
TENSORS = 40
STATE_BYTES = 1_700_000_000
QUICK_STATE_BYTES = 100_000_000
LOADED = "loaded/step-0000000001"


# ── what is measured: one process per rank ──────────────────────────────────────────────────────────────────────────


def _penstock(url: str, *, saves: bool) -> Any:
    from penstock.torch.checkpoint import StorageReader, StorageWriter

    return StorageWriter(url) if saves else StorageReader(url)


def _penstock_two_threads(url: str, *, saves: bool) -> Any:
    from penstock.torch.checkpoint import StorageReader, StorageWriter

    return StorageWriter(url, thread_count=2) if saves else StorageReader(url)


def _connector(url: str, *, saves: bool, threads: int = 1) -> Any:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    config = S3ClientConfig(force_path_style=True)
    if saves:
        return S3StorageWriter(REGION, url, s3client_config=config, thread_count=threads)
    return S3StorageReader(REGION, url, s3client_config=config)


def _connector_two_threads(url: str, *, saves: bool) -> Any:
    return _connector(url, saves=saves, threads=2)


STORAGES = {
    "penstock": _penstock,
    "penstock2": _penstock_two_threads,
    "connector": _connector,
    "connector2": _connector_two_threads,
}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def be_rank(kind: str, action: str, url: str, state_bytes: int, rank: int, port: int) -> tuple[float, float]:
    """Be one rank; return the seconds that the work took, and the processor time of this rank."""
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    rows = state_bytes // TENSORS // RANKS // 4096

    def state(fill: float) -> dict[str, Any]:
        local = [torch.full((rows, 1024), fill + number) for number in range(TENSORS)]
        return {f"layer {number}": DTensor.from_local(each, mesh, [Shard(0)]) for number, each in enumerate(local)}

    tensors = state(1.0 if action == "save" else 0.0)
    seconds = cpu_s = 0.0
    for turn in range(2):
        storage = STORAGES[kind](f"{url}/{turn}" if action == "save" and url[0] != "/" else url, saves=action == "save")
        dist.barrier()
        start_s, cpu_s = time.monotonic(), _cpu_s()
        if action == "save":
            dcp.save(tensors, storage_writer=storage)
        else:
            dcp.load(tensors, storage_reader=storage)
        cpu_s = _cpu_s() - cpu_s
        dist.barrier()
        seconds = time.monotonic() - start_s
        if url[0] == "/":
            break
    for number in range(TENSORS):
        local = tensors[f"layer {number}"].to_local()
        assert local[0, 0] == local[-1, -1] == 1.0 + number, "wrong bytes were loaded"
    dist.barrier()
    return seconds, cpu_s


def run(kind: str, action: str, endpoint_url: str, bucket: str, state_bytes: str) -> dict[str, Any]:
    """Be rank 0, with the other ranks as child processes."""
    os.environ |= KEYS | {"AWS_REGION": REGION, "AWS_ENDPOINT_URL": endpoint_url}
    url = (
        f"{endpoint_url}/{LOADED}"
        if endpoint_url[0] == "/"
        else f"s3://{bucket}/{LOADED if action == 'load' else 'saved'}"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = [kind, action, url, state_bytes]
    others = [
        subprocess.Popen([sys.executable, __file__, "--rank", *words, str(rank), str(port)]) for rank in range(1, RANKS)
    ]
    seconds, cpu_s = be_rank(kind, action, url, int(state_bytes), 0, port)
    if any(other.wait() for other in others):
        raise RuntimeError("a rank failed")
    package = kind.rstrip("2").replace("connector", "s3torchconnector")
    versions = {name: __import__(name).__version__ for name in (package, "torch")}
    megabytes = int(state_bytes) / 1e6
    return {
        "seconds": seconds,
        "work_cpu_s": RANKS * cpu_s,
        "samples": None,
        "versions": versions,
        "megabytes": megabytes,
    }


def _client(kind: str, action: str) -> Any:
    return lambda url, bucket, state_bytes: run(kind, action, url, bucket, state_bytes)


CLIENTS = {f"{action} {kind}": _client(kind, action) for action in ("save", "load") for kind in STORAGES}


# ── the comparison ──────────────────────────────────────────────────────────────────────────────────────────────────


def _client_of(name: str, action: str, kind: str, state_bytes: int) -> OneTurn:
    python = sys.executable if kind.startswith("penstock") else str(HERE / ".venvs/s3torchconnector/bin/python")
    made = {"python": python, "words": (state_bytes,), "options": {"threads": 2 if kind.endswith("2") else 1}}
    return OneTurn(name, f"{action} {kind}", script=__file__, samples_count=0, **made)


def _write_what_is_loaded(folder: Path, state_bytes: int) -> None:
    command = [sys.executable, __file__, "--client", "save penstock", str(folder), "", str(state_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the checkpoint to load was not written: {done.stderr[-2000:]}")


def main() -> None:
    from clients import BUCKET
    from harness import arguments, memory_folder

    from penstock.bench.origin.server import Origin
    from penstock.bench.turns import Row, Run

    options = arguments(
        __doc__ or "",
        without_delay={"action": "store_true", "help": "neither a delay nor a rate"},
        megabytes={"type": int, "default": None, "help": "size of the state"},
    )
    state_bytes = (options.megabytes or 0) * 1_000_000 or (QUICK_STATE_BYTES if options.quick else STATE_BYTES)
    network = {} if options.without_delay else {"ttfb_ms": 30.0, "rate_bytes_per_s": 90_000_000}
    with memory_folder() as root:
        (root / BUCKET).mkdir()
        _write_what_is_loaded(root / BUCKET, state_bytes)
        for action, must, aim in (("save", 1.0, 1.5), ("load", 1.5, 3.0)):
            clients = [
                _client_of("penstock", action, "penstock", state_bytes),
                _client_of("connector", action, "connector", state_bytes),
            ]
            if action == "save":
                clients += [
                    _client_of("penstock, 2 threads", action, "penstock2", state_bytes),
                    _client_of("connector, 2 threads", action, "connector2", state_bytes),
                ]
            metrics = {
                "MB/s": lambda answer: answer["megabytes"] / answer["seconds"],
                "CPU s/GB": lambda answer: answer["work_cpu_s"] / answer["megabytes"] * 1e3,
                "RSS MB": lambda answer: answer["memory_bytes"] / 1e6,
            }
            question = f"{action} {state_bytes / 1e6:.0f} MB by two ranks"
            with Origin(root, lists_writes=True, **network) as origin:
                turns = Run(question, origin, options.select(clients), metrics, options.turns(5, 1))
                with turns:
                    turns.turns(lambda client: client.measure())
                peers = [client.name for client in clients if client.name.startswith("connector")]
                best = turns.best("MB/s", *peers)
                turns.report([Row(f"MB/s : {best}", turns.ratios("MB/s", "penstock", best), must, aim)], **network)
        shutil.rmtree(root / BUCKET, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_rank(*sys.argv[2:4], sys.argv[4], *map(int, sys.argv[5:]))  # type: ignore[call-arg]
        os._exit(0)  # gloo's threads may abort the interpreter's end: pytorch/pytorch#179291
    elif sys.argv[1:2] == ["--client"]:
        be_client(CLIENTS, *sys.argv[2:])
        sys.stdout.flush()
        os._exit(0)
    else:
        main()
