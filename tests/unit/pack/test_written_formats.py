"""Every written format, compressed or not: the same samples, reproducible bytes, right counts and indexes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.errors import ConfigError, CorruptShardError
from penstock.formats import FORMATS, feed_in_pieces, parser_of
from penstock.pack import convert, pack, verify, writer
from penstock.pack.destination import Destination
from penstock.pack.written_formats import FORMATS_WRITTEN
from penstock.store.local import LocalStore


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return 12 samples with a json each."""
    root = tmp_path / "source"
    root.mkdir()
    for number in range(12):
        (root / f"{number:03d}.json").write_text(json.dumps({"n": number, "text": "x" * 50 * number}))
    return root


def shards(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and ".penstock" not in path.parts)


def values_of(path: Path) -> list[bytes]:
    """Return the only field of each sample."""
    parser = parser_of(ps.formats.format_of_name(path.name) or "", shard=str(path))
    found = [sample for piece in feed_in_pieces(parser, path.read_bytes()) for sample in piece]
    found += parser.finish()
    return [bytes(*sample.fields.values()) for sample in found]


@pytest.mark.parametrize("name", [name for name in FORMATS_WRITTEN if not name.startswith("parquet")])
def test_the_same_bytes_and_the_same_samples(source: Path, tmp_path: Path, name: str) -> None:
    """Packing twice gives equal shards, which are verified, read by their name's format, and have each sample once."""
    fields = {"recordio": "json=record", "tfrecord": "json=record"}.get(name.partition(".")[0])
    for folder in ("one", "two"):
        packed = pack(
            source, tmp_path / folder, format=name, samples_max=5, fields=fields, verify=True, allow_loss=True
        )
    one, two = shards(tmp_path / "one"), shards(tmp_path / "two")
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    tables = [path for path in one if path.name != "index.json"]
    assert [path.name for path in tables] == [row.key for row in packed.rows]
    decided = {"recordio": "recordio-raw", "tfrecord": "tfrecord-raw"}  # by the first record, which is JSON
    assert {row.format for row in packed.rows} == {decided.get(name, FORMATS_WRITTEN[name].read_as)}
    values = [value for path in tables for value in values_of(path)]
    assert [json.loads(value)["n"] for value in values] == list(range(12))
    assert verify(f"{tmp_path}/one/").samples_count == 12


@pytest.mark.parametrize("name", ["mds", "tar.zst", "mds.gz"])
def test_the_index_is_what_reading_would_give(source: Path, tmp_path: Path, name: str) -> None:
    """Offsets, checksums, keys and members equal those that ``penstock index`` finds; compressed shards have only keys."""
    pack(source, tmp_path / "out", format=name, samples_max=5, allow_loss=True)
    place = Destination(LocalStore(tmp_path / "out")).place
    mine = {key: place.load_shard(row) for key, row in place.load().rows.items()}
    ps.build_index(f"{tmp_path}/out/", beside=True, again=True)
    for key, row in place.load().rows.items():
        built = place.load_shard(row)
        assert (built.row, built.keys) == (mine[key].row, mine[key].keys)
        for column in ("offsets", "crc32c"):
            assert np.array_equal(getattr(built, column), getattr(mine[key], column))
        assert str(built.members) == str(mine[key].members)
    assert len(mine) == 3


def test_parquet_has_codecs_and_checksums(source: Path, tmp_path: Path) -> None:
    """``parquet.zst`` and similar formats compress Parquet's pages; a flipped bit in a page is found."""
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, codec in (
        ("parquet", "UNCOMPRESSED"),
        ("parquet.zst", "ZSTD"),
        ("parquet.gz", "GZIP"),
        ("parquet.snappy", "SNAPPY"),
    ):
        for folder in ("one", "two"):
            pack(source, tmp_path / folder / name, format=name, verify=True, allow_loss=True)
        path = tmp_path / "one" / name / "shard-000000.parquet"
        assert path.read_bytes() == (tmp_path / "two" / name / path.name).read_bytes()
        assert parquet.ParquetFile(path).metadata.row_group(0).column(1).compression == codec
        assert [json.loads(row["json"])["n"] for row in parquet.read_table(path).to_pylist()] == list(range(12))
    plain = tmp_path / "one/parquet/shard-000000.parquet"
    data = bytearray(plain.read_bytes())
    data[data.index(b"x" * 50) + 20] ^= 1
    parser = parser_of("parquet", shard="x")
    parser.feed(data)
    with pytest.raises(CorruptShardError, match="checksum"):
        parser.finish()


