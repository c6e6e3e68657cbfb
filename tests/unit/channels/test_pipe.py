"""Pipes: what their readers get, epoch after epoch, and how they end."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from penstock.channels import InputChannel
from penstock.channels.entries import Entries, EpochOrder, open_source
from penstock.channels.pipe import Content, PipeChannel, open_pipe_channel, pipe_orders, record_head
from penstock.errors import ConfigError, CorruptShardError, DataError, ObjectMissingError
from penstock.formats import parser_of
from penstock.store.memory import MemoryStore
from penstock.types import Get

WAIT_S_MAX = 20


class Stores:
    """Memory stores by their URLs."""

    def __init__(self) -> None:
        self.by_root: dict[str, MemoryStore] = {}

    def __call__(self, root_url: str) -> MemoryStore:
        return self.by_root.setdefault(root_url, MemoryStore())


@pytest.fixture
def stores() -> Stores:
    """Stores of this test alone; ``memory://`` URLs split like S3's."""
    return Stores()


@pytest.fixture
def begin(stores: Stores, tmp_path: Path) -> Iterator[Callable[..., PipeChannel]]:
    """Begins a channel named ``train`` of ``memory://bucket/``."""
    begun = []

    def begin_it(*, host_rank: int = 0, hosts_count: int = 1, **fields: Any) -> PipeChannel:
        channel = InputChannel(**({"name": "train", "url": "memory://bucket/train/", "mode": "Pipe"} | fields))
        entries = Entries(open_source(channel, stores))
        begun.append(
            open_pipe_channel(channel, entries, path=tmp_path / "train", host_rank=host_rank, hosts_count=hosts_count)
        )
        return begun[-1]

    yield begin_it
    for channel in begun:
        channel.close()


def fill(stores: Stores, count: int = 10) -> list[bytes]:
    store = stores("memory://bucket")
    contents = [b"<object %03d>" % number * (number + 1) for number in range(count)]
    for number, content in enumerate(contents):
        store.write(f"train/{number:03d}", content)
    return contents


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def open_epoch(path: Path, epoch: int = 0) -> Any:
    fifo = path.with_name(f"{path.name}_{epoch}")
    wait_until(fifo.exists)
    return fifo.open("rb")


def read_epoch(path: Path, epoch: int = 0) -> bytes:
    with open_epoch(path, epoch) as file:
        return file.read()


def records(data: bytes) -> list[bytes]:
    parser = parser_of("recordio-raw", shard="pipe")
    return [bytes(sample.fields["record"]) for sample in (*parser.feed(data), *parser.finish())]


def test_objects_back_to_back(stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path) -> None:
    """Each epoch has all objects in the order of their keys, without separators; epochs never end."""
    contents = fill(stores)
    begin()
    for epoch in range(5):
        assert read_epoch(tmp_path / "train", epoch) == b"".join(contents)
    assert not (tmp_path / "train").exists()


def test_only_one_fifo_at_a_time(stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path) -> None:
    """The FIFO of an epoch is gone when the next epoch can be read, and nothing is left after ``close``."""
    fill(stores)
    channel = begin()
    for epoch in range(3):
        read_epoch(tmp_path / "train", epoch)
        wait_until(lambda epoch=epoch: not (tmp_path / f"train_{epoch}").exists())
    channel.close()
    assert list(tmp_path.iterdir()) == []


def test_large_objects(stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path) -> None:
    """Objects of many parts arrive whole and in order, with a reader that is slower than the writer."""
    data = os.urandom(40 << 20)
    stores("memory://bucket").write("train/large", data)
    begin()
    with open_epoch(tmp_path / "train") as file:
        assert file.read(1000) == data[:1000]
        assert file.read() == data[1000:]


