"""Operations through ``Cached``, with and without failures of the disk."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import json
import logging
import math
import os
import pickle
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cache import CacheConfig, Cached, metadata
from penstock.cache.maintenance import clear, open_directory, survey, trim, verify
from penstock.cache.warm import warm
from penstock.config import MIB
from penstock.errors import ConfigError, ObjectChangedError, ObjectMissingError, UnavailableError
from penstock.fetch import PlanItem
from penstock.fetch.budget import process_budget
from penstock.loader.explain import warm_cache
from penstock.store.faulty import Faulty
from penstock.store.local import LocalStore
from penstock.store.memory import MemoryStore
from penstock.store.traced import Traced
from penstock.types import ByteRange, Get, Head, Landing, ObjectInfo
from servers.leaks import nothing_left
from store_contract.support import WatchingSink, content, submit

BLOCK_BYTES = 4096


class World:
    """A store that counts its requests, and caches around it that share a directory as processes would."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder
        self.memory = MemoryStore()
        self.stack = stack

    def cache(self, inner: Any = None, **options: Any) -> Cached:
        """Open the cache as another process would."""
        self.traced = Traced(inner or self.memory)
        config = CacheConfig(
            self.folder,
            **{"bytes_max": 10**8, "free_ratio_min": 0.0, "block_bytes": BLOCK_BYTES, **options},
        )
        return self.stack.enter_context(Cached(self.traced, config))

    def asked(self) -> dict[str, int]:
        """Return the requests that the store inside the last cache received."""
        return dict(self.traced.statistics().operations)

    def entries(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("v1/entries/*/*") if path.suffix.endswith("b"))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with contextlib.ExitStack() as stack:
        yield World(tmp_path / "cache", stack)


def listed(store: Any, prefix: str = "") -> list[PlanItem]:
    return [PlanItem(info.key, etag=info.etag, size_bytes=info.size_bytes) for info in store.list(prefix)]


def epoch(store: Any) -> bytes:
    """Return all bytes, listed and streamed as a loader does it."""
    return b"".join(bytes(chunk.data) for chunk in store.read_parts(listed(store), part_bytes=65536))


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_warm_epoch_is_one_listing(world: World) -> None:
    """A second process reads everything from the disk; its only request is one page of a listing."""
    for index in range(20):
        world.memory.write(f"k{index:02}", content(30_000 * index, index))
    cold = epoch(world.cache())
    store = world.cache()
    assert epoch(store) == cold
    assert world.asked() == {"ListPage": 1}
    assert store.statistics().fetched_bytes == 0


def test_a_warm_epoch_within_the_ttl_asks_nothing(world: World) -> None:
    """With a TTL, another process needs no request at all, not even for a listing or for reads without an ETag."""
    objects = {f"k{index}": content(10_000 + index, index) for index in range(5)}
    for key, data in objects.items():
        world.memory.write(key, data)
    first = world.cache(metadata_ttl_s=math.inf)
    epoch(first)
    for key in objects:
        first.read(key)
    store = world.cache(metadata_ttl_s=math.inf)
    assert epoch(store) == b"".join(objects.values())
    assert {blob.key: bytes(blob.data) for blob in store.read_many(objects)} == objects
    assert store.stat("k1").size_bytes == 10_001
    assert world.asked() == {}


def test_bare_keys_are_asked_for_by_a_head(world: World) -> None:
    """Without a TTL, reading a key without an ETag sends only a HEAD if its bytes are on disk."""
    world.memory.write("k", content(9000))
    assert world.cache().read("k").data == content(9000)
    assert world.asked() == {"Get": 1}
    assert world.cache().read("k").data == content(9000)
    assert world.asked() == {"Head": 1}


def test_a_head_of_a_cached_version_is_answered_from_the_disk(world: World) -> None:
    """A HEAD that names a version whose blocks are on disk sends no request; one that names none, or another, does."""
    world.memory.write("k", content(9000))
    etag = world.memory.stat("k").etag
    world.cache().read("k")
    store = world.cache()
    _, sink = submit(store, Head("k", etag, 9000))
    assert sink.wait().info == ObjectInfo("k", 9000, etag)
    assert world.asked() == {}
    for operation in (Head("k"), Head("k", '"other"', 9000)):
        submit(store, operation)[1].wait()
    assert world.asked() == {"Head": 2}


def test_a_replaced_object_is_read_anew(world: World) -> None:
    """Without a TTL, a version that another host wrote is read at once."""
    world.memory.write("k", content(9000))
    store = world.cache()
    assert store.read("k").data == content(9000)
    world.memory.write("k", content(9000, 5))
    assert store.read("k").data == content(9000, 5)
    assert epoch(store) == content(9000, 5)


def test_what_is_missing_is_remembered_within_the_ttl(world: World) -> None:
    """Other processes know from the disk that an object is missing, until it is written through a cache of the node."""
    with pytest.raises(ObjectMissingError):
        world.cache(metadata_ttl_s=math.inf).stat("none")
    store = world.cache(metadata_ttl_s=math.inf)
    for ask in (store.stat, store.read):
        with pytest.raises(ObjectMissingError, match="none"):
            ask("none")
    assert world.asked() == {}
    world.cache(metadata_ttl_s=math.inf).write("none", b"now")
    assert world.cache(metadata_ttl_s=math.inf).read("none").data == b"now"


