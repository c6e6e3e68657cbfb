"""Building an index: what is read, what is kept, and what fails."""

from __future__ import annotations

import io
import os
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from indexing import Shard
from loading import write_counted
from penstock.errors import ConfigError, PenstockError, StoreError
from penstock.formats import RecordIOWriter, TarParser, TFRecordWriter, parser_of
from penstock.index import IndexPlace, ShardLike, ShardRow, beside, build, in_directory, lookup
from penstock.store.faulty import Faulty
from penstock.store.local import LocalStore
from penstock.store.memory import MemoryStore

Listed = Callable[..., list[ShardLike]]
Tar = Callable[..., bytes]


class Heard:
    """A listener that records its calls."""

    def __init__(self) -> None:
        self.plans: list[tuple[int, int]] = []
        self.read_bytes = 0
        self.how: dict[str, str] = {}
        self.failures: dict[str, PenstockError] = {}

    def planned(self, shards_count: int, size_bytes: int) -> None:
        self.plans.append((shards_count, size_bytes))

    def progressed(self, size_bytes: int) -> None:
        self.read_bytes += size_bytes

    def indexed(self, row: ShardRow, how: str) -> None:
        self.how[row.key] = how

    def failed(self, url: str, error: PenstockError) -> None:
        self.failures[url.rpartition("/")[2]] = error


def fill(store: MemoryStore | LocalStore, tar: Tar, count: int = 4) -> None:
    for number in range(count):
        store.write(f"{number}.tar", tar(5 + number, seed=number))


def test_a_data_set_is_indexed_once(memory: MemoryStore, listed: Listed, tar: Tar, tmp_path: Path) -> None:
    """The first build reads every byte once, the second none; both give the same rows in any place."""
    fill(memory, tar)
    shards = listed(memory)
    for place in (beside(shards), in_directory(shards, tmp_path)):
        first, second = Heard(), Heard()
        built = build(shards, place, listener=first)
        assert (built.failed, built.dataset.samples_count, len(built.dataset)) == ((), 5 + 6 + 7 + 8, 4)
        assert set(first.how.values()) == {"read"}
        assert first.plans == [(4, first.read_bytes)]
        again = build(listed(memory, ""), place, listener=second)
        assert again.dataset.rows == built.dataset.rows
        assert (set(second.how.values()), second.read_bytes, second.plans) == ({"known"}, 0, [(0, 0)])
        found = lookup(shards, index_dir=tmp_path)
        assert found.is_complete
        assert found.samples_count == 26
        for row, index in zip(found.rows, found.place.load_shards(filter(None, found.rows)), strict=True):
            data = bytes(memory.read(index.row.key).data)
            parser = TarParser("x")
            assert index.row == row
            assert index.keys == [sample.key for sample in parser.feed(data) + parser.finish()]


def test_only_what_changed_is_read_again(memory: MemoryStore, listed: Listed, tar: Tar) -> None:
    """Replaced and new shards are indexed and the others kept; before that, the lookup has no rows for them."""
    fill(memory, tar)
    place = beside(listed(memory))
    build(listed(memory), place)
    memory.write("1.tar", tar(50, seed=9))
    memory.write("9.tar", tar(2, seed=2))
    found = lookup(listed(memory))
    assert [row is None for row in found.rows] == [False, True, False, False, True]
    heard = Heard()
    build(listed(memory), place, listener=heard)
    assert heard.how == {"0.tar": "known", "1.tar": "read", "2.tar": "known", "3.tar": "known", "9.tar": "read"}
    assert lookup(listed(memory)).samples_count == 5 + 50 + 7 + 8 + 2


def test_a_pattern_shares_the_folders_index(memory: MemoryStore, listed: Listed, tar: Tar) -> None:
    """Indexing some shards and then others keeps both; each result has only its own shards."""
    fill(memory, tar)
    shards = listed(memory)
    place = beside(shards)
    assert list(build(shards[:2], place).dataset.rows) == ["0.tar", "1.tar"]
    assert list(build(shards[2:], place).dataset.rows) == ["2.tar", "3.tar"]
    assert list(place.load().rows) == ["0.tar", "1.tar", "2.tar", "3.tar"]


def test_a_killed_build_goes_on(memory: MemoryStore, listed: Listed, tar: Tar) -> None:
    """Finished shards are known from their own files if the data set's index was never written."""
    fill(memory, tar)
    place = beside(listed(memory))
    build(listed(memory)[:3], place)
    memory.delete(".penstock/dataset.index")
    heard = Heard()
    build(listed(memory), place, listener=heard)
    assert heard.how == {"0.tar": "known", "1.tar": "known", "2.tar": "known", "3.tar": "read"}
    assert len(place.load()) == 4