def test_a_seed_shuffles_every_epoch(stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path) -> None:
    """With a seed, each epoch has all objects in another order, and the same order in another run."""
    contents = fill(stores, 30)
    runs = []
    for _ in range(2):
        channel = begin(shuffle_seed=7, record_wrapper="RecordIO")
        runs.append([records(read_epoch(tmp_path / "train", epoch)) for epoch in range(3)])
        channel.close()
    assert runs[0] == runs[1]
    assert all(sorted(epoch) == sorted(contents) for epoch in runs[0])
    assert runs[0][0] != runs[0][1] != runs[0][2] != contents


def test_an_early_close_goes_to_the_next_epoch(
    stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path
) -> None:
    """A reader that closes the FIFO early finds the next epoch from its start, whatever it has left behind."""
    data = os.urandom(5 << 20)
    stores("memory://bucket").write("train/a", data)
    begin()
    for epoch in range(4):
        with open_epoch(tmp_path / "train", epoch) as file:
            assert file.read(10) == data[:10]
    assert read_epoch(tmp_path / "train", 4) == data


def test_recordio(stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path) -> None:
    """Each object is one record, padded to four bytes, also an empty one and one that holds the magic number."""
    store = stores("memory://bucket")
    contents = [b"", b"a", b"ab", b"abc", b"hello", b"\x0a\x23\xd7\xce" * 3, os.urandom(20 << 20)]
    for number, content in enumerate(contents):
        store.write(f"train/{number}", content)
    begin(record_wrapper="RecordIO")
    data = read_epoch(tmp_path / "train")
    assert len(data) % 4 == 0
    assert bytes.fromhex("0a23d7ce0500000068656c6c6f000000") in data
    assert records(data) == contents


def test_gzip_is_inflated(stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path) -> None:
    """Each object is inflated on its own, also of several members, as it is or as one record."""
    store = stores("memory://bucket")
    contents = [b"a" * 1000, b"", os.urandom(3 << 20), b"b" * (20 << 20)]
    for number, content in enumerate(contents):
        half = len(content) // 2
        store.write(f"train/{number}", gzip.compress(content[:half]) + gzip.compress(content[half:]))
    channel = begin(compression="Gzip")
    assert read_epoch(tmp_path / "train") == b"".join(contents)
    channel.close()
    begin(compression="Gzip", record_wrapper="RecordIO")
    assert records(read_epoch(tmp_path / "train")) == contents


def test_what_is_no_gzip_fails(stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path) -> None:
    """An object that cannot be inflated fails the channel by its name; its reader does not see an end of the epoch."""
    stores("memory://bucket").write("train/a", b"not gzip")
    channel = begin(compression="Gzip")
    with open_epoch(tmp_path / "train") as file:
        with pytest.raises(CorruptShardError, match="train/a"):
            check_until_it_raises(channel)
        os.set_blocking(file.fileno(), False)
        assert file.read() is None  # nothing yet, which is not the end


def check_until_it_raises(channel: PipeChannel) -> None:
    deadline_s = time.monotonic() + WAIT_S_MAX
    while time.monotonic() < deadline_s:
        channel.check()
        time.sleep(0.002)


def test_a_missing_object_fails(stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path) -> None:
    """An object that a manifest names and that does not exist fails the channel with the object's name."""
    stores("memory://bucket").write("list.json", b'[{"prefix": "memory://bucket/"}, "none"]')
    channel = begin(url="memory://bucket/list.json", data_type="ManifestFile")
    with open_epoch(tmp_path / "train"), pytest.raises(ObjectMissingError, match="none"):
        check_until_it_raises(channel)


def test_an_empty_prefix_fails_at_once(begin: Callable[..., PipeChannel]) -> None:
    """A channel without an object is refused before a FIFO is there."""
    with pytest.raises(ObjectMissingError, match="'train' has no object"):
        begin()


def test_folder_markers_are_no_objects(stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path) -> None:
    """The empty objects that consoles make for folders are not records."""
    store = stores("memory://bucket")
    store.write("train/", b"")
    store.write("train/a", b"x")
    begin(record_wrapper="RecordIO")
    assert records(read_epoch(tmp_path / "train")) == [b"x"]


