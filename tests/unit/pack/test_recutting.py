"""``penstock.pack.convert`` with a size: shards are recut by the sizes of their sources alone."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from penstock.errors import ConfigError, DataError
from penstock.formats import TarWriter, feed_in_pieces, parser_of
from penstock.pack import convert, pack, verify
from penstock.pack.converting import Conversion, ConvertOptions


def tar(first: int, sizes: list[int]) -> bytes:
    out = io.BytesIO()
    archive = TarWriter(out.write)
    for number, size in enumerate(sizes, first):
        archive.add({"__key__": f"k{number:04d}", "bin": bytes([number % 251]) * size})
    archive.finish()
    return out.getvalue()


def keys_of(path: Path) -> list[str]:
    parser = parser_of("tar", shard=str(path))
    found = [sample for piece in feed_in_pieces(parser, path.read_bytes()) for sample in piece]
    return [sample.key for sample in [*found, *parser.finish()]]


def tars(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.tar"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return 30 samples of 1 to 3 KB in three tars of about 20 KB."""
    root = tmp_path / "in"
    root.mkdir()
    for number in range(3):
        (root / f"{number}.tar").write_bytes(tar(10 * number, [500 + 80 * (n % 7) for n in range(10)]))
    return root


@given(st.lists(st.lists(st.integers(0, 3000), max_size=12), min_size=1, max_size=5), st.integers(6_000, 40_000))
@settings(max_examples=25, deadline=None)
def test_every_sample_once_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[list[int]], bytes_max: int
) -> None:
    """With any sizes, no sample is lost, repeated or moved, and no shard is much larger than the limit."""
    folder = tmp_path_factory.mktemp("recut")
    (folder / "in").mkdir()
    first = 0
    for number, each in enumerate(sizes):
        (folder / f"in/{number}.tar").write_bytes(tar(first, each))
        first += len(each)
    packed = convert(folder / "in", folder / "out", to="tar", bytes_max=bytes_max)
    assert [key for path in tars(folder / "out") for key in keys_of(path)] == [f"k{n:04d}" for n in range(first)]
    assert packed.samples_count == first
    assert all(row.size_bytes <= bytes_max + 4096 + 1024 for row in packed.rows)


def test_larger_and_smaller(source: Path, tmp_path: Path) -> None:
    """Merging and splitting keep the samples, give a right index, and equal bytes with any number of jobs."""
    convert(source, tmp_path / "one/all-%02d.tar", to="tar", bytes_max=10**6, verify=True)
    (whole,) = tars(tmp_path / "one")
    assert keys_of(whole) == [f"k{n:04d}" for n in range(30)]
    for jobs in (1, 4):
        convert(tmp_path / "one", tmp_path / f"small{jobs}", to="tar", bytes_max=9_000, jobs=jobs, verify=True)
    small = tars(tmp_path / "small1")
    assert len(small) == 5
    assert [path.read_bytes() for path in small] == [path.read_bytes() for path in tars(tmp_path / "small4")]
    assert [key for path in small for key in keys_of(path)] == [f"k{n:04d}" for n in range(30)]
    assert verify(f"{tmp_path}/small1/").samples_count == 30


def test_it_goes_on(source: Path, tmp_path: Path) -> None:
    """Missing shards in the middle of one source's shards are written again with the same bytes."""
    whole = convert(source, tmp_path / "out", to="tar", bytes_max=9_000)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tars(tmp_path / "out")}
    gone = [path for number, path in enumerate(before) if number in (0, 2, 3)]
    for path in gone:
        path.unlink()
    packed = convert(source, tmp_path / "out", to="tar", bytes_max=9_000)
    assert packed.shards_written == 3
    assert [row.samples_count for row in packed.rows] == [row.samples_count for row in whole.rows]
    for path, (data, time_ns) in before.items():
        assert path.read_bytes() == data
        assert path in gone or path.stat().st_mtime_ns == time_ns


def test_the_plan_can_be_looked_at(source: Path, tmp_path: Path) -> None:
    """A dry run shows the sources and the size of each shard."""
    options = ConvertOptions(to="tar", bytes_max=9_000)
    with Conversion(source, tmp_path / "out", options, connection={}) as conversion:
        plan = conversion.plan(append=False, overwrite=False)
    assert not (tmp_path / "out").exists()
    assert plan.source_bytes == sum(path.stat().st_size for path in tars(source))
    assert all(shard.size_bytes <= 9_000 for shard in plan.shards)
    assert [shard.name for shard in plan.shards][:2] == ["shard-000000.tar", "shard-000001.tar"]


def test_compressed_sources_stay_whole(source: Path, tmp_path: Path) -> None:
    """Compressed shards can be joined but not divided, because the positions of their samples are unknown."""
    for path in tars(source):
        (source / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), compresslevel=0))
        path.unlink()
    packed = convert(source, tmp_path / "out", to="tar", bytes_max=1_600)
    assert [row.samples_count for row in packed.rows] == [10, 10, 10]
    assert convert(source, tmp_path / "all", to="tar.zst", bytes_max=10**6).rows[0].samples_count == 30


def test_parquet_is_cut_between_row_groups(tmp_path: Path) -> None:
    """The smallest possible piece of a source is one sample."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "in").mkdir()
    rows = [{"__key__": f"k{n:04d}", "bin": bytes([n]) * 1000} for n in range(40)]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "in/a.parquet", row_group_size=10, compression="none")
    packed = convert(tmp_path / "in", tmp_path / "out", to="tar", bytes_max=22_000, allow_loss=True)
    assert [key for path in tars(tmp_path / "out") for key in keys_of(path)] == [f"k{n:04d}" for n in range(40)]
    assert all(row.samples_count % 10 == 0 for row in packed.rows)
    assert 1 < len(packed.rows) <= 3


def test_what_cannot_be(source: Path, tmp_path: Path) -> None:
    """A sample larger than a shard, a name without a size, a name of another format and a size of 0 are refused."""
    with pytest.raises(DataError, match="a shard has at most 900"):
        convert(source, tmp_path / "out", to="tar", bytes_max=900)
    with pytest.raises(ConfigError, match="each shard keeps its own"):
        convert(source, tmp_path / "x-%06d.tar", to="tar")
    with pytest.raises(ConfigError, match="do not have the suffix of tfrecord"):
        convert(source, tmp_path / "x-%06d.tar", to="tfrecord", bytes_max=9_000, allow_loss=True)
    with pytest.raises(ConfigError, match="at least 1"):
        convert(source, tmp_path / "out", to="tar", bytes_max=0)
    pack([{"x": b""}], tmp_path / "other")
    with pytest.raises(ConfigError, match="not empty"):
        convert(source, tmp_path / "other", to="tar", bytes_max=9_000)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/a.tar").write_bytes(b"")
    with pytest.raises(DataError, match="all 1 shards are empty"):
        convert(tmp_path / "empty", tmp_path / "out", to="tar", bytes_max=9_000)
