"""Large objects become files without passing through memory, whatever the server does meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import penstock as ps
from penstock.cache import CacheConfig
from penstock.config import KIB, FetchConfig, HedgeConfig, RetryConfig
from penstock.errors import StoreError
from penstock.fetch import PlanItem
from penstock.memory.file_landings import LandingFile
from penstock.store.records import FileRecords
from penstock.transfer import FileReceiver, TransferItem, stream
from penstock.types import Chunk, ObjectInfo
from servers.faulty import FaultyServer

pytestmark = pytest.mark.server

FAST = RetryConfig(backoff_s=0.005, backoff_s_max=0.05)
SMALL_PARTS = FetchConfig(part_bytes=256 * KIB)
DATA = b"".join(number.to_bytes(4, "big") for number in range(400_000))  # 1.6 MB: seven parts, no two alike
OTHER = bytes(byte ^ 255 for byte in DATA)

Connect = Callable[..., ps.Store]


class Listener:
    """Records what was moved and what failed; see ``TransferListener``."""

    def __init__(self) -> None:
        self.moved_keys: list[str] = []
        self.failures: dict[str, Exception] = {}
        self.size_bytes = 0

    def moved(self, item: TransferItem) -> None:
        self.moved_keys.append(item.key)

    def failed(self, item: TransferItem, error: Exception) -> None:
        self.failures[item.key] = error

    def progressed(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes


class WatchedReceiver(FileReceiver):
    """Counts the chunks that landed in files."""

    in_file_count = 0

    def receive(self, item: TransferItem, chunk: Chunk) -> None:
        self.in_file_count += chunk.in_file
        super().receive(item, chunk)


def items(store: ps.Store, folder: Path) -> Iterator[TransferItem]:
    for info in store.list():
        yield TransferItem(info, info.key, folder / info.key)


def put(faulty: FaultyServer, objects: dict[str, bytes]) -> None:
    for key, data in objects.items():
        faulty.objects[key] = data


def moved(store: ps.Store, folder: Path) -> tuple[Listener, WatchedReceiver]:
    listener = Listener()
    receiver = WatchedReceiver(listener)
    stream(store, items(store, folder), receiver, listener)
    return listener, receiver


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_objects_land_in_their_files(faulty: FaultyServer, connect_faulty: Connect, tmp_path: Path) -> None:
    """All chunks of large objects are in the files; small and empty ones come through memory; no descriptor is left."""
    put(faulty, {"a": DATA, "b": b"small", "c": b"", "d/e": OTHER})
    with connect_faulty(retry=FAST, fetch=SMALL_PARTS) as store:
        listener, receiver = moved(store, tmp_path)
    assert tree(tmp_path) == faulty.objects
    assert listener.moved_keys == ["a", "b", "c", "d/e"]
    assert listener.size_bytes == 2 * len(DATA) + 5
    assert receiver.in_file_count == 14
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [link for link in links if str(link.readlink()).startswith(str(tmp_path))]


@pytest.mark.parametrize(
    "kind",
    [
        "close", "close_head", "promise_more", "reset", "reset_head", "chunked", "chunked_cut", "chunked_whole",
        "unsized", "500", "503", "corrupt", "wrong_checksum", "wrong_range", "short_range", "ignore_range", "html",
        "garbage_headers", "empty_200",
    ],
)  # fmt: skip
def test_any_fault_gives_right_bytes_or_an_error(
    faulty: FaultyServer, connect_faulty: Connect, tmp_path: Path, kind: str
) -> None:
    """A third of all bodies fails in one way: a file is right or missing, and nothing else is left in the folder."""
    put(faulty, {"a": DATA, "b": OTHER})
    with connect_faulty(retry=FAST, fetch=SMALL_PARTS) as store:
        keys = [TransferItem(ObjectInfo(key, len(DATA), store.stat(key).etag), key, tmp_path / key) for key in "ab"]
        faulty.random_faults([kind], ratio=0.3, seed=7)
        listener = Listener()
        stream(store, iter(keys), FileReceiver(listener), listener)
    found = tree(tmp_path)
    assert found == {key: faulty.objects[key] for key in listener.moved_keys}
    assert set(listener.moved_keys) | set(listener.failures) == {"a", "b"}


def test_an_object_that_changes_is_no_mixture(faulty: FaultyServer, connect_faulty: Connect, tmp_path: Path) -> None:
    """If the object is replaced between two parts, it fails, and the others are complete."""
    put(faulty, {"a": DATA, "b": DATA})
    faulty.fail("change", times=1, match=lambda request: request.key == "a" and request.span is not None)
    with connect_faulty(retry=FAST, fetch=SMALL_PARTS) as store:
        listener, _ = moved(store, tmp_path)
    assert list(listener.failures) == ["a"]
    assert tree(tmp_path) == {"b": DATA}


def test_a_wrong_size_in_the_listing(faulty: FaultyServer, connect_faulty: Connect, tmp_path: Path) -> None:
    """An object of another size than was listed is requested again, and comes whole, through memory."""
    faulty.objects["a"] = DATA
    listener = Listener()
    receiver = WatchedReceiver(listener)
    with connect_faulty(retry=FAST, fetch=SMALL_PARTS) as store:
        info = store.stat("a")._replace(size_bytes=len(DATA) + 1_000_000)
        stream(store, iter([TransferItem(info, "a", tmp_path / "a")]), receiver, listener)
    assert tree(tmp_path) == {"a": DATA}
    assert receiver.in_file_count == 0


def test_a_second_request_that_wins(faulty: FaultyServer, connect_faulty: Connect, tmp_path: Path) -> None:
    """If a late request is sent a second time, the body of the one that answers first is in the file."""
    put(faulty, {f"{number:03d}": bytes([number]) * 1000 for number in range(100)})
    with connect_faulty(hedge=HedgeConfig(wait_s_min=0.01), fetch=SMALL_PARTS, retry=FAST) as store:
        for _ in store.read_many(sorted(faulty.objects)):
            pass
        faulty.objects["z"] = DATA
        faulty.fail(
            "stall_head", times=2, seconds=5, match=lambda request: request.key == "z" and request.method == "GET"
        )
        listener = Listener()
        receiver = WatchedReceiver(listener)
        stream(store, iter([TransferItem(store.stat("z"), "z", tmp_path / "z")]), receiver, listener)
    assert tree(tmp_path) == {"z": DATA}
    assert receiver.in_file_count == 7


def test_a_cache_still_keeps_what_is_read(faulty: FaultyServer, connect_faulty: Connect, tmp_path: Path) -> None:
    """Through a cache, bodies pass through memory, and the second download needs no request for them."""
    faulty.objects["a"] = DATA
    for name in ("one", "two"):
        cache = CacheConfig(tmp_path / "cache", 1 << 30)
        with connect_faulty(cache=cache, retry=FAST, fetch=SMALL_PARTS) as store:
            _, receiver = moved(store, tmp_path / name)
        assert receiver.in_file_count == 0
    assert tree(tmp_path / "one") == tree(tmp_path / "two") == {"a": DATA}
    assert sum(request.key == "a" and request.method == "GET" for request in faulty.requests) <= 7


def test_headers_of_cached_objects_are_asked_for_at_the_same_time(
    faulty: FaultyServer, connect_faulty: Connect, tmp_path: Path
) -> None:
    """Reads from a cache tell no headers: one HEAD for each object, beside the reads, and not one after the other."""
    put(faulty, {f"{number:02d}": bytes([number]) * 100 for number in range(30)})
    faulty.fail("delay", times=None, seconds=0.1, match=lambda request: request.method == "HEAD")
    with connect_faulty(cache=CacheConfig(tmp_path / "cache", 1 << 30), hedge=None) as store:
        began_s = time.monotonic()
        listener = Listener()
        records = FileRecords(tmp_path / "records")
        stream(store, items(store, tmp_path / "one"), FileReceiver(listener, records=records), listener)
    assert time.monotonic() - began_s < 2
    assert len(listener.moved_keys) == 30
    assert sum(request.method == "HEAD" for request in faulty.requests) == 30


def test_a_file_that_cannot_be_written(faulty: FaultyServer, connect_faulty: Connect) -> None:
    """The answer is an error that names the file and is not tried again."""
    faulty.objects["a"] = DATA
    fd = os.open("/dev/full", os.O_RDWR)
    file = LandingFile(fd, Path("/dev/full"))
    os.close(fd)
    with connect_faulty(retry=FAST, fetch=SMALL_PARTS) as store:
        info = store.stat("a")
        requests_count = len(faulty.requests)
        with pytest.raises(StoreError, match="/dev/full: No space left on device"):
            for _ in store.read_parts([PlanItem("a", etag=info.etag, size_bytes=info.size_bytes, target=file)]):
                pass
    assert len(faulty.requests) - requests_count <= 9