def test_a_write_ends_listings_of_all_processes(world: World) -> None:
    """A listing with an endless TTL is not used after a write through any cache of the directory."""
    first, second = world.cache(metadata_ttl_s=math.inf), world.cache(metadata_ttl_s=math.inf)
    assert list(first.list()) == []
    second.write("k", b"x")
    assert [info.key for info in first.list()] == ["k"]
    second.delete("k")
    assert list(first.list()) == []


@pytest.mark.parametrize("writer_ttl_s", [0.0, math.inf])
def test_a_write_ends_the_metadata_of_all_processes(world: World, writer_ttl_s: float) -> None:
    """What a process remembers within the TTL, also that a key is missing, ends with a write by another, for that key alone."""
    for key in ("put", "copied", "deleted", "other"):
        world.memory.write(key, b"old")
    writer = world.cache(metadata_ttl_s=writer_ttl_s)
    reader = world.cache(metadata_ttl_s=math.inf)
    keys = [info.key for info in reader.list()]
    assert {bytes(reader.read(key).data) for key in keys} == {b"old"}
    with pytest.raises(ObjectMissingError):
        reader.read("missing")
    assert reader.stat_nowait("put") == reader.stat("put")
    writer.write("put", b"new")
    writer.write("missing", b"new")
    writer.copy("put", "copied")
    writer.delete("deleted")
    for key in ("put", "copied", "deleted"):
        assert reader.stat_nowait(key) is None
    for key in ("put", "copied", "missing"):
        assert bytes(reader.read(key).data) == b"new"
    for ask in (reader.stat, reader.read):
        with pytest.raises(ObjectMissingError):
            ask("deleted")
    before = world.asked()
    for key in ("other", "put", "missing"):
        assert reader.stat_nowait(key) == reader.stat(key)
        reader.read(key)
    assert world.asked() == before


def test_metadata_is_asked_for_after_very_many_writes(world: World) -> None:
    """An answer is not looked for in the notes of more than 8 192 writes; the store is asked, once."""
    world.memory.write("k", b"x")
    writer, reader = world.cache(), world.cache(metadata_ttl_s=math.inf)
    reader.stat("k")
    for count, requests in ((8192, 1), (8193, 2), (1, 2)):
        writer.note_written(["other"] * count)
        reader.stat("k")
        assert world.asked() == {"Head": requests}


def test_notes_of_writes_take_little_room(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of notes begins anew at its bound: every write is noticed, and other objects are asked for once."""
    monkeypatch.setattr(metadata, "_FILE_BYTES_MAX", 1 << 17)
    world.memory.write("k", b"x")
    writer, reader = world.cache(), world.cache(metadata_ttl_s=math.inf)
    path = Path(reader.context.metadata._generation_path)
    for turn in range(3):
        reader.stat("k")
        writer.write("written", b"%d" % turn)
        with ThreadPoolExecutor(4) as pool:
            for _ in range(4):
                pool.submit(writer.note_written, ["other"] * 5000)
        assert bytes(reader.read("written").data) == b"%d" % turn
        reader.stat("k")
    assert world.asked()["Head"] == 4 + 2  # of "k", and of "written" once it was known
    assert path.stat().st_size > 3 * 20_000 * 8
    assert path.stat().st_blocks * 512 <= 1 << 17
    assert [entry.name for entry in path.parent.glob("generation-*")] == [path.name]


@pytest.mark.parametrize("writes_itself", [True, False])
@pytest.mark.parametrize("operation", [Head("k"), Get("k")])
def test_an_answer_from_before_a_write_is_not_kept(
    world: World, tmp_path: Path, operation: Head | Get, writes_itself: bool
) -> None:
    """If an object is written while an answer about it is on its way, no process trusts that answer afterwards."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "k").write_bytes(b"old")
    held = _HeldAnswer(folder)
    reader = world.cache(held, metadata_ttl_s=math.inf)
    writer = reader if writes_itself else world.cache(LocalStore(folder), metadata_ttl_s=math.inf)
    _, sink = submit(reader, operation)
    assert held.begun.wait(10)
    writer.write("k", b"replaced")
    held.gate.set()
    info = sink.wait().info
    assert info is not None
    assert info.size_bytes == 3  # the operations overlap, so the old version is a right answer
    for store in (world.cache(LocalStore(folder), metadata_ttl_s=math.inf), reader, writer):
        assert store.stat("k").size_bytes == 8
        assert bytes(store.read("k").data) == b"replaced"


class _HeldAnswer(LocalStore):
    """Files whose first answer to a Head or Get is on its way until the gate opens."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = threading.Event()
        self.begun = threading.Event()

    def _head(self, operation: Head) -> ObjectInfo:
        info = super()._head(operation)
        self.begun.set()
        assert self.gate.wait(10)
        return info

    def _get(self, operation: Get, job: Any) -> None:
        super()._get(operation, job)
        self.begun.set()
        assert self.gate.wait(10)


def test_the_ttl_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry older than the TTL is not used, nor one from the future after the clock was set back."""
    world.memory.write("k", b"x")
    world.cache(metadata_ttl_s=60.0).stat("k")
    now_s = time.time()
    for jump_s, requests in ((30.0, {}), (90.0, {"Head": 1}), (-3600.0, {"Head": 1})):
        store = world.cache(metadata_ttl_s=60.0)
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: now_s + jump_s)
        store.stat("k")
        monkeypatch.undo()
        assert world.asked() == requests
        if requests:
            break
    store = world.cache(metadata_ttl_s=60.0)
    monkeypatch.setattr(time, "time", lambda: now_s - 3600.0)
    store.stat("k")
    assert world.asked() == {"Head": 1}