def test_again_reads_everything(memory: MemoryStore, listed: Listed, tar: Tar) -> None:
    """``again`` ignores what is known."""
    fill(memory, tar)
    place = beside(listed(memory))
    build(listed(memory), place)
    heard = Heard()
    build(listed(memory), place, again=True, listener=heard)
    assert set(heard.how.values()) == {"read"}


def test_an_interrupted_build_keeps_what_is_finished(memory: MemoryStore, listed: Listed, tar: Tar) -> None:
    """Ctrl-C is raised, and the shards before it are in the index."""
    fill(memory, tar)
    place = beside(listed(memory))

    class Interrupting(Heard):
        def indexed(self, row: ShardRow, how: str) -> None:
            super().indexed(row, how)
            if len(self.how) == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(listed(memory), place, listener=Interrupting())
    assert list(place.load().rows) == ["0.tar", "1.tar"]


def test_a_shard_that_fails_does_not_stop_the_others(memory: MemoryStore, listed: Listed, tar: Tar) -> None:
    """Corrupt, cut off, unknown and missing shards are named with their errors; the others are indexed."""
    fill(memory, tar, 6)
    damaged = bytearray(tar(9))
    damaged[600:700] = b"\xff" * 100
    damaged[1024:3000] = b"\xff" * 1976
    memory.write("1.tar", damaged)
    memory.write("2.tar", tar(9)[:2000])
    memory.write("3.tar", b"<html>" * 100)
    shards = listed(memory)
    memory.delete("4.tar")
    heard = Heard()
    built = build(shards, beside(shards), listener=heard)
    assert list(built.dataset.rows) == ["0.tar", "5.tar"]
    assert sorted(heard.failures) == ["1.tar", "2.tar", "3.tar", "4.tar"]
    assert len(built.failed) == 4
    assert "HTML" in str(heard.failures["3.tar"])


def test_good_samples_of_corrupt_shards(memory: MemoryStore, listed: Listed) -> None:
    """With ``skip_sample``, good samples are indexed and the others counted; a job that skips them reads the same."""
    out = io.BytesIO()
    writer = TFRecordWriter(out.write)
    spans = [writer.add({"record": bytes([number]) * 50}) for number in range(10)]
    writer.finish()
    damaged = bytearray(out.getvalue())
    damaged[spans[4].start + 20] ^= 1
    memory.write("0.tfrecord", damaged)
    shards = listed(memory)
    place = beside(shards)
    assert len(build(shards, place).failed) == 1
    built = build(shards, place, on_corrupt="skip_sample")
    assert (built.failed, built.skipped) == ((), ((memory.describe("0.tfrecord"), 1),))
    row = built.dataset.rows["0.tfrecord"]
    assert row.samples_count == 9
    offsets = place.load_shard(row).offsets
    assert offsets is not None
    start, end = offsets[[3, 6]].tolist()  # the fourth good one's neighbour is the corrupt one
    parser = parser_of("tfrecord-raw", shard="x", start_offset_bytes=start, on_corrupt="skip_sample")
    samples = parser.feed(bytes(damaged[start:end])) + parser.finish()
    assert [bytes(sample.fields["record"])[0] for sample in samples] == [3, 5, 6]


def test_a_format_that_was_said(memory: MemoryStore, listed: Listed) -> None:
    """A given format is not detected, but the first record still decides the content of records."""
    out = io.BytesIO()
    writer = TFRecordWriter(out.write)
    writer.add({"x": b"x"})
    writer.finish()
    memory.write("data", out.getvalue())

    class Said(Shard):
        format = "tfrecord-raw"

    shards = [Said(*shard) for shard in listed(memory)]  # type: ignore[misc]
    built = build(shards, beside(shards))
    assert [row.format for row in built.dataset.rows.values()] == ["tfrecord-example"]


def test_a_shard_that_changes_under_way_is_not_indexed(memory: MemoryStore, listed: Listed, tar: Tar) -> None:
    """Only the listed version is read."""
    fill(memory, tar)
    shards = listed(memory)
    memory.write("2.tar", tar(99))
    built = build(shards, beside(shards))
    assert [url.rpartition("/")[2] for url, _ in built.failed] == ["2.tar"]


def test_an_index_that_cannot_be_written_is_an_error(memory: MemoryStore, listed: Listed, tar: Tar) -> None:
    """A build fails if its index cannot be written."""
    fill(memory, tar, 2)
    refusing = Faulty(MemoryStore(name="other"), ratio=1.0, error=StoreError("read-only"))
    with pytest.raises(StoreError, match="read-only"):
        build(listed(memory), IndexPlace(refusing, "", base=memory.describe("")))


