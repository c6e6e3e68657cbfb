"""Distributed checkpoints on a real S3 server: ranks of torchrun, kills at any moment, and stores that fail in the middle."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from connecting import connection_to
from penstock.checkpoints import Checkpoints
from penstock.config import RetryConfig, TransportConfig
from penstock.torch.checkpoint import StorageReader, StorageWriter
from penstock.transport import engine
from ranks import run_ranks

if TYPE_CHECKING:
    from penstock.testing.s3_server import S3Server
    from servers.faulty import FaultyServer


dcp: Any = torch.distributed.checkpoint  # it exports nothing, as far as mypy can see

pytestmark = [pytest.mark.server, pytest.mark.torch, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

SCENARIO = Path(__file__).parent / "dcp_scenario.py"
QUICK: dict[str, Any] = {
    "transport": TransportConfig(connect_s_max=2, first_byte_s_max=1, stall_s_max=1),
    "retry": RetryConfig(attempts_max=2, total_s_max=0.2, backoff_s=0.01, backoff_s_max=0.02),
}


# ── ranks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def settings(server: S3Server) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": server.access_key,
        "AWS_SECRET_ACCESS_KEY": server.secret_key,
        "AWS_REGION": server.region,
    }


def test_two_ranks(s3_endpoint: S3Server, bucket: str) -> None:
    """Two ranks save a sharded model, also asynchronously, and load it; a rank that fails commits nothing."""
    url = f"s3://{bucket}/run/"
    actions = ["save=1", "load=1", "thread=2", "fail=3", "fail=2", "load=2"]
    said = run_ranks(2, SCENARIO, url, s3_endpoint.endpoint_url, *actions, environment=settings(s3_endpoint))
    assert said.split("done ")[1:] == [f"{action}\n" for action in actions]
    with connected(s3_endpoint, url) as run:
        assert [(info.step, info.status, info.world_size) for info in run.all()][:2] == [
            (1, "whole", 2),
            (2, "whole", 2),
        ]
        assert run.inspect(3).status == "unfinished"
        assert run.verify(2).ok
        assert len(run.remove_debris()) == 2
        assert run.steps() == [1, 2]


@pytest.mark.heavy
def test_other_numbers_of_ranks(s3_endpoint: S3Server, bucket: str) -> None:
    """What two ranks saved, four load, and the other way round; an asynchronous save in a process commits as well."""
    url = f"s3://{bucket}/run/"
    for ranks, actions in ((2, ["process=1"]), (4, ["load=1", "save=2"]), (2, ["load=2"]), (1, ["load=1", "load=2"])):
        run_ranks(ranks, SCENARIO, url, s3_endpoint.endpoint_url, *actions, environment=settings(s3_endpoint))


# ── kills ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def state(step: int) -> dict[str, Any]:
    """A state from which each byte tells the step."""
    generator = torch.Generator().manual_seed(step)
    return {f"tensor {number}": torch.randn(20_000, generator=generator) for number in range(5)} | {"step": step}


def connected(server: S3Server, url: str) -> Checkpoints:
    return Checkpoints(url, **connection_to(server))


def save_on_and_on(url: str, connect: dict[str, Any], first: int, again: bool, begun: Any) -> None:
    """Save step after step, or the same step again and again, until somebody kills this process."""
    import warnings

    warnings.simplefilter("ignore")
    step = first
    while True:
        begun.send(step)
        dcp.save(
            state(step),
            storage_writer=StorageWriter(f"{url}step-{1 if again else step:010d}", thread_count=2, **connect),
        )
        step += 1


def loaded(url: str, step: int, connect: dict[str, Any]) -> dict[str, Any]:
    target: dict[str, Any] = {f"tensor {number}": torch.zeros(20_000) for number in range(5)} | {"step": -1}
    dcp.load(target, storage_reader=StorageReader(f"{url}step-{step:010d}", **connect))
    return target


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(
        torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name]
        for name, value in first.items()
    )


def check_kills(server: S3Server, url: str, *, kills: int, again: bool, seed: int) -> None:
    """Kill a process that saves, at random moments; after each, the newest whole checkpoint is exact and nothing is half."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    chance, connect, last = random.Random(seed), connection_to(server), 0
    for _ in range(kills):
        mine, its = context.Pipe(duplex=False)
        child = context.Process(target=save_on_and_on, args=(url, connect, last + 1, again, its))
        child.start()
        its.close()
        for _ in range(chance.randint(1, 3)):
            step = mine.recv()  # so all before this one are committed
        until = time.monotonic() + chance.uniform(0, 0.12)
        while time.monotonic() < until and mine.poll(until - time.monotonic()):
            step = mine.recv()
        child.kill()
        child.join()
        while mine.poll():
            try:
                step = mine.recv()
            except EOFError:
                break
        mine.close()
        last = check_what_is_left(server, url, step, again=again)
    with connected(server, url) as run:
        final = 1 if again else last + 1
        dcp.save(state(last + 1), storage_writer=StorageWriter(f"{url}step-{final:010d}", **connect))
        expected = {f"step-{each:010d}" for each in run.steps()}
        assert run.debris() == []
        for info in run.all():
            assert (info.status, info.problem) == ("whole", None)
        keys = [info.key for info in run.store.list("")]
        assert {key.partition("/")[0] for key in keys} == expected
        assert len(keys) == sum(info.files_count + 1 for info in run.all())  # and each manifest


