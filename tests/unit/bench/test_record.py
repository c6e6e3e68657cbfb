"""The file of a run: what a process that was ended leaves, and what goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from measuring import made_record, turn
from penstock.bench.record import FILE, BenchRecord
from penstock.bench.turns import surroundings
from penstock.errors import ConfigError, DataError
from penstock.version import __version__


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_line_that_was_cut_off(tmp_path: Path, is_whole: bool) -> None:
    """It is dropped, and removed only by a run that goes on, whose next line is complete."""
    made_record(tmp_path, turn("a", 10), turn("b", 10), is_complete=False)
    path = tmp_path / FILE
    cut = path.read_bytes()[: -1 if is_whole else -20]
    path.write_bytes(cut)
    assert [each["name"] for each in BenchRecord.load(tmp_path).turns] == ["a"]
    assert path.read_bytes() == cut
    record = BenchRecord.load(tmp_path, is_continued=True)
    assert not record.has_turn("b", {}, 0)
    record.add("turn", **turn("b", 10))
    record.add("end", ended=1.0)
    loaded = BenchRecord.load(tmp_path)
    assert [each["name"] for each in loaded.turns] == ["a", "b"]
    assert loaded.is_complete
    assert loaded.has_turn("b", {}, 0)


def test_a_damaged_line_in_the_middle(tmp_path: Path) -> None:
    """It is an error that names the line."""
    made_record(tmp_path, turn("a", 10))
    path = tmp_path / FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"{\n" + lines[1])
    with pytest.raises(DataError, match="line 2 is damaged"):
        BenchRecord.load(tmp_path)


def test_no_run(tmp_path: Path) -> None:
    """A folder without a record, and one in which nothing was begun, are errors; a run may begin in the latter."""
    with pytest.raises(ConfigError, match=f"has no {FILE}"):
        BenchRecord.load(tmp_path)
    (tmp_path / FILE).write_text('{"kind": "ru')
    with pytest.raises(ConfigError, match="holds no run"):
        BenchRecord.load(tmp_path)
    assert BenchRecord.load(tmp_path, is_continued=True).run == {}
    assert (tmp_path / FILE).read_text() == ""


def test_the_parts_of_a_run(tmp_path: Path) -> None:
    """A folder has its own record, or those of parts, in the order in which they ran."""
    for name in ("b", "a"):
        made_record(tmp_path / name, turn(name, 10))
    path = tmp_path / "a" / FILE
    path.write_text(path.read_text().replace("1700000000.0", "1700000001.0"))
    assert [record.path.parent.name for record in BenchRecord.load_parts(tmp_path)] == ["b", "a"]
    assert [record.path.parent.name for record in BenchRecord.load_parts(tmp_path / "a")] == ["a"]
    with pytest.raises(ConfigError, match="has no record"):
        BenchRecord.load_parts(tmp_path / "c")


def test_a_machine_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The version stands for the commit, as in slim images."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert surroundings()["commit"] == __version__
