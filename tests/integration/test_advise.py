"""``penstock advise`` against a real S3 and a misbehaving one: what it measures, says, prints and refuses."""

from __future__ import annotations

import io
import json
import math
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.advise.measurement import SHARES, WINDOW_BATCHES, loader_statistics
from penstock.advise.probes import StoreProbe
from penstock.config import cores_count
from penstock.errors import AccessDeniedError, ConfigError, ObjectMissingError
from penstock.pipeline import Batch
from penstock.store import Store
from servers.faulty import FaultyServer

pytestmark = pytest.mark.server

SECONDS = 0.2
COMMAND = [sys.executable, "-c", "from penstock.cli import main; main()", "advise"]


def tar(samples: int, size_bytes: int = 2000) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for number in range(samples):
            for suffix, value in (("bin", random.Random(number).randbytes(size_bytes)), ("cls", b"%d" % number)):
                member = tarfile.TarInfo(f"{number:06d}.{suffix}")
                member.size = len(value)
                archive.addfile(member, io.BytesIO(value))
    return out.getvalue()


@pytest.fixture(autouse=True)
def _one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start worker processes once: the rates do not matter here."""
    monkeypatch.setattr("penstock.advise.measurement.ROUNDS", 1)


def run(*arguments: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=100, check=False, **changes)


def test_a_data_set_of_shards(user: Any, bucket: str, s3_store: Store) -> None:
    """The profile says what is there, exactly; the advice covers every topic; the step is called on real batches."""
    for number in range(8):
        s3_store.write(f"x/{number:03d}.tar", tar(50))
    batches: list[dict[str, Any]] = []
    pipeline = ps.shards("s3://other/").shuffle(1000).decode(ps.Integer("cls")).batch(25)
    report = ps.advise(f"s3://{bucket}/x/", pipeline=pipeline, step=batches.append, seconds=SECONDS)
    data, store = report.profile.data, report.profile.store
    assert data is not None
    assert store is not None
    assert (data.kind, data.objects_count, data.samples_per_object, data.formats) == ("shards", 8, 50.0, {"tar": 8})
    assert (data.member_bytes["bin"], data.unused_members, data.batch_size, data.lanes) == (2000.0, ("bin",), 25, 64)
    assert {rate.processes > 0 for rate in data.cpu_rates} == {False, True}
    assert data.samples_per_s is not None
    assert len(batches) >= 4
    assert batches[0]["cls"].shape == (25,)
    assert report.profile.step_samples_per_s > 0
    assert [rate.connections for rate in store.rates][:2] == [1, 4]
    topics = [advice.topic for advice in report.advice if advice.topic != "cluster"]  # by what limited here
    assert topics == [
        "limit", "decoding", "concurrency", "workers", "shard size", "cache", "random access", "index", "fields", "door",
    ]  # fmt: skip
    assert all(advice.text and advice.evidence for advice in report.advice)
    assert report.profile.received_bytes > 8 * 50 * 2000
    assert not report.profile.notes


def test_objects_and_what_is_printed(user: Any, bucket: str, s3_store: Store, tmp_path: Path) -> None:
    """Pairs of objects are one sample; JSON has a line for each part; the advised code and flags run."""
    for number in range(60):
        s3_store.write(f"x/{number:03d}.bin", bytes(3000))
        s3_store.write(f"x/{number:03d}.cls", b"7")
    url = f"s3://{bucket}/x/"
    done = run(url, "--seconds", str(SECONDS), "--apply", "--json", "--step-ms", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    by_kind = {line["kind"]: line for line in lines}
    assert set(by_kind) == {"machine", "store", "data", "advice", "configuration", "summary", "apply"}
    assert (by_kind["data"]["objects_count"], by_kind["data"]["samples_per_object"]) == (120, 0.5)
    assert by_kind["store"]["connection_bytes_per_s"] is None  # small objects do not tell
    assert by_kind["summary"]["step_samples_per_s"] == by_kind["data"]["batch_size"] / 0.005
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", by_kind["apply"]["code"]],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    words = by_kind["apply"]["flags"].split()
    assert words[:2] == ["penstock", "advise"]
    tried = run(*words[2:], "--seconds", str(SECONDS), "--json", cwd=tmp_path)
    assert tried.returncode == 0, tried.stderr
    first, second = (json.loads(line) for line in tried.stdout.splitlines())
    assert first["options"] == {}
    assert second["options"]
    assert first["samples_per_s"] > 0


def test_edges(user: Any, bucket: str, s3_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing there, one object, other formats beside shards, more objects than are looked at: each is said."""
    with pytest.raises(ObjectMissingError, match="no object to measure"):
        ps.advise(f"s3://{bucket}/none/", seconds=SECONDS)
    s3_store.write("one/a.tar", tar(20))
    one = ps.advise(f"s3://{bucket}/one/a.tar", seconds=SECONDS)
    assert "there is one object only" in one.profile.notes[0]
    for number in range(9):
        s3_store.write(f"mixed/{number}.txt", b"text")
    s3_store.write("mixed/a.tar", tar(20))
    s3_store.write("mixed/b.txt", b"text")
    monkeypatch.setattr("penstock.advise.measurement.LISTED_MAX", 10)
    mixed = ps.advise(f"s3://{bucket}/mixed/", seconds=SECONDS)
    assert mixed.profile.data is not None
    assert mixed.profile.data.formats == {".txt": 9, "tar": 1}
    assert mixed.profile.notes == (
        "there are more than the 10 objects that were looked at: number and size are estimates",
        "mixed formats: this looks at 1 objects of tar, and leaves out 9 objects of other formats",
    )
    with pytest.raises(ConfigError, match="one source"):
        ps.advise(f"s3://{bucket}/one/", pipeline=ps.mix({ps.shards("s3://a/"): 1, ps.shards("s3://b/"): 1}).batch(2))