# ── manifests ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_manifest(stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path) -> None:
    """The objects come in the order of the manifest, whose prefix and names are joined as they are."""
    contents = fill(stores)
    rows = [{"prefix": "memory://bucket/train/0"}, "03", "01", "03"]
    stores("memory://bucket").write("list.json", json.dumps(rows).encode())
    begin(url="memory://bucket/list.json", data_type="ManifestFile")
    assert read_epoch(tmp_path / "train") == contents[3] + contents[1] + contents[3]


def test_a_long_manifest_begins_at_once(stores: Stores, begin: Callable[..., PipeChannel]) -> None:
    """A channel begins before all lines of its manifest are read; a wrong line fails it when the pipe comes to it."""
    stores("memory://bucket").write("small", b"-")
    lines = [json.dumps({"url": "memory://bucket/small"})] * 3 + ["{"]
    stores("memory://bucket").write("list.jsonl", "\n".join(lines).encode())
    channel = begin(url="memory://bucket/list.jsonl", data_type="ManifestFile")
    with pytest.raises(DataError, match="line 4 of the manifest is not JSON"):
        check_until_it_raises(channel)


def test_a_manifest_of_two_buckets(stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path) -> None:
    """A bucket is opened when the first of its objects is met, and each object comes from its own."""
    urls = [f"memory://{bucket}/{name}" for bucket in ("one", "two") for name in ("a", "b")]
    for url in urls:
        stores(url[:12]).write(url[13:], url.encode())
    order = [urls[index] for index in (0, 3, 1, 2)]
    stores("memory://one").write("list.jsonl", "\n".join(json.dumps({"url": url}) for url in order).encode())
    begin(url="memory://one/list.jsonl", data_type="ManifestFile")
    assert read_epoch(tmp_path / "train") == "".join(order).encode()


@pytest.mark.parametrize("url", ["file:///etc/hostname", "/etc/hostname", "http://127.0.0.1:1/x"])
@pytest.mark.parametrize("data_type", ["ManifestFile", "AugmentedManifestFile"])
def test_a_manifest_does_not_read_the_host(
    stores: Stores, begin: Callable[..., PipeChannel], data_type: str, url: str
) -> None:
    """A manifest in a store that names a file of this machine, or another host, is refused before the channel begins."""
    row = {"image-ref": url.replace("/etc/", "file:///etc/") if url[0] == "/" else url}
    stores("memory://bucket").write("list.jsonl", json.dumps(row).encode())
    names = ("image-ref",) if data_type == "AugmentedManifestFile" else ()
    with pytest.raises(DataError, match="may name only what begins with memory://"):
        begin(url="memory://bucket/list.jsonl", data_type=data_type, attribute_names=names)


def test_an_augmented_manifest(stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path) -> None:
    """Attributes come in the chosen order: the objects of references, text as it is, other values as JSON."""
    contents = fill(stores, 3)
    stores("memory://other").write("x", b"elsewhere")
    urls = [*(f"memory://bucket/train/{number:03d}" for number in range(3)), "memory://other/x"]
    rows = [
        {"label": value, "unused": 1, "image-ref": url}
        for value, url in zip([1, "cat", {"a": [1, 2]}, None], urls, strict=True)
    ]
    text = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    stores("memory://bucket").write("lines.manifest", text.encode())
    fields = {"url": "memory://bucket/lines.manifest", "data_type": "AugmentedManifestFile"}
    expected = [
        contents[0], b"1", b"1", contents[1], b"cat", b"cat", contents[2], b'{"a": [1, 2]}', b'{"a": [1, 2]}',
        b"elsewhere", b"null", b"null",
    ]  # fmt: skip
    channel = begin(**fields, attribute_names=("image-ref", "label", "label"), record_wrapper="RecordIO")
    assert records(read_epoch(tmp_path / "train")) == expected
    channel.close()
    channel = begin(**fields, attribute_names=("image-ref", "label", "label"))
    assert read_epoch(tmp_path / "train") == b"".join(expected)
    channel.close()
    begin(**fields, attribute_names=("label",), record_wrapper="RecordIO")
    assert records(read_epoch(tmp_path / "train")) == [b"1", b"cat", b'{"a": [1, 2]}', b"null"]


