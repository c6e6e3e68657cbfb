"""``PipeReader`` on real FIFOs: formats, epochs, resuming."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.channels import PipeReader
from penstock.errors import ConfigError, CorruptShardError, DeadlineError
from penstock.formats.tar import ArchiveSplitter
from penstock.store.memory import MemoryStore
from piped import tar, tfrecords


def test_recordio(store: MemoryStore, begin: Callable[..., Path]) -> None:
    """Records of RecordIO come as they were stored, with the magic number inside them, too."""
    values = [b"", b"abc", b"\x0a\x23\xd7\xce" * 5, os.urandom(3 << 20)]
    for number, value in enumerate(values):
        store.write(f"{number}", value)
    reader = PipeReader("train", base=begin(record_wrapper="RecordIO"))
    assert [list(reader) for _ in range(2)] == [values, values]


def test_tfrecord(store: MemoryStore, begin: Callable[..., Path]) -> None:
    """TFRecords of several shards come as one sequence."""
    for number in range(3):
        store.write(f"{number}", tfrecords([b"%d-%d" % (number, k) for k in range(100)]))
    reader = PipeReader("train", format="tfrecord", base=begin())
    assert list(reader) == [b"%d-%d" % (number, k) for number in range(3) for k in range(100)]


def test_tar(store: MemoryStore, begin: Callable[..., Path]) -> None:
    """Samples of several tar shards, one behind the other in the pipe, are all there."""
    for number in range(3):
        store.write(f"{number}", tar([f"{number}{k}" for k in range(5)]))
    found = list(PipeReader("train", format="tar", base=begin()))
    names = [f"{number}{k}" for number in range(3) for k in range(5)]
    assert [sample["__key__"] for sample in found] == names
    assert found[7] == {"__key__": "12", "jpg": b"12 jpg", "cls": b"12 cls"}


def test_lines(store: MemoryStore, begin: Callable[..., Path]) -> None:
    """Lines come without their breaks, also those across objects and reads, and a last one without a break."""
    lines = [b"%d" % number * (number % 50) for number in range(100_000)]
    data = b"\n".join(lines)
    store.write("0", data[:1_000_003])
    store.write("1", data[1_000_003:])
    assert list(PipeReader("train", format="lines", base=begin())) == lines


def test_leaving_an_epoch_early(store: MemoryStore, begin: Callable[..., Path]) -> None:
    """A loop that is left in the middle is followed by the next epoch from its start."""
    store.write("0", b"\n".join(b"%d" % number for number in range(1000)))
    reader = PipeReader("train", format="lines", base=begin())
    for epoch in range(3):
        assert reader.epoch == epoch
        assert next(iter(reader)) == b"0"
        reader.close()
    assert len(list(reader)) == 1000


def test_resuming_inside_an_epoch(store: MemoryStore, tmp_path: Path, begin: Callable[..., Path]) -> None:
    """A reader of a new run goes on where the state was taken, at every position, with shuffled epochs."""
    for number in range(20):
        store.write(f"{number:02d}", b"%02d" % number)
    base = begin(shuffle_seed=3, record_wrapper="RecordIO")
    reader = PipeReader("train", base=base)
    states, samples = [reader.state_dict()], []
    for _ in range(3):
        for sample in reader:
            samples.append(sample)
            states.append(reader.state_dict())
    for position in (0, 1, 19, 20, 21, 45, 59):
        again = PipeReader("train", base=begin(shuffle_seed=3, record_wrapper="RecordIO"))
        again.load_state_dict(states[position])
        rest = [sample for _ in range(3 - again.epoch) for sample in again]
        assert rest == samples[position:]


def test_a_state_of_an_epoch_that_is_over(store: MemoryStore, begin: Callable[..., Path]) -> None:
    """A pipe gives each epoch once, so a state before the reader's own epoch is refused."""
    store.write("0", b"x")
    reader = PipeReader("train", format="lines", base=begin())
    list(reader)
    with pytest.raises(ConfigError, match="epoch 0 is over"):
        reader.load_state_dict({"epoch": 0, "samples": 0})
    with pytest.raises(ConfigError, match="epoch=None"):
        reader.load_state_dict({})


