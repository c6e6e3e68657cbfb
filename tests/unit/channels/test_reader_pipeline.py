"""``PipeReader.pipeline()`` on real FIFOs: formats, epochs, resuming, closing."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.channels import PipeReader
from penstock.channels.reader import PIPE_FORMATS, PipeEpoch
from penstock.errors import ClosedError, ConfigError, CorruptShardError
from penstock.store.memory import MemoryStore
from piped import tar, tfrecords

Begin = Callable[..., Path]
ONE_RANK: dict[str, Any] = {"rank": 0, "world_size": 1}


def write_records(store: MemoryStore, count: int) -> None:
    for number in range(count):
        store.write(f"{number:02d}", b"%02d" % number)


def records_of(batch: dict[str, Any]) -> list[bytes]:
    return [bytes(value) for value in batch["record"]]


def open_descriptors() -> set[str]:
    links = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.add(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return links


def test_tar(store: MemoryStore, begin: Begin) -> None:
    """The members of a tar sample are decoded as those of a shard are, and its name is the sample's key."""
    for number in range(3):
        store.write(f"{number}", tar([f"{number}{k}" for k in range(5)]))
    reader = PipeReader("train", format="tar", base=begin())
    pipeline = reader.pipeline().decode(ps.Text("cls"), ps.Bytes("jpg")).batch(4)
    assert repr(pipeline).startswith("PipeReader('train', format='tar').pipeline().decode(")
    names = [f"{number}{k}" for number in range(3) for k in range(5)]
    with ps.Loader(pipeline, **ONE_RANK) as loader:
        for _ in range(2):
            batches = list(loader)
            assert [key for batch in batches for key in batch["__key__"]] == names
            assert [text for batch in batches for text in batch["cls"]] == [f"{name} cls" for name in names]
            assert batches[0]["__shard__"] == ["pipe:train"] * 4


def test_tfrecord(store: MemoryStore, begin: Begin) -> None:
    """TFRecords of several objects come as one sequence, in the field ``record``."""
    for number in range(3):
        store.write(f"{number}", tfrecords([b"%d-%d" % (number, k) for k in range(100)]))
    reader = PipeReader("train", format="tfrecord", base=begin())
    with ps.Loader(reader.pipeline().batch(32), **ONE_RANK) as loader:
        found = [record for batch in loader for record in records_of(batch)]
    assert found == [b"%d-%d" % (number, k) for number in range(3) for k in range(100)]


def test_lines(store: MemoryStore, begin: Begin) -> None:
    """Lines come in the field ``line``, and their keys are their numbers, also across the blocks of a read."""
    lines = [b"%d" % number for number in range(20_000)]
    store.write("0", b"\n".join(lines))
    reader = PipeReader("train", format="lines", base=begin())
    with ps.Loader(reader.pipeline().decode(ps.Text("line")).batch(1000), **ONE_RANK) as loader:
        batches = list(loader)
    assert [text for batch in batches for text in batch["line"]] == [line.decode() for line in lines]
    assert batches[9]["__key__"][:2] == ["000000009000", "000000009001"]


def test_resuming_inside_an_epoch(store: MemoryStore, begin: Begin) -> None:
    """A loader on the pipe of a new run continues after each batch, with shuffled objects and a window of samples."""
    write_records(store, 11)

    def loader() -> ps.Loader:
        reader = PipeReader("train", base=begin(shuffle_seed=3, record_wrapper="RecordIO"))
        return ps.Loader(reader.pipeline().shuffle(4, seed=1).batch(3), **ONE_RANK)

    states, batches = [], []
    with loader() as first:
        for _ in range(3):
            for batch in first:
                states.append(json.dumps(first.state_dict()))
                batches.append(records_of(batch))
    epochs = [[record for batch in batches[at : at + 4] for record in batch] for at in (0, 4, 8)]
    assert [sorted(epoch) for epoch in epochs] == [[b"%02d" % number for number in range(11)]] * 3
    assert len(set(map(tuple, epochs))) == 3
    for at, state in enumerate(states):
        with loader() as again:
            again.load_state_dict(json.loads(state))
            rest = []
            while again.epoch < 3:
                rest += [records_of(batch) for batch in again]
        assert rest == batches[at + 1 :]


def test_another_seed_is_refused(store: MemoryStore, begin: Begin) -> None:
    """A state of a channel with another seed is refused, since the order of its objects is another one."""
    write_records(store, 5)

    def loader(seed: int) -> ps.Loader:
        base = begin(shuffle_seed=seed, record_wrapper="RecordIO")
        (base / "input" / "config" / "penstock.json").write_text(json.dumps({"pipe_seeds": {"train": seed}}))
        return ps.Loader(PipeReader("train", base=base).pipeline().batch(2), **ONE_RANK)

    with loader(3) as first:
        next(iter(first))
        state = first.state_dict()
    with loader(3) as again:
        again.load_state_dict(state)
        assert sum(len(batch["record"]) for batch in again) == 3
    with loader(4) as other:
        other.load_state_dict(state)
        with pytest.raises(ConfigError, match="the data set changed"):
            next(iter(other))