def test_lines_of_an_augmented_manifest_stay_together(
    stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path
) -> None:
    """Shuffling moves whole lines: each object is followed by its own label, in every epoch."""
    contents = fill(stores, 20)
    rows = [{"r-ref": f"memory://bucket/train/{number:03d}", "label": number} for number in range(20)]
    stores("memory://bucket").write("m", "\n".join(map(json.dumps, rows)).encode())
    begin(
        url="memory://bucket/m", data_type="AugmentedManifestFile", attribute_names=("label", "r-ref"), shuffle_seed=0,
        record_wrapper="RecordIO",
    )  # fmt: skip
    orders = []
    for epoch in range(2):
        found = records(read_epoch(tmp_path / "train", epoch))
        orders.append([int(label) for label in found[::2]])
        assert found[1::2] == [contents[number] for number in orders[-1]]
        assert sorted(orders[-1]) == list(range(20))
    assert orders[0] != orders[1]


# ── several pipes and hosts ─────────────────────────────────────────────────────────────────────────────────────────


def read_all(paths: list[Path], epoch: int) -> list[list[bytes]]:
    """Read one epoch of several pipes at the same time."""
    found: list[list[bytes]] = [[] for _ in paths]

    def read(number: int) -> None:
        found[number] = records(read_epoch(paths[number], epoch))

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(paths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S_MAX)
    return found


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("split", [0, 2])
def test_each_epoch_has_the_objects_of_its_beginning(
    stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path, seed: int | None, split: int
) -> None:
    """What was replaced, added or deleted before an epoch is in it as it is now, in all pipes that share the data."""
    store = stores("memory://bucket")
    fill(stores, 4)
    channel = begin(split=split, shuffle_seed=seed, record_wrapper="RecordIO")
    paths = [tmp_path / f"train-{number}" for number in range(split)] or [tmp_path / "train"]
    for epoch in range(4):
        found = [record for each in read_all(paths, epoch) for record in each]
        assert sorted(found) == sorted(bytes(store.read(info.key).data) for info in store.list("train/"))
        store.write("train/000", b"replaced %d" % epoch)
        store.write(f"train/new-{epoch}", b"added %d" % epoch)
        store.delete(f"train/00{3 - epoch}")
        channel.check()


def test_an_epoch_of_objects_that_have_not_changed_is_read_once(
    stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path
) -> None:
    """If the listing at the beginning of an epoch finds no change, what was read ahead is used."""
    fill(stores, 3)
    store = stores("memory://bucket")
    counted: list[str] = []
    submit = store.submit

    def counting(operation: Any, sink: Any) -> Any:
        counted.append(type(operation).__name__)
        return submit(operation, sink)

    store.submit = counting  # type: ignore[method-assign]
    begin(shuffle_seed=1)
    for epoch in range(3):
        read_epoch(tmp_path / "train", epoch)
    wait_until(lambda: counted.count("Get") == 12)
    assert counted.count("ListPage") == 3


@pytest.mark.parametrize("seed", [None, 5])
def test_split(stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path, seed: int | None) -> None:
    """The parts of a split together have each object once, in every epoch."""
    contents = fill(stores, 20)
    begin(split=3, shuffle_seed=seed, record_wrapper="RecordIO")
    for epoch in range(2):
        found = read_all([tmp_path / f"train-{number}" for number in range(3)], epoch)
        assert sorted(chain.from_iterable(found)) == sorted(contents)
        assert max(map(len, found)) - min(map(len, found)) <= 1


