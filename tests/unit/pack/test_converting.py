"""``penstock.pack.convert`` between formats, sample for sample; conversions that lose something are refused."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from penstock.errors import ConfigError, CorruptShardError, DataError
from penstock.formats import (
    FORMATS,
    JsonLinesWriter,
    RecordIOWriter,
    TarWriter,
    TFRecordWriter,
    feed_in_pieces,
    parser_of,
)
from penstock.formats.mds import Column
from penstock.pack import convert, pack, verify
from penstock.pack.written_formats import FORMAT_FEATURES, FORMATS_WRITTEN, PLAIN_FORMATS, loss_table, losses

WRITERS = {
    "tar": (TarWriter, ".tar"),
    "tfrecord": (TFRecordWriter, ".tfrecord"),
    "recordio": (RecordIOWriter, ".rec"),
    "jsonl": (JsonLinesWriter, ".jsonl"),
}


def shard(format_name: str, samples: list[dict]) -> bytes:
    out = io.BytesIO()
    writer = WRITERS[format_name][0](out.write)
    for sample in samples:
        writer.add(sample)
    writer.finish()
    return out.getvalue()


def samples_of(path: Path, format_name: str) -> list[tuple[str, dict]]:
    parser = parser_of(format_name, shard=str(path))
    found = [sample for piece in feed_in_pieces(parser, path.read_bytes()) for sample in piece] + parser.finish()
    return [
        (sample.key, {n: bytes(v) if v.format == "B" else v.tolist() for n, v in sample.fields.items()})
        for sample in found
    ]


def images(first: int, count: int) -> list[dict]:
    return [
        {"__key__": f"a/{number:03d}", "cls": str(number), "jpg": bytes([number]) * (40 * number + 1)}
        for number in range(first, first + count)
    ]


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    folder = tmp_path / "tars"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.tar").write_bytes(shard("tar", images(number * 10, 10)))
    return folder


def test_tar_to_tfrecord_and_back(tars: Path, tmp_path: Path) -> None:
    """With a key field nothing is lost, each shard keeps its name and samples, and the index is right."""
    packed = convert(tars, tmp_path / "records", to="tfrecord", key_field="key", verify=True)
    assert [row.key for row in packed.rows] == ["0.tfrecord", "1.tfrecord", "2.tfrecord"]
    assert packed.samples_count == 30
    convert(tmp_path / "records", tmp_path / "back", to="tar", allow_loss=True)
    for number in range(3):
        found = [fields for _, fields in samples_of(tmp_path / f"back/{number}.tar", "tar")]
        assert found == [
            {"cls": str(n).encode(), "jpg": bytes([n]) * (40 * n + 1), "key": b"a/%03d" % n}
            for n in range(number * 10, number * 10 + 10)
        ]
    assert verify(f"{tmp_path}/back/").samples_count == 30


def test_records_go_as_they_are(tmp_path: Path) -> None:
    """Between TFRecord and RecordIO the bytes of a record stay the same, also those of an Example."""
    (tmp_path / "in").mkdir()
    data = shard("tfrecord", [{"label": [1, 2], "x": b"abc"}, {"y": 1.5}])
    (tmp_path / "in/a.tfrecord").write_bytes(data)
    convert(tmp_path / "in", tmp_path / "rec", to="recordio")
    convert(tmp_path / "rec", tmp_path / "back", to="tfrecord")
    assert (tmp_path / "back/a.tfrecord").read_bytes() == data


def test_numbers_become_text_or_arrays(tmp_path: Path) -> None:
    """In a tar a single number becomes digits, and several become a .npy; this loss must be allowed."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.tfrecord").write_bytes(shard("tfrecord", [{"cls": 7, "box": [1.5, 2.5], "x": b"abc"}]))
    with pytest.raises(ConfigError, match="would lose the types of numbers"):
        convert(tmp_path / "in", tmp_path / "out", to="tar")
    convert(tmp_path / "in", tmp_path / "out", to="tar", allow_loss=True)
    ((_, fields),) = samples_of(tmp_path / "out/a.tar", "tar")
    assert (fields["cls"], fields["x"]) == (b"7", b"abc")
    assert np.load(io.BytesIO(fields["box.npy"])).tolist() == [1.5, 2.5]