def test_neighbours_are_one_request(world: World) -> None:
    """Neighbouring missing blocks are fetched with one request, which includes no other blocks."""
    data = content(10 * BLOCK_BYTES)
    world.memory.write("k", data)
    item = listed(world.memory)[0]
    store = world.cache()
    assert store.read("k", ByteRange(5 * BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 2)).data == data[20481:20482]
    store = world.cache()
    got = b"".join(bytes(chunk.data) for chunk in store.read_parts([item]))
    assert got == data
    # one without knowing the version, which stored nothing; then the whole
    assert world.asked() == {"Get": 1}
    (world.folder / "v1/entries").rename(world.folder / "gone")
    store = world.cache()
    list(store.list())
    completion = submit(store, Get("k", ByteRange(5 * BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 2), item.etag))[1].wait()
    assert bytes(completion.body) == data[20481:20482]
    assert store.statistics().fetched_bytes == BLOCK_BYTES
    assert b"".join(bytes(chunk.data) for chunk in store.read_parts([item])) == data
    assert world.asked() == {"ListPage": 1, "Get": 3}
    assert store.statistics().fetched_bytes == len(data)


def test_many_reads_of_one_block_are_one_request(world: World) -> None:
    """Concurrent reads of a missing block share one request, and all get their bytes."""
    data = content(3 * BLOCK_BYTES)
    world.memory.write("k", data)
    store = world.cache()
    etag = next(iter(store.list())).etag
    sinks = [submit(store, Get("k", ByteRange(index, index + 6000), etag))[1] for index in range(0, 6000, 100)]
    for index, sink in zip(range(0, 6000, 100), sinks, strict=True):
        assert bytes(sink.wait().body) == data[index : index + 6000]
    assert store.statistics().fetched_bytes == len(data)


def test_a_read_that_gives_up_does_not_take_others_with_it(world: World) -> None:
    """If the read that fetches a block is cancelled, the reads that wait for the block fetch it themselves."""
    data = content(BLOCK_BYTES)
    world.memory.write("k", data)
    gate = threading.Event()
    held = _Held(world.memory, gate)
    store = world.cache(held)
    etag = next(iter(store.list())).etag
    first, first_sink = submit(store, Get("k", ByteRange(0, 100), etag))
    assert held.begun.wait(10)
    _, second_sink = submit(store, Get("k", ByteRange(100, 200), etag))
    while store.statistics().shared_count == 0:
        threading.Event().wait(0.001)
    first.cancel()
    gate.set()
    first_sink.wait()
    assert bytes(second_sink.wait().body) == data[100:200]


def test_a_shared_block_of_another_size_is_an_error_for_one_alone(world: World) -> None:
    """If a store tells two sizes of one version, a read that waits for another's shorter block ends with an error."""
    data = content(1000)
    world.memory.write("k", data)
    gate = threading.Event()
    held = _Held(world.memory, gate)
    store = world.cache(held)
    info = next(iter(store.list()))
    _, first_sink = submit(store, Get("k", ByteRange(0, 100), info.etag))
    assert held.begun.wait(10)
    store.context.metadata.put("k", info._replace(size_bytes=3000), time.monotonic(), 0)
    _, second_sink = submit(store, Get("k", ByteRange(0, 3000), info.etag))
    while store.statistics().shared_count == 0:
        threading.Event().wait(0.001)
    gate.set()
    assert isinstance(second_sink.wait().error, ObjectChangedError)
    assert bytes(first_sink.wait().body) == data[:100]


class _Held(MemoryStore):
    """A store that answers the first Get only when the gate opens."""

    def __init__(self, memory: MemoryStore, gate: threading.Event) -> None:
        super().__init__()
        self._bucket = memory._bucket
        self.gate = gate
        self.begun = threading.Event()

    def _get(self, operation: Get, job: Any) -> None:
        self.begun.set()
        self.gate.wait(10)
        super()._get(operation, job)


def test_the_stores_error_is_the_readers(world: World) -> None:
    """If a fetch fails, the read raises the store's error, nothing is kept, and the next read tries again."""
    world.memory.write("k", content(9000))
    faulty = Faulty(world.memory, fail_at_call=2, error=UnavailableError("503"))
    store = world.cache(faulty)
    item = listed(store)[0]
    with pytest.raises(UnavailableError):
        list(store.read_parts([item]))
    assert world.entries() == []
    assert b"".join(bytes(chunk.data) for chunk in store.read_parts([item])) == content(9000)


def test_a_pinned_version_outlives_its_object(world: World) -> None:
    """A pinned version can be read after the object was replaced, but a missing block of it raises an error."""
    data = content(5 * BLOCK_BYTES)
    world.memory.write("k", data)
    item = listed(world.memory)[0]
    epoch(world.cache())
    world.memory.write("k", content(5 * BLOCK_BYTES, 3))
    store = world.cache()
    assert b"".join(bytes(chunk.data) for chunk in store.read_parts([item])) == data
    world.entries()[0].unlink()
    with pytest.raises(ObjectChangedError):
        list(world.cache().read_parts([item]))


def test_nothing_is_copied_on_the_way(world: World) -> None:
    """A block from the disk lands in the sink's landing, and no byte around it changes."""
    data = content(3 * BLOCK_BYTES)
    world.memory.write("k", data)
    epoch(world.cache())
    store = world.cache()
    etag = next(iter(store.list())).etag
    buffer = bytearray(b"#" * 20_000)
    landing = Landing(buffer, 1000, 1000 + 6000)
    completion = submit(store, Get("k", ByteRange(3000, 9000), etag), WatchingSink(landing))[1].wait()
    assert completion.landing is landing
    assert bytes(buffer) == b"#" * 1000 + data[3000:9000] + b"#" * 13_000
    assert completion.verified == "crc32c"


