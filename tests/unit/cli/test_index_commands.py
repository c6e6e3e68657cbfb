"""``penstock index`` and ``penstock manifest`` on directories and memory stores, in this process."""

from __future__ import annotations

import io
import json
import uuid
from pathlib import Path

import pytest

from penstock.cli.app import run
from penstock.formats import TarWriter, TFRecordWriter
from penstock.index import ManifestEntry, read_manifest
from penstock.store.memory import MemoryStore


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(name=f"cli-{uuid.uuid4().hex}")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the user's cache directory for a test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "penstock" / "index"


def tar(count: int) -> bytes:
    out = io.BytesIO()
    writer = TarWriter(out.write)
    for number in range(count):
        writer.add({"__key__": f"{number:04d}", "cls": str(number)})
    writer.finish()
    return out.getvalue()


def records(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_index_says_what_it_did(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line goes to stderr and nothing to stdout; the second time nothing is read."""
    data = tmp_path / "data"
    data.mkdir()
    for number in range(3):
        (data / f"{number}.tar").write_bytes(tar(5))
    assert run(["index", f"{data}/"]) == 0
    out, errors = capsys.readouterr()
    assert out == ""
    assert "15 samples in 3 shards (3 read)" in errors
    assert str(cache) in errors
    assert run(["index", f"{data}/"]) == 0
    assert "15 samples in 3 shards (3 known already)" in capsys.readouterr().err
    assert run(["index", "--again", f"{data}/"]) == 0
    assert "(3 read)" in capsys.readouterr().err


def test_an_upload_that_was_cut_off_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tar of 0 bytes fails ``index`` and ``verify``, which name and count it; one with only an end mark does not."""
    data = tmp_path / "data"
    data.mkdir()
    for name, shard in (("a", tar(5)), ("b", b""), ("c", tar(0))):
        (data / f"{name}.tar").write_bytes(shard)
    assert run(["index", f"{data}/"]) == 1
    errors = capsys.readouterr().err
    assert "b.tar: the object has 0 bytes" in errors
    assert "5 samples in 2 shards" in errors
    assert "1 failed" in errors
    assert run(["verify", f"{data}/"]) == 1
    errors = capsys.readouterr().err
    assert "b.tar" in errors
    assert "1 failed" in errors
    (data / "b.tar").unlink()
    assert run(["verify", f"{data}/"]) == 0


def test_index_beside_the_shards(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The index lies under .penstock/, which is not listed as a shard; JSON has a line per shard."""
    for number in range(2):
        (tmp_path / f"{number}.tar").write_bytes(tar(4 + number))
    for how in ("read", "known"):
        assert run(["index", "--beside", "--json", f"{tmp_path}/"]) == 0
        first, second, summary = records(capsys.readouterr().out)
        assert (first["key"], first["how"], first["samples_count"]) == ("0.tar", how, 4)
        assert second["key"] == "1.tar"
        assert {name: summary[name] for name in ("shards", "samples", "failed", how)} == {
            "shards": 2, "samples": 9, "failed": 0, how: 2,
        }  # fmt: skip
        assert summary["index"] == f"file://{tmp_path}/.penstock/"
    assert not cache.exists()


def test_index_brings_up_to_date_what_lies_beside(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An index beside the shards is used and extended; only --index-dir makes another one."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "0.tar").write_bytes(tar(4))
    assert run(["index", "--beside", f"{data}/"]) == 0
    (data / "1.tar").write_bytes(tar(5))
    assert run(["index", f"{data}/"]) == 0
    said = capsys.readouterr().err.splitlines()[-1]
    assert "9 samples in 2 shards (1 known already, 1 read)" in said
    assert said.endswith(f"file://{data}/.penstock/")
    assert not cache.exists()
    (data / ".penstock/dataset.index").write_bytes(b"damaged")
    assert run(["index", f"{data}/"]) == 0
    assert capsys.readouterr().err.strip().endswith(f"file://{data}/.penstock/")
    assert run(["index", "--index-dir", f"{tmp_path}/other", f"{data}/"]) == 0
    assert f"{tmp_path}/other" in capsys.readouterr().err


def test_index_of_a_corrupt_shard_fails_and_does_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A corrupt shard is named with its error; the others are indexed, and the exit code is 1."""
    (tmp_path / "a.tar").write_bytes(b"no tar at all" * 99)
    (tmp_path / "b.tar").write_bytes(tar(3))
    folder = tmp_path / "index"
    assert run(["index", "--index-dir", str(folder), f"{tmp_path}/"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert "a.tar" in errors[0]
    assert "3 samples in 1 shard (1 read), 1 failed" in errors[1]
    assert run(["index", "--json", "--index-dir", str(folder), f"{tmp_path}/"]) == 1
    failed = [line for line in records(capsys.readouterr().out) if line["action"] == "failed"]
    assert [line["error"] for line in failed] == ["CorruptShardError"]


def test_index_leaves_corrupt_samples_out_where_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--skip-corrupt`` indexes the good samples of a shard and says how many it left out."""
    out = io.BytesIO()
    writer = TFRecordWriter(out.write)
    spans = [writer.add({"record": b"x" * 40}) for _ in range(5)]
    writer.finish()
    damaged = bytearray(out.getvalue())
    damaged[spans[2].start + 20] ^= 1
    (tmp_path / "0.tfrecord").write_bytes(damaged)
    assert run(["index", f"{tmp_path}/"]) == 1
    assert "1 failed" in capsys.readouterr().err
    assert run(["index", "--skip-corrupt", f"{tmp_path}/"]) == 0
    assert "4 samples in 1 shard (1 read), 1 corrupt sample in 1 shard left out" in capsys.readouterr().err


def test_index_refuses_what_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two places at once, and a folder without shards, are errors of one line."""
    assert run(["index", "--beside", "--index-dir", "x", f"{tmp_path}/"]) == 2
    assert "excludes" in capsys.readouterr().err
    assert run(["index", f"{tmp_path}/"]) == 1
    assert "no shards here" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_manifest_of_a_folder(tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A manifest has every object below the URL with size and ETag, except .penstock/, and is read back as URLs."""
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    data = tmp_path / "data"
    for name, content in (
        ("a/1.tar", b"xyz"),
        ("b.jpg", b""),
        (".penstock/dataset.index", b"i"),
        ("c/.penstock/x", b"i"),
    ):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(content)
    target = tmp_path / f"out.manifest.{suffix}"
    assert run(["manifest", str(data), "-o", str(target)]) == 0
    assert "2 objects" in capsys.readouterr().err
    entries = read_manifest(target.read_bytes(), url=str(target))
    assert [(entry.url, entry.size_bytes) for entry in entries] == [
        (f"file://{data}/a/1.tar", 3),
        (f"file://{data}/b.jpg", 0),
    ]
    assert all(entry.etag for entry in entries)


def test_manifest_to_stdout_and_to_a_store(memory: MemoryStore, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """``-o -`` prints the manifest; at a URL it is written at once, with keys relative to the listed folder."""
    info = memory.write("t/1.tar", b"abc")
    assert run(["manifest", f"memory://{memory.name}/t", "-o", "-"]) == 0
    out = capsysbinary.readouterr().out
    expected = [ManifestEntry(f"memory://{memory.name}/t/1.tar", 3, info.etag)]
    assert read_manifest(out, url="x") == expected
    assert run(["manifest", f"memory://{memory.name}/t/", "-o", f"memory://{memory.name}/lists/m.jsonl"]) == 0
    assert bytes(memory.read("lists/m.jsonl").data) == out


def test_manifest_of_nothing_leaves_nothing(
    memory: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty folder, and a folder as the target, are errors, and no file appears."""
    target = tmp_path / "m.jsonl"
    assert run(["manifest", f"memory://{memory.name}/", "-o", str(target)]) == 1
    assert "no object lies below" in capsys.readouterr().err
    assert not target.exists()
    memory.write("x", b"")
    assert run(["manifest", f"memory://{memory.name}/", "-o", f"{tmp_path}/"]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_numbers_agree_with_their_nouns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One is a shard; of none, nothing is said about how they were read."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.tar").write_bytes(tar(1))
    assert run(["index", f"{data}/"]) == 0
    assert "1 sample in 1 shard (1 read)," in capsys.readouterr().err
    (data / "a.tar").write_bytes(b"")
    assert run(["index", "--index-dir", f"{tmp_path}/index", f"{data}/"]) == 1
    assert "0 samples in 0 shards, 1 failed" in capsys.readouterr().err
