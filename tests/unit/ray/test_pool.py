"""The pool of workers without a cluster: closing it, and what an interruption leaves."""

from __future__ import annotations

import signal
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.errors import ClosedError, ConfigError
from penstock.loader.statistics import Meter
from penstock.ray.pool import Machine, RayPool, RayWorker
from penstock.ray.workers import Workers
from servers.leaks import threads


@pytest.fixture(autouse=True)
def _as_if_ray_were_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.ray.workers.find_spec", lambda name: name)


def test_closed_while_a_thread_waits_for_the_cluster() -> None:
    """That thread learns it at once, and starts no other broker."""
    pool = RayPool(Workers(count=1, address="127.0.0.1:1"), Meter(), address="127.0.0.1:1")
    raised: list[BaseException] = []

    def connect() -> None:
        try:
            pool.connect(avoided=None)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    time.sleep(1)
    pool.close()
    thread.join(20)
    assert [type(error) for error in raised] == [ClosedError]
    assert pool._process.poll() is not None
    with pytest.raises(ClosedError):
        pool.connect(avoided=None)
    assert pool._broker is None


def test_a_worker_whose_start_is_interrupted_is_closed() -> None:
    """Ctrl-C while a large job is being sent: its thread and its connection end, because nobody else knows the worker."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        machine = Machine("name", *listener.getsockname(), b"")

        def connect(*, avoided: Machine | None) -> tuple[socket.socket, Machine]:
            del avoided
            return socket.create_connection(listener.getsockname()), machine

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        job: Any = SimpleNamespace(number=0, first_batch=0, data=b"x" * (64 << 20))
        pool: Any = SimpleNamespace(connect=connect)
        before_all, before = threads(), signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 1)
            with pytest.raises(KeyboardInterrupt):
                RayWorker(job, pool)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert threads() <= before_all
        assert not machine.workers


@pytest.mark.parametrize(
    "name", ["AWS_ACCESS_KEY_ID", "HF_TOKEN", "WANDB_API_KEY", "PGPASSWORD", "db_passwd", "MY_SECRETS"]
)
def test_variables_that_hold_secrets_are_refused(name: str) -> None:
    """Ray's dashboard would show them."""
    with pytest.raises(ConfigError, match=name):
        Workers(count=1, runtime_env={"env_vars": {name: "x"}})


def test_other_variables_are_not() -> None:
    """A word that only looks like one."""
    Workers(count=1, runtime_env={"env_vars": {"TOKENIZERS_PARALLELISM": "false", "KEYBOARD": "us"}})
    Workers(count=1, runtime_env={"env_vars": None})
