"""``Loader(workers=)``: the batches are those of a plain loader, whatever happens to the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

import penstock as ps
from connecting import connection_to
from loading import index, write_counted
from penstock.errors import ClusterLostError, ConfigError, DecodeError
from penstock.loader.workers.messages import MessageChannel
from penstock.ray import broker, elastic, host, pool
from penstock.testing.s3_server import S3Server
from resuming import assert_same
from servers.leaks import is_alive

pytestmark = pytest.mark.timeout(300)
SIZES = (90, 0, 130, 14, 101, 60)
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_counted(tmp_path / "data", SIZES)
    return tmp_path / "data"


@pytest.fixture
def place(folder: Path, tmp_path: Path) -> Path:
    """An index of the shards."""
    return index(made_of(folder), tmp_path / "index")


def made_of(folder: Path, **options: Any) -> Any:
    """Columns of all kinds: numbers, pictures whose rows go to their places one by one, texts, and bytes of any length."""

    def pictured(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        number = int(sample["cls"])
        picture = np.full((40, 30, 3), number % 251, np.uint8)
        return {
            "cls": number,
            "picture": picture,
            "noise": rng.random(3),
            "text": f"{number} ü",
            "raw": b"x" * (number * 20),
        }

    return ps.shards(f"{folder}/").shuffle(window=50, seed=3).map(pictured).batch(8, **options)


def kill_node(cluster: Cluster, node: Any) -> None:
    """Kill a node at once, with all that runs there."""
    (raylet,) = node.all_processes["raylet"]
    kill_all(raylet.process)
    cluster.remove_node(node, allow_graceful=False)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all that it started."""
    for pid in descendants(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(process_id: int) -> set[int]:
    """A process and all that it started, directly or not."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        if text := _quietly(stat).decode(errors="replace"):
            parents[int(stat.parent.name)] = int(text.rpartition(")")[2].split()[1])
    last, found = {process_id}, set[int]()
    while last:
        found |= last
        last = {pid for pid, parent in parents.items() if parent in last}
    return found


def _quietly(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("mode", ["require", "stream"])
def test_a_node_is_killed_in_the_middle(cluster: Cluster, folder: Path, place: Path, mode: Any) -> None:
    """Four workers on four nodes, one of which is killed: batch by batch those of the plain loader, and so is the state."""
    made = made_of(folder)
    options: dict[str, Any] = {"index": mode, "index_dir": place, "lanes": 4}
    with ps.Loader(made, **options) as loader:
        expected = [(batch, loader.state_dict()) for _ in loader.epochs(2) for batch in loader]
    victim = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    workers = ps.ray.Workers(count=4, address=cluster.address)
    with ps.Loader(made, workers=workers, **options) as loader:
        found = []
        for _ in loader.epochs(2):
            for batch in loader:
                found.append((batch, loader.state_dict()))
                if len(found) == 20:
                    assert loader.statistics().cluster_workers_count == 4
                    kill_node(cluster, victim)
                    killed_s = time.monotonic()
                if len(found) == 40:
                    print(f"{time.monotonic() - killed_s:.2f} s for 20 batches, one node of four being killed")
        assert loader.statistics().node_decode_s
    for (left, before), (right, after) in zip(expected, found, strict=True):
        assert_same(left, right)
        assert after == before


def worker_pids(of: str) -> list[int]:
    """Processes with this in their command line, of the clusters and loaders of this process alone."""
    mine = descendants(os.getpid())
    return [pid for pid in mine if of.encode() in _quietly(Path(f"/proc/{pid}/cmdline")) and is_alive(pid)]


WORKER = "penstock.loader.workers.worker"


def plain(made: Any, **options: Any) -> list[Any]:
    with ps.Loader(made, **options) as loader:
        return list(loader)


def assert_same_batches(expected: list[Any], loader: Any) -> None:
    """The rest of an epoch of a loader is what is expected."""
    for left, right in zip(expected, loader, strict=True):
        assert_same(left, right)


def mapped(folder: Path, function: Callable[..., Any]) -> Any:
    return ps.shards(f"{folder}/").shuffle(window=50, seed=3).map(function).batch(8)


@pytest.mark.parametrize("kills_count", [8, pytest.param(100, marks=pytest.mark.heavy)])
def test_workers_are_killed_at_random_moments(cluster: Cluster, folder: Path, place: Path, kills_count: int) -> None:
    """Processes and the actors that start them: no batch differs."""
    made = made_of(folder)
    options: dict[str, Any] = {"index": "require", "index_dir": place, "lanes": 4}
    chosen, kills = random.Random(1), 0
    workers = ps.ray.Workers(count=3, address=cluster.address)
    with ps.Loader(made, **options) as alone, ps.Loader(made, workers=workers, **options) as loader:
        while kills < kills_count:
            for left, right in zip(alone, loader, strict=True):
                assert_same(left, right)
                if kills < kills_count and chosen.random() < 0.2:
                    time.sleep(chosen.random() / 10)
                    victims = worker_pids("ray::Host") if chosen.random() < 0.3 else worker_pids(WORKER)
                    if victims:
                        os.kill(chosen.choice(victims), signal.SIGKILL)
                        kills += 1


def test_the_cluster_is_lost(folder: Path, place: Path) -> None:
    """Without a head, training goes on in threads, or ends with an error that says so."""
    made = made_of(folder)
    options: dict[str, Any] = {"index": "require", "index_dir": place, "lanes": 2}
    expected = plain(made, **options)
    lost = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 2, "include_dashboard": False})
    workers = ps.ray.Workers(count=2, address=lost.address, wait_s=15)
    patient = ps.ray.Workers(count=2, address=lost.address, wait_s=15, fallback=True)
    try:
        with (
            ps.Loader(made, workers=workers, **options) as loader,
            ps.Loader(made, workers=patient, **options) as other,
        ):
            batches, others = iter(loader), iter(other)
            for left in expected[:5]:
                assert_same(left, next(batches))
                assert_same(left, next(others))
            lost.shutdown()
            for pid in worker_pids(WORKER):
                os.kill(pid, signal.SIGKILL)
            assert_same_batches(expected[5:], others)
            assert other.statistics().cluster_workers_count == 0
            with pytest.raises(ClusterLostError, match="no worker of the Ray cluster is left"):
                list(batches)
    finally:
        lost.shutdown()


def start_head(port: int) -> subprocess.Popen[bytes]:
    """A cluster of one node with two CPUs, whose head is at this port."""
    anywhere = ("node-manager", "object-manager", "dashboard-agent-listen", "dashboard-agent-grpc", "metrics-export")
    options = [
        "--block",
        f"--port={port}",
        "--num-cpus=2",
        f"--object-store-memory={80 << 20}",
        "--include-dashboard=false",
    ]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--node-ip-address=127.0.0.1", *options]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}  # otherwise it depends on whether this user has a token
    command += [f"--{name}-port=0" for name in anywhere]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def two_epochs(loader: Any) -> Iterator[Any]:
    for _ in loader.epochs(2):
        yield from loader


def test_a_cluster_that_does_not_answer(folder: Path) -> None:
    """The error says so after ``wait_s``, and closing waits no longer for Ray, which goes on trying."""
    workers = ps.ray.Workers(count=1, address="127.0.0.1:1", wait_s=3)
    with ps.Loader(made_of(folder), workers=workers) as loader:
        with pytest.raises(ClusterLostError, match="the cluster does not answer"):
            list(loader)
        failed_s = time.monotonic()
    assert time.monotonic() - failed_s < 5  # once it has answered, Ray gets ten seconds to end


def test_the_head_restarts(folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that waits for the cluster goes on there; one that went on in threads has workers again in the next epoch."""
    made = made_of(folder)
    options: dict[str, Any] = {"index": "require", "index_dir": place, "lanes": 2}
    with ps.Loader(made, **options) as loader:
        expected = [batch for _ in loader.epochs(2) for batch in loader]
    monkeypatch.setattr(pool, "REJOIN_S", 3.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    workers = ps.ray.Workers(count=1, address=f"127.0.0.1:{port}", wait_s=120)
    patient = ps.ray.Workers(count=1, address=f"127.0.0.1:{port}", wait_s=10, fallback=True)
    head = start_head(port)
    try:
        with (
            ps.Loader(made, workers=workers, **options) as loader,
            ps.Loader(made, **options, workers=patient) as other,
        ):
            batches, others = two_epochs(loader), two_epochs(other)
            for left in expected[:5]:
                assert_same(left, next(batches))
                assert_same(left, next(others))
            kill_all(head)
            for left in expected[5 : len(expected) // 2]:
                assert_same(left, next(others))
            assert other.statistics().cluster_workers_count == 0
            head = start_head(port)
            assert_same_batches(expected[5:], batches)
            assert loader.statistics().cluster_workers_count == 1
            assert_same_batches(expected[len(expected) // 2 :], others)
            assert other.statistics().cluster_workers_count == 1
    finally:
        kill_all(head)


def test_a_full_object_store_and_two_jobs(cluster: Cluster, folder: Path, place: Path) -> None:
    """Batches do not pass through it. Two loaders, one of them elastic, share the cluster and a pool, and neither starves."""
    made = made_of(folder)
    options: dict[str, Any] = {"index": "require", "index_dir": place, "lanes": 4}
    expected = plain(made, **options)
    held = ray.put(np.zeros(60 << 20, np.uint8))
    found: list[list[Any]] = [[], []]
    counts: list[int] = []
    both = threading.Barrier(2)

    def read(number: int) -> None:
        shared = ps.ray.Workers(min=1, max=2, pool="suite", address=cluster.address)
        with ps.Loader(made, workers=shared, **options) as loader:
            for batch in loader:
                found[number].append(batch)
            both.wait(120)
            counts.append(loader.statistics().cluster_workers_count)
            both.wait(120)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    for each in found:
        assert_same_batches(expected, each)
    assert counts == [1, 1]
    del held


def test_a_loop_that_stalls_gets_workers_and_gives_them_back(
    cluster: Cluster, folder: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with one; while it waits there are more of them, and fewer when it does not; the batches stay the same."""
    monkeypatch.setattr(elastic, "IDLE_S_MIN", 6.0)

    def slow(sample: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.02)
        return {"cls": int(sample["cls"])}

    def quick(sample: dict[str, Any]) -> dict[str, Any]:
        return {"cls": int(sample["cls"])}

    options: dict[str, Any] = {"index": "require", "index_dir": place, "lanes": 4, "threads": 1}
    workers = ps.ray.Workers(min=1, max=2, address=cluster.address)
    with (
        ps.Loader(mapped(folder, quick), **options) as alone,
        ps.Loader(mapped(folder, slow), workers=workers, **options) as loader,
    ):

        def read_until(count: int, step_s: float) -> None:
            deadline_s = time.monotonic() + 90
            while True:
                for left, right in zip(alone, loader, strict=True):
                    assert_same(left, right)
                    if loader.statistics().cluster_workers_count == count:
                        return
                    assert time.monotonic() < deadline_s
                    time.sleep(step_s)

        read_until(2, 0)
        assert loader.bottleneck().part == "preprocessing cluster"
        read_until(1, 0.3)


def test_functions_that_raise_hang_and_leak(cluster: Cluster, folder: Path, place: Path, tmp_path: Path) -> None:
    """An error comes with the node; a worker that hangs is replaced, and so is one that holds too much."""
    options: dict[str, Any] = {"index": "require", "index_dir": place, "lanes": 2}
    hung, leaked = tmp_path / "hung", tmp_path / "leaked"

    def raising(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == b"77":
            raise ValueError("seventy-seven")
        return sample

    def troubled(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] == b"77" and not hung.exists():
            hung.touch()
            time.sleep(1000)
        if sample["cls"] == b"300" and not leaked.exists():
            leaked.touch()
            kept = bytearray(os.urandom(1) * (400 << 20))
            time.sleep(1000)
            del kept
        return {"cls": int(sample["cls"])}

    def calm(sample: dict[str, Any]) -> dict[str, Any]:
        return {"cls": int(sample["cls"])}

    workers = ps.ray.Workers(count=2, address=cluster.address)
    with (
        ps.Loader(mapped(folder, raising), workers=workers, **options) as loader,
        pytest.raises(DecodeError, match="seventy-seven") as caught,
    ):
        list(loader)
    assert any("of the Ray cluster" in note for note in caught.value.__notes__)
    expected = plain(mapped(folder, calm), **options)
    workers = ps.ray.Workers(count=2, address=cluster.address, answer_s_max=30, memory_bytes_max=400 << 20)
    with ps.Loader(mapped(folder, troubled), workers=workers, **options) as loader:
        assert_same_batches(expected, loader)
    assert hung.exists()
    assert leaked.exists()


def test_nodes_that_lack_something_are_named(
    cluster: Cluster, folder: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of penstock, no penstock that works, no descriptors, and a module that only this process has."""
    options: dict[str, Any] = {"index": "require", "index_dir": place, "lanes": 2}
    other = tmp_path / "other" / "penstock"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    environment = {"env_vars": {"PYTHONPATH": str(other.parent)}}
    for version, match in (
        ("__version__ = '0.0.1'", "has penstock 0.0.1"),
        ("raise ImportError('no')", "lacks a package"),
    ):
        (other / "version.py").write_text(version)
        workers = ps.ray.Workers(count=1, address=cluster.address, runtime_env=environment)
        with ps.Loader(made_of(folder), workers=workers, **options) as loader, pytest.raises(ConfigError, match=match):
            next(iter(loader))
    (other / "version.py").write_text("raise OSError(24, 'Too many open files')")
    workers = ps.ray.Workers(count=1, address=cluster.address, runtime_env=environment, wait_s=15)
    with (
        ps.Loader(made_of(folder), workers=workers, **options) as loader,
        pytest.raises(ClusterLostError, match=r"is left: OSError: \[Errno 24\] Too many open files"),
    ):
        next(iter(loader))
    alone = tmp_path / "alone" / "only_here_of_ray.py"
    alone.parent.mkdir()
    alone.write_text("def function(sample):\n    return sample\n")
    monkeypatch.syspath_prepend(alone.parent)
    function = importlib.import_module("only_here_of_ray").function
    alone.unlink()
    workers = ps.ray.Workers(count=1, address=cluster.address)
    with (
        ps.Loader(mapped(folder, function), workers=workers, **options) as loader,
        pytest.raises(ConfigError, match=r"lacks a package: ModuleNotFoundError.*only_here_of_ray"),
    ):
        next(iter(loader))
    for wrong, match in (
        ({"count": 1, "max": 2}, "either count="),
        ({"min": 3, "max": 2}, "must not be larger"),
        ({"count": 1, "pool": "x"}, "divides max="),
        ({"count": 1, "runtime_env": {"env_vars": {"AWS_SECRET_ACCESS_KEY": "x"}}}, "dashboard shows"),
    ):
        with pytest.raises(ConfigError, match=match):
            ps.ray.Workers(**wrong)


def test_workers_that_ray_does_not_start(cluster: Cluster, folder: Path) -> None:
    """Ray's reason is the error, at once."""
    for options in ({"resources": {"GPU": 1}}, {"runtime_env": {"pip": 3}}):
        workers = ps.ray.Workers(count=1, address=cluster.address, **options)
        with (
            ps.Loader(made_of(folder), workers=workers) as loader,
            pytest.raises(ConfigError, match="does not start such workers"),
        ):
            next(iter(loader))


def test_actors_that_fail_for_hours(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause before the next one grows to its bound; no number of failures ends the broker."""
    monkeypatch.setattr(broker, "RETRY_S", 0.0)
    actor = ray.remote(host.Host).remote()
    ray.kill(actor)
    ours, theirs = socket.socketpair()
    ours.close()

    async def fail() -> None:
        made = broker.Broker(MessageChannel(theirs), ps.ray.Workers(count=1, address=cluster.address))
        for _ in range(1100):
            made._actors["failing"] = actor
            await made._follow("failing", actor)

    with theirs:
        asyncio.run(fail())


def test_nothing_is_left_of_a_driver_that_is_killed(cluster: Cluster, folder: Path, place: Path) -> None:
    """Its broker, the actors and the worker processes end."""
    before = {name: set(worker_pids(name)) for name in (WORKER, "penstock.ray.broker", "ray::Host")}
    program = f"""
        import sys, time
        import penstock as ps
        made = ps.shards("{folder}/").decode(ps.Integer("cls")).batch(8)
        loader = ps.Loader(made, workers=ps.ray.Workers(count=2, address="{cluster.address}"), lanes=2)
        next(iter(loader))
        print("begun", flush=True)
        time.sleep(1000)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == b"begun\n"
        begun = {name: set(worker_pids(name)) - pids for name, pids in before.items()}
        assert all(begun.values()), begun
        driver.kill()
    deadline_s = time.monotonic() + 60
    while left := [pid for pids in begun.values() for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)


def test_keys_do_not_reach_ray(cluster: Cluster, s3_endpoint: S3Server, bucket: str, folder: Path) -> None:
    """The secret that a pipeline was given reads the data on the nodes, and is in no log of Ray and no command line."""
    secret = connection_to(s3_endpoint)
    with ps.connect(f"s3://{bucket}/", **secret) as store:
        for path in folder.glob("*.tar"):
            store.write(f"ray/{path.name}", path.read_bytes())
    made = ps.shards(f"s3://{bucket}/ray/", **secret).decode(ps.Integer("cls")).batch(8)
    workers = ps.ray.Workers(count=2, address=cluster.address)
    with ps.Loader(made, workers=workers, lanes=2) as loader:
        assert sum(len(batch["cls"]) for batch in loader) >= sum(SIZES)
        key = s3_endpoint.secret_key.encode()
        shown = [*Path(cluster.head_node.get_session_dir_path()).rglob("*.*"), *Path("/proc").glob("[0-9]*/cmdline")]
        assert [path for path in shown if path.is_file() and key in _quietly(path)] == []
