"""``penstock.pack`` from files, tables and iterables to shards in directories."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import ConfigError, DataError, ObjectChangedError, ObjectMissingError, StoreError
from penstock.formats import feed_in_pieces, parser_of
from penstock.index import read_manifest
from penstock.pack import Packed, Packing, PackOptions, advice, pack, verify
from penstock.pack.destination import Destination
from penstock.pack.plan import PackPlan
from penstock.pack.recipes import NullListener
from penstock.pack.workers import ExecutionOptions
from penstock.sources.shards import ShardFinder
from penstock.store.local import LocalStore


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return 24 samples in 3 folders, with a jpg and a txt each."""
    root = tmp_path / "source"
    for number in range(24):
        folder = root / f"class{number % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:03d}.jpg").write_bytes(hashlib.blake2b(b"%d" % number).digest() * (number + 1))
        (folder / f"{number:03d}.txt").write_text(f"text {number}")
    return root


def samples_of(path: Path, format_name: str | None = None) -> list[tuple[str, dict[str, bytes]]]:
    """Return the keys and fields of a shard."""
    parser = parser_of(format_name or {".tar": "tar", ".rec": "recordio", ".jsonl": "jsonl"}[path.suffix], shard="x")
    found = [sample for piece in feed_in_pieces(parser, path.read_bytes()) for sample in piece] + parser.finish()
    return [(sample.key, {name: bytes(value) for name, value in sample.fields.items()}) for sample in found]


