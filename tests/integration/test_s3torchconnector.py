"""Programs for the S3 Connector for PyTorch run on penstock, on real servers, after their import was changed."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest

from penstock.errors import ChecksumError, ShortReadError
from penstock.fetch import process_budget
from servers.faulty import FaultyServer
from servers.gateway import wait_until
from servers.leaks import children, threads

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.checkpoint")
s3torchconnector = pytest.importorskip("penstock.compat.s3torchconnector")
pytestmark = [pytest.mark.server, pytest.mark.torch]

OBJECTS = {f"{number:03d}": bytes([number]) * (100 + number) for number in range(30)}


@pytest.fixture
def prefix(user: Any, bucket: str) -> str:
    """A prefix with 30 objects."""
    client = user.client()
    for name, data in OBJECTS.items():
        client.put_object(Bucket=bucket, Key=f"job/data/{name}", Body=data)
    return f"s3://{bucket}/job"


def read(reader: Any) -> tuple[str, bytes]:
    return reader.key.rpartition("/")[2], reader.read()


def test_a_program_runs_after_changing_its_import(prefix: str, user: Any, tmp_path: Path) -> None:
    """Map and iterable data set in a DataLoader with workers, and a checkpoint; region wrong, endpoint without a scheme."""
    script = Path(__file__).with_name("s3torchconnector_job.py")
    host = user.endpoint_url.removeprefix("http://")
    environment = os.environ | {
        "AWS_REGION": "ap-south-2",
        "AWS_DEFAULT_REGION": "ap-south-2",
        "AWS_ENDPOINT_URL": host,
    }
    done = subprocess.run(
        [sys.executable, str(script), prefix], env=environment, cwd=tmp_path, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    wanted = [[name, sum(data)] for name, data in OBJECTS.items()]
    assert found["drawn"] == wanted
    assert found["streamed"] == [*zip_of(wanted[::2], wanted[1::2])]
    assert (found["checkpoint"], found["length"]) == (True, 30)
    assert "has no scheme, so 'http://127.0.0.1" in done.stderr


def zip_of(*shares: list[Any]) -> list[Any]:
    """The shares of the workers in the DataLoader's order, one sample of each in turn."""
    return [one for group in zip(*shares, strict=True) for one in group]


def test_an_exception_commits_nothing(prefix: str) -> None:
    """After an exception inside ``with``, and when a writer is dropped, the earlier object is still there, whole."""
    checkpoint = s3torchconnector.S3Checkpoint(region="us-east-1")
    uri = f"{prefix}/state"
    with checkpoint.writer(uri) as writer:
        writer.write(memoryview(b"whole"))
        assert (writer.tell(), writer.writable(), writer.readable()) == (5, True, False)

    def fail() -> None:
        with writer:
            writer.write(b"half" * 3_000_000)
            raise KeyError("the program's own")

    writer = checkpoint.writer(uri)
    with pytest.raises(KeyError):
        fail()
    assert writer.closed
    with pytest.raises(ValueError, match="aborted"):
        writer.write(b"more")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dropped = checkpoint.writer(uri)
        dropped.write(b"half")
        del dropped
    assert "never closed. Hint: with checkpoint.writer(uri) as file" in str(told[0].message)
    assert checkpoint.reader(uri).read() == b"whole"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_goes_to_the_store_and_back(prefix: str) -> None:
    """``dcp.S3StorageWriter`` and ``S3StorageReader`` save and load a state; the files have the strategy's prefix."""
    dcp = pytest.importorskip("penstock.compat.s3torchconnector.dcp")
    strategy = dcp.RoundRobinPrefixStrategy(["a", "b"], epoch_num=3)
    writer = dcp.S3StorageWriter("us-east-1", f"{prefix}/dcp", prefix_strategy=strategy, thread_count=2)
    state = {"weights": torch.arange(200_000, dtype=torch.float32).reshape(400, 500), "bias": torch.ones(7), "step": 3}
    torch.distributed.checkpoint.save(state, storage_writer=writer, no_dist=True)
    found = {"weights": torch.zeros(400, 500), "bias": torch.zeros(7), "step": 0}
    reader = dcp.S3StorageReader("us-east-1", f"{prefix}/dcp")
    torch.distributed.checkpoint.load(found, storage_reader=reader, no_dist=True)
    assert torch.equal(found["weights"], state["weights"])
    assert found["step"] == 3
    files = s3torchconnector.S3MapDataset.from_prefix(f"{prefix}/dcp/a/epoch_3/__0_", region="us-east-1")
    assert len(files) == 2