def check_what_is_left(server: S3Server, url: str, step: int, *, again: bool) -> int:
    """Compare what a killed process left while or after it saved `step`; return the newest step that is whole."""
    connect = connection_to(server)
    with connected(server, url) as run:
        if again:
            newest = run.newest()
            if newest is None:
                assert step == 1
                return 0
            found = loaded(url, 1, connect)
            assert found["step"] in (step - 1, step)
            assert equal(found, state(found["step"]))
            return int(found["step"])
        committed = [info for info in run.all() if info.status != "unfinished"]
        assert {info.status for info in committed} <= {"whole"}
        newest_step = max((info.step or 0 for info in committed), default=0)
        assert newest_step in (step - 1, step)
        if newest_step:
            assert run.newest().step == newest_step  # type: ignore[union-attr]
            assert equal(loaded(url, newest_step, connect), state(newest_step))
        return newest_step


@pytest.mark.parametrize("again", [False, True])
def test_kills(s3_endpoint: S3Server, bucket: str, again: bool) -> None:
    """A process killed while it saves leaves the earlier checkpoint; the next save removes its debris."""
    check_kills(s3_endpoint, f"s3://{bucket}/run/", kills=4, again=again, seed=int(again))


@pytest.mark.heavy
@pytest.mark.parametrize("again", [False, True])
def test_a_hundred_kills(s3_endpoint: S3Server, bucket: str, again: bool) -> None:
    """So it is at fifty random moments of saves to new directories, and of saves that replace a checkpoint."""
    check_kills(s3_endpoint, f"s3://{bucket}/run/", kills=50, again=again, seed=7 + int(again))


# ── stores that fail ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def faulty_run(faulty: FaultyServer) -> Iterator[Checkpoints]:
    """A run with the checkpoint of step 1, in a store that can fail."""
    with Checkpoints(f"{faulty.url}/run/", **faulty_options(faulty)) as run:
        dcp.save(state(1), storage_writer=StorageWriter(f"{faulty.url}/run/step-0000000001", **faulty_options(faulty)))
        yield run


def faulty_options(faulty: FaultyServer) -> dict[str, Any]:
    return {"endpoint_url": faulty.endpoint_url, "anonymous": True, **QUICK}


WHEN: dict[str, Callable[[Any], bool]] = {
    "marker": lambda request: request.method == "PUT" and "saving-" in request.key,
    "data": lambda request: request.method == "PUT" and request.key.endswith(".distcp"),
    "manifest": lambda request: request.method == "PUT" and "manifest-" in request.key,
    "commit": lambda request: request.method == "PUT" and request.key.endswith(".metadata"),
}