def test_json_lines_both_ways(tmp_path: Path) -> None:
    """Keys and JSON objects survive in a tar and come back; bytes that are not text are refused."""
    (tmp_path / "in").mkdir()
    lines = [{"__key__": f"k{number}", "text": "ü", "n": [number, None]} for number in range(4)]
    (tmp_path / "in/a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    convert(tmp_path / "in", tmp_path / "tar", to="tar")
    assert [key for key, _ in samples_of(tmp_path / "tar/a.tar", "tar")] == ["k0", "k1", "k2", "k3"]
    convert(tmp_path / "tar", tmp_path / "back", to="jsonl", allow_loss=True)
    assert [json.loads(line) for line in (tmp_path / "back/a.jsonl").read_text().splitlines()] == lines
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes/a.tar").write_bytes(shard("tar", [{"__key__": "a", "jpg": b"\xff\xd8"}]))
    with pytest.raises(DataError, match="these bytes are not UTF-8"):
        convert(tmp_path / "bytes", tmp_path / "none", to="jsonl", allow_loss=True)


def test_compressed_zip_and_parquet(tars: Path, tmp_path: Path) -> None:
    """Every readable format can be converted: gzip, zip and Parquet give the same tar as the tar itself."""
    pa = pytest.importorskip("pyarrow")
    import gzip
    import zipfile

    from pyarrow import parquet

    whole = (tars / "1.tar").read_bytes()
    (tmp_path / "in").mkdir()
    (tmp_path / "in/g.tar.gz").write_bytes(gzip.compress(whole))
    samples = images(10, 10)
    with zipfile.ZipFile(tmp_path / "in/z.zip", "w") as archive:
        for sample in samples:
            archive.writestr(sample["__key__"] + ".cls", sample["cls"])
            archive.writestr(sample["__key__"] + ".jpg", sample["jpg"])
    rows = [{**sample, "cls": sample["cls"].encode()} for sample in samples]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "in/p.parquet", row_group_size=3)
    packed = convert(tmp_path / "in", tmp_path / "out", to="tar", allow_loss=True, verify=True)
    assert packed.samples_count == 30
    for name in ("g", "z", "p"):
        assert (tmp_path / f"out/{name}.tar").read_bytes() == whole