def test_mosaicml_finds_its_index(source: Path, tmp_path: Path) -> None:
    """Each folder of MDS shards has an ``index.json`` of all of them, in order, which changes with them."""

    def entries(folder: Path) -> list[tuple[str, int, int]]:
        table = json.loads((folder / "index.json").read_text())
        return [(each["raw_data"]["basename"], each["raw_data"]["bytes"], each["samples"]) for each in table["shards"]]

    out = tmp_path / "out"
    pack(source, out, format="mds", samples_max=5, allow_loss=True)
    pack(source, out, format="mds", append=True, allow_loss=True)
    found = entries(out)
    assert [(name, count) for name, _, count in found] == [
        (f"shard.{n:05d}.mds", c) for n, c in enumerate((5, 5, 2, 12))
    ]
    assert [size for _, size, _ in found] == [path.stat().st_size for path in shards(out) if path.suffix == ".mds"]
    pack(source, out, overwrite=True)
    assert [path.name for path in shards(out)] == ["shard-000000.tar"]
    pack(source, tmp_path / "split", format="mds.zst", split={"a": 0.5, "b": 0.5}, allow_loss=True)
    assert sum(count for split in "ab" for *_, count in entries(tmp_path / "split" / split)) == 12
    (entry,) = json.loads((tmp_path / "split/a/index.json").read_text())["shards"]
    assert entry["zip_data"]["bytes"] == (tmp_path / "split/a" / entry["zip_data"]["basename"]).stat().st_size
    with pytest.raises(ConfigError, match=r"one index\.json"):
        pack(source, tmp_path / "x", name="{split}-%06d.mds", split={"a": 0.5, "b": 0.5})


def test_a_foreign_index_json_stays(source: Path, tmp_path: Path) -> None:
    """An ``index.json`` that no packing wrote is never replaced."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out/index.json").write_text("mine")
    for options in ({"append": True}, {"overwrite": True}):
        with pytest.raises(ConfigError, match="penstock did not write it"):
            pack(source, tmp_path / "out", format="mds", allow_loss=True, **options)
    pack(source, tmp_path / "tars")
    with pytest.raises(ConfigError, match="penstock did not write it"):
        convert(tmp_path / "tars", tmp_path / "out", to="mds", allow_loss=True, append=True)
    assert (tmp_path / "out/index.json").read_text() == "mine"


def test_names_say_the_compression(source: Path, tmp_path: Path) -> None:
    """``x-%06d.tar.gz`` is a compressed tar; a contradicting format is refused; the manifest has the software versions."""
    pack(source, tmp_path / "out/x-%06d.tar.gz")
    data = (tmp_path / "out/x-000000.tar.gz").read_bytes()
    assert data[4:8] == bytes(4)  # no time
    assert gzip.decompress(data)[257:262] == b"ustar"
    assert "zlib" in json.loads((tmp_path / "out/.penstock/packed.manifest").read_text().splitlines()[0])["versions"]
    with pytest.raises(ConfigError, match=r"suffix of tar\.gz"):
        pack(source, tmp_path / "no", name="x-%06d.tar.gz", format="tar")
    with pytest.raises(ConfigError, match="not one of tar"):
        pack(source, tmp_path / "no", format="tar.lzma")
    with writer(tmp_path / "w/x-%03d.mds.zstd") as out:
        out.write({"__key__": "a", "cls": 3})
    assert json.loads((tmp_path / "w/index.json").read_text())["shards"][0]["column_encodings"] == ["int"]


def test_a_broken_compressed_shard_is_found(source: Path, tmp_path: Path) -> None:
    """gzip and zstd end with a checksum of their content, so a flipped bit is found."""
    for name in ("tar.gz", "tar.zst"):
        pack(source, tmp_path / name, format=name, allow_loss=True)
        (path,) = shards(tmp_path / name)
        stat, data = path.stat(), bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        with path.open("r+b") as file:
            file.write(data)
        import os

        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        (problem,) = verify(f"{tmp_path / name}/").problems
        assert isinstance(problem.error, CorruptShardError)


def test_every_format_that_is_written_is_read() -> None:
    """A written format is read by its registry name and by its suffix."""
    for written in FORMATS_WRITTEN.values():
        assert written.read_as in FORMATS
        assert ps.formats.format_of_name(f"x{written.suffix}") == written.read_as