@pytest.mark.parametrize("moment", WHEN)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("close_head", "ShortReadError"),
        ("403", "AccessDeniedError"),
        ("quota", "StoreFullError: .*free some space"),
        ("507", "StoreFullError: .*free some space"),
    ],
)
@pytest.mark.parametrize("directory", ["step-0000000001", "step-0000000002"])
def test_a_store_that_fails_while_saving(
    faulty: FaultyServer, faulty_run: Checkpoints, directory: str, kind: str, message: str, moment: str
) -> None:
    """Unreachable, no permission, a full bucket, at any moment: an error that names the file, and the earlier checkpoint."""
    faulty.fail(kind, times=None, match=WHEN[moment])
    writer = StorageWriter(f"{faulty.url}/run/{directory}", **faulty_options(faulty))
    file = {"marker": "saving-", "data": "__0_0-", "manifest": "manifest-", "commit": r"\.metadata"}[moment]
    with pytest.raises(CheckpointException, match=rf"(?s)({message}.*|).*s3://bucket/run/.*{file}") as raised:
        dcp.save(state(2), storage_writer=writer)
    assert message.partition(":")[0] in str(raised.value)
    assert equal(loaded(f"{faulty.url}/run/", 1, faulty_options(faulty)), state(1))
    assert faulty_run.newest().step == 1  # type: ignore[union-attr]
    faulty.heal()
    dcp.save(state(2), storage_writer=writer)
    assert equal(loaded(f"{faulty.url}/run/", int(directory[5:]), faulty_options(faulty)), state(2))
    assert len(faulty.objects) == 3 * len(faulty_run.steps())
    assert faulty.uploads == {}


def test_a_store_that_does_not_let_delete(faulty: FaultyServer, faulty_run: Checkpoints, caplog: Any) -> None:
    """Without permission to delete, the save is committed, and a warning says that old files stay."""
    faulty.fail("403", times=None, match=lambda request: request.method == "DELETE" or "?delete" in request.path)
    dcp.save(state(2), storage_writer=StorageWriter(f"{faulty.url}/run/step-0000000001", **faulty_options(faulty)))
    assert "The checkpoint is committed, but old files were not removed" in caplog.text
    assert equal(loaded(f"{faulty.url}/run/", 1, faulty_options(faulty)), state(2))


def test_a_store_that_does_not_let_list(faulty: FaultyServer, faulty_run: Checkpoints) -> None:
    """Without permission to list, saves are committed and checkpoints are loaded all the same."""
    del faulty_run
    faulty.fail("403", times=None, match=lambda request: request.is_list)
    dcp.save(state(3), storage_writer=StorageWriter(f"{faulty.url}/run/step-0000000003", **faulty_options(faulty)))
    assert equal(loaded(f"{faulty.url}/run/", 3, faulty_options(faulty)), state(3))


@pytest.mark.parametrize(
    ("kind", "message"),
    [("close", "ShortReadError"), ("403", "AccessDeniedError"), ("corrupt", "damaged|Checksum"), ("500", "500")],
)
def test_a_store_that_fails_while_loading(
    faulty: FaultyServer, faulty_run: Checkpoints, kind: str, message: str
) -> None:
    """Short bodies, no permission, flipped bytes and server errors: an error that names the file."""
    del faulty_run
    faulty.fail(kind, times=None, match=".distcp")
    with pytest.raises(CheckpointException, match=rf"(?s){message}.*") as raised:
        loaded(f"{faulty.url}/run/", 1, faulty_options(faulty))
    assert "s3://bucket/run/step-0000000001/__0_0-" in str(raised.value)


def test_nothing_is_left_behind(
    faulty: FaultyServer, faulty_run: Checkpoints, nothing_left: Callable[[], AbstractContextManager[None]]
) -> None:
    """Saves and loads, and those that fail, leave no thread and no descriptor."""
    del faulty_run
    engine.close()  # its connections may stay
    with nothing_left():
        for fails in (False, True):
            with StorageWriter(f"{faulty.url}/run/step-0000000002", thread_count=4, **faulty_options(faulty)) as writer:
                if fails:
                    faulty.fail("403", times=None, match=WHEN["data"])
                    with pytest.raises(CheckpointException):
                        dcp.save(state(2), storage_writer=writer)
                else:
                    dcp.save(state(2), storage_writer=writer)
        loaded(f"{faulty.url}/run/", 2, faulty_options(faulty))
        engine.close()
