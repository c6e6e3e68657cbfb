"""A process that saves checkpoints is killed at random moments: the newest whole one is always there, and nothing half is."""

from __future__ import annotations

import os
import random
import re
import select
import signal
import traceback
from typing import TYPE_CHECKING, Any

import pytest

import penstock as ps
from connecting import connection_to
from penstock.checkpoints import Checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.testing.s3_server import S3Server

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.server,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning"),
]

LAYERS, KEEP_LAST = 4, 3


def model_of(step: int) -> Any:
    """A model whose every value is the step, so that a mixture of two checkpoints shows."""
    model = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(LAYERS)))
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(step)
    return model


def train(url: str, options: dict[str, Any], seed: int, told: int) -> None:
    """Restore, check that the state is of one step, then save step after step, and tell each one that has been saved."""
    chance = random.Random(seed)
    model = model_of(-1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    checkpoint = ps.torch.Checkpoint(model=model, optimizer=optimizer, **options)
    step = checkpoint.restore(url)
    if step is not None:
        values = {float(value) for each in model.parameters() for value in each.detach().unique()}
        states = {float(each["momentum_buffer"].unique()) for each in optimizer.state.values()}
        assert values == states == {float(step)}, (step, values, states)
    os.write(told, f"restored {step}\n".encode())
    step = step or 0
    while True:
        step += 1
        with torch.no_grad():
            for value in model.parameters():
                value.fill_(step)
                optimizer.state[value]["momentum_buffer"] = torch.full_like(value, step)
        wait = chance.random() < 0.5
        checkpoint.save(url, step=step, wait=wait, keep_last=KEEP_LAST)
        os.write(told, f"saved {step if wait else step - 1}\n".encode())  # a save in the background may still fail


def forked(run: Callable[..., None], *arguments: Any) -> tuple[int, int]:
    """Call a function in a process of its own; its ID, and a pipe of what it tells."""
    told, telling = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        try:
            os.close(told)
            torch.set_num_threads(1)
            run(*arguments, telling)
        except BaseException:
            os.write(telling, b"failed " + traceback.format_exc().encode())
        finally:
            os._exit(1)
    os.close(telling)
    return process_id, told


def lines_until_killed(process_id: int, told: int, delay_s: float) -> list[str]:
    """Kill a process `delay_s` after it told that it had restored its state; return what it told."""
    text = b""
    while b"\n" not in text and (piece := os.read(told, 65536)):
        text += piece
    select.select([], [], [], delay_s)
    os.kill(process_id, signal.SIGKILL)
    os.waitpid(process_id, 0)
    while piece := os.read(told, 65536):
        text += piece
    os.close(told)
    return text.decode().splitlines()


def saved_in(text: str) -> list[int]:
    """The steps that a process told to have been saved."""
    return [int(number) for number in re.findall(r"^saved (\d+)$", text, re.MULTILINE)]


HALF_OF_A_HUNDRED = [pytest.mark.heavy, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("kills", "seed"),
    [(3, 3), pytest.param(50, 1, marks=HALF_OF_A_HUNDRED), pytest.param(50, 2, marks=HALF_OF_A_HUNDRED)],
)
def test_killed_at_random_moments(s3_endpoint: S3Server, bucket: str, kills: int, seed: int) -> None:
    """After each kill the newest checkpoint is the last one that was told, or a later one, and every committed one verifies."""
    url = f"s3://{bucket}/run/"
    options = connection_to(s3_endpoint)
    assert ps.torch.Checkpoint  # imported here, rather than in each process
    chance = random.Random(seed)
    newest: int | None = None
    with Checkpoints(url, **options) as checkpoints:
        for number in range(kills):
            process_id, told = forked(train, url, options, number)
            lines = lines_until_killed(process_id, told, chance.random() * 0.8)
            assert lines, "it was killed before it restored anything"
            assert not any(line.startswith("failed") for line in lines), "\n".join(lines)
            assert lines[0] == f"restored {newest}"
            found = checkpoints.newest()
            newest = None if found is None else found.step
            assert (newest or 0) >= max(saved_in("\n".join(lines)), default=0)
            for step in checkpoints.steps():
                info = checkpoints.inspect(step)
                assert info.status in ("whole", "unfinished"), info
                assert info.status == "unfinished" or checkpoints.verify(step).ok
        assert newest is not None
        process_id, told = forked(train, url, options, kills)
        text = ""
        while max(saved_in(text), default=0) < newest + 3 and (piece := os.read(told, 65536)):
            text += piece.decode()
        os.kill(process_id, signal.SIGKILL)
        os.waitpid(process_id, 0)
        os.close(told)
        left = checkpoints.steps()
        assert len(left) <= KEEP_LAST + 2  # one that is being saved, and one that is being removed
        assert min(left) > newest - KEEP_LAST  # what killed saves left is gone


def replace(url: str, options: dict[str, Any], told: int) -> None:
    """Save the same step again and again, each time with other values."""
    value = os.getpid() % 1000
    model = model_of(value)
    checkpoint = ps.torch.Checkpoint(model=model, rng=False, **options)
    while True:
        value += 1
        with torch.no_grad():
            for each in model.parameters():
                each.fill_(value)
        checkpoint.save(url, step=7)
        os.write(told, b"saved 7\n")


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=[pytest.mark.heavy, pytest.mark.timeout(1800)])])
def test_restores_while_two_processes_replace_the_checkpoint_and_are_killed(
    s3_endpoint: S3Server, bucket: str, kills: int
) -> None:
    """Each restore finds a checkpoint of one save, and in the end the files of one are left."""
    url = f"s3://{bucket}/replaced/"
    options = connection_to(s3_endpoint)
    model = model_of(0)
    reader = ps.torch.Checkpoint(model=model, rng=False, **options)
    reader.save(url, step=7)
    chance = random.Random(kills)
    restores = 0
    for _ in range(kills):
        savers = [forked(replace, url, options) for _ in range(2)]
        assert all(os.read(told, 5) == b"saved" for _, told in savers)
        for _ in range(10):
            assert reader.restore(url) == 7
            assert len({float(value) for each in model.parameters() for value in each.detach().unique()}) == 1
            restores += 1
        for process_id, told in savers:
            select.select([], [], [], chance.random() * 0.1)
            os.kill(process_id, signal.SIGKILL)
            os.waitpid(process_id, 0)
            with os.fdopen(told) as pipe:
                assert "failed" not in pipe.read()
    assert restores == 10 * kills
    with Checkpoints(url, **options) as checkpoints:
        assert checkpoints.verify(7).ok
        checkpoints.remove_debris()
        assert checkpoints.verify(7).ok
        assert len(list(checkpoints.store.list(""))) == 3  # data, manifest and commit marker
