"""Recording an index as a by-product, and comparing ranges with it."""

from __future__ import annotations

import io
import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c

from penstock.errors import ChecksumError, ConfigError, CorruptShardError, StoreError
from penstock.formats import TarParser
from penstock.index import IndexBuilder, IndexPlace, ShardIndex, ShardRecorder, Verifier, VersionedShard
from penstock.index import recorder as recorder_module
from penstock.store.faulty import Faulty
from penstock.store.local import LocalStore
from penstock.store.memory import MemoryStore


def found(data: bytes, key: str = "a.tar") -> VersionedShard:
    return VersionedShard(None, key, len(data), '"e"', '"e"')  # type: ignore[arg-type]


def record(data: bytes, cuts: list[int]) -> ShardIndex:
    """Return the index of a shard that arrives in chunks with these bounds."""
    recorder, parser = ShardRecorder(found(data), "tar"), TarParser("a.tar")
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        recorder.feed(data[start:end], parser.feed(data[start:end]))
    return recorder.finish(parser.finish())


def check(index: ShardIndex, data: bytes) -> None:
    """Each extent parses to its sample and has its checksum; together, extents tile the shard's samples."""
    assert index.offsets is not None
    assert index.crc32c is not None
    assert index.keys is not None
    assert index.offsets[0] == 0
    samples = TarParser("a.tar")
    whole = samples.feed(data) + samples.finish()
    assert len(whole) == len(index)
    for number, sample in enumerate(whole):
        start, end = index.offsets[number : number + 2].tolist()
        parser = TarParser("a.tar", start_offset_bytes=start)
        (alone,) = parser.feed(data[start:end]) + parser.finish()
        assert (alone.key, alone.fields) == (sample.key, sample.fields) == (index.keys[number], alone.fields)
        assert crc32c(data[start:end]) == index.crc32c[number]


@pytest.mark.parametrize("seed", range(8))
def test_extents_tile_the_shard_whatever_the_cuts(odd_tar: bytes, tar: Callable[..., bytes], seed: int) -> None:
    """Extents, checksums and keys do not depend on the bounds of chunks."""
    source = random.Random(seed)
    for data in (odd_tar, tar(60, seed=seed)):
        count = source.choice([0, 3, 50])
        check(record(data, sorted(source.sample(range(1, len(data)), count))), data)


def test_large_samples_and_small_tails(tar: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums of samples over many chunks are updated as chunks arrive; little of a chunk is kept."""
    monkeypatch.setattr(recorder_module, "TAIL_BYTES", 4096)
    data = tar(20, size_max=100_000)
    check(record(data, list(range(1000, len(data), 1000))), data)


def test_what_follows_a_sample_too_long_costs_the_checksums() -> None:
    """If a sample's end is known only long after it, there are no checksums, but the offsets are right."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as file:
        for name, size in (("a.jpg", 9), ("__meta__/big", 300_000), ("b.jpg", 9)):
            member = tarfile.TarInfo(name)
            member.size = size
            file.addfile(member, io.BytesIO(bytes(size)))
    data = out.getvalue()
    index = record(data, list(range(10_000, len(data), 10_000)))
    assert index.offsets is not None
    assert len(index) == 2
    if index.crc32c is not None:
        check(index, data)


def test_a_shard_heard_of_in_part_is_refused(tar: Callable[..., bytes]) -> None:
    """``finish`` before the end of the shard makes no index."""
    data = tar(10)
    recorder, parser = ShardRecorder(found(data), "tar"), TarParser("a.tar")
    recorder.feed(data[:5000], parser.feed(data[:5000]))
    with pytest.raises(ConfigError, match=r"5000 of \d+ bytes of a.tar were recorded"):
        recorder.finish()


def test_an_empty_shard_has_no_samples(tar: Callable[..., bytes]) -> None:
    """An empty tar is a shard without samples; an object of no bytes is not a tar."""
    assert len(record(tar(0), [])) == 0
    with pytest.raises(CorruptShardError, match="0 bytes"):
        record(b"", [])


@pytest.mark.parametrize("piece_bytes", [1, 700, 10**9])
def test_a_range_is_held_against_its_checksums(tar: Callable[..., bytes], piece_bytes: int) -> None:
    """The bytes of any run of samples pass in any chunks; a wrong bit is an error that names the sample."""
    data = tar(12, size_max=900)
    index = record(data, [])
    assert index.offsets is not None
    start, end = index.offsets[[3, 7]].tolist()

    def feed(piece: bytes) -> None:
        verifier = Verifier(index, first_sample=3, url="s3://b/a.tar")
        for at in range(0, len(piece), piece_bytes):
            verifier.feed(piece[at : at + piece_bytes])

    feed(data[start:end])
    damaged = bytearray(data[start:end])
    damaged[index.offsets[5] - start + 600] ^= 1
    with pytest.raises(ChecksumError, match="sample 5 of the shard") as caught:
        feed(bytes(damaged))
    assert caught.value.span == tuple(index.offsets[[5, 6]].tolist())


def test_without_checksums_nothing_is_held_against_anything(tar: Callable[..., bytes]) -> None:
    """With another tool's index, which has no checksums, all ranges pass."""
    row = record(tar(0), []).row._replace(samples_count=1, size_bytes=9)
    Verifier(ShardIndex(row, offsets=np.array([0, 9], np.int64)), first_sample=0, url="x").feed(b"anything.")


def test_the_builder_writes_shards_and_then_the_data_set(tar: Callable[..., bytes], tmp_path: Path) -> None:
    """Added rows are read back; rows that another process wrote in the meantime are kept."""
    place = IndexPlace(LocalStore(tmp_path / "index"), "", base="file:///d/")
    first, second = tar(3), tar(5, seed=1)
    with IndexBuilder(place) as builder, IndexBuilder(place) as other:
        for each, data, key in ((builder, first, "1.tar"), (other, second, "2.tar")):
            assert not each.has(found(data, key))
            recorder, parser = ShardRecorder(found(data, key), "tar"), TarParser(key)
            recorder.feed(data, parser.feed(data))
            each.add(recorder.finish(parser.finish()))
            assert each.has(found(data, key))
    loaded = place.load()
    assert sorted(loaded.rows) == ["1.tar", "2.tar"]
    assert [len(index) for index in place.load_shards(loaded.rows[key] for key in ("2.tar", "1.tar"))] == [5, 3]
    assert oct((tmp_path / "index").stat().st_mode & 0o777) == "0o700"


def test_a_builder_without_news_writes_nothing(tmp_path: Path) -> None:
    """A builder without rows leaves no folder behind."""
    with IndexBuilder(IndexPlace(LocalStore(tmp_path / "index"), "", base="file:///d/")):
        pass
    assert not (tmp_path / "index").exists()


def test_a_failed_write_is_said(tar: Callable[..., bytes]) -> None:
    """If the store refuses the index, the build raises its error."""
    data = tar(2)
    faulty = Faulty(MemoryStore(name="refuses"), fail_at_call=2, error=StoreError("disk full"))
    builder = IndexBuilder(IndexPlace(faulty, "", base="file:///d/"))
    recorder, parser = ShardRecorder(found(data), "tar"), TarParser("a")
    recorder.feed(data, parser.feed(data))
    builder.add(recorder.finish(parser.finish()))
    with pytest.raises(StoreError, match="disk full"):
        builder.close()
    builder.close()
