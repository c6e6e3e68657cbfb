"""Patterns, ``--include`` and ``--exclude``, and the errors if nothing is left."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from penstock.cli.app import run
from penstock.cli.selection import KeyFilter
from penstock.store.memory import MemoryStore

KEYS = [
    "train/a-00000.tar",
    "train/a-00001.tar",
    "train/a-00009.tar",
    "train/b-00000.tar",
    "train/note.txt",
    "train/x/c.tar",
]


@pytest.fixture
def memory() -> MemoryStore:
    store = MemoryStore(name=f"cli-{uuid.uuid4().hex}")
    for key in KEYS:
        store.write(key, key.encode())
    return store


def url(store: MemoryStore, key: str = "") -> str:
    return f"memory://{store.name}/{key}"


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def listed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.split()[-1] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("include", "exclude", "taken"),
    [
        ([], [], ["a.jpg", "x/b.jpg", "x/b.txt"]),
        (["*.jpg"], [], ["a.jpg", "x/b.jpg"]),
        (["*.{jpg,txt}"], ["x/*"], ["a.jpg"]),
        (["x/**"], ["*.txt"], ["x/b.jpg"]),
        (["*.txt", "a*"], [], ["a.jpg", "x/b.txt"]),
        ([], ["b.*"], ["a.jpg"]),
        (["/*"], [], []),
    ],
)
def test_what_filters_take(include: list[str], exclude: list[str], taken: list[str]) -> None:
    """A key needs an include and no exclude; a glob without a slash is compared with the name at any depth."""
    kept = KeyFilter(include, exclude)
    assert [key for key in ("a.jpg", "x/b.jpg", "x/b.txt") if kept.takes(key)] == taken


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("train/*-0000{0..1}.tar", ["a-00000.tar", "a-00001.tar", "b-00000.tar"]),
        ("train/*.tar", ["a-00000.tar", "a-00001.tar", "a-00009.tar", "b-00000.tar"]),
        ("train/**.tar", ["a-00000.tar", "a-00001.tar", "a-00009.tar", "b-00000.tar", "x/c.tar"]),
        ("train/[!a]*.t?r", ["b-00000.tar"]),
        ("*/x/", ["train/x/c.tar"]),
    ],
)
def test_patterns_name_the_same_for_ls_and_cp(
    memory: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], pattern: str, expected: list[str]
) -> None:
    """Copies are named relative to the folder above the first wildcard, and ``ls`` lists what ``cp`` copies."""
    assert run(["cp", url(memory, pattern), str(tmp_path / "to")]) == 0
    assert names(tmp_path / "to") == expected
    assert run(["ls", url(memory, pattern)]) == 0
    folder = "" if pattern.startswith("*") else "train/"
    assert listed(capsys) == [folder + name for name in expected]


def test_patterns_of_files(memory: MemoryStore, tmp_path: Path) -> None:
    """A local pattern that the shell did not expand works too."""
    assert run(["cp", url(memory, "train/"), str(tmp_path / "from")]) == 0
    assert run(["cp", f"{tmp_path}/*/*-00000.tar", f"{tmp_path}/../{tmp_path.name}-to/"]) == 0
    assert names(tmp_path.with_name(f"{tmp_path.name}-to")) == ["from/a-00000.tar", "from/b-00000.tar"]


def test_a_name_with_wildcards_goes_first(memory: MemoryStore, tmp_path: Path) -> None:
    """An object or folder with exactly the pattern's name is used."""
    memory.write("odd/[ab].txt", b"odd")
    memory.write("odd/a.txt", b"a")
    memory.write("odd/{x}/y", b"y")
    assert run(["cp", url(memory, "odd/[ab].txt"), f"{tmp_path}/one/"]) == 0
    assert names(tmp_path / "one") == ["[ab].txt"]
    assert run(["cp", url(memory, "odd/{x}/"), f"{tmp_path}/two/"]) == 0
    assert names(tmp_path / "two") == ["y"]


def test_filters_of_cp_and_ls(memory: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``cp`` and ``ls`` filter the same objects, relative to the URL that was named."""
    options = ["--include", "*.tar", "--exclude", "x/**", "--exclude", "b-*"]
    assert run(["cp", *options, url(memory, "train/"), str(tmp_path)]) == 0
    assert names(tmp_path) == ["a-00000.tar", "a-00001.tar", "a-00009.tar"]
    assert run(["ls", "-r", *options, url(memory, "train/")]) == 0
    assert listed(capsys) == [f"train/{name}" for name in names(tmp_path)]
    assert run(["ls", "-r", "--include", "*.zip", url(memory, "train/")]) == 1
    assert "leave nothing of 6 objects" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{root}/nothing/"], "there is nothing below this"),
        (["{root}/nothing"], "neither this object nor an object below it exists"),
        (["{root}/train/*.zip"], "no key matches this"),
        (["{root}/train/", "--include", "*.zip"], "leave nothing of 6 objects"),
        (["{root}/train/a-0000{{0..2}}.tar"], "train/a-00002.tar"),
        (["{root}/train/[b-a].tar"], "is not a valid pattern"),
        (["{root}/train/a{{b.tar"], "a brace that is not closed"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_copying_nothing_is_an_error(
    memory: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str, dry: bool
) -> None:
    """A source without objects, or without one that braces name, is an error that says what is missing."""
    root = url(memory).rstrip("/")
    full = [each.format(root=root) for each in arguments]
    assert run(["cp", *full, str(tmp_path / "to"), *(["--dry-run"] if dry else [])]) == (
        2 if "valid pattern" in says or "brace that" in says else 1
    )
    assert says in capsys.readouterr().err


def test_copying_an_empty_directory_is_an_error(memory: MemoryStore, tmp_path: Path) -> None:
    """An empty directory is an error too; copying again what exists is not."""
    (tmp_path / "empty").mkdir()
    assert run(["cp", str(tmp_path / "empty"), url(memory, "x/")]) == 1
    assert run(["cp", "-r", url(memory, "train/"), str(tmp_path / "to")]) == 0
    assert run(["cp", "--recursive", url(memory, "train/"), str(tmp_path / "to")]) == 0


def test_a_pattern_that_takes_its_own_copies_is_refused(
    memory: MemoryStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within one store, a copy may not write what it reads, but may write elsewhere below the same folder."""
    assert run(["cp", url(memory, "train/**"), url(memory, "train/copy/")]) == 2
    assert "would match" in capsys.readouterr().err
    assert run(["cp", url(memory, "train/a-*.tar"), url(memory, "train/copy/")]) == 0
    assert [info.key for info in memory.list("train/copy/")] == [f"train/copy/a-0000{n}.tar" for n in (0, 1, 9)]