def shards(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def everything(folder: Path) -> dict[str, dict[str, bytes]]:
    """Return all samples of a folder of shards; a repeated key fails the test."""
    pairs = [pair for shard in shards(folder) for pair in samples_of(shard)]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def test_files_of_one_stem_are_a_sample(source: Path, tmp_path: Path) -> None:
    """Each file is in exactly one shard, with its folder and stem as the key, byte for byte."""
    packed = pack(source, tmp_path / "out", bytes_max=10_000)
    assert isinstance(packed, Packed)
    found = everything(tmp_path / "out")
    assert found == {
        f"class{number % 3}/{number:03d}": {
            "jpg": hashlib.blake2b(b"%d" % number).digest() * (number + 1),
            "txt": b"text %d" % number,
        }
        for number in range(24)
    }
    assert packed.samples_count == 24
    assert packed.shards_written == len(packed.rows) == len(shards(tmp_path / "out")) > 3


def test_shards_keep_their_limits(source: Path, tmp_path: Path) -> None:
    """No tar exceeds the limits of bytes and samples, and the plan has the exact size of each tar."""
    pack(source, tmp_path / "out", bytes_max=9_000)
    store = LocalStore(tmp_path / "out")
    plan = next(iter(Destination(store)._plans.values()))
    assert {shard.name: shard.size_bytes for shard in plan.shards} == {
        path.name: path.stat().st_size for path in shards(tmp_path / "out")
    }
    assert max(shard.size_bytes for shard in plan.shards) <= 9_000
    pack(source, tmp_path / "few", samples_max=5)
    assert [len(samples_of(shard)) for shard in shards(tmp_path / "few")] == [5, 5, 5, 5, 4]


def test_a_loader_reads_them(source: Path, tmp_path: Path) -> None:
    """A loader finds the index beside the shards, and all samples."""
    pack(source, tmp_path / "out", bytes_max=9_000, labels="folders")
    pipeline = ps.shards(f"{tmp_path}/out/").decode(ps.Text("txt"), ps.Integer("cls")).select(["txt", "cls"]).batch(4)
    with ps.Loader(pipeline, index="require") as loader:
        pairs = [pair for batch in loader for pair in zip(batch["txt"], batch["cls"].tolist(), strict=True)]
    assert sorted(pairs) == sorted((f"text {number}", number % 3) for number in range(24))


def test_the_same_input_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    """Packing twice gives equal shards, also shuffled, and with any number of jobs."""
    for name, jobs in (("one", 1), ("two", 3)):
        pack(source, tmp_path / name, bytes_max=9_000, shuffle=True, seed=5, jobs=jobs)
    one, two = shards(tmp_path / "one"), shards(tmp_path / "two")
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    pack(source, tmp_path / "three", bytes_max=9_000, shuffle=True, seed=6)
    assert everything(tmp_path / "three") == everything(tmp_path / "one")
    assert list(everything(tmp_path / "three")) != list(everything(tmp_path / "one"))


def test_packed_again_nothing_is_done(source: Path, tmp_path: Path) -> None:
    """A second call reads no source and writes no shard."""
    first = pack(source, tmp_path / "out", bytes_max=9_000)
    before = {path: path.stat().st_mtime_ns for path in shards(tmp_path / "out")}
    second = pack(source, tmp_path / "out", bytes_max=9_000)
    assert (second.shards_written, second.rows) == (0, first.rows)
    assert {path: path.stat().st_mtime_ns for path in shards(tmp_path / "out")} == before


def test_a_shard_that_went_away_is_written_again(source: Path, tmp_path: Path) -> None:
    """Only missing shards are written, with the same bytes as before."""
    pack(source, tmp_path / "out", bytes_max=9_000)
    gone = shards(tmp_path / "out")[1]
    data = gone.read_bytes()
    gone.unlink()
    assert pack(source, tmp_path / "out", bytes_max=9_000).shards_written == 1
    assert gone.read_bytes() == data


def test_a_failed_packing_goes_on(source: Path, tmp_path: Path) -> None:
    """A failing transform stops the packing; when it no longer fails, the same call ends with the usual bytes."""
    pack(source, tmp_path / "whole", bytes_max=9_000, transform=failing)
    failing.at = 17
    with pytest.raises(DataError, match=r"Failing failed at .*: ValueError: no"):
        pack(source, tmp_path / "out", bytes_max=9_000, transform=failing, jobs=1)
    finished = [path.read_bytes() for path in shards(tmp_path / "out")]
    failing.at = None
    packed = pack(source, tmp_path / "out", bytes_max=9_000, transform=failing)
    assert 0 < packed.shards_written < len(packed.rows)
    whole = [path.read_bytes() for path in shards(tmp_path / "whole")]
    assert [path.read_bytes() for path in shards(tmp_path / "out")] == whole
    assert whole[: len(finished)] == finished


class Failing:
    """A transform that fails if an environment variable is set, so that it is the same transform in both cases."""

    @property
    def at(self) -> int | None:
        return int(os.environ[FAILS_AT]) if FAILS_AT in os.environ else None

    @at.setter
    def at(self, number: int | None) -> None:
        os.environ.pop(FAILS_AT, None)
        if number is not None:
            os.environ[FAILS_AT] = str(number)

    def __call__(self, sample: dict) -> dict:
        if sample["txt"] == b"text %d" % (-1 if self.at is None else self.at):
            raise ValueError("no")
        return sample


FAILS_AT = "PENSTOCK_TEST_FAILS_AT"


failing = Failing()


def test_a_transform_changes_fields(source: Path, tmp_path: Path) -> None:
    """A transform gets bytes and ``__key__``; its result is stored with the key."""
    pack(source, tmp_path / "out", transform=lambda sample: {"txt": sample["txt"].upper(), "n": len(sample["jpg"])})
    found = everything(tmp_path / "out")
    assert found["class0/003"] == {"txt": b"TEXT 3", "n": b"256"}
    with pytest.raises(DataError, match="not a sample"):
        pack(source, tmp_path / "none", transform=lambda sample: None)


def test_splits_go_by_the_key(source: Path, tmp_path: Path) -> None:
    """Each sample is in one split, which does not depend on other samples."""
    split = {"train": 0.7, "val": 0.3}
    pack(source, tmp_path / "out", split=split)
    train, val = samples_of(tmp_path / "out/train-000000.tar"), samples_of(tmp_path / "out/val-000000.tar")
    assert len(train) + len(val) == 24
    assert 2 <= len(val) <= 14
    for path in (source / "class1").iterdir():
        path.unlink()
    pack(source, tmp_path / "fewer", split=split)
    left = samples_of(tmp_path / "fewer/val-000000.tar")
    assert left == [sample for sample in val if not sample[0].startswith("class1")]


def test_labels_of_folders_and_tables(source: Path, tmp_path: Path) -> None:
    """Folders are numbered in order; a table has numbers, or words that are numbered; a missing label is an error."""
    pack(source, tmp_path / "folders", labels="folders", label_field="label")
    assert everything(tmp_path / "folders")["class2/002"]["label"] == b"2"
    table = tmp_path / "labels.csv"
    rows = [f"class{n % 3}/{n:03d}.jpg,{'even' if n % 2 == 0 else 'odd'}" for n in range(24)]
    table.write_text("\n".join(["file,label", *rows]))
    pack(source, tmp_path / "words", labels=str(table))
    assert everything(tmp_path / "words")["class2/005"]["cls"] == b"1"
    assert json.loads((tmp_path / "words/.penstock/packed.manifest").read_text().splitlines()[0])["classes"] == [
        "even",
        "odd",
    ]
    table.write_text("\n".join(["file,label", *rows[1:]]))
    with pytest.raises(DataError, match="has no label"):
        pack(source, tmp_path / "gap", labels=str(table))
    (source / "top.jpg").write_bytes(b"x")
    with pytest.raises(DataError, match="not in a folder"):
        pack(source, tmp_path / "top", labels="folders")
    (source / "top.jpg").unlink()
    with pytest.raises(ConfigError, match=r"labels='folder' is neither 'folders' nor .*table.*[.]csv"):
        pack(source, tmp_path / "misspelt", labels="folder")
    with pytest.raises(DataError, match="already has a field 'txt'"):
        pack(source, tmp_path / "twice", labels="folders", label_field="txt")


def test_a_table_of_files(source: Path, tmp_path: Path) -> None:
    """CSV, JSON lines and Parquet name files in a column, give typed values, and number the keys."""
    pytest.importorskip("pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"path": f"class{n % 3}/{n:03d}.jpg", "label": n, "score": n / 2} for n in range(6)]
    (source / "t.csv").write_text(
        "\n".join(["path,label,score", *(f"{r['path']},{r['label']},{r['score']}" for r in rows)])
    )
    (source / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parquet.write_table(pa.Table.from_pylist(rows), source / "t.parquet")
    expected = {
        f"{n:09d}": {"jpg": (source / rows[n]["path"]).read_bytes(), "cls": b"%d" % n, "score": b"%.1f" % (n / 2)}
        for n in range(6)
    }
    for name in ("t.csv", "t.jsonl", "t.parquet"):
        pack(source / name, tmp_path / name, fields="path=jpg:file,label=cls:int,score:float")
        assert everything(tmp_path / name) == expected
    pack(source / "t.jsonl", tmp_path / "guess")
    assert everything(tmp_path / "guess")["000000003"]["label"] == b"3"
    pack(source / "t.jsonl", tmp_path / "records", fields="path=jpg:file,label=cls:int", format="tfrecord")
    (_, fields), *_ = samples_of(tmp_path / "records/shard-000000.tfrecord", "tfrecord")
    assert int.from_bytes(fields["cls"], "little") == 0
    assert fields["jpg"] == expected["000000000"]["jpg"]


def test_tables_that_are_wrong(source: Path, tmp_path: Path) -> None:
    """A missing file or column, a wrong type, a repeated key and an empty table are errors that name the fault."""

    def packed(text: str, **options: str) -> None:
        (source / "t.csv").write_text(text)
        pack(source / "t.csv", tmp_path / "out", **options)

    fields = "path=jpg:file,label=cls:int"
    with pytest.raises(ObjectMissingError, match=r"gone\.jpg"):
        packed("path,label\ngone.jpg,1", fields=fields)
    with pytest.raises(DataError, match="'label'"):
        packed("path\nclass0/000.jpg", fields=fields)
    with pytest.raises(DataError, match="not of type int"):
        packed("path,label\nclass0/000.jpg,x", fields=fields)
    with pytest.raises(DataError, match="same key as another row"):
        packed("__key__,path,label\na,class0/000.jpg,1\na,class0/000.jpg,1", fields=fields)
    with pytest.raises(DataError, match="no rows"):
        packed("path,label\n", fields=fields)
    with pytest.raises(DataError, match="as many values"):
        packed("path,label\nclass0/000.jpg\n", fields=fields)
    with pytest.raises(ConfigError, match="has a usual name for files"):
        packed("a,b\n1,2")
    assert not (tmp_path / "out").exists()


def test_a_manifest_as_source(source: Path, tmp_path: Path) -> None:
    """The objects of a manifest are packed without a listing; the written manifest names the shards and their versions."""
    lines = [{"key": f"class0/{n:03d}.jpg"} for n in (0, 3, 6)]
    manifest = source / "files.manifest.jsonl"
    manifest.write_text("\n".join(map(json.dumps, lines)))
    pack(manifest, tmp_path / "out")
    assert list(everything(tmp_path / "out")) == ["000", "003", "006"]
    data = (tmp_path / "out/.penstock/packed.manifest").read_bytes()
    (entry,) = read_manifest(data, url="x")
    assert entry.url == f"file://{tmp_path}/out/shard-000000.tar"
    assert entry.size_bytes == (tmp_path / "out/shard-000000.tar").stat().st_size


def test_objects_described_and_taken_one_by_one(source: Path, tmp_path: Path) -> None:
    """``penstock.objects`` is a source; with ``group_by="file"`` each file is a sample; fields can be selected and renamed."""
    pack(ps.objects(f"{source}/*/00*.txt"), tmp_path / "out")
    assert len(everything(tmp_path / "out")) == 10
    for path in source.rglob("*.jpg"):
        path.unlink()
    pack(source, tmp_path / "single", group_by="file", fields="txt=text")
    assert everything(tmp_path / "single")["class0/000"] == {"text": b"text 0"}
    with pytest.raises(DataError, match="no file 'jpg'"):
        pack(source, tmp_path / "none", fields="jpg")


def test_names_that_are_no_sample_key(source: Path, tmp_path: Path) -> None:
    """A name without extension is refused, or passed over on request; hidden files are passed over and counted."""
    (source / ".DS_Store").write_bytes(b"x")
    assert pack(source, tmp_path / "hidden").passed_over == 1
    (source / "README").write_text("x")
    with pytest.raises(DataError, match=r"'README' is not a sample key"):
        pack(source, tmp_path / "out")
    assert pack(source, tmp_path / "out", skip_unnamed=True).passed_over == 2


def test_two_files_of_one_key_and_extension(source: Path, tmp_path: Path) -> None:
    """Two files whose extensions differ only in case are refused, and nothing is written."""
    (source / "class0/000.JPG").write_bytes(b"x")
    with pytest.raises(DataError, match="second field 'jpg'"):
        pack(source, tmp_path / "out")
    with pytest.raises(DataError, match="are both sample"):
        pack(source, tmp_path / "out", group_by="file")
    assert not (tmp_path / "out").exists()


def test_a_sample_larger_than_a_shard(source: Path, tmp_path: Path) -> None:
    """A sample larger than a shard is refused before anything is written, with both sizes."""
    with pytest.raises(DataError, match=r"takes \d+ bytes, but a shard has at most 2500"):
        pack(source, tmp_path / "out", bytes_max=2_500)
    assert not (tmp_path / "out").exists()


def test_a_file_larger_than_memory(source: Path, tmp_path: Path) -> None:
    """A file that does not fit into the budget twice is refused when planned; so is a budget too small for one shard."""
    with (source / "class0/huge.bin").open("wb") as file:
        file.truncate(200_000_000)
    with pytest.raises(ConfigError, match="200000000 bytes, more than half"):
        pack(source, tmp_path / "out", memory_bytes_max=128 << 20)
    with pytest.raises(ConfigError, match="must be at least"):
        pack(source, tmp_path / "out", memory_bytes_max=1 << 20)


def test_an_empty_source(tmp_path: Path) -> None:
    """An empty folder and an empty iterable are errors that say so."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(ObjectMissingError, match="no objects here"):
        pack(tmp_path / "empty", tmp_path / "out")
    (tmp_path / "empty/.hidden").write_text("x")
    with pytest.raises(ObjectMissingError, match="no files to pack"):
        pack(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(DataError, match="is empty"):
        pack(iter([]), tmp_path / "out2")


def test_a_destination_inside_the_source(source: Path, tmp_path: Path) -> None:
    """A destination inside the source, or the source itself, is refused: the next run would pack it."""
    for inside in (source / "packed", source):
        with pytest.raises(ConfigError, match="lies inside the source"):
            pack(source, inside)
    pack(source, tmp_path / "source-packed")  # a name that begins alike is another folder


def test_a_destination_that_is_not_empty(source: Path, tmp_path: Path) -> None:
    """Existing shards are refused, appended to on request, or overwritten on request except for foreign objects."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"not empty \(1 objects, the first is 'notes.txt'\)"):
        pack(source, out)
    pack(source, out, append=True, samples_max=10)
    with pytest.raises(ConfigError, match="not empty"):
        pack(source, out, samples_max=20)
    pack(source / "class0", out, append=True)
    assert [path.name for path in shards(out)] == ["notes.txt", *(f"shard-{n:06d}.tar" for n in range(4))]
    assert Destination(LocalStore(out)).place.load().samples_count == 32
    pack(source, out, overwrite=True, samples_max=20)
    assert [path.name for path in shards(out)] == ["notes.txt", "shard-000000.tar", "shard-000001.tar"]
    assert Destination(LocalStore(out)).place.load().samples_count == 24
    assert (out / "notes.txt").read_text() == "mine"
    verified = verify(f"{out}/")
    assert (verified.samples_count, verified.problems) == (24, ())


def test_overwriting_never_takes_a_foreign_shard(source: Path, tmp_path: Path) -> None:
    """A foreign object with the name of a new shard is refused, and stays."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "shard-000000.tar").write_bytes(b"foreign")
    with pytest.raises(ConfigError, match="penstock did not pack it"):
        pack(source, out, overwrite=True)
    assert (out / "shard-000000.tar").read_bytes() == b"foreign"
    pack(source, out, append=True)
    assert [path.name for path in shards(out)] == ["shard-000000.tar", "shard-000001.tar"]


def test_appending_waits_for_what_is_unfinished(source: Path, tmp_path: Path) -> None:
    """Appending to an interrupted packing is refused, so that it keeps its numbers."""
    failing.at = 17
    with pytest.raises(DataError):
        pack(source, tmp_path / "out", transform=failing)
    failing.at = None
    (tmp_path / "out/x.txt").write_text("not empty")
    with pytest.raises(ConfigError, match="unfinished packing"):
        pack(source / "class0", tmp_path / "out", append=True)


def test_a_source_that_changed_since_it_was_planned(source: Path, tmp_path: Path) -> None:
    """A resumed packing follows its plan: another version of a file is an error and is never mixed in."""
    failing.at = 17
    with pytest.raises(DataError):
        pack(source, tmp_path / "out", bytes_max=9_000, transform=failing, jobs=1)
    failing.at = None
    (source / "class2/023.jpg").write_bytes(b"another")
    with pytest.raises(ObjectChangedError):
        pack(source, tmp_path / "out", bytes_max=9_000, transform=failing)
    pack(source, tmp_path / "out", bytes_max=9_000, transform=failing, overwrite=True)
    assert everything(tmp_path / "out")["class2/023"]["jpg"] == b"another"


def test_a_stored_plan_reads_nothing_outside_the_source(source: Path, tmp_path: Path) -> None:
    """A plan that somebody else has put beside the shards, and that reads another directory, is refused."""
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key").write_text("secret")
    with Packing(source, f"{tmp_path}/out/", PackOptions(), connection={}) as packing:
        plan = packing.plan(append=False, overwrite=False)
        plan.roots = [f"{tmp_path}/secrets"]
        packing.save()
    with pytest.raises(DataError, match=r"the stored plan reads .*secrets, which does not belong to the source"):
        pack(source, tmp_path / "out")
    assert everything(tmp_path / "out") == {}
    pack(source, tmp_path / "out", overwrite=True)


def test_a_file_that_went_away(source: Path, tmp_path: Path) -> None:
    """A file that cannot be read stops the packing with an error that names it; no shard is visible in part."""
    options = PackOptions(bytes_max=9_000)
    with Packing(source, f"{tmp_path}/out/", options, connection={}) as packing:
        packing.plan(append=False, overwrite=False)
        packing.save()
    (source / "class2/002.jpg").unlink()
    with pytest.raises(StoreError, match=r"002\.jpg"):
        pack(source, tmp_path / "out", bytes_max=9_000)
    for shard in shards(tmp_path / "out"):
        assert samples_of(shard)


def test_a_dry_run_writes_nothing(source: Path, tmp_path: Path) -> None:
    """Planning changes nothing, also if it will overwrite shards."""
    with Packing(source, f"{tmp_path}/out/", PackOptions(), connection={}) as packing:
        assert isinstance(packing.plan(append=False, overwrite=False), PackPlan)
    assert not (tmp_path / "out").exists()
    pack(source, tmp_path / "out")
    before = [path.read_bytes() for path in sorted((tmp_path / "out").rglob("*")) if path.is_file()]
    with Packing(source, f"{tmp_path}/out/", PackOptions(samples_max=3), connection={}) as packing:
        assert len(packing.plan(append=False, overwrite=True).shards) == 8
    assert [path.read_bytes() for path in sorted((tmp_path / "out").rglob("*")) if path.is_file()] == before


def test_what_packing_keeps_is_no_data(source: Path, tmp_path: Path) -> None:
    """Objects under ``.penstock/`` are listed neither as shards nor as objects, even with a shard's name."""
    pack(source, tmp_path / "out")
    (tmp_path / "out/.penstock/old.tar").write_bytes(bytes(1024))
    for source_of in (ps.shards, ps.objects):
        finder = ShardFinder(source_of(f"{tmp_path}/out/").source, fetch=None)
        assert [shard.key for shard in finder.find()] == ["shard-000000.tar"]
        finder.close()


def test_shards_are_no_files_to_pack(source: Path, tmp_path: Path) -> None:
    """A folder of shards is refused, with the command that rewrites shards as a hint."""
    pack(source, tmp_path / "out")
    with pytest.raises(ConfigError, match="penstock convert"):
        pack(tmp_path / "out", tmp_path / "again")
    with pytest.raises(ConfigError, match="already describes shards"):
        pack(ps.shards(f"{tmp_path}/out/"), tmp_path / "again")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "rar"}, "not one of tar"),
        ({"bytes_max": 0}, "at least 1"),
        ({"samples_max": 0}, "at least 1"),
        ({"name": "x.tar"}, "exactly one number"),
        ({"name": "../%06d.tar"}, "plain relative path"),
        ({"name": "x-%06d.tar", "split": {"a": 1.0}}, "{split}"),
        ({"name": "x-%06d.zip"}, "not one of tar"),
        ({"name": "x-%06d.webp"}, "ends with '.webp', which is not the suffix of a shard format"),
        ({"name": "x-%06d.jpg", "format": "tar"}, "x-%06d.tar"),
        ({"name": "x-%06d.tar", "format": "tfrecord"}, "suffix of tar"),
        ({"split": {"a": 0.5}}, "sum to 0.5"),
        ({"split": {"a/b": 1.0}}, "letters, digits"),
        ({"fields": "a=b:nothing"}, "not one of file"),
        ({"fields": "a=b,c=b"}, "a field twice"),
        ({"fields": "a=,b"}, "SOURCE=FIELD"),
        ({"seed": -1}, "must be a whole number in"),
        ({"group_by": "folder"}, "'stem' or 'file'"),
        ({"transform": 3}, "function"),
        ({"jobs": 0}, "at least 1"),
        ({"append": True, "overwrite": True}, "exclude each other"),
    ],
)
def test_options_that_cannot_be(source: Path, tmp_path: Path, options: dict, message: str) -> None:
    """Each invalid argument is refused with its value and bound before anything is written."""
    with pytest.raises(ConfigError, match=message):
        pack(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_advice_is_given_outside_the_usual_range() -> None:
    """Shard sizes below 100 MB and above 1 GB give a warning with the reason."""
    assert advice(256_000_000) is None
    assert "seeks" in advice(1_000_000)
    assert "ranks" in advice(5_000_000_000)


def test_the_module_is_the_function(source: Path, tmp_path: Path) -> None:
    """``penstock.pack`` is callable, and has ``writer`` and ``verify``."""
    import penstock.pack as module

    assert module(source, tmp_path / "out").samples_count == 24  # type: ignore[operator]
    assert callable(module.writer)


def test_verifying_finds_what_is_wrong(source: Path, tmp_path: Path) -> None:
    """A flipped bit, a missing shard, an extra one and one of another size are problems with their URLs."""
    pack(source, tmp_path / "out", bytes_max=9_000, verify=True)
    first, second, third, *_ = shards(tmp_path / "out")
    status = first.stat()
    data = bytearray(first.read_bytes())
    data[600] ^= 1
    with first.open("r+b") as file:
        file.write(data)
    os.utime(first, ns=(status.st_atime_ns, status.st_mtime_ns))  # as the pin sees it, the same version
    second.unlink()
    third.write_bytes(third.read_bytes() + bytes(512))
    (tmp_path / "out/zzz.tar").write_bytes(bytes(1024))
    found = {problem.url.rpartition("/")[2]: str(problem.error) for problem in verify(f"{tmp_path}/out/").problems}
    assert set(found) == {first.name, second.name, third.name, "zzz.tar"}
    assert "checksum of sample" in found[first.name]
    assert "does not exist" in found[second.name]
    assert "its index says" in found[third.name]
    assert "run `penstock index` again" in found[third.name]
    assert "it is in no index" in found["zzz.tar"]
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "a.tar").write_bytes(bytes(1024))
    with pytest.raises(ConfigError, match="no index has the shards"):
        verify(f"{alone}/", index_dir=tmp_path / "nowhere")


