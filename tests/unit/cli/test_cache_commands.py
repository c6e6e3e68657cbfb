"""``penstock cache`` on directories, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock import ByteRange, CacheConfig, connect
from penstock.cli.app import run
from penstock.fetch import PlanItem
from penstock.store.local import LocalStore


@pytest.fixture
def warmed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, Path]:
    """Return a directory of two objects, and a cache that has both."""
    data, folder = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    for name in ("a", "b"):
        (data / name).write_bytes(name.encode() * 10_000)
    assert run(["cache", "warm", f"{data}/", "--cache", f"{folder}:100MB"]) == 0
    assert "2 objects" in capsys.readouterr().out
    return data, folder


def test_warming_again_fetches_nothing(warmed: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Objects in the cache are verified, not fetched, and the JSON says so."""
    data, folder = warmed
    assert run(["cache", "warm", f"{data}/", "--cache", f"{folder}:100MB", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["requests_count"], done["size_bytes"], done["fetched_bytes"]) == (2, 20_000, 0)


def test_warming_what_was_accessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of JSON lines names the ranges to read; an invalid line is refused with its number."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a").write_bytes(bytes(100_000))
    lines = tmp_path / "accesses.jsonl"
    lines.write_text('{"key": "a", "start": 5000, "end": 5010}\n{"key": "a"}\n')
    command = ["cache", "warm", f"{tmp_path}/data/", "--cache", f"{tmp_path}/cache:100MB", "--json"]
    assert run([*command, "--accesses", str(lines)]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["requests_count"], done["size_bytes"]) == (2, 100_010)
    lines.write_text('{"key": "a"}\n{"start": 5}\n')
    assert run([*command, "--accesses", str(lines)]) == 2
    assert "accesses.jsonl:2" in capsys.readouterr().err


def test_warming_more_than_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If objects are evicted while others are read, the command says so and fails, because a job would not find them."""
    (tmp_path / "data").mkdir()
    for name in "abc":
        (tmp_path / f"data/{name}").write_bytes(bytes(4_000_000))
    command = ["cache", "warm", f"{tmp_path}/data/", "--cache", f"{tmp_path}/cache:9MB"]
    assert run(command) == 1
    assert "evicted again: the cache or its disk is too small" in capsys.readouterr().err


def test_warming_by_a_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Braces and wildcards name shards, as in a pipeline."""
    (tmp_path / "data").mkdir()
    for number in range(4):
        (tmp_path / f"data/{number}.tar").write_bytes(bytes(1000))
    for pattern, count in (("{1..3}.tar", 3), ("*.tar", 4)):
        cache = f"{tmp_path}/cache-{count}:100MB"
        assert run(["cache", "warm", f"{tmp_path}/data/{pattern}", "--cache", cache, "--json"]) == 0
        done = json.loads(capsys.readouterr().out)
        assert (done["requests_count"], done["fetched_bytes"]) == (count, 1000 * count)


