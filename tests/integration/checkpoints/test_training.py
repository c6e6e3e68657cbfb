"""Training runs that are killed and started again: everything comes back from the bucket, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

import penstock as ps
from connecting import connection_to
from loading import counted, shard
from penstock.checkpoints import Checkpoints
from ranks import Ranks

if TYPE_CHECKING:
    from penstock.testing.s3_server import S3Server

pytest.importorskip("torch")
pytestmark = [pytest.mark.server, pytest.mark.torch]

SCENARIO = Path(__file__).parent / "training_scenario.py"
HEAVY = [pytest.mark.heavy, pytest.mark.timeout(1800)]
SIZES = (9, 4, 7, 5, 6, 8)
STEPS, EVERY = 14, 3
RUN_S_MAX = 300.0  # four ranks on a busy machine of two cores


class Training:
    """One run of ``training_scenario.py``, which may be killed and started again.

    Args:
        s3: The server.
        bucket: The bucket with the data.
        folder: Empty folder for logs; ``tmp`` in it is the only place where the processes may put temporary files.
        name: Name of the run: its checkpoints lie below it.
        kind: ``plain``, ``ddp`` or ``fsdp``.
    """

    def __init__(self, s3: S3Server, bucket: str, folder: Path, name: str, kind: str) -> None:
        self.out, self.tmp, self.kind = folder / name, folder / f"{name}-tmp", kind
        self.out.mkdir()
        self.tmp.mkdir()
        self.url = f"s3://{bucket}/{name}/"
        self._data = f"s3://{bucket}/data/"
        self._ranks: Ranks | None = None
        self._environment = {
            **os.environ, **s3.environment, "TMPDIR": str(self.tmp), "HOME": str(self.tmp), "OMP_NUM_THREADS": "1",
        }  # fmt: skip

    def start(self, ranks: int, *, steps: int = STEPS) -> Ranks:
        self._ranks = Ranks(
            ranks, SCENARIO, self._data, self.url, str(self.out), str(steps), str(EVERY), self.kind,
            environment=self._environment, folder=self.tmp, stdout=self.out / "stdout", stderr=self.out / "stderr",
        )  # fmt: skip
        return self._ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End what a failed test has left."""
        if self._ranks is not None:
            self._ranks.kill()

    def run(self, ranks: int, *, steps: int = STEPS) -> None:
        """Run it to its end."""
        assert self.start(ranks, steps=steps).wait(RUN_S_MAX) == 0, (self.out / "stderr").read_text()[-3000:]

    def run_and_kill(self, ranks: int, chance: random.Random) -> bool:
        """Run it until a random moment, and kill all processes or one rank; return whether it ended before."""
        before = [len(self.log(rank)) for rank in range(ranks)]
        running = self.start(ranks)
        lines = chance.randrange(1, STEPS)
        while running.poll() is None and any(len(self.log(rank)) < before[rank] + lines for rank in range(ranks)):
            time.sleep(0.02)
        with suppress(subprocess.TimeoutExpired):
            running.wait(chance.random() * 0.3)
        ended = running.poll() is not None
        if ended:
            assert running.poll() == 0, (self.out / "stderr").read_text()[-3000:]
        pids = [[line["pid"] for line in self.log(rank) if "pid" in line][-1] for rank in range(ranks)]
        if ended or chance.random() < 0.5:
            running.kill()
        else:
            os.kill(chance.choice(pids), signal.SIGKILL)
            running.wait(RUN_S_MAX)
        return ended

    def log(self, rank: int) -> list[dict[str, Any]]:
        path = self.out / f"{rank}.jsonl"
        lines = path.read_text().split("\n") if path.exists() else []
        return [json.loads(line) for line in lines[:-1]]  # the last one may have been cut short by a kill


def by_step(log: list[dict[str, Any]]) -> dict[int, Any]:
    """Loss and keys of each step; a step that was made twice was the same both times."""
    found: dict[int, Any] = {}
    for line in log:
        if "loss" in line:
            made = (line["loss"], line["keys"])
            assert found.setdefault(line["step"], made) == made
    return found