def test_progress_adds_up(source: Path, tmp_path: Path) -> None:
    """The reported plan, progress and finished shards agree."""

    class Heard:
        def __init__(self) -> None:
            self.total = self.samples = self.bytes = self.known = self.new = self.verified_count = 0

        def planned(self, shards_count: int, samples_count: int, source_bytes: int) -> None:
            self.total = source_bytes

        def progressed(self, samples_count: int, source_bytes: int) -> None:
            self.samples += samples_count
            self.bytes += source_bytes

        def finished(self, row: object, *, known: bool) -> None:
            self.known += known
            self.new += not known

        def verified(self, row: object) -> None:
            self.verified_count += 1

    heard = Heard()
    packed = pack(source, tmp_path / "out", bytes_max=9_000, listener=heard, verify=True)
    assert (heard.samples, heard.bytes) == (24, heard.total)
    assert (heard.known, heard.new, heard.verified_count) == (0, len(packed.rows), len(packed.rows))
    assert heard.total == sum(path.stat().st_size for path in source.rglob("*") if path.is_file())


def test_text_goes_through(tmp_path: Path) -> None:
    """Non-ASCII names, spaces and percent signs survive, also after a resume."""
    root = tmp_path / "a b%20c"
    root.mkdir()
    (root / "ü n.txt").write_text("x")
    pack(root, f"{tmp_path}/out%20/")
    pack(root, f"{tmp_path}/out%20/")
    (shard,) = shards(tmp_path / "out%20")
    assert samples_of(shard) == [("ü n", {"txt": b"x"})]
    shard.unlink()
    pack(root, f"{tmp_path}/out%20/")
    assert samples_of(shard) == [("ü n", {"txt": b"x"})]