def test_a_loop_and_a_loader_take_turns(store: MemoryStore, begin: Begin) -> None:
    """The reader's own loop goes on with the epoch after those of a loader, and a loader cannot go back."""
    write_records(store, 4)
    reader = PipeReader("train", base=begin(record_wrapper="RecordIO"))
    wanted = [b"00", b"01", b"02", b"03"]
    with ps.Loader(reader.pipeline().batch(4), **ONE_RANK) as loader:
        assert [records_of(batch) for batch in loader] == [wanted]
        assert list(reader) == wanted
        with pytest.raises(ConfigError, match="epoch 1 is over"):
            next(iter(loader))
    assert reader.epoch == 2


def test_leaving_an_epoch_early(store: MemoryStore, begin: Begin) -> None:
    """A loader that takes a part of each epoch goes on with the next one from its start, and leaves no descriptor open."""
    write_records(store, 50)
    base = begin(record_wrapper="RecordIO")
    before = open_descriptors()
    reader = PipeReader("train", base=base)
    with ps.Loader(reader.pipeline().take(3).batch(3), **ONE_RANK) as loader:
        for _ in range(5):
            assert [records_of(batch) for batch in loader] == [[b"00", b"01", b"02"]]
    added = {link for link in open_descriptors() - before if "train_" in link and "(deleted)" in link}
    assert added == set()


def test_closing_while_the_pipe_is_silent(begin: Begin) -> None:
    """A loader is closed at once although the writer of its pipe gives nothing; no descriptor stays open."""
    base = begin(mode="File")
    config = base / "input" / "config" / "inputdataconfig.json"
    config.write_text(json.dumps({"train": {"TrainingInputMode": "Pipe"}}))
    path = base / "input" / "data" / "train_0"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    os.write(writer, b"first\nsecond\nthird")
    loader = ps.Loader(PipeReader("train", format="lines", base=base).pipeline().batch(2), **ONE_RANK)
    assert [bytes(line) for line in next(iter(loader))["line"]] == [b"first", b"second"]
    closing = threading.Thread(target=loader.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    os.close(writer)
    assert str(path) not in open_descriptors()


@pytest.mark.parametrize("delay_s", [0.0, 0.0002, 0.001])
def test_closing_at_any_moment(tmp_path: Path, delay_s: float) -> None:
    """Closing an epoch while another thread reads it ends the read and closes its descriptors, whenever it happens."""
    path = tmp_path / "train_0"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)

    failures: list[Exception] = []

    def read_all(epoch: PipeEpoch) -> None:
        try:
            while epoch.read() is not None:
                os.write(writer, b"again\n")
        except ClosedError as error:
            failures.append(error)

    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        epoch = PipeEpoch(os.open(path, os.O_RDONLY), PIPE_FORMATS["lines"], name="train")
        os.write(writer, b"line\n")
        thread = threading.Thread(target=read_all, args=(epoch,))
        thread.start()
        thread.join(delay_s)
        epoch.close()
        epoch.close()
        thread.join(30)
        assert not thread.is_alive()
    assert len(failures) == 20
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(writer)


def test_a_pipe_of_another_format(store: MemoryStore, begin: Begin) -> None:
    """A pipe that is not of its format is an error that names the pipe."""
    store.write("0", b"not a record of anything")
    with (
        ps.Loader(PipeReader("train", base=begin()).pipeline().batch(1), **ONE_RANK) as loader,
        pytest.raises(CorruptShardError, match="train"),
    ):
        next(iter(loader))


@pytest.mark.parametrize("name", ["recordio", "tfrecord", "tar", "lines"])
def test_empty_epochs(store: MemoryStore, begin: Begin, name: Any) -> None:
    """A pipe without an object gives epochs without a batch, in each format."""
    store.write("0", b"x")
    reader = PipeReader("train", format=name, copy=1, base=begin(split=2))
    with ps.Loader(reader.pipeline().batch(1), **ONE_RANK) as loader:
        assert [list(loader) for _ in range(2)] == [[], []]


@pytest.mark.torch
def test_a_data_loader(store: MemoryStore, begin: Begin) -> None:
    """A PyTorch DataLoader without workers iterates over the pipe; with workers it is refused, as they would share it."""
    torch_data = pytest.importorskip("torch.utils.data")
    write_records(store, 8)
    reader = PipeReader("train", base=begin(record_wrapper="RecordIO"))
    dataset = ps.torch.IterableDataset(reader.pipeline().batch(3), **ONE_RANK)
    batches = list(torch_data.DataLoader(dataset, batch_size=None))
    assert [record for batch in batches for record in records_of(batch)] == [b"%02d" % number for number in range(8)]
    with pytest.raises(ConfigError, match=r"pipe:train is read by one process.*num_workers=0"):
        list(torch_data.DataLoader(dataset, batch_size=None, num_workers=1))