@pytest.fixture
def weather(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> FaultyServer:
    """The misbehaving server, with objects, as the environment's endpoint."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", faulty.endpoint_url)
    for name, data in OBJECTS.items():
        faulty.objects[f"data/{name}"] = data
    return faulty


def held_bytes() -> int:
    """Bytes of the process's budget that somebody holds."""
    budget = process_budget().statistics()
    return budget.used_bytes - budget.free_bytes


UNSIGNED = s3torchconnector.S3ClientConfig(unsigned=True, max_attempts=2)


@pytest.mark.parametrize("constructor", ["sequential", "range_based"])
def test_a_damaged_checkpoint_is_an_error(weather: FaultyServer, constructor: str) -> None:
    """``torch.load`` of a reader reads a checkpoint in pieces, and still raises if one of them is damaged."""
    checkpoint = s3torchconnector.S3Checkpoint(
        "us-east-1",
        s3client_config=UNSIGNED,
        reader_constructor=getattr(s3torchconnector.S3ReaderConstructor, constructor)(),
    )
    with checkpoint.writer("s3://bucket/model.pt") as writer:
        torch.save({str(number): torch.arange(100_000) for number in range(5)}, writer)
    with checkpoint.reader("s3://bucket/model.pt") as reader:
        assert len(torch.load(reader)) == 5
    weather.fail(
        "corrupt", times=None, match=lambda request: bool(request.span) and request.span[1] - request.span[0] > 99_999
    )
    with checkpoint.reader("s3://bucket/model.pt") as reader, pytest.raises(ChecksumError):
        torch.load(reader)
    files = fsspec.filesystem("penstock", endpoint_url=weather.endpoint_url, anon=True)
    with files.open("s3/bucket/model.pt") as file, pytest.raises(ChecksumError):
        torch.load(file)


def test_a_short_body_is_an_error(weather: FaultyServer) -> None:
    """A body that ends early is never handed out: it is read again, or, if that fails too, it is an error of this object."""
    weather.fail("close", times=1, match="data/004", after_bytes=10)
    dataset = s3torchconnector.S3IterableDataset.from_prefix(
        "s3://bucket/data/", s3client_config=UNSIGNED, transform=read
    )
    assert dict(dataset) == OBJECTS
    weather.fail("close", times=2, match="data/011", after_bytes=10)
    found = {}
    with pytest.raises(s3torchconnector.S3Exception) as caught:
        found.update(iter(dataset))
    assert isinstance(caught.value, ShortReadError)
    assert "data/011" in str(caught.value)


@pytest.mark.parametrize("kind", [s3torchconnector.S3MapDataset, s3torchconnector.S3IterableDataset])
def test_nothing_is_left_of_an_abandoned_data_set(kind: Any, weather: FaultyServer) -> None:
    """Iterating in part, keeping a reader, and dropping all of it leaves no thread or process, and no bytes in the budget."""

    def some() -> int:
        dataset = kind.from_prefix("s3://bucket/data/", s3client_config=UNSIGNED)
        readers = iter(dataset)
        return len(next(readers).read()) + len(next(readers).read(3))

    some()
    gc.collect()
    before, held = threads() | children(), held_bytes()
    for _ in range(3):
        assert some() == 103
    wait_until(lambda: threads() | children() <= before)
    wait_until(lambda: held_bytes() <= held)