@pytest.mark.parametrize("same", [True, False], ids=["same", "other"])
def test_two_packings_at_once(source: Path, tmp_path: Path, *, same: bool) -> None:
    """Of two runs, the one that began last goes on; the first stops before it commits a shard, and says why."""
    other = tmp_path / "other"
    other.mkdir()
    for number in range(24):
        (other / f"{number:03d}.jpg").write_bytes(b"other")
    options = PackOptions(samples_max=5)
    folder = f"{tmp_path}/dst/"
    with (
        Packing(source, folder, options, connection={}) as first,
        Packing(source if same else other, folder, options, connection={}) as second,
    ):
        for packing in (first, second):
            packing.plan(append=False, overwrite=False)
        for packing in (first, second):
            packing.save()
        with pytest.raises(ConfigError, match=r"another run .* has begun to write to"):
            first.run(ExecutionOptions(), NullListener())
        assert not list((tmp_path / "dst").glob("*.tar"))
        packed = second.run(ExecutionOptions(), NullListener())
    assert packed.samples_count == 24
    assert not verify(folder).problems


def test_a_shard_that_was_replaced_meanwhile(source: Path, tmp_path: Path) -> None:
    """A shard that another program replaced or added is noticed before the packing counts as finished."""

    def replacing(sample: dict[str, Any]) -> dict[str, Any]:
        (tmp_path / "dst/shard-000004.tar").write_bytes(b"")
        return {"jpg": sample["jpg"]}

    with pytest.raises(DataError, match=r"shard-000004.tar exists, and this run did not write it"):
        pack(source, tmp_path / "dst", samples_max=6, transform=replacing)
    (tmp_path / "dst/shard-000004.tar").unlink()
    assert pack(source, tmp_path / "dst", samples_max=6, transform=replacing).shards_written == 0  # all are there