def test_memory_goes_home_at_once(world: World) -> None:
    """After a cold epoch its buffers are free again, without the cyclic garbage collector."""
    world.memory.write("k", content(5 * MIB))
    store = world.cache(block_bytes=MIB)
    items = listed(store)
    gc.collect()
    before = process_budget().statistics()
    gc.disable()
    try:
        assert sum(len(chunk.data) for chunk in store.read_parts(items, part_bytes=MIB)) == 5 * MIB
        after = process_budget().statistics()
    finally:
        gc.enable()
    assert after.used_bytes - after.free_bytes == before.used_bytes - before.free_bytes


class _Opened:
    """Counts how entries are opened; with `refuses`, direct I/O is refused after the file was created."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, refuses: bool) -> None:
        self.direct_count = self.buffered_count = 0
        self.read: list[str] = []
        self._refuses = refuses
        self._open = os.open
        monkeypatch.setattr(os, "open", self)

    def __call__(self, path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            self.direct_count += 1
            if self._refuses:
                os.close(self._open(path, flags & ~os.O_DIRECT, *rest, **options))
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        elif "/temporary/" in str(path):
            self.buffered_count += 1
        elif "/entries/" in str(path):
            self.read.append(Path(path).suffix)
        return self._open(path, flags, *rest, **options)


@pytest.mark.parametrize("refuses", [False, True])
def test_whole_blocks_go_past_the_page_cache(world: World, monkeypatch: pytest.MonkeyPatch, refuses: bool) -> None:
    """Aligned blocks are written with direct I/O, but the rest of an object is not; after one refusal, none are."""
    data = content(3 * MIB + 5)
    world.memory.write("k", data)
    opened = _Opened(monkeypatch, refuses=refuses)
    store = world.cache(block_bytes=MIB, threads_max=1)
    items = listed(store)
    parts = [bytes(chunk.data) for chunk in store.read_parts(items, part_bytes=4 * MIB)]
    assert b"".join(parts) == data
    assert (opened.direct_count, opened.buffered_count) == ((1, 4) if refuses else (3, 1))
    assert store.statistics().troubles == {}
    other = world.cache(block_bytes=MIB)
    assert epoch(other) == data
    assert (other.statistics().hit_count > 3, other.statistics().fetched_bytes) == (True, 0)


def test_a_block_is_written_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block is written once, even if its folder does not exist yet."""
    world.memory.write("k", content(64 * BLOCK_BYTES))
    opened = _Opened(monkeypatch, refuses=False)
    store = world.cache()
    epoch(store)
    assert opened.buffered_count == store.statistics().stored_count == 64


@pytest.mark.parametrize(("ttl_s", "looks"), [(0.0, [".s"]), (3600.0, [".s", ".m"])])
def test_an_unknown_object_is_looked_up_once(
    world: World, monkeypatch: pytest.MonkeyPatch, ttl_s: float, looks: list[str]
) -> None:
    """A first read tries each file that may know the object once, and then removes none to make way for what it stores."""
    world.memory.write("k", content(BLOCK_BYTES))
    opened = _Opened(monkeypatch, refuses=False)
    store = world.cache(metadata_ttl_s=ttl_s)
    removed: list[str] = []
    monkeypatch.setattr(store.context.directory, "remove", lambda name: removed.append(name.file))
    assert bytes(store.read("k").data) == content(BLOCK_BYTES)
    assert (opened.read, removed, opened.buffered_count) == (looks, [], 2)
    assert store.statistics().used_bytes == disk_bytes(world)


@pytest.mark.parametrize("ttl_s", [0.0, 1e-9])
def test_a_replaced_record_is_counted_once(world: World, ttl_s: float) -> None:
    """When the record of an object takes the place of an older one, the number of its folder stays what the files take."""
    world.memory.write("k", content(BLOCK_BYTES))
    assert bytes(world.cache(metadata_ttl_s=ttl_s).read("k").data) == content(BLOCK_BYTES)
    world.memory.write("k", content(BLOCK_BYTES, 1))
    store = world.cache(metadata_ttl_s=ttl_s)
    assert bytes(store.read("k").data) == content(BLOCK_BYTES, 1)
    assert store.statistics().used_bytes == disk_bytes(world)


class _Weak(MemoryStore):
    """A store with weak ETags."""

    def _put(self, operation: Any) -> Any:
        super()._put(operation)
        stored = self._bucket.objects[operation.key]
        info = stored.info._replace(etag='W/"1"')
        self._bucket.objects[operation.key] = stored._replace(info=info)
        return info


@pytest.mark.parametrize("ttl_s", [0.0, math.inf])
def test_weak_versions_are_not_kept(world: World, ttl_s: float) -> None:
    """Every read of an object with a weak ETag goes to the store, since objects with equal ETags may differ."""
    store = world.cache(_Weak(), metadata_ttl_s=ttl_s)
    for seed in range(3):
        store.inner.write("k", content(9000, seed))
        assert store.read("k").data == content(9000, seed)
        assert store.read("k", ByteRange(5000, 5010)).data == content(9000, seed)[5000:5010]
        store.stat("k")
    assert world.entries() == []
    assert store.statistics().uncacheable_count == 6


