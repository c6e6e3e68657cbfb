"""Processes that share a cache: each byte is fetched once, and a killed process neither blocks others nor leaves files."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock as ps
from forking import exit_code_of, start_child
from penstock.cache import CacheConfig, Cached
from penstock.cache.maintenance import survey, verify
from penstock.errors import ObjectMissingError
from penstock.store.local import LocalStore
from store_contract.support import content

if TYPE_CHECKING:
    from servers.faulty import FaultyServer

pytestmark = pytest.mark.server  # it starts processes

SCENARIO = Path(__file__).with_name("cache_scenario.py")
DATA_BYTES = 12 * 300_000


class Processes:
    """Runs scenarios in processes of their own, and ends them."""

    def __init__(self, folder: Path) -> None:
        self.data, self.cache = folder / "data", folder / "cache"
        self.data.mkdir()
        whole = hashlib.sha256()
        for index in range(12):
            data = content(300_000, index)
            (self.data / f"{index:02}").write_bytes(data)
            whole.update(data)
        self.digest = whole.hexdigest()
        self.begun: list[subprocess.Popen[str]] = []

    def start(self, scenario: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(SCENARIO), scenario, str(self.data), str(self.cache)]
        self.begun.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return self.begun[-1]

    def answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        out, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        record = json.loads(out.splitlines()[-1])
        assert (record["size_bytes"], record["digest"]) == (DATA_BYTES, self.digest)
        assert (record["corrupt_count"], record["troubles"]) == (0, {}), errors
        return dict(record)

    def close(self) -> None:
        for process in self.begun:
            process.kill()
            process.communicate()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    running = Processes(tmp_path)
    yield running
    running.close()


def test_processes_fetch_each_byte_once(processes: Processes) -> None:
    """Four processes that start on a cold data set read each byte from the store once."""
    answers = [processes.answer(process) for process in [processes.start("epoch") for _ in range(4)]]
    assert sum(answer["received_bytes"] for answer in answers) == DATA_BYTES
    assert processes.answer(processes.start("epoch"))["received_bytes"] == 0


def test_fifty_processes_at_once(processes: Processes) -> None:
    """Together they read the store once; no lock or descriptor is refused, and the accounting is right."""
    process = processes.start("crowd")
    out, errors = process.communicate(timeout=100)
    record = json.loads(out)
    assert (record["wrong"], record["size_bytes"], record["digest"]) == ([], DATA_BYTES, processes.digest), errors
    assert record["received_bytes"] == DATA_BYTES
    with Cached(LocalStore(processes.data), CacheConfig(processes.cache, 10**9, free_ratio_min=0.0)) as store:
        assert store.statistics().used_bytes == survey(processes.cache).size_bytes


DISK = """
mount -t tmpfs -o size=2m,mode=700 tmpfs "$CACHE" || exit 77
"$@" epoch "$DATA" "$CACHE" && "$@" epoch "$DATA" "$CACHE" &&
mount -o remount,ro "$CACHE" && "$@" epoch "$DATA" "$CACHE" &&
mount -o remount,rw "$CACHE" && chmod -R a-rwx "$CACHE/v1/entries" &&
setpriv --bounding-set=-all --inh-caps=-all "$@" epoch "$DATA" "$CACHE"
"""
INODES = """
mount -t tmpfs -o size=64m,nr_inodes=104,mode=700 tmpfs "$CACHE" || exit 77
"$@" epoch "$DATA" "$CACHE" && "$@" epoch "$DATA" "$CACHE"
"""


def test_a_disk_that_fails_fails_no_job(processes: Processes) -> None:
    """With a real full disk, read-only disk or lost permission every byte is right, and the failure is logged."""
    ended, records = mounted(processes, DISK)
    small, again, read_only, forbidden = records
    assert small["troubles"] == again["troubles"] == {}  # it holds what fits, and evicts for the rest
    assert 0 < small["used_bytes"] <= 2 << 20
    assert read_only["hit_count"] > 0
    refused_count = sum(read_only["troubles"].get(f"{what} EROFS", 0) for what in ("write", "evict"))
    assert 0 < refused_count < 100  # tried again now and then, not for every block
    assert "read EACCES" in forbidden["troubles"]
    said = [line for line in ended.stderr.splitlines() if "logged once" in line]
    assert len(said) == sum(len(record["troubles"]) for record in records)  # one warning for each, however many blocks


def test_a_disk_without_inodes_is_full(processes: Processes) -> None:
    """If no more files fit, the oldest entries are removed, and no write fails although bytes are free."""
    _, records = mounted(processes, INODES)
    for record in records:
        assert record["troubles"] == {}
        assert 0 < record["used_bytes"] < DATA_BYTES


def mounted(processes: Processes, script: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Run a shell script that mounts a disk for the cache in its own namespace; return its result and its epochs' records."""
    processes.cache.mkdir()
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, str(SCENARIO)]
    environment = {**os.environ, "CACHE": str(processes.cache), "DATA": str(processes.data)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    if ended.returncode == 77 or "unshare" in ended.stderr:
        pytest.skip("needs a mount namespace")
    assert ended.returncode == 0, ended.stderr
    records = [json.loads(line) for line in ended.stdout.splitlines() if "digest" in line]
    assert {(record["size_bytes"], record["digest"]) for record in records} == {(DATA_BYTES, processes.digest)}
    return ended, records


def test_a_killed_holder_holds_nobody_up(processes: Processes) -> None:
    """If a process is killed while it fetches, the others fetch its blocks long before ``wait_s_max`` is over."""
    holder = processes.start("stuck")
    assert holder.stdout is not None
    assert "holds" in json.loads(holder.stdout.readline())
    waiting = processes.start("epoch")
    assert waiting.stdout is not None
    waiting.stdout.readline()
    holder.send_signal(signal.SIGKILL)
    answer = processes.answer(waiting)
    assert answer["received_bytes"] == DATA_BYTES
    assert answer["expired_count"] == 0


def test_a_stalled_holder_is_waited_for_in_vain_only_so_long(processes: Processes) -> None:
    """Others wait for a stalled process at most ``wait_s_max``, and then fetch its blocks."""
    holder = processes.start("stuck")
    assert holder.stdout is not None
    holder.stdout.readline()
    answer = processes.answer(processes.start("impatient"))
    assert answer["expired_count"] > 0
    assert answer["received_bytes"] == DATA_BYTES


def test_killed_at_any_moment(processes: Processes) -> None:
    """When processes that write and evict are killed repeatedly, no entry is wrong and the accounting converges."""
    randomly = random.Random(0)
    for _ in range(8):
        pair = [processes.start("forever") for _ in range(2)]
        for process in pair:
            assert process.stdout is not None
            process.stdout.readline()
        for _ in range(randomly.randrange(3)):
            assert pair[0].stdout is not None
            assert json.loads(pair[0].stdout.readline())["digest"] == processes.digest
        for process in pair:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    entries_count, corrupt_count = verify(processes.cache)
    assert corrupt_count == 0
    assert entries_count > 0
    found = survey(processes.cache)  # a scan of all: the numbers are right from then on
    config = CacheConfig(processes.cache, 10**9, free_ratio_min=0.0, block_bytes=64 * 1024)
    with Cached(LocalStore(processes.data), config) as store:
        next(iter(store.list()))
        assert store.statistics().used_bytes == found.size_bytes
    assert list((processes.cache / "v1/temporary").iterdir()) == []
    assert processes.answer(processes.start("epoch"))["corrupt_count"] == 0


def test_a_write_is_visible_to_other_processes_at_once(processes: Processes) -> None:
    """With an endless TTL, a process that knows objects, or that they are missing, sees what another process writes."""
    config = CacheConfig(processes.cache, 10**9, free_ratio_min=0.0, metadata_ttl_s=math.inf)
    with Cached(LocalStore(processes.data), config) as store:
        for index in range(4):
            assert store.read(f"{index:02}").data == content(300_000, index)
        with pytest.raises(ObjectMissingError):
            store.stat("missing")
        changing = processes.start("change")
        _, errors = changing.communicate(timeout=60)
        assert changing.returncode == 0, errors
        for key in ("00", "01", "missing"):
            assert bytes(store.read(key).data) == b"new"
            assert store.stat(key).size_bytes == 3
        with pytest.raises(ObjectMissingError):
            store.read("02")
        assert store.read("03").data == content(300_000, 3)


def test_a_forked_child_reads_on(processes: Processes) -> None:
    """A forked child of a process that uses a cache has its own threads, leases and descriptors."""
    config = CacheConfig(processes.cache, 10**9, free_ratio_min=0.0, block_bytes=64 * 1024)
    with Cached(LocalStore(processes.data), config) as store:
        assert store.read("03").data == content(300_000, 3)
        child = start_child(lambda: [store.read(f"0{n}").data for n in (3, 4)] == [content(300_000, n) for n in (3, 4)])
        assert exit_code_of(child) == 0
        assert store.read("04").data == content(300_000, 4)
        assert store.statistics().fetched_bytes == 300_000
        assert store.statistics().troubles == {}


@pytest.mark.parametrize("kind", ["shards", "objects"])
def test_a_warm_epoch_of_a_loader(
    faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The server sees no request with an endless TTL; without a TTL it sees a listing and a search for an index."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for number in range(4):
        file, member = io.BytesIO(), tarfile.TarInfo(f"{number}.bin")
        member.size = 50_000
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.addfile(member, io.BytesIO(content(50_000, number)))
        faulty.objects[f"data/{number}.tar"] = file.getvalue()

    def asked(ttl_s: float) -> set[str]:
        """Return the requests that a new process sends."""
        before = len(faulty.requests)
        source = ps.shards if kind == "shards" else ps.objects
        pipeline = source(f"{faulty.url}/data/", endpoint_url=faulty.endpoint_url, anonymous=True).shuffle().batch(2)
        cache = CacheConfig(tmp_path / "cache", 10**9, free_ratio_min=0.0, metadata_ttl_s=ttl_s)
        with ps.Loader(pipeline, cache=cache) as loader:
            assert sum(len(batch["__key__"]) for batch in loader) == 4
        return {request.key or "listing" for request in faulty.requests[before:]}

    shards = {f"data/{number}.tar" for number in range(4)}
    index = {"data/.penstock/dataset.index"} if kind == "shards" else set()
    assert asked(0.0) == shards | index | {"listing"}
    assert asked(0.0) == index | {"listing"}
    assert asked(math.inf) <= index | {"listing"}
    assert asked(math.inf) == set()