def test_seeds_of_copies_differ_over_all_hosts() -> None:
    """Copies have seeds of their own on all hosts; hosts that share objects out agree on the order."""
    channel = InputChannel(name="t", url="s3://b/", mode="Pipe", copies=2, shuffle_seed=10)
    seeds = [order.seed for rank in range(3) for order in pipe_orders(channel, host_rank=rank, hosts_count=3)]
    assert seeds == [10, 11, 12, 13, 14, 15]
    channel = InputChannel(
        name="t", url="s3://b/", mode="Pipe", copies=2, shuffle_seed=10, distribution="ShardedByS3Key"
    )
    seeds = [order.seed for rank in range(2) for order in pipe_orders(channel, host_rank=rank, hosts_count=2)]
    assert seeds == [10, 11, 10, 11]


# ── how pipes end ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("state", ["nobody came", "blocked", "early", "between"])
def test_closing_in_every_state(
    stores: Stores,
    begin: Callable[..., PipeChannel],
    tmp_path: Path,
    nothing_left: Callable[[], AbstractContextManager[None]],
    state: str,
) -> None:
    """A channel ends at once and leaves nothing, whether nobody came, the reader is slow, or it has left."""
    stores("memory://bucket").write("train/a", os.urandom(30 << 20))
    begin().close()  # the threads of the stores are there now
    with nothing_left():
        channel = begin()
        file = None if state == "nobody came" else open_epoch(tmp_path / "train")
        if file is not None and state != "between":
            file.read(1)
        if file is not None and state == "early":
            file.close()
        if file is not None and state == "between":
            file.read()
        started_s = time.monotonic()
        channel.close()
        channel.close()
        assert time.monotonic() - started_s < 10
        if file is not None:
            file.close()
    assert list(tmp_path.iterdir()) == []


def test_a_fifo_of_a_killed_run_is_replaced(stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path) -> None:
    """A FIFO that is there already does not disturb; a file of that name is an error and stays."""
    contents = fill(stores)
    os.mkfifo(tmp_path / "train_0")
    channel = begin()
    assert read_epoch(tmp_path / "train") == b"".join(contents)
    channel.close()
    (tmp_path / "train_0").write_text("mine")
    with pytest.raises(FileExistsError):
        begin()
    assert (tmp_path / "train_0").read_text() == "mine"


def test_a_program_that_removes_its_input(stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path) -> None:
    """A FIFO that was removed or replaced does not keep the channel from ending."""
    fill(stores)
    channel = begin()
    (tmp_path / "train_0").unlink()
    other = begin()
    started_s = time.monotonic()
    channel.close()
    assert time.monotonic() - started_s < 10
    other.close()


def test_records_have_a_bound() -> None:
    """An object that one record cannot hold is refused by its name, before a byte of it is written."""
    records = InputChannel(name="train", url="s3://b/", mode="Pipe", record_wrapper="RecordIO")
    with pytest.raises(ConfigError, match=r"s3://b/x has more than 536870911 bytes"):
        next(Content(records).wrap([b""], 1 << 29, "s3://b/x"))
    assert record_head((1 << 29) - 1, "") == bytes.fromhex("0a23d7ceffffff1f")


def test_the_next_epoch_is_read_ahead(stores: Stores, begin: Callable[..., PipeChannel], tmp_path: Path) -> None:
    """When all of an epoch has been requested, the next one has begun, before anybody asks for it."""
    fill(stores, 3)
    store = stores("memory://bucket")
    counted: list[str] = []
    submit = store.submit

    def counting(operation: Any, sink: Any) -> Any:
        if isinstance(operation, Get):
            counted.append(operation.key)
        return submit(operation, sink)

    store.submit = counting  # type: ignore[method-assign]
    begin()
    with open_epoch(tmp_path / "train") as file:
        file.read()
        wait_until(lambda: len(counted) == 6)


def test_order_without_a_seed_needs_no_count() -> None:
    """Without a seed, the first entries are known before the listing has ended."""

    def count() -> int:
        raise AssertionError("the listing must not be waited for")

    numbers = EpochOrder(part=1, parts_count=3).numbers(count, epoch=0)
    assert [next(numbers) for _ in range(3)] == [1, 4, 7]