@pytest.mark.parametrize("name", ["tar", "recordio", "jsonl", "mds", "tfrecord", "tar.gz", "tar.zst", "parquet", "zip"])
def test_nothing_is_verified_without_a_checksum(source: Path, tmp_path: Path, name: str) -> None:
    """With an index from an epoch, overwritten bytes in a value are found, or the shard is not called verified."""
    out = tmp_path / "out"
    if name == "zip":
        out.mkdir()
        with zipfile.ZipFile(out / "x.zip", "w") as archive:
            for number in range(24):
                archive.writestr(f"{number:03d}.jpg", b"abcdefgh" * 50)
    else:
        field = {"jsonl": "text", "recordio": "record"}.get(name, "jpg")
        samples = [{"__key__": f"{number:03d}", field: "abcdefgh" * 50} for number in range(24)]
        pack(samples, out, format=name, allow_loss=True)
        shutil.rmtree(out / ".penstock")
    with ps.Loader(ps.shards(f"{out}/").batch(4), index_dir=tmp_path / "index") as loader:
        assert sum(1 for _ in loader)
    verified = verify(f"{out}/", index_dir=tmp_path / "index")
    is_checked = name in ("tfrecord", "tar.gz", "tar.zst", "parquet", "zip")
    assert (len(verified.failed), len(verified.unchecked), verified.shards_count) == (0, not is_checked, is_checked)
    (shard,) = (path for path in out.iterdir() if path.is_file() and path.name != "index.json")
    status, data = shard.stat(), bytearray(shard.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 4] = bytes(byte ^ 1 for byte in data[len(data) // 2 : len(data) // 2 + 4])
    with shard.open("r+b") as file:
        file.write(data)
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    verified = verify(f"{out}/", index_dir=tmp_path / "index")
    assert len(verified.problems) == 1
    assert verified.shards_count == 0
    assert verified.failed or not is_checked


def test_mixed_extensions_are_one_field(tmp_path: Path) -> None:
    """`.JPG` is `.jpg` by itself; alternatives of a field take `.jpeg` and `.png` as well, when packing and when reading."""
    names = ["a.jpg", "b.JPG", "c.jpeg", "d.png"]
    (tmp_path / "source").mkdir()
    for name in names:
        (tmp_path / "source" / name).write_bytes(name.encode())
    with pytest.raises(DataError, match="'jpg', only"):
        pack(tmp_path / "source", tmp_path / "one", fields="jpg")
    pack(tmp_path / "source", tmp_path / "one", fields="jpg;jpeg;png")
    wanted = {name[0]: {"jpg": name.encode()} for name in names}
    assert everything(tmp_path / "one") == wanted
    pack(tmp_path / "source", tmp_path / "image", fields="png;jpeg;jpg=image:bytes")
    assert everything(tmp_path / "image") == {key: {"image": each["jpg"]} for key, each in wanted.items()}
    pack(tmp_path / "source", tmp_path / "kept")
    assert {name for each in everything(tmp_path / "kept").values() for name in each} == {"jpg", "jpeg", "png"}
    with ps.Loader(ps.shards(f"{tmp_path}/kept/").decode(ps.Bytes("jpg;jpeg;png")).batch(4)) as loader:
        [batch] = loader
    assert batch["jpg"] == [name.encode() for name in names]


def test_the_names_of_classes_can_be_read(source: Path, tmp_path: Path) -> None:
    """They are with the packed shards, however these are named, and absent where labels are numbers or there are none."""
    names = ("class0", "class1", "class2")
    packed = pack(source, tmp_path / "out", labels="folders", samples_max=10)
    assert packed.classes == names
    assert pack(source, tmp_path / "out", labels="folders", samples_max=10).classes == names  # nothing is left to do
    for urls in (
        f"{tmp_path}/out/",
        f"{tmp_path}/out",
        f"{tmp_path}/out/*.tar",
        f"{tmp_path}/out/shard-00000{{0..2}}.tar",
    ):
        with ps.Loader(ps.shards(urls).batch(2)) as loader:
            assert loader.classes == names, urls
    made = ps.shards([str(path) for path in shards(tmp_path / "out")]).decode(ps.Integer("cls"))
    with made.open() as dataset:
        assert dataset.classes is not None
        assert dataset.classes[dataset["class1/004"]["cls"]] == "class1"
    assert pack(source, tmp_path / "bare").classes is None
    with ps.Loader(ps.mix({ps.shards(f"{tmp_path}/{name}/"): 1 for name in ("out", "bare")}).batch(2)) as loader:
        assert loader.classes is None
    with ps.objects(f"{source}/").open() as files:
        assert files.classes is None


def test_a_map_dataset_has_classes(source: Path, tmp_path: Path) -> None:
    """As torchvision's data sets do."""
    pytest.importorskip("torch")
    pack(source, tmp_path / "out", labels="folders")
    assert ps.torch.MapDataset(ps.shards(f"{tmp_path}/out/")).classes == ("class0", "class1", "class2")


def test_a_writer_shows_where_it_writes(tmp_path: Path) -> None:
    """And how far it is."""
    with ps.pack.writer(f"{tmp_path}/x-%06d.tar") as out:
        out.write({"__key__": "a", "txt": "x"})
        assert repr(out) == f"<SequenceWriter 'file://{tmp_path}/': 1 samples, open>"
    assert repr(out).endswith("1 samples, closed>")