def assert_same(killed: Training, whole: Training, ranks: int) -> None:
    """Losses, keys, and everything in the end are equal."""
    for rank in range(ranks):
        steps = by_step(killed.log(rank))
        assert sorted(steps) == list(range(1, STEPS + 1))
        assert steps == by_step(whole.log(rank))
        assert killed.log(rank)[-1]["end"] == whole.log(rank)[-1]["end"]
        assert killed.log(rank)[-1]["latest"] == STEPS // EVERY * EVERY


@pytest.fixture
def data_bucket(s3_endpoint: S3Server, s3_client: Any) -> str:
    """A bucket with six shards and their index below ``data/``."""
    name = s3_endpoint.create_bucket()
    total = 0
    for number, size in enumerate(SIZES):
        body = shard(counted(range(total, total + size)))
        s3_client.put_object(Bucket=name, Key=f"data/s-{number:03d}.tar", Body=body)
        total += size
    ps.build_index(ps.shards(f"s3://{name}/data/", **connection_to(s3_endpoint)), beside=True)
    return name


@pytest.mark.parametrize(
    ("kind", "ranks", "kills"),
    [
        ("plain", 1, 1),
        pytest.param("plain", 1, 6, marks=HEAVY),
        pytest.param("ddp", 2, 4, marks=HEAVY),
        pytest.param("fsdp", 2, 6, marks=HEAVY),
        pytest.param("fsdp", 4, 4, marks=HEAVY),
    ],
)
def test_a_killed_run_goes_on(
    s3_endpoint: S3Server, data_bucket: str, tmp_path: Path, kind: str, ranks: int, kills: int
) -> None:
    """Killed at random moments and started again until it is done, a run is bit for bit one that was not killed."""
    with (
        Training(s3_endpoint, data_bucket, tmp_path, "whole", kind) as whole,
        Training(s3_endpoint, data_bucket, tmp_path, "killed", kind) as killed,
    ):
        whole.run(ranks)
        chance = random.Random(f"{kind} {ranks}")
        if not any(killed.run_and_kill(ranks, chance) for _ in range(kills)):
            killed.run(ranks)
    assert_same(killed, whole, ranks)
    for training in (killed, whole):
        assert [path for path in training.tmp.rglob("*") if path.is_file()] == []
        for rank in range(ranks):
            names = {path for path in training.log(rank)[-1]["written"] if Path(path).parent != training.tmp}
            assert names <= {str(training.out / f"{rank}.jsonl")}


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("first", "second"), [(2, 4), (4, 2)])
def test_another_number_of_ranks(
    s3_endpoint: S3Server, data_bucket: str, tmp_path: Path, first: int, second: int
) -> None:
    """Weights and optimizer are exact at another world size, and every sample of the epoch is trained on once."""
    with Training(s3_endpoint, data_bucket, tmp_path, "run", "fsdp") as training:
        training.run(first, steps=EVERY)
        saved = next(line for line in training.log(0) if line.get("saved") == EVERY)["digest"]
        training.run(second, steps=EVERY + 20)
    for rank in range(second):
        begin = [line for line in training.log(rank) if "pid" in line][-1]
        assert begin["step"] == EVERY
        assert {name: begin["digest"][name] for name in ("weights", "optimizer", "scheduler")} == {
            name: saved[name] for name in ("weights", "optimizer", "scheduler")
        }
    logs = [training.log(rank) for rank in range(max(first, second))]
    keys = [key for log in logs for line in log if line.get("epoch") == 0 for key in line["keys"]]
    assert len(keys) == len(set(keys))
    assert sum(SIZES) - len(keys) < 3 * second  # drop_last


def test_the_store_holds_whole_checkpoints(s3_endpoint: S3Server, data_bucket: str, tmp_path: Path) -> None:
    """keep_last=3 leaves three checkpoints, each of which verifies, and nothing else."""
    with Training(s3_endpoint, data_bucket, tmp_path, "run", "plain") as training:
        training.run(1)
    with Checkpoints(training.url, **connection_to(s3_endpoint)) as checkpoints:
        assert checkpoints.steps() == [6, 9, 12]
        assert all(checkpoints.verify(step).ok for step in checkpoints.steps())
        assert checkpoints.debris() == []