def test_warming_a_pipeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``module:attribute`` names a pipeline or a function that returns one; all its sources and indexes are read."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.tar").write_bytes(bytes(10_240))
    (tmp_path / "training_of_this_test.py").write_text(
        "import penstock as ps\n"
        f"one = ps.shards({str(tmp_path / 'a')!r} + '/')\n"
        f"def both(): return ps.mix({{one: 1, ps.objects({str(tmp_path / 'b')!r} + '/'): 1}})\n"
        "neither = 7\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["--cache", f"{tmp_path}/cache:100MB", "--json"]
    for name, count, fetched_bytes in (("one", 1, 10_240), ("both", 2, 10_240)):
        assert run(["cache", "warm", f"training_of_this_test:{name}", *command]) == 0
        done = json.loads(capsys.readouterr().out)
        assert (done["requests_count"], done["fetched_bytes"]) == (count, fetched_bytes)
    for name, said in (("neither", "not a pipeline"), ("missing", "no attribute"), ("all", "no attribute")):
        assert run(["cache", "warm", f"training_of_this_test:{name}", *command]) == 2
        assert said in capsys.readouterr().err


def test_a_recorded_epoch_warms_another_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Accesses that one node recorded, with ranges of large objects, fill the cache of another node."""
    (tmp_path / "data").mkdir()
    for name in ("a", "b"):
        (tmp_path / "data" / name).write_bytes(name.encode() * 3_000_000)
    spans = [("a", ByteRange(1_000_000, 1_000_010)), ("b", ByteRange(2_999_000, 3_000_000)), ("a", ByteRange(5, 10))]

    def read(folder: str, **options: str) -> int:
        config = CacheConfig(tmp_path / folder, 10**8, free_ratio_min=0.0, **options)  # type: ignore[arg-type]
        with connect(str(tmp_path / "data"), cache=config) as store:
            versions = {info.key: info for info in store.list()}
            plan = [PlanItem(key, span, versions[key].etag, versions[key].size_bytes) for key, span in spans]
            assert [len(blob) for blob in store.read_many(plan)] == [10, 1000, 5]
            fetched_bytes: int = store.statistics().fetched_bytes  # type: ignore[attr-defined]
            return fetched_bytes

    record = str(tmp_path / "epoch.jsonl")
    assert read("here", record_path=record) > 0
    command = ["cache", "warm", f"{tmp_path}/data/", "--cache", f"{tmp_path}/there:100MB", "--json"]
    assert run([*command, "--accesses", record]) == 0
    assert json.loads(capsys.readouterr().out)["fetched_bytes"] < 6_000_000
    assert read("there") == 0


def test_copying_through_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``cp --cache`` caches what it reads: the second copy requests no bytes from the source."""
    (tmp_path / "data").mkdir()
    counts = {"a": 10, "b": 3_000_000, "c": 0}
    for name, count in counts.items():
        (tmp_path / "data" / name).write_bytes(name.encode() * count)
    read_keys = []
    read = LocalStore._get
    monkeypatch.setattr(
        LocalStore,
        "_get",
        lambda store, operation, job: (read_keys.append(operation.key), read(store, operation, job))[1],
    )
    for number in (1, 2):
        command = ["cp", f"{tmp_path}/data/", f"{tmp_path}/copy{number}/", "--cache", f"{tmp_path}/cache:100MB"]
        assert run(command) == 0
        for name, count in counts.items():
            assert (tmp_path / f"copy{number}" / name).read_bytes() == name.encode() * count
        assert set(read_keys) - {"c"} == ({"a", "b"} if number == 1 else set())
        read_keys.clear()


def test_nothing_to_warm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prefix without objects and a cache without a size are errors."""
    (tmp_path / "data").mkdir()
    assert run(["cache", "warm", f"{tmp_path}/data/", "--cache", f"{tmp_path}/cache:100MB"]) == 1
    assert "nothing to read" in capsys.readouterr().err
    assert run(["cache", "warm", f"{tmp_path}/data/", "--cache", f"{tmp_path}/cache"]) == 2
    assert "how large" in capsys.readouterr().err


def test_stats_verify_trim_clear(warmed: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Each command reports its result, for people and for machines; corruption gives exit code 1 once."""
    _, folder = warmed
    assert run(["cache", "stats", str(folder)]) == 0
    assert "2 entries" in capsys.readouterr().out
    assert run(["cache", "stats", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"] == {"block": 2}
    victim = next(iter(sorted(folder.glob("v1/entries/*/*b"))))
    raw = bytearray(victim.read_bytes())
    raw[-1] ^= 1
    victim.write_bytes(raw)
    assert run(["cache", "verify", str(folder)]) == 1
    assert "1 corrupt" in capsys.readouterr().out
    assert run(["cache", "verify", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries_count"] == 1
    assert run(["cache", "trim", str(folder), "1KB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed_count"] == 1
    assert run(["cache", "clear", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed_bytes"] == 0


@pytest.mark.parametrize("command", ["stats", "verify", "clear"])
def test_what_is_no_cache_is_left_alone(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory that is not a cache is refused."""
    (tmp_path / "precious").write_text("x")
    assert run(["cache", command, str(tmp_path)]) == 2
    assert "not a penstock cache" in capsys.readouterr().err
    assert (tmp_path / "precious").exists()