def test_fields_are_chosen_and_named(tmp_path: Path) -> None:
    """Field names that a tar cannot have are refused, or can be renamed."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.tfrecord").write_bytes(shard("tfrecord", [{"image/encoded": b"x", "image/class/label": 3}]))
    with pytest.raises(DataError, match="without a slash"):
        convert(tmp_path / "in", tmp_path / "out", to="tar", allow_loss=True)
    fields = "image/encoded=jpg,image/class/label=cls"
    convert(tmp_path / "in", tmp_path / "named", to="tar", fields=fields, allow_loss=True)
    ((_, found),) = samples_of(tmp_path / "named/a.tar", "tar")
    assert found == {"jpg": b"x", "cls": b"3"}


def test_a_conversion_goes_on(tars: Path, tmp_path: Path) -> None:
    """A corrupt shard stops the conversion; after a repair the finished shards, which are complete, are not converted again."""
    good = (tars / "1.tar").read_bytes()
    (tars / "1.tar").write_bytes(good[:1000] + b"\xff" * 1000 + good[2000:])
    with pytest.raises(CorruptShardError):
        convert(tars, tmp_path / "out", to="tfrecord", allow_loss=True, jobs=1)
    assert [path.name for path in (tmp_path / "out").glob("*.tfrecord")] == ["0.tfrecord"]
    packed = convert(
        ps.shards(f"{tars}/", on_corrupt="skip_shard"), tmp_path / "skipped", to="tfrecord", allow_loss=True
    )
    assert 20 <= packed.samples_count < 30
    again = convert(
        ps.shards(f"{tars}/", on_corrupt="skip_shard"), tmp_path / "skipped", to="tfrecord", allow_loss=True
    )
    assert (again.shards_written, again.rows) == (0, packed.rows)


def test_what_cannot_be(tars: Path, tmp_path: Path) -> None:
    """Unknown formats, bad destinations, two shards with one name, and several fields for one are refused."""
    with pytest.raises(ConfigError, match="not one of tar"):
        convert(tars, tmp_path / "out", to="zip")
    with pytest.raises(ConfigError, match="inside the source"):
        convert(tars, tars / "out", to="jsonl", allow_loss=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/x").write_bytes(b"")
    with pytest.raises(ConfigError, match="not empty"):
        convert(tars, tmp_path / "out", to="tfrecord", allow_loss=True)
    with pytest.raises(DataError, match="a record holds one field"):
        convert(tars, tmp_path / "rec", to="recordio", allow_loss=True)
    (tars / "0.tfrecord").write_bytes(b"")
    with pytest.raises(DataError, match="two shards would become"):
        convert(tars, tmp_path / "two", to="tfrecord", allow_loss=True)
    with pytest.raises(ConfigError, match="not a plain set of shards"):
        convert(ps.objects(f"{tars}/"), tmp_path / "o", to="tfrecord")


def test_the_table_knows_every_format() -> None:
    """Every readable format has a row whatever its compression and content, and every pair of formats has an answer."""
    names = {name.removesuffix(".gz").removesuffix(".zst").partition("-")[0] for name in FORMATS}
    assert names == set(FORMAT_FEATURES)
    for name in FORMATS:
        for target in FORMATS_WRITTEN:
            losses(name, target)
    assert loss_table().count("\n") == len(FORMAT_FEATURES) + 1
    assert losses("tar", "tar") == ()
    assert losses("tar", "tfrecord", key_field="key") == ()
    with pytest.raises(ConfigError, match="cannot be converted to"):
        losses("tar", "zip")


SAMPLES = {
    "tar": [{"__key__": f"k{n}", "cls": str(n), "jpg": b"text %d" % n} for n in range(3)],
    "recordio": [{"__key__": f"k{n}", "record": b"text %d" % n} for n in range(3)],
    "jsonl": [{"__key__": f"k{n}", "n": n, "text": "ü"} for n in range(3)],
}
TYPED = [{"__key__": f"k{n}", "cls": n, "jpg": b"text %d" % n} for n in range(3)]


@pytest.mark.parametrize("target", PLAIN_FORMATS)
@pytest.mark.parametrize("source", PLAIN_FORMATS)
def test_what_is_said_to_be_kept_is_kept(tmp_path: Path, source: str, target: str) -> None:
    """If a pair of formats loses nothing, keys, names and values come back equal; otherwise it is refused."""
    pack(SAMPLES.get(source, TYPED), tmp_path / "in", format=source, allow_loss=True)
    if losses(source, target):
        with pytest.raises(ConfigError, match="would lose"):
            convert(tmp_path / "in", tmp_path / "out", to=target)
        return
    convert(tmp_path / "in", tmp_path / "out", to=target, verify=True)
    (before,), (after,) = ([p for p in (tmp_path / f).iterdir() if p.stem.startswith("s")] for f in ("in", "out"))
    raw = "-raw" if (source, target) == ("tfrecord", "recordio") else ""  # which keeps records as they are
    old, new = samples_of(before, source + raw), samples_of(after, target)
    if FORMAT_FEATURES[source].keys and FORMAT_FEATURES[target].keys:
        assert [key for key, _ in new] == [key for key, _ in old]
    if "jsonl" not in (source, target):
        assert [fields for _, fields in new] == [fields for _, fields in old]
    elif source == target:
        assert before.read_bytes() == after.read_bytes()


def test_the_guide_has_the_table() -> None:
    """The table on the page is the one that ``convert`` uses."""
    guide = Path(__file__).parents[3] / "docs/guides/packing.md"
    assert f"\n{loss_table()}\n" in guide.read_text()


def test_fields_are_typed(tars: Path, tmp_path: Path) -> None:
    """``cls:int`` turns digits into numbers, ``text`` numbers into text; other values are an error with their name."""
    convert(tars, tmp_path / "records", to="tfrecord", fields="jpg,cls=label:int", key_field="key")
    (first, *_) = samples_of(tmp_path / "records/1.tfrecord", "tfrecord")
    assert first[1]["label"] == [10]
    convert(tmp_path / "records", tmp_path / "back", to="tar", fields="label=cls:text,jpg", allow_loss=True)
    assert samples_of(tmp_path / "back/1.tar", "tar")[0][1]["cls"] == b"10"
    with pytest.raises(DataError, match="'jpg' is not of type int"):
        convert(tars, tmp_path / "no", to="tfrecord", fields="jpg:int", allow_loss=True)


def test_mds_stays_what_mosaicml_reads(tmp_path: Path) -> None:
    """From MDS to MDS, compressed or recut, each column keeps its encoding and each value its type."""
    columns = [
        Column("blob", "pkl", None), Column("n", "int", 8), Column("s", "str_int", None), Column("u8", "uint8", 1),
        Column("picture", "jpeg", None), Column("fixed", "ndarray:int16:2", 4), Column("any", "ndarray", None),
    ]  # fmt: skip
    samples = [
        [b"p%d" % n, struct.pack("<q", n), b"%d" % n, bytes([n]), b"\xff\xd8%d" % n, struct.pack("<2h", n, -n),
         bytes([34, 1 << 2, 3]) + struct.pack("<3f", n, 0, 1)]
        for n in range(6)
    ]  # fmt: skip
    encoded = []
    for sample in samples:
        open_sizes = [len(value) for value, column in zip(sample, columns, strict=True) if column.size_bytes is None]
        encoded.append(struct.pack(f"<{len(open_sizes)}I", *open_sizes) + b"".join(sample))
    names, encodings, sizes = zip(*columns, strict=True)
    head = json.dumps({"column_names": names, "column_encodings": encodings, "column_sizes": sizes}).encode()
    start = 4 + 4 * 7 + len(head)
    bounds = [start + sum(map(len, encoded[:n])) for n in range(7)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/shard.00000.mds").write_bytes(struct.pack("<8I", 6, *bounds) + head + b"".join(encoded))
    convert(tmp_path / "in", tmp_path / "zst", to="mds.zst", verify=True)
    convert(tmp_path / "zst", tmp_path / "back/s.%05d.mds", to="mds", bytes_max=10**6, verify=True)
    before = samples_of(tmp_path / "in/shard.00000.mds", "mds")
    after = samples_of(tmp_path / "back/s.00000.mds", "mds")
    assert [fields for _, fields in after] == [fields for _, fields in before]
    (entry,) = json.loads((tmp_path / "back/index.json").read_text())["shards"]
    said = dict(zip(entry["column_names"], entry["column_encodings"], strict=True))
    assert said == {
        **{column.name: column.encoding for column in columns},
        "any": "ndarray:float32",
        "fixed": "ndarray:int16",
    }