def slow(sample: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.01)
    return sample


def test_decoding_is_timed_in_many_batches(
    user: Any, bucket: str, s3_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of two or three batches would be half a batch wrong, so batches are as small as the rate asks."""
    s3_store.write("x/a.tar", tar(50))
    sizes: list[tuple[bool, int]] = []

    def watched(pipeline: ps.Pipeline, **options: Any) -> Any:
        stage = pipeline.stage(Batch)
        assert stage is not None
        assert stage.size is not None
        sizes.append(("threads" in options, stage.size))
        return loader_statistics(pipeline, **options)

    monkeypatch.setattr("penstock.advise.measurement.loader_statistics", watched)
    report = ps.advise(f"s3://{bucket}/x/", pipeline=ps.shards("s3://other/").map(slow).batch(50), seconds=2.0)
    assert report.profile.data is not None
    assert report.profile.data.cpu_rates
    assert report.profile.data.batch_size == 50
    rate_max = cores_count() / 0.01
    assert max(size for is_timed, size in sizes if is_timed) <= math.ceil(rate_max * 2.0 / SHARES / WINDOW_BATCHES)
    assert {size for is_timed, size in sizes if not is_timed} == {50}


def test_a_pipeline_that_raises(user: Any, bucket: str, s3_store: Store, tmp_path: Path) -> None:
    """The store is measured nevertheless; the error is named, and the exit code is 1."""
    s3_store.write("x/a.tar", tar(20))
    (tmp_path / "job.py").write_text(
        "import penstock as ps\n"
        "def broken(sample):\n    raise ValueError('no such word')\n"
        "def pipeline():\n    return ps.shards('s3://any/').map(broken).batch(4)\n"
    )
    done = run(f"s3://{bucket}/x/", "--pipeline", "job:pipeline", "--seconds", str(SECONDS), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "the pipeline or the step failed" in done.stdout
    assert "no such word" in done.stdout
    assert "first_byte_p50" in done.stdout


def test_interrupted(user: Any, bucket: str, s3_store: Store) -> None:
    """Ctrl-C prints what was found, and ends as Ctrl-C ends other commands."""
    s3_store.write("x/a.tar", tar(20))
    with subprocess.Popen(
        [*COMMAND, "--verbose", f"s3://{bucket}/x/", "--seconds", "60", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        requests = 0  # during the first ones, packages are imported, and those in C may lose an interrupt
        while requests < 50:
            line = process.stderr.readline()
            assert line, process.wait()
            requests += b"a.tar" in line
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=20)
    assert process.returncode == 130, errors
    summary = json.loads(out.splitlines()[-1])
    assert summary["is_interrupted"]
    assert json.loads(out.splitlines()[0])["kind"] == "machine"


def test_a_store_that_throttles(faulty: FaultyServer, connect_faulty: Callable[..., Store]) -> None:
    """Answers that ask to slow down are counted by number of connections; so many connections are not advised."""
    faulty.objects["x/a.bin"] = bytes(100_000)
    store = connect_faulty()
    probe = StoreProbe(store, [store.stat("x/a.bin")], seconds=0.2, bytes_max=10**8)
    faulty.random_faults(["slow_down"], ratio=0.2)
    probe.run(lambda _: None)
    assert probe.profile is not None
    assert probe.profile.throttled_connections == 1
    assert max(rate.throttled_ratio for rate in probe.profile.rates) > 0.05
    assert probe.received_bytes >= 100_000
    report = ps.advise(f"{faulty.url}/x/", endpoint_url=faulty.endpoint_url, anonymous=True, seconds=2.0)
    assert report.best.requests_max == 4
    assert any("the store throttles at" in advice.text for advice in report.advice)


def test_no_permission_to_list(faulty: FaultyServer) -> None:
    """It is an error with what to name instead; one object can be looked at without listing."""
    faulty.objects["x/a.bin"] = bytes(100_000)
    faulty.fail("403", match=lambda request: not request.key, times=None)
    where: Any = {"endpoint_url": faulty.endpoint_url, "anonymous": True}
    with pytest.raises(AccessDeniedError):
        ps.advise(f"{faulty.url}/x/", seconds=SECONDS, **where)
    report = ps.advise(f"{faulty.url}/x/a.bin", seconds=SECONDS, **where)
    assert report.profile.store is not None
    assert report.profile.options == where