def test_copies_by_rank(store: MemoryStore, begin: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel with several pipes gives each rank its own, by number or by ``LOCAL_RANK``."""
    for number in range(4):
        store.write(f"{number}", b"%d" % number)
    base = begin(split=2, record_wrapper="RecordIO")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert list(PipeReader("train", base=base)) == [b"1", b"3"]
    assert list(PipeReader("train", copy=0, base=base)) == [b"0", b"2"]


@pytest.mark.parametrize("name", ["recordio", "tfrecord", "tar", "lines"])
def test_empty_epochs(store: MemoryStore, begin: Callable[..., Path], name: Any) -> None:
    """A pipe without an object gives epochs without a sample, in each format."""
    store.write("0", b"x")
    reader = PipeReader("train", format=name, copy=1, base=begin(split=2))
    assert [list(reader) for _ in range(2)] == [[], []]


@pytest.mark.parametrize("cut_bytes", [1, 511, 512, 513, 10_000, 1 << 20])
def test_joined_archives(cut_bytes: int) -> None:
    """Archives one behind the other are told apart wherever the stream is cut."""
    archives = [tar(["a", "b"]), tar([]), tar(["c"])]
    stream = b"".join(archives)
    splitter, found = ArchiveSplitter(), [b""]
    for at in range(0, len(stream), cut_bytes):
        for piece, is_end in splitter.feed(stream[at : at + cut_bytes]):
            found[-1] += bytes(piece)
            if is_end:
                found.append(b"")
    assert splitter.finish() == b""
    assert found == [archives[0] + archives[1], archives[2]]  # an archive without members is only zeros
    assert b"".join(found) == stream


def test_refusals(store: MemoryStore, begin: Callable[..., Path], tmp_path: Path) -> None:
    """A channel that is not there, is not a pipe, or does not come is an error that says so."""
    with pytest.raises(ConfigError, match="has no channels"):
        PipeReader("train", base=tmp_path)
    store.write("0", b"not a record of anything")
    base = begin()
    with pytest.raises(ConfigError, match=r"no channel 'val'.*the channels are train"):
        PipeReader("val", base=base)
    with pytest.raises(ConfigError, match="format='csv'"):
        PipeReader("train", format="csv", base=base)  # type: ignore[arg-type]
    with pytest.raises(CorruptShardError, match="train"):
        list(PipeReader("train", base=base))
    late = PipeReader("train", base=base, wait_s_max=0)
    late.load_state_dict({"epoch": 0, "samples": 0})
    (base / "input" / "data" / "train_0").unlink(missing_ok=True)
    with pytest.raises(DeadlineError, match="train_0 did not appear"):
        list(late)
    begin(mode="File")
    with pytest.raises(ConfigError, match="is in File mode"):
        PipeReader("train", base=base)


@pytest.mark.torch
def test_a_data_loader(store: MemoryStore, begin: Callable[..., Path]) -> None:
    """Each worker of a PyTorch DataLoader reads its own part of a split; together they have each sample once."""
    torch_data = pytest.importorskip("torch.utils.data")
    for number in range(40):
        store.write(f"{number:02d}", b"%02d" % number)
    base = begin(split=2, record_wrapper="RecordIO")

    class Samples(torch_data.IterableDataset):  # type: ignore[name-defined, misc]
        def __iter__(self) -> Iterator[Any]:
            return iter(PipeReader("train", copy=torch_data.get_worker_info().id, base=base))

    loader = torch_data.DataLoader(Samples(), batch_size=None, num_workers=2)
    assert sorted(loader) == [b"%02d" % number for number in range(40)]