def test_empty_shards_and_many_pieces(memory: MemoryStore, listed: Listed, tar: Tar) -> None:
    """Shards without samples are indexed, and so is a shard in many parts; one without bytes fails, alone."""
    from penstock.config import FetchConfig

    memory.write("0.tar", b"")
    memory.write("1.tar", tar(0))
    memory.write("2.tar", tar(300))
    memory.fetch_config = FetchConfig(part_bytes=64 * 1024)
    built = build(listed(memory), beside(listed(memory)))
    assert [row.samples_count for row in built.dataset.rows.values()] == [0, 300]
    assert [(url, type(error).__name__) for url, error in built.failed] == [
        (memory.describe("0.tar"), "CorruptShardError")
    ]


def starts(data: bytes) -> list[int]:
    parser = TarParser("x")
    return [sample.offset_bytes for sample in parser.feed(data) + parser.finish()]


def zipped(count: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for number in range(count):
            archive.writestr(f"{number:03d}.txt", "x" * 5000)
            archive.writestr(f"{number:03d}.cls", str(number))
    return out.getvalue()


def test_footers_say_how_many(memory: MemoryStore, listed: Listed) -> None:
    """Only the end of zip and Parquet is read; damaged and replaced shards fail alone; names need not show the format."""
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"x": list(range(777))})
    out = io.BytesIO()
    parquet.write_table(table, out, row_group_size=100)
    memory.write("a.zip", zipped(30))
    memory.write("b.parquet", out.getvalue())
    memory.write("c.zip", zipped(5)[:-40])
    memory.write("d.zip", zipped(6))
    memory.write("e-without-a-suffix", zipped(7))
    shards = listed(memory)
    memory.write("d.zip", zipped(8))
    heard = Heard()
    built = build(shards, beside(shards), listener=heard)
    assert {key: row.samples_count for key, row in built.dataset.rows.items()} == {
        "a.zip": 30, "b.parquet": 777, "e-without-a-suffix": 7,
    }  # fmt: skip
    assert set(heard.how.values()) == {"footer"}
    assert {key: type(error).__name__ for key, error in heard.failures.items()} == {
        "c.zip": "CorruptShardError", "d.zip": "ObjectChangedError",
    }  # fmt: skip
    assert heard.read_bytes == shards[-1].size_bytes
    found = lookup(shards)
    assert [row is not None and row.has_offsets for row in found.rows] == [False] * 5


@pytest.mark.parametrize("with_end", [True, False])
def test_energons_index_saves_the_reading(memory: MemoryStore, listed: Listed, tar: Tar, with_end: bool) -> None:
    """Extents come from .tar.idx, with or without the last end, and the shard is not read."""
    fill(memory, tar, 2)
    for key in ("0.tar", "1.tar"):
        data = bytes(memory.read(key).data)
        offsets = starts(data) + ([len(data) - 1024] if with_end else [])
        memory.write(f"{key}.idx", struct.pack(f"<{len(offsets)}Q", *offsets))
    heard = Heard()
    place = beside(listed(memory))
    built = build(listed(memory), place, listener=heard)
    assert (heard.how, heard.read_bytes) == ({"0.tar": "idx", "1.tar": "idx"}, 0)
    assert [row.samples_count for row in built.dataset.rows.values()] == [5, 6]
    for index in place.load_shards(built.dataset.rows.values()):
        data = bytes(memory.read(index.row.key).data)
        assert index.crc32c is None
        assert index.offsets is not None
        for start, end in zip(index.offsets[:-1].tolist(), index.offsets[1:].tolist(), strict=True):
            parser = TarParser("x", start_offset_bytes=start)
            assert len(parser.feed(data[start:end]) + parser.finish()) == 1


def test_tfrecord2idx_and_im2rec_save_the_reading(memory: MemoryStore, listed: Listed) -> None:
    """Text indexes beside TFRecord and RecordIO shards give the same extents as reading."""
    source = random.Random(2)
    for writer_of, key in ((TFRecordWriter, "0.tfrecord"), (RecordIOWriter, "1.rec")):
        out = io.BytesIO()
        writer = writer_of(out.write)
        spans = [writer.add({"record": source.randbytes(source.randrange(1, 500))}) for _ in range(20)]
        writer.finish()
        memory.write(key, out.getvalue())
        if key == "0.tfrecord":
            text = "".join(f"{span.start} {span.length_bytes}\n" for span in spans)
        else:
            text = "".join(f"{number}\t{span.start}\n" for number, span in enumerate(spans))
        memory.write(key.partition(".")[0] + ".idx", text.encode())
    place = beside(listed(memory))
    by_idx, by_reading = Heard(), Heard()
    first = build(listed(memory), place, listener=by_idx)
    said = [index.offsets.tolist() for index in place.load_shards(first.dataset.rows.values())]  # type: ignore[union-attr]
    second = build(listed(memory), place, again=True, listener=by_reading)
    read = [index.offsets.tolist() for index in place.load_shards(second.dataset.rows.values())]  # type: ignore[union-attr]
    assert (set(by_idx.how.values()), set(by_reading.how.values())) == ({"idx"}, {"read"})
    assert said == read


