"""Two packings or conversions are the same if source, options and transform are; otherwise the second is refused."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import ConfigError, DataError, PenstockError
from penstock.pack import convert, pack, verify
from penstock.pack.options import PackOptions, source_digest, unsigned_url


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return six folders of two samples each."""
    for number in range(12):
        path = tmp_path / "source" / f"part{number // 2}" / f"{number:03d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text {number}")
    return tmp_path / "source"


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of the shards by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


class Stop(BaseException):
    """Ends a run in the middle, as a signal does."""


def interrupted(size: int) -> Callable[[dict], dict]:
    """Return a transform that pads to `size`; while ``armed`` is set, it ends the run at the seventh sample."""

    def transform(sample: dict) -> dict:
        if ARMED and sample["txt"] == b"text 7":
            raise Stop
        return {"txt": sample["txt"].ljust(size)}

    return transform


ARMED: list[bool] = []


@pytest.fixture
def half(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the destination of an interrupted packing with ``interrupted(20)``."""
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "ARMED", [True])
    with pytest.raises(Stop):
        pack(source, tmp_path / "out", samples_max=2, transform=interrupted(20), transform_version="20", jobs=1)
    monkeypatch.setattr(module, "ARMED", [])
    assert contents(tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"transform": interrupted(30), "transform_version": "30"}, "another transform"),
        ({"transform": interrupted(20), "transform_version": None}, "another transform"),
        ({"samples_max": 3}, "samples_max=2 instead of 3"),
        ({"format": "jsonl"}, "format='tar' instead of 'jsonl'"),
        ({"shuffle": True}, "shuffle=False instead of True"),
        ({"labels": "folders"}, "another labels|labels=None instead of 'folders'"),
        ({"source": "part0"}, "another source"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_another_job_does_not_go_on(source: Path, half: Path, change: dict[str, Any], what: str) -> None:
    """Resuming with another transform, option or source is refused, names the difference, and changes nothing."""
    before = contents(half)
    options: dict[str, Any] = {
        "samples_max": 2, "transform": interrupted(20), "transform_version": "20", "jobs": 1,
    } | change  # fmt: skip
    where = source / options.pop("source", "")
    for append in (False, True):
        with pytest.raises(ConfigError, match=what):
            pack(where, half, append=append, **options)
    assert contents(half) == before
    packed = pack(source, half, samples_max=2, transform=interrupted(20), transform_version="20")
    assert (packed.samples_count, packed.shards_written) == (12, 6 - len(before))
    assert not verify(str(half)).problems


def resize(size: int) -> Callable[[dict], dict]:
    return lambda sample: {"txt": sample["txt"].ljust(size)}


def test_closures_tell_transforms_apart(source: Path, tmp_path: Path) -> None:
    """The same code with another value in its closure is another transform; with an equal value it is the same."""
    pack(source, tmp_path / "out", transform=resize(224))
    assert pack(source, tmp_path / "out", transform=resize(224)).shards_written == 0
    with pytest.raises(ConfigError, match="what was packed here has another transform"):
        pack(source, tmp_path / "out", transform=resize(256))


@pytest.mark.parametrize("convert_them", [False, True], ids=["pack", "convert"])
def test_every_url_of_a_list_counts(source: Path, tmp_path: Path, convert_them: bool) -> None:
    """Changing the third of five URLs, or their order, makes another source."""
    if convert_them:
        for number in range(6):
            pack(source / f"part{number}", tmp_path / "tars" / f"x{number}-%d.tar", append=True)
        urls = [f"{tmp_path}/tars/x{number}-0.tar" for number in range(6)]

        def run(chosen: list[str]) -> int:
            return convert(ps.shards(chosen), tmp_path / "out", to="tfrecord", key_field="k").shards_written
    else:
        urls = [f"{source}/part{number}/{2 * number:03d}.txt" for number in range(6)]

        def run(chosen: list[str]) -> int:
            return pack(ps.objects(chosen), tmp_path / "out").shards_written

    assert run(urls[:5])
    assert run(urls[:5]) == 0
    before = contents(tmp_path / "out")
    for other in ([*urls[:2], urls[5], *urls[3:5]], urls[:4], [urls[1], urls[0], *urls[2:5]]):
        with pytest.raises(ConfigError, match="another source"):
            run(other)
    assert contents(tmp_path / "out") == before


def test_every_packing_of_a_destination_can_be_run_again(source: Path, tmp_path: Path) -> None:
    """After others were appended, a finished packing still does nothing, except that it writes its own missing shard."""
    parts = [source / f"part{number}" for number in range(3)]
    for part in parts:
        pack(part, tmp_path / "out", append=True, samples_max=1)
    before = contents(tmp_path / "out")
    assert len(before) == 6
    for part in parts:
        assert pack(part, tmp_path / "out", samples_max=1).shards_written == 0
    (tmp_path / "out/shard-000002.tar").unlink()
    assert [pack(part, tmp_path / "out", samples_max=1).shards_written for part in parts] == [0, 1, 0]
    assert contents(tmp_path / "out") == before
    assert not verify(f"{tmp_path}/out/").problems


def test_a_finished_packing_of_what_changed_since(source: Path, tmp_path: Path) -> None:
    """Added, removed or changed files are an error that counts them, not a packing that has nothing to do."""
    pack(source, tmp_path / "out")
    before = contents(tmp_path / "out")
    (source / "part0/100.txt").write_text("new")
    (source / "part1/002.txt").unlink()
    (source / "part2/004.txt").write_text("changed")
    for append in (False, True):
        with pytest.raises(DataError, match="1 added, 1 removed, 1 changed"):
            pack(source, tmp_path / "out", append=append)
    assert contents(tmp_path / "out") == before
    assert pack(source, tmp_path / "out", overwrite=True).samples_count == 12


def test_a_finished_conversion_of_what_changed_since(source: Path, tmp_path: Path) -> None:
    """A source shard that was replaced is an error."""
    pack(source, tmp_path / "tars", samples_max=4)
    convert(f"{tmp_path}/tars/", tmp_path / "out", to="parquet")
    assert convert(f"{tmp_path}/tars/", tmp_path / "out", to="parquet").shards_written == 0
    (tmp_path / "tars/shard-000001.tar").write_bytes((tmp_path / "tars/shard-000000.tar").read_bytes() + bytes(512))
    with pytest.raises(DataError, match=r"0 added, 0 removed, 1 changed \(shards"):
        convert(f"{tmp_path}/tars/", tmp_path / "out", to="parquet")


@pytest.mark.parametrize("what", ["labels", "table"])
def test_a_table_that_changed_while_it_was_packed(source: Path, tmp_path: Path, what: str) -> None:
    """A table of samples or labels must not change before the packing is finished."""
    table = source / "rows.csv"
    options: dict[str, Any] = {"samples_max": 2, "jobs": 1, "transform": interrupted(20), "transform_version": "20"}
    rows = [f"part{number // 2}/{number:03d}.txt,{number}" for number in range(12)]
    where: Path = table
    if what == "labels":
        where, table = source, tmp_path / "labels.csv"
        rows = [row.replace(".txt", "") for row in rows]
        options["labels"] = str(table)
    table.write_text("\n".join(["path,label", *rows]))
    ARMED.append(True)
    with pytest.raises(Stop):
        pack(where, tmp_path / "out", **options)
    ARMED.clear()
    before = contents(tmp_path / "out")
    table.write_text("\n".join(["path,label", *rows]).replace(",3", ",33"))
    with pytest.raises(DataError, match="0 added, 0 removed, 1 changed"):
        pack(where, tmp_path / "out", **options)
    assert contents(tmp_path / "out") == before


def test_a_relative_path_is_where_it_was(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same relative path in another working directory is another source; an absolute path may be the same one."""
    other = tmp_path / "other/source"
    other.mkdir(parents=True)
    (other / "a.txt").write_text("other")
    monkeypatch.chdir(tmp_path)
    pack("source", tmp_path / "out")
    assert pack(source, tmp_path / "out").shards_written == 0
    assert pack(f"{source.as_uri()}/", tmp_path / "out").shards_written == 0
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(ConfigError, match="another source"):
        pack("source", tmp_path / "out")


def test_an_endpoint_is_part_of_a_source() -> None:
    """Buckets of the same name at two endpoints are two sources; a file has no endpoint."""
    endpoints = [{"endpoint_url": f"http://127.0.0.1:{port}"} for port in (1, 2)]
    assert len({source_digest("s3://bucket/x/", each) for each in endpoints}) == 2
    assert len({source_digest("/data/x/", each) for each in endpoints}) == 1
    assert len({source_digest(ps.shards("s3://bucket/x/", format=name), {}) for name in ("tar", "tfrecord")}) == 2


@pytest.mark.parametrize(
    ("signed", "bare"),
    [
        (
            "https://h/a.csv?X-Amz-Signature=1&X-Amz-Date=2&versionId=3&X-Amz-Credential=4",
            "https://h/a.csv?versionId=3",
        ),
        ("https://h/a.csv?GoogleAccessId=x&Expires=1&Signature=2", "https://h/a.csv"),
        ("https://c.blob/a.csv?sv=1&se=2&sp=r&sig=3&comp=x", "https://c.blob/a.csv?comp=x"),
        ("https://user:secret@h/a.csv", "https://h/a.csv"),
        ("https://h/a.csv?id=7&sv=2&Expires=1", "https://h/a.csv?id=7&sv=2&Expires=1"),
        ("s3://bucket/part-?.tar", "s3://bucket/part-?.tar"),
    ],
)
def test_signing_again_makes_no_other_source(signed: str, bare: str) -> None:
    """Parameters of a signature, users and passwords do not matter; every other parameter does."""
    assert unsigned_url(signed) == bare


def test_a_plan_of_an_earlier_version_goes_on(source: Path, tmp_path: Path) -> None:
    """This version finishes a packing that an earlier version began and identified by its options only."""
    packed = pack(source, tmp_path / "out", samples_max=2)
    kept = tmp_path / "out/.penstock/pack"
    (path,) = kept.glob("*.plan")
    lines = gzip.decompress(path.read_bytes()).split(b"\n")
    head = json.loads(lines[0])
    del head["job"]
    head["identity"] = PackOptions(samples_max=2).identity_before(str(source))
    path.unlink()
    path.with_suffix(".done").unlink()
    (kept / f"{head['identity']}.plan").write_bytes(gzip.compress(b"\n".join([json.dumps(head).encode(), *lines[1:]])))
    (tmp_path / "out/shard-000003.tar").unlink()
    again = pack(source, tmp_path / "out", samples_max=2)
    assert (again.shards_written, again.samples_count) == (1, packed.samples_count)
    with pytest.raises(ConfigError, match="an earlier version of penstock started it"):
        pack(source, tmp_path / "out", samples_max=3)


def test_a_transform_that_cannot_be_compared(source: Path, tmp_path: Path) -> None:
    """A transform without a digest is refused early, unless it has a version; a version needs a transform."""
    with (tmp_path / "log").open("w") as file:

        def logged(sample: dict) -> dict:
            file.write(sample["__key__"])
            return sample

        with pytest.raises(ConfigError, match=r"file holds an object of _io\.TextIOWrapper"):
            pack(source, tmp_path / "out", transform=logged)
        assert not (tmp_path / "out").exists()
        pack(source, tmp_path / "out", transform=logged, transform_version="1")
        assert pack(source, tmp_path / "out", transform=logged, transform_version="1").shards_written == 0
        with pytest.raises(ConfigError, match="another transform"):
            pack(source, tmp_path / "out", transform=logged, transform_version="2")
    with pytest.raises(PenstockError, match="needs a transform"):
        pack(source, tmp_path / "out", transform_version="1")