# ── who shares what ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_namespaces_do_not_see_each_other(world: World) -> None:
    """A namespace does not use blocks and answers of another."""
    world.memory.write("k", content(5000))
    epoch(world.cache(namespace="a", metadata_ttl_s=math.inf))
    epoch(world.cache(namespace="b", metadata_ttl_s=math.inf))
    assert world.asked() == {"ListPage": 1, "Get": 1}
    epoch(world.cache(namespace="a", metadata_ttl_s=math.inf))
    assert world.asked() == {}


def test_everything_is_private(world: World) -> None:
    """Directories have mode 0700 and files 0600, whatever the umask."""
    before = os.umask(0)
    try:
        world.memory.write("k", content(5000))
        epoch(world.cache(metadata_ttl_s=60.0))
    finally:
        os.umask(before)
    for path in [world.folder, *world.folder.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_pickled_store_shares_the_directory(world: World) -> None:
    """A pickled cache finds the blocks of the original."""
    world.memory.write("k", content(5000))
    epoch(world.cache())
    store = world.cache()
    with pickle.loads(pickle.dumps(store)) as other:
        assert epoch(other) == content(5000)
        assert other.statistics().fetched_bytes == 0
        assert other.config == store.config


# ── what the disk does ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("damage", ["data", "header", "cut", "empty", "swapped", "longer identity"])
def test_a_corrupt_block_is_fetched_again_alone(world: World, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """A damaged block is never returned: it alone is removed and fetched again."""
    data = content(8 * BLOCK_BYTES)
    world.memory.write("k", data)
    epoch(world.cache())
    victim, other = world.entries()[:2]
    raw = bytearray(victim.read_bytes())
    if damage == "data":
        raw[-1] ^= 1
    elif damage == "header":
        raw[20] ^= 1
    elif damage == "cut":
        raw = raw[:-1]
    elif damage == "empty":
        raw = bytearray()
    elif damage == "swapped":
        raw = bytearray(other.read_bytes())
    else:
        raw[100:100] = bytes(64)
    victim.write_bytes(raw)
    store = world.cache()
    with caplog.at_level(logging.WARNING):
        assert epoch(store) == data
    statistics = store.statistics()
    assert (statistics.corrupt_count, statistics.fetched_bytes) == (1, BLOCK_BYTES)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert epoch(world.cache()) == data
    assert world.asked() == {"ListPage": 1}


def test_a_block_that_goes_while_it_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is evicted while it is read is read to its end, without a request and without an error."""
    data = content(3 * BLOCK_BYTES)
    world.memory.write("k", data)
    epoch(world.cache())
    preadv, gone = os.preadv, []

    def evicting(fd: int, *rest: Any) -> int:
        if not gone:
            gone.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
            gone[0].unlink()
        return preadv(fd, *rest)

    store = world.cache()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", evicting)
        assert epoch(store) == data
    assert not gone[0].exists()
    assert (store.statistics().fetched_bytes, store.statistics().corrupt_count) == (0, 0)


@pytest.mark.parametrize("is_cached", [True, False, None])
def test_the_header_is_read_before_the_block(
    world: World, monkeypatch: pytest.MonkeyPatch, is_cached: bool | None
) -> None:
    """A read of a whole block reads its header separately, each time (``CpuSlots.read_waiting``).

    It reads from the page cache first and then from the disk; if the page cache cannot be asked, only from the disk.
    """
    world.memory.write("k", content(2 * MIB))
    store = world.cache(block_bytes=MIB, threads_max=1)
    epoch(store)
    reads: list[tuple[int, int, bool]] = []
    preadv = os.preadv

    def noting(fd: int, views: list[memoryview], offset: int, flags: int = 0) -> int:
        waits = flags != os.RWF_NOWAIT
        reads.append((offset, len(views[0]), waits))
        if not waits and is_cached is None:
            raise OSError(errno.EOPNOTSUPP, "as on tmpfs")
        if not waits and not is_cached:
            raise BlockingIOError(errno.EAGAIN, "not in memory")
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", noting)
    now, then = [(0, 4096, False), (4096, MIB, False)], [(0, 4096, True), (4096, MIB, True)]
    first = {True: 2 * now, False: [now[0], now[0], *then, *then], None: [now[0], *then, *then]}
    again = {True: first[True], False: first[False], None: [*then, *then]}
    for expected in (first[is_cached], again[is_cached]):
        reads.clear()
        assert sum(len(chunk.data) for chunk in store.read_parts(listed(store))) == 2 * MIB
        assert reads == expected


def test_cpu_slots_are_released(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Corrupt, missing and slow blocks release their CPU slots."""
    data = content(64 * BLOCK_BYTES)
    world.memory.write("k", data)
    epoch(world.cache())
    for number, path in enumerate(world.entries()):
        if number % 3 == 0:
            path.write_bytes(b"garbage")
        elif number % 3 == 1:
            path.unlink()
    preadv = os.preadv

    def slowly(fd: int, views: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags == os.RWF_NOWAIT:
            raise BlockingIOError(errno.EAGAIN, "not in memory")
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", slowly)
    for _ in range(2):
        assert epoch(world.cache()) == data


def test_the_directory_may_go_under_way(world: World) -> None:
    """After ``rm -rf`` of the directory, a job goes on and fills the directory again."""
    data = content(8 * BLOCK_BYTES)
    world.memory.write("k", data)
    store = world.cache()
    assert epoch(store) == data
    shutil.rmtree(world.folder)
    assert epoch(store) == data
    assert epoch(store) == data
    assert store.statistics().fetched_bytes == 2 * len(data)
    assert store.statistics().troubles == {}


def test_a_disk_that_takes_nothing_more(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """If a write fails half-way, the job goes on, one warning is logged, and no partial file remains."""
    data = content(8 * BLOCK_BYTES)
    world.memory.write("k", data)
    store = world.cache()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))  # a real failure of the file system: EFBIG
    try:
        with caplog.at_level(logging.WARNING):
            assert epoch(store) == data
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    statistics = store.statistics()
    assert statistics.refused_count == 8
    assert set(statistics.troubles) == {"write EFBIG"}
    assert len(caplog.records) == 1
    assert "what is read is not kept" in caplog.text
    assert world.entries() == list((world.folder / "v1/temporary").iterdir()) == []


def test_a_quota_that_is_used_up(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a quota is used up, the job goes on, one warning is logged, and reservations are given back."""
    data = content(8 * BLOCK_BYTES)
    world.memory.write("k", data)
    store = world.cache()

    def refuse(*_: object) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "writev", refuse)
        assert epoch(store) == data
    assert set(store.statistics().troubles) == {"write EDQUOT"}
    assert (store.statistics().stored_count, store.statistics().refused_count) == (0, 8)
    assert len(caplog.records) == 1
    assert store.statistics().used_bytes == disk_bytes(world) == 0
    assert list((world.folder / "v1/temporary").iterdir()) == []


def test_a_quota_below_the_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a quota refuses a block, the oldest entries are removed, and later blocks are kept again."""
    for index in range(40):
        world.memory.write(f"k{index:02}", content(BLOCK_BYTES, index))
    store = world.cache(threads_max=1)
    monkeypatch.setattr("penstock.cache.statistics.PAUSE_S", 0.0)
    writev, refused = os.writev, []

    def write(fd: int, pieces: list[Any]) -> int:
        if disk_bytes(world) + 8192 > 20 * 8192:
            refused.append(fd)
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return writev(fd, pieces)

    monkeypatch.setattr(os, "writev", write)
    assert len(epoch(store)) == 40 * BLOCK_BYTES
    assert 0 < len(refused) <= 10
    assert store.statistics().stored_count == 40 - len(refused)
    assert disk_bytes(world) == store.statistics().used_bytes > 16 * 8192
    before = store.statistics().fetched_bytes
    next(iter(store.read_parts(listed(store, "k39"))))
    assert store.statistics().fetched_bytes == before


def test_free_space_is_left(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """If less space is free than must remain free, nothing is stored, one warning says so, and no failure is counted."""
    world.memory.write("k", content(9000))
    store = world.cache(free_ratio_min=0.999)
    assert epoch(store) == content(9000)
    assert store.statistics().stored_count == 0
    assert store.statistics().refused_count == 3
    assert not store.statistics().troubles
    (warning,) = (record.getMessage() for record in caplog.records if record.name == "penstock.cache")
    assert f"99.9% of {world.folder}'s disk must remain free" in warning


def test_a_cache_at_its_limit_does_not_warn_of_the_disk(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A cache that evicts because of its own limit says nothing about the disk."""
    world.memory.write("k", content(64 * BLOCK_BYTES))
    store = world.cache(bytes_max=20 * BLOCK_BYTES)
    epoch(store)
    assert store.statistics().evicted_count > 0
    assert not caplog.records


def test_a_disk_that_others_fill_costs_what_is_needed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk, a cache below its limit removes only as much as a new entry needs."""
    world.memory.write("k", content(64 * BLOCK_BYTES))
    world.memory.write("new", content(BLOCK_BYTES))
    store = world.cache(threads_max=1)
    epoch(store)
    full = os.statvfs(world.folder)
    begun_bytes = disk_bytes(world)

    def without_room(_: str) -> os.statvfs_result:
        free_count = (begun_bytes - disk_bytes(world)) // full.f_frsize  # what is removed is free again
        return os.statvfs_result((*full[:3], free_count, free_count, *full[5:]))

    monkeypatch.setattr(os, "statvfs", without_room)
    assert store.read("new").data == content(BLOCK_BYTES)
    statistics = store.statistics()
    assert (statistics.stored_count, statistics.evicted_count, statistics.refused_count) == (
        66,
        2,
        0,
    )  # its version is kept too


def test_leftovers_of_the_killed_are_removed(world: World) -> None:
    """A new process removes temporary files of processes that have ended, but not of others."""
    world.memory.write("k", content(9000))
    living = world.cache()
    epoch(living)
    temporary = world.folder / "v1/temporary"
    dead = temporary / "0123456789abc-7"
    dead.write_bytes(b"half")
    mine = temporary / f"{living.context.directory.leases.token}-999"
    mine.write_bytes(b"half")
    store = world.cache()
    epoch(store)
    store.close()
    assert list(temporary.iterdir()) == [mine]


def test_closing_releases_everything(world: World) -> None:
    """After ``close()`` no thread and no descriptor is left."""
    world.memory.write("k", content(50_000))
    epoch(world.memory)
    with nothing_left():
        store = Cached(MemoryStore({"k": content(50_000)}), CacheConfig(world.folder, 10**8, free_ratio_min=0.0))
        assert epoch(store) == content(50_000)
        store.close()
        store.close()
    assert store.statistics().used_bytes == disk_bytes(world)


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def disk_bytes(world: World) -> int:
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in world.folder.glob("v1/entries/*/*"))


def test_the_limit_holds_and_the_oldest_go(world: World) -> None:
    """The directory never exceeds the limit, and the entries used last remain."""
    for index in range(40):
        world.memory.write(f"k{index:02}", content(BLOCK_BYTES, index))
    store = world.cache(bytes_max=20 * 8192)  # a block of 4 KiB and its header take two pages
    for index in range(40):
        store.read(f"k{index:02}")
        assert disk_bytes(world) <= 20 * 8192
    assert store.statistics().evicted_count > 0
    assert store.statistics().used_bytes == disk_bytes(world)
    there = {item.key for item in listed(store) if store.context.directory.exists(_name(store, item))}
    assert "k39" in there
    assert "k00" not in there


def _name(store: Cached, item: PlanItem) -> Any:
    from penstock.cache.entry import block_name

    assert item.etag is not None
    return block_name(store.context.identities.of_version(item.key, item.etag)[1], 0)


def test_the_limit_holds_whoever_writes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With eight threads that store at once, the directory never exceeds the limit, not even briefly."""
    for index in range(80):
        world.memory.write(f"k{index:02}", content(BLOCK_BYTES, index))
    held: list[int] = []
    rename = os.rename

    def watched(*paths: Any) -> None:
        rename(*paths)
        held.append(disk_bytes(world))

    monkeypatch.setattr(os, "rename", watched)
    store = world.cache(bytes_max=20 * 8192)
    assert epoch(store) == epoch(world.memory)
    assert len(held) > 40
    assert max(held) <= 20 * 8192
    assert store.statistics().used_bytes == disk_bytes(world)


def test_what_was_used_in_the_future_goes_first(world: World) -> None:
    """An entry that a wrong clock marked as used in the future is evicted first."""
    for index in range(40):
        world.memory.write(f"k{index:02}", content(BLOCK_BYTES, index))
    store = world.cache(bytes_max=20 * 8192)
    for index in range(15):
        store.read(f"k{index:02}")
    items = {item.key: item for item in listed(store)}
    ahead = Path(store.context.directory.entries + _name(store, items["k14"]).path)
    os.utime(ahead, (time.time() + 10**6, time.time() + 10**6))
    for index in range(15, 22):
        store.read(f"k{index:02}")
    assert not ahead.exists()
    assert store.context.directory.exists(_name(store, items["k13"]))


def test_another_layout_is_left_alone(world: World) -> None:
    """The folder of another layout is not counted, trimmed or verified, but ``clear`` empties it."""
    other = world.folder / "v9/entries/00"
    other.mkdir(parents=True)
    (other / "theirs").write_bytes(bytes(100_000))
    world.memory.write("k", content(9000))
    store = world.cache()
    assert epoch(store) == content(9000)
    assert store.statistics().used_bytes == disk_bytes(world) > 0
    assert verify(world.folder) == (3, 0)
    trim(world.folder, 0)
    assert (other / "theirs").stat().st_size == 100_000
    clear(world.folder)
    assert not other.exists()


def test_what_is_used_stays(world: World) -> None:
    """A block that is read repeatedly outlives blocks that are not."""
    world.memory.write("hot", content(BLOCK_BYTES, 99))
    for index in range(60):
        world.memory.write(f"k{index:02}", content(BLOCK_BYTES, index))
    items = {item.key: item for item in listed(world.memory)}
    for index in range(60):
        store = world.cache(bytes_max=20 * 8192, wait_s_max=1.0)  # another process: it marks what it uses
        for key in ("hot", f"k{index:02}"):
            list(store.read_parts([items[key]]))
    store = world.cache(bytes_max=20 * 8192)
    list(store.read_parts([items["hot"]]))
    assert store.statistics().fetched_bytes == 0


def test_numbers_that_a_killed_process_left_wrong_heal(world: World) -> None:
    """Scans during storing and eviction correct wrong numbers, and the next start restores lost ones."""
    for index in range(40):
        world.memory.write(f"k{index:02}", content(BLOCK_BYTES, index))
    store = world.cache(bytes_max=20 * 8192)
    for folder in range(256):
        store.context.directory.usage.set(folder, 10**6)
    epoch(store)
    assert store.statistics().used_bytes == disk_bytes(world)
    (world.folder / "v1/usage").unlink()
    other = world.cache(bytes_max=20 * 8192)
    list(other.list())
    other.read("k00")
    other.close()
    assert other.statistics().used_bytes == disk_bytes(world) <= 20 * 8192


# ── looking after it ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_survey_verify_trim_clear(world: World) -> None:
    """The functions count entries, find corrupt ones, remove the oldest and all, but leave other files alone."""
    for index in range(10):
        world.memory.write(f"k{index}", content(2 * BLOCK_BYTES, index))
    store = world.cache(metadata_ttl_s=60.0)
    epoch(store)
    found = survey(world.folder)
    assert found.counts == {"block": 20, "page": 1}
    assert found.size_bytes == disk_bytes(world) == store.statistics().used_bytes
    assert [(origin.objects_count, origin.blocks_count) for origin in found.origins] == [(10, 20)]
    assert verify(world.folder) == (21, 0)
    victim, other = world.entries()[:2]
    victim.write_bytes(other.read_bytes())  # whole, but another block's
    assert verify(world.folder) == (21, 1)
    removed_count, removed_bytes = trim(world.folder, 5 * 8192)
    assert removed_count >= 15
    assert removed_bytes == found.size_bytes - 8192 - disk_bytes(world)
    assert disk_bytes(world) <= 5 * 8192
    (world.folder / "notes.txt").write_text("mine")
    (world.folder / "v0/entries").mkdir(parents=True)  # another penstock's
    assert clear(world.folder) > 0
    assert disk_bytes(world) == store.statistics().used_bytes == 0
    assert (world.folder / "notes.txt").read_text() == "mine"
    assert not (world.folder / "v0").exists()


def test_only_a_cache_is_looked_after(tmp_path: Path) -> None:
    """A directory without the cache's tag is refused, so that nothing is removed by mistake."""
    (tmp_path / "precious").write_text("x")
    for act in (survey, verify, clear, open_directory):
        with pytest.raises(ConfigError, match="not a penstock cache"):
            act(tmp_path)
    assert (tmp_path / "precious").exists()


def test_warming_reads_what_is_not_there(world: World) -> None:
    """Warming a second time fetches nothing, and a store without a cache is refused."""
    for index in range(5):
        world.memory.write(f"k{index}", content(9000, index))
    store = world.cache()
    seen: list[int] = []
    first = warm(store, listed(store), progress=lambda count, size_bytes: seen.append(size_bytes))
    assert (first.requests_count, first.size_bytes, first.fetched_bytes, first.refused_count) == (5, 45_000, 45_000, 0)
    assert sum(seen) == 45_000
    assert warm(world.cache(), listed(store)).fetched_bytes == 0
    with pytest.raises(ConfigError, match="no cache"):
        warm(world.memory, ["k0"])


def test_warming_a_pipeline_tells_how_it_goes(tmp_path: Path) -> None:
    """The total is reported once, then the progress; a pipeline that reads no store is refused."""
    for name, count in (("a", 1), ("b", 3)):
        (tmp_path / f"{name}.bin").write_bytes(bytes(count * 100_000))
    expected: list[int | None] = []
    done: list[tuple[int, int]] = []
    cache = CacheConfig(tmp_path / "cache", 10**8, free_ratio_min=0.0)
    warmed = warm_cache(
        ps.objects(f"{tmp_path}/*.bin"), cache, expect=expected.append, progress=lambda *step: done.append(step)
    )
    assert expected == [400_000]
    assert (sum(count for count, _ in done), sum(size_bytes for _, size_bytes in done)) == (2, 400_000)
    assert (warmed.requests_count, warmed.fetched_bytes, warmed.refused_count) == (2, 400_000, 0)
    with pytest.raises(ConfigError, match="no store"):
        warm_cache(ps.objects(["a"], read=lambda _: b""), cache)
    with pytest.raises(ConfigError, match="pipeline"):
        warm_cache("s3://bucket", cache)  # type: ignore[arg-type]


def test_what_is_read_is_recorded(world: World, tmp_path: Path) -> None:
    """Every read appends a complete line of JSON to ``record_path``, which caches may share."""
    path = tmp_path / "accesses.jsonl"
    for _ in range(2):
        store = world.cache(MemoryStore({"k": content(9000)}), record_path=str(path))
        store.read("k", ByteRange(5, 10))
        store.read("k", ByteRange(0, 9000))
        store.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows == 2 * [{"key": "k", "start": 5, "end": 10}, {"key": "k", "start": 0, "end": 9000}]
    store = world.cache(MemoryStore({"k": content(9000)}), record_path=str(tmp_path / "none/accesses.jsonl"))
    assert store.read("k").data == content(9000)
    store.close()
    assert set(store.statistics().troubles) == {"record ENOENT"}


def test_the_statistics_are_a_record(world: World) -> None:
    """The statistics are immutable."""
    statistics = world.cache().statistics()
    with pytest.raises(dataclasses.FrozenInstanceError):
        statistics.hit_count = 1  # type: ignore[misc]


class UnchangingSink(WatchingSink):
    """A sink that leaves the body alone."""

    leaves_body_alone = True


def test_a_sink_that_leaves_the_body_alone_does_not_wait_for_the_disk(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its bytes before they are stored. Until then, other reads of any part wait, and none asks the store again."""
    data = content(3 * BLOCK_BYTES + 7)
    world.memory.write("a", data)
    cached = world.cache(metadata_ttl_s=3600)
    may_go_on, write = threading.Event(), cached.context.directory.write

    def waiting_write(entries: Any) -> int:
        assert may_go_on.wait(10)
        return write(entries)

    monkeypatch.setattr(cached.context.directory, "write", waiting_write)
    _, first = submit(cached, Get("a"), UnchangingSink())
    assert bytes(first.wait().body) == data
    spans = [None, ByteRange(5, 9), ByteRange(BLOCK_BYTES - 3, 2 * BLOCK_BYTES + 3)]
    others = [submit(cached, Get("a", span), kind())[1] for kind in (WatchingSink, UnchangingSink) for span in spans]
    assert world.entries() == []
    may_go_on.set()
    for sink, span in zip(others, spans * 2, strict=True):
        assert bytes(sink.wait().body) == (data if span is None else data[span.start : span.end])
    assert world.asked() == {"Get": 1}
    cached.close()
    assert len(world.entries()) == 4


def test_large_bodies_are_stored_before_their_reader_is_notified(world: World) -> None:
    """Only small bodies are stored later, so that the memory that waits for the disk is bounded."""
    data = content(MIB + 1)
    world.memory.write("a", data)
    cached = world.cache()
    _, sink = submit(cached, Get("a"), UnchangingSink())
    assert bytes(sink.wait().body) == data
    assert len(world.entries()) == -(-len(data) // BLOCK_BYTES)
