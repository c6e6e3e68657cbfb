"""torchrun and ``penstock run`` together: each rank has pipes of its own, whichever of the two starts the other."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from penstock.store import Store

pytest.importorskip("torch")

pytestmark = [pytest.mark.server, pytest.mark.heavy]

COUNT = 24
WAIT_S_MAX = 120

TRAIN = textwrap.dedent("""
    import os, pathlib
    import torch.distributed as dist
    from penstock.channels import PipeReader

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = {name: [line.decode() for line in PipeReader(name, format="lines")] for name in ("part", "copy")}
    everyone = [None] * ranks
    dist.all_gather_object(everyone, mine)
    pathlib.Path(os.environ["SM_OUTPUT_DATA_DIR"], f"rank-{rank}").write_text(repr(everyone))
    dist.destroy_process_group()
""")


@pytest.fixture
def environment(s3_endpoint: Any, s3_store: Store, tmp_path: Path) -> dict[str, str]:
    """The variables of a run on the session's S3; the objects and the script of all runs are there."""
    for number in range(COUNT):
        s3_store.write(f"train/{number:02d}", b"%02d\n" % number)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "tmp").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return {
        **kept,
        "AWS_CONFIG_FILE": os.devnull,
        "TMPDIR": str(tmp_path / "tmp"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **s3_endpoint.environment,
    }


def penstock_run(bucket: str, out: Path, *options: str, extra: str = "") -> list[str]:
    return [
        sys.executable, "-c", "from penstock.cli import main; main()", "run", "--mode", "pipe",
        "-c", f"part=s3://{bucket}/train/,seed=3{extra}", "-c", f"copy=s3://{bucket}/train/,seed=5,copies=2",
        "--output-url", f"{out}/", *options, "--",
    ]  # fmt: skip


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--monitor-interval", "0.1", *options]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def end_all(processes: list[subprocess.Popen[str]]) -> None:
    try:
        for process in processes:
            _, errors = process.communicate(timeout=WAIT_S_MAX)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.wait()


def everyone(*folders: Path) -> list[dict[str, list[str]]]:
    """Return what each rank has read; all ranks agree on it."""
    found = [path.read_text() for folder in folders for path in sorted(folder.glob("rank-*"))]
    assert len(found) == 2
    assert len(set(found)) == 1
    ranks: list[dict[str, list[str]]] = ast.literal_eval(found[0])
    return ranks


def check(ranks: list[dict[str, list[str]]]) -> None:
    names = [f"{number:02d}" for number in range(COUNT)]
    assert all(rank["part"] for rank in ranks)
    assert sorted(name for rank in ranks for name in rank["part"]) == names
    assert all(sorted(rank["copy"]) == names for rank in ranks)
    assert ranks[0]["copy"] != ranks[1]["copy"]


def test_a_run_that_starts_torchrun(bucket: str, environment: dict[str, str], tmp_path: Path) -> None:
    """Two ranks of one host share the parts of a split exactly, and each has a whole copy in an order of its own."""
    command = [
        *penstock_run(bucket, tmp_path / "out", extra=",split=2"),
        *torchrun("--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), "train.py"),
    ]
    process = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    end_all([process])
    check(everyone(tmp_path / "out"))
    assert list((tmp_path / "tmp").glob("penstock-run-*")) == []


def test_a_run_on_each_host(bucket: str, environment: dict[str, str], tmp_path: Path) -> None:
    """Two hosts with one rank each share a channel by ShardedByS3Key exactly; copies differ between the hosts, too."""
    port = free_port()
    processes = []
    for number, host in enumerate(("algo-1", "algo-2")):
        given = penstock_run(
            bucket, tmp_path / host, "--hosts", "algo-1,algo-2", "--current-host", host,
            extra=",distribution=ShardedByS3Key,split=1",
        )  # fmt: skip
        launcher = torchrun(
            "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1",
            "--master-addr", "127.0.0.1", "--master-port", str(port), "train.py",
        )  # fmt: skip
        processes.append(
            subprocess.Popen([*given, *launcher], env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        )
    end_all(processes)
    check(everyone(tmp_path / "algo-1", tmp_path / "algo-2"))


def test_torchrun_that_starts_a_run_on_each_host(bucket: str, environment: dict[str, str], tmp_path: Path) -> None:
    """A run that torchrun starts on each of two hosts takes the hosts from torchrun, and its program remains a rank of it."""
    port = free_port()
    processes = []
    for number, host in enumerate(("algo-1", "algo-2")):
        given = penstock_run(bucket, tmp_path / host, extra=",distribution=ShardedByS3Key,split=1")
        launcher = torchrun(
            "--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", "1", "--no-python",
            "--master-addr", "127.0.0.1", "--master-port", str(port),
        )  # fmt: skip
        command = [*launcher, *given, sys.executable, "train.py"]
        processes.append(subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True))
    end_all(processes)
    check(everyone(tmp_path / "algo-1", tmp_path / "algo-2"))