def test_an_index_that_does_not_fit_is_passed_over(memory: MemoryStore, listed: Listed, tar: Tar) -> None:
    """If another tool's index does not fit, is damaged, or is ignored on request, the shard is read."""
    fill(memory, tar, 3)
    memory.write("0.tar.idx", struct.pack("<2Q", 0, 1 << 40))
    memory.write("1.tar.idx", struct.pack("<3Q", 0, 512, 1024))  # inside a member
    data = bytes(memory.read("2.tar").data)
    memory.write("2.idx", struct.pack("<7Q", *starts(data)))
    heard = Heard()
    build(listed(memory), beside(listed(memory)), listener=heard)
    assert heard.how == {"0.tar": "read", "1.tar": "read", "2.tar": "idx"}
    memory.delete([info.key for info in memory.list(".penstock/")])
    heard = Heard()
    build(listed(memory), beside(listed(memory)), foreign_indexes=False, listener=heard)
    assert set(heard.how.values()) == {"read"}


def test_an_index_older_than_its_shard_is_passed_over(tmp_path: Path, listed: Listed, tar: Tar) -> None:
    """A shard that is newer than its .idx is read."""
    import os

    store = LocalStore(tmp_path)
    fill(store, tar, 2)
    for key in ("0.tar", "1.tar"):
        data = (tmp_path / key).read_bytes()
        (tmp_path / f"{key}.idx").write_bytes(struct.pack(f"<{len(starts(data))}Q", *starts(data)))
    os.utime(tmp_path / "1.tar.idx", (1, 1))
    heard = Heard()
    build(listed(store), beside(listed(store)), listener=heard)
    assert heard.how == {"0.tar": "idx", "1.tar": "read"}


def test_local_files_are_tied_to_size_and_time(tmp_path: Path, listed: Listed, tar: Tar) -> None:
    """A rewritten file is indexed again, although its name and size are the same."""
    store = LocalStore(tmp_path / "data")
    store.write("0.tar", tar(5))
    place = in_directory(listed(store), tmp_path / "index")
    build(listed(store), place)
    assert lookup(listed(store), index_dir=tmp_path / "index").is_complete
    store.write("0.tar", tar(5))
    assert not lookup(listed(store), index_dir=tmp_path / "index").is_complete


def test_the_index_beside_wins_unless_it_has_holes(
    memory: MemoryStore, listed: Listed, tar: Tar, tmp_path: Path
) -> None:
    """The complete one of two places is used, or else the one with more shards."""
    fill(memory, tar)
    shards = listed(memory)
    build(shards[:1], beside(shards))
    build(shards[:2], in_directory(shards, tmp_path))
    assert lookup(shards, index_dir=tmp_path).place.url.startswith("file:")
    build(shards, beside(shards))
    assert lookup(shards, index_dir=tmp_path).place.url.startswith("memory:")


def test_nothing_is_left_running(
    memory: MemoryStore, listed: Listed, tar: Tar, nothing_left: Callable[..., object]
) -> None:
    """A build leaves no thread and no descriptor behind, even if a shard fails."""
    fill(memory, tar)
    memory.write("2.tar", b"garbage" * 99)
    shards = listed(memory)
    with nothing_left():  # type: ignore[attr-defined]
        build(shards, beside(shards))


def test_an_index_of_local_shards_outlives_links_and_permissions(tmp_path: Path) -> None:
    """What changes the status of a shard but not its bytes neither outdates its index nor ends an epoch; a rewrite does."""
    write_counted(tmp_path, (3, 3))
    pipeline = ps.shards(f"{tmp_path}/").batch(1)
    ps.build_index(pipeline, index_dir=tmp_path / "index")
    shards = sorted(tmp_path.glob("*.tar"))
    with ps.Loader(pipeline, index="require", index_dir=tmp_path / "index") as loader:
        batches = iter(loader)
        next(batches)
        for shard in shards:
            (tmp_path / f"{shard.name}.link").hardlink_to(shard)
            shard.chmod(0o600)
        assert sum(1 for _ in batches) == 5
    with ps.Loader(pipeline, index="require", index_dir=tmp_path / "index") as loader:
        assert sum(1 for _ in loader) == 6
    shards[0].write_bytes(shards[0].read_bytes())
    os.utime(shards[0], (1, 1))
    with (
        ps.Loader(pipeline, index="require", index_dir=tmp_path / "index") as loader,
        pytest.raises(ConfigError, match="1 of 2 shards"),
    ):
        next(iter(loader))
