"""The loader on real S3 servers, and on one that misbehaves."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock as ps
from connecting import connection_to
from loading import counted, numbers, pipeline, shard, write_counted
from penstock.errors import AccessDeniedError, ObjectMissingError

if TYPE_CHECKING:
    from servers.faulty import FaultyServer

SIZES = (30, 1, 0, 45, 20, 17)
pytestmark = pytest.mark.server


@pytest.fixture
def stored(tmp_path: Path, s3_client: Any, bucket: str) -> Path:
    """A folder of shards, and the same ones in the bucket below ``train/``, put there by botocore."""
    write_counted(tmp_path / "train", SIZES)
    for path in (tmp_path / "train").iterdir():
        s3_client.put_object(Bucket=bucket, Key=f"train/{path.name}", Body=path.read_bytes())
    s3_client.put_object(Bucket=bucket, Key="train/README.md", Body=b"not a shard")
    return tmp_path / "train"


def remote(url: str, s3_endpoint: Any, **changes: Any) -> Any:
    settings = connection_to(s3_endpoint)
    shards = ps.shards(url, **(settings | changes))
    return shards.shuffle(window=64, seed=0).decode(ps.Integer("cls"), ps.Text("txt")).batch(8)


def test_the_same_batches_from_a_bucket_as_from_a_folder(stored: Path, bucket: str, s3_endpoint: Any) -> None:
    """Same shards, same samples, same order, whichever store they lie in."""
    with ps.Loader(pipeline(stored)) as here, ps.Loader(remote(f"s3://{bucket}/train/", s3_endpoint)) as there:
        for _ in range(2):
            batches = list(zip(here, there, strict=True))
            assert sorted(numbers(batch for batch, _ in batches)) == list(range(sum(SIZES)))
            for left, right in batches:
                np.testing.assert_array_equal(left["cls"], right["cls"])
                assert left["__key__"] == right["__key__"]


def test_errors_reach_the_loop(stored: Path, bucket: str, s3_endpoint: Any) -> None:
    """A missing bucket, an empty prefix and a wrong secret each arrive as their own error."""
    wrong = ps.Credentials(access_key=s3_endpoint.access_key, secret_key="wrong")
    for url, changes, error in (
        ("s3://penstock-no-such-bucket/train/", {}, ObjectMissingError),
        (f"s3://{bucket}/nothing/", {}, ObjectMissingError),
        (f"s3://{bucket}/train/s-{{000..009}}.tar", {}, ObjectMissingError),
        (f"s3://{bucket}/train/", {"credentials": wrong}, AccessDeniedError),
    ):
        with ps.Loader(remote(url, s3_endpoint, **changes)) as loader, pytest.raises(error):
            list(loader)


# ── weather ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def shards_on(faulty: FaultyServer) -> FaultyServer:
    """The misbehaving server with 20 shards below ``train/``."""
    for index in range(20):
        faulty.objects[f"train/{index:02d}.tar"] = shard(counted(range(index * 25, index * 25 + 25)))
    return faulty


def anonymous(server: FaultyServer, *, batch: int = 16, **settings: Any) -> Any:
    shards = ps.shards(f"{server.url}/train/", endpoint_url=server.endpoint_url, anonymous=True, **settings)
    return shards.shuffle(window=100).decode(ps.Integer("cls")).batch(batch)


def test_faults_change_nothing(shards_on: FaultyServer) -> None:
    """With a tenth of the requests failing, every sample arrives once, in the order of a fair day."""
    with ps.Loader(anonymous(shards_on)) as loader:
        fair = numbers(loader)
    retry = ps.RetryConfig(backoff_s=0.001, attempts_max=10)
    shards_on.random_faults(["503", "500", "close", "reset"], ratio=0.1, seed=1)
    with ps.Loader(anonymous(shards_on, retry=retry)) as loader:
        foul = numbers(loader)
    assert foul == fair
    assert sorted(foul) == list(range(500))


def test_close_does_not_wait_for_a_store_that_hangs(shards_on: FaultyServer) -> None:
    """While the reader waits for bytes that do not come, close() returns at once and the threads are gone."""
    asked = threading.Event()

    def is_shard(request: Any) -> bool:
        if request.key.endswith(".tar"):
            asked.set()
            return True
        return False

    shards_on.fail("stall", times=None, match=is_shard)
    loader = ps.Loader(anonymous(shards_on))
    ended: list[BaseException] = []

    def trains() -> None:
        try:
            next(iter(loader))
        except ps.ClosedError as error:
            ended.append(error)

    waiting = threading.Thread(target=trains)
    waiting.start()
    assert asked.wait(10)
    began_s = time.monotonic()
    loader.close()
    waiting.join(10)
    assert time.monotonic() - began_s < 5
    assert ended
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-read")]


@pytest.mark.parametrize("where", ["loop", "wait"])
def test_ctrl_c(shards_on: FaultyServer, where: str) -> None:
    """Ctrl-C in the training loop, or while it waits for a store that hangs, ends the program at once."""
    if where == "wait":
        shards_on.fail("stall", times=None, match="10.tar")
    code = (
        "import sys, penstock as ps\n"
        "pipeline = ps.shards(sys.argv[1], endpoint_url=sys.argv[2], anonymous=True).decode(ps.Integer('cls')).batch(5)\n"
        "loader = ps.Loader(pipeline)\n"
        "for epoch in loader.epochs(1_000_000):\n"
        "    for batch in loader:\n"
        "        print(batch['cls'][0], flush=True)\n"
    )
    command = [sys.executable, "-c", code, f"{shards_on.url}/train/", shards_on.endpoint_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if line.strip() == (
                "245" if where == "wait" else "5"
            ):  # "wait": the last batch before the shard that hangs
                break
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=10)
    assert child.returncode == -signal.SIGINT
    assert errors.rstrip().endswith("KeyboardInterrupt")
