"""``sync``, ``rm`` and ``du``, on directories and memory stores."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

import pytest

from penstock.cli.app import run
from penstock.store.memory import MemoryStore

OBJECTS = {"d/a": b"a", "d/b": b"bb", "d/x/c.tmp": b"ccc", "d/x/y/e": b"eeeee", "other": b"o"}


@pytest.fixture
def memory() -> MemoryStore:
    store = MemoryStore(name=f"cli-{uuid.uuid4().hex}")
    for key, data in OBJECTS.items():
        store.write(key, data)
    return store


def url(store: MemoryStore, key: str = "") -> str:
    return f"memory://{store.name}/{key}"


def keys(store: MemoryStore, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


FILES = {key.removeprefix("d/"): data for key, data in OBJECTS.items() if key.startswith("d/")}


# ── sync ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("to", ["files", "objects", "the same store"])
def test_sync_makes_the_target_what_the_source_is(memory: MemoryStore, tmp_path: Path, to: str) -> None:
    """Missing and changed objects are copied and extra ones deleted, before, between and after the others in key order."""
    extra = {"!": b"", "ab": b"1", "x/y/f": b"2", "x0": b"3", "zz/z": b"4", "b": b"changed, longer"}
    other = MemoryStore(name=f"cli-{uuid.uuid4().hex}")
    target = {"files": str(tmp_path), "objects": url(other, "t"), "the same store": url(memory, "t/")}[to]
    write(tmp_path, extra)
    for store in (other, memory):
        for name, data in extra.items():
            store.write(f"t/{name}", data)
    assert run(["sync", "--delete", url(memory, "d/"), target]) == 0
    if to == "files":
        assert tree(tmp_path) == FILES
    else:
        store = other if to == "objects" else memory
        assert {key[2:]: bytes(store.read(key).data) for key in keys(store, "t/")} == FILES
    assert keys(memory, "d/") == [f"d/{name}" for name in sorted(FILES)]


def test_sync_without_delete_and_dry_deletes_nothing(
    memory: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Objects are deleted only with --delete, and --dry-run prints which."""
    write(tmp_path, {"extra": b"1"})
    assert run(["sync", url(memory, "d/"), str(tmp_path)]) == 0
    assert tree(tmp_path) == FILES | {"extra": b"1"}
    assert run(["sync", "--delete", "--dry-run", "--json", url(memory, "d/"), str(tmp_path)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["target"] for line in lines if line["action"] == "would delete"] == [f"file://{tmp_path}/extra"]
    assert (lines[-1]["copied"], lines[-1]["deleted"]) == (0, 1)
    assert "extra" in tree(tmp_path)


def test_filters_protect_from_deletion(memory: MemoryStore, tmp_path: Path) -> None:
    """Objects that a filter or pattern leaves out are neither copied nor deleted."""
    write(tmp_path, {"keep.tmp": b"1", "x/keep.tmp": b"2", "gone": b"3"})
    assert run(["sync", "--delete", "--exclude", "*.tmp", url(memory, "d/"), str(tmp_path)]) == 0
    kept = {name: data for name, data in FILES.items() if not name.endswith(".tmp")}
    assert tree(tmp_path) == kept | {"keep.tmp": b"1", "x/keep.tmp": b"2"}
    assert run(["sync", "--delete", url(memory, "d/?"), str(tmp_path)]) == 0
    assert "x/y/e" in tree(tmp_path)


@pytest.mark.parametrize("source", ["nothing/", "d/*.zip", "d/{a,q}"])
def test_an_empty_source_deletes_nothing(memory: MemoryStore, tmp_path: Path, source: str) -> None:
    """A source without objects, or without one that braces name, is an error before anything is deleted."""
    write(tmp_path, {"extra": b"1", "q": b"2"})
    assert run(["sync", "--delete", url(memory, source), str(tmp_path)]) == 1
    assert tree(tmp_path).keys() >= {"extra", "q"}


def test_an_empty_source_that_is_meant(memory: MemoryStore, tmp_path: Path) -> None:
    """``--allow-empty`` empties the target; a missing directory is still an error."""
    write(tmp_path, {"extra": b"1"})
    assert run(["sync", "--delete", "--allow-empty", f"{tmp_path}/none/", url(memory, "d/")]) == 1
    assert len(keys(memory, "d/")) == len(FILES)
    assert run(["sync", "--delete", "--allow-empty", url(memory, "nothing/"), str(tmp_path)]) == 0
    assert tree(tmp_path) == {}


def test_a_failed_copy_deletes_nothing(memory: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If an object could not be copied, nothing is deleted, and the command says so."""
    write(tmp_path, {"extra": b"1"})
    memory.write("d/../up", b"no name for a file")
    assert run(["sync", "--delete", url(memory, "d/"), str(tmp_path)]) == 1
    assert "extra" in tree(tmp_path)
    assert "not deleted, because others failed: 1 object that SRC lacks" in capsys.readouterr().err


def test_what_the_source_names_but_cannot_copy_is_not_deleted(
    memory: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link that leads nowhere or to itself, and a pipe, keep the objects of their name and below, and the command says so."""
    write(tmp_path, {"a": b"a"})
    (tmp_path / "b").symlink_to("nowhere")
    (tmp_path / "disk").symlink_to("not-mounted/images")
    (tmp_path / "other").symlink_to("other")
    (tmp_path / "x").mkdir()
    os.mkfifo(tmp_path / "x" / "c.tmp")
    memory.write("d/other", b"o")
    memory.write("d/x", b"a directory in the source")
    memory.write("d/a/x", b"a file in the source")
    memory.write("d/disk/1", b"1")
    memory.write("d/disk/y/2", b"2")
    for options in (["--dry-run"], []):
        assert run(["sync", "--delete", *options, str(tmp_path), url(memory, "d/")]) == 0
        assert f"5 objects are not deleted, such as {url(memory, 'd/b')}, because SRC" in capsys.readouterr().err
    assert keys(memory, "d/") == ["d/a", "d/b", "d/disk/1", "d/disk/y/2", "d/other", "d/x/c.tmp"]


@pytest.mark.parametrize(("source", "target"), [("d/x/", "d/"), ("d/", "d/x/"), ("d/", "d/"), ("d/x/*", "d/")])
def test_neither_may_lie_inside_the_other(
    memory: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, target: str
) -> None:
    """A sync that would delete its own source is refused, in stores and directories."""
    write(tmp_path, OBJECTS)
    assert run(["sync", "--delete", url(memory, source), url(memory, target)]) == 2
    assert run(["sync", "--delete", f"{tmp_path}/{source}", f"{tmp_path}/{target}"]) == 2
    assert capsys.readouterr().err.count("inside the other") == 2
    assert keys(memory) == sorted(OBJECTS)
    assert tree(tmp_path) == OBJECTS


def test_one_object_is_not_synced(memory: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``sync`` is for folders."""
    assert run(["sync", url(memory, "other"), str(tmp_path)]) == 2
    assert "penstock cp copies it" in capsys.readouterr().err


# ── rm ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["d/a"], ["d/b", "d/x/c.tmp", "d/x/y/e", "other"]),
        (["d/[ab]"], ["d/x/c.tmp", "d/x/y/e", "other"]),
        (["d/**"], ["other"]),
        (["-r", "d/x"], ["d/a", "d/b", "other"]),
        (["-r", "d/x/"], ["d/a", "d/b", "other"]),
        (["-r", "d/", "--include", "*.tmp"], ["d/a", "d/b", "d/x/y/e", "other"]),
        (["-r", "d/", "--exclude", "x/**"], ["d/x/c.tmp", "d/x/y/e", "other"]),
        (["-r", "", "--whole-bucket"], []),
        (["-r", "d/", "--dry-run"], sorted(OBJECTS)),
    ],
)
def test_rm_removes_what_was_named(memory: MemoryStore, arguments: list[str], left: list[str]) -> None:
    """``rm`` removes an object, a pattern's objects, or everything below a folder, and nothing else."""
    full = [each if each.startswith(("-", "*", "x/")) else url(memory, each) for each in arguments]
    assert run(["rm", *full]) == 0
    assert keys(memory) == left


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["d/"], "--recursive"),
        (["d"], "--recursive"),
        (["-r", ""], "--whole-bucket"),
        (["nothing"], "neither this object"),
        (["-r", "nothing/"], "nothing below this"),
        (["*.zip"], "no key matches"),
    ],
)
def test_rm_refuses(memory: MemoryStore, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    """A folder, a whole bucket and a file system's root need an option; a missing object is an error."""
    assert run(["rm", *(each if each.startswith("-") else url(memory, each) for each in arguments)]) == (
        2 if says.startswith("--") else 1
    )
    assert says in capsys.readouterr().err
    assert keys(memory) == sorted(OBJECTS)
    assert run(["rm", "-r", "/", "--dry-run"]) == 2
    assert "--whole-bucket" in capsys.readouterr().err


def test_rm_of_files_and_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Directories work too; --dry-run prints what would be removed, --json a line for each and a summary."""
    write(tmp_path, {"d/a": b"1", "d/x/b": b"2", "e": b"3"})
    assert run(["rm", "-r", f"{tmp_path}/d", "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"file://{tmp_path}/d/a", f"file://{tmp_path}/d/x/b"]
    assert run(["rm", "-r", f"{tmp_path}/d", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["action"] for line in lines] == ["removed", "removed", "summary"]
    assert tree(tmp_path) == {"e": b"3"}


def test_what_lies_behind_links_stays(memory: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``rm`` and ``sync --delete`` keep files behind a link to another directory; links to files are removed."""
    write(tmp_path, {"disk/precious": b"1", "disk/deep/precious": b"2", "data/old": b"3"})
    (tmp_path / "data/link").symlink_to(tmp_path / "disk")
    (tmp_path / "data/file").symlink_to(tmp_path / "disk/precious")
    assert run(["rm", "-r", "--dry-run", f"{tmp_path}/data"]) == 0
    out, errors = capsys.readouterr()
    assert "precious" not in out
    assert "2 files behind links to directories: not removed" in errors
    assert run(["sync", "--delete", url(memory, "d/"), f"{tmp_path}/data/"]) == 0
    assert not (tmp_path / "data/old").exists()
    assert run(["rm", "-r", f"{tmp_path}/data"]) == 0
    assert tree(tmp_path / "disk") == {"precious": b"1", "deep/precious": b"2"}
    assert not (tmp_path / "data/file").is_symlink()
    assert (tmp_path / "data/link").is_symlink()


# ── du ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def sums(text: str) -> dict[str, tuple[int, int]]:
    return {each["key"]: (each["size_bytes"], each["objects"]) for each in map(json.loads, text.splitlines())}


def test_du_counts(memory: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``du`` counts bytes and objects of each folder down to the given depth, with the total last."""
    assert run(["du", "--json", url(memory, "d/")]) == 0
    assert sums(capsys.readouterr().out) == {"d/": (11, 4)}
    assert run(["du", "--json", "--depth", "2", url(memory)]) == 0
    found = sums(capsys.readouterr().out)
    assert found == {"d/": (11, 4), "d/x/": (8, 2), "": (12, 5)}
    assert list(found)[-1] == ""
    assert run(["du", "--human", "--exclude", "*.tmp", url(memory, "d")]) == 0
    assert capsys.readouterr().out.split() == ["8", "B", "3", "d/"]
    assert run(["du", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split()[:2] == ["0", "0"]
    assert run(["du", url(memory, "nothing/")]) == 1


# ── mv ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("to", ["files", "the same store"])
def test_mv_leaves_nothing_behind(memory: MemoryStore, tmp_path: Path, to: str) -> None:
    """Everything that is selected arrives and is then removed; the rest stays."""
    target = {"files": f"{tmp_path}/", "the same store": url(memory, "t/")}[to]
    assert run(["mv", "--dry-run", url(memory, "d/"), target]) == 0
    assert keys(memory) == sorted(OBJECTS)
    assert run(["mv", "--quiet", "--exclude", "*.tmp", url(memory, "d/"), target]) == 0
    moved = {name: data for name, data in FILES.items() if not name.endswith(".tmp")}
    assert keys(memory, "d/") == ["d/x/c.tmp"]
    found = tree(tmp_path) if to == "files" else {key[2:]: bytes(memory.read(key).data) for key in keys(memory, "t/")}
    assert found == moved
    assert run(["mv", url(memory, "other"), target]) == 0
    assert keys(memory, "other") == []


def test_mv_removes_nothing_if_a_copy_failed(memory: MemoryStore, tmp_path: Path) -> None:
    """A file in the place of a folder refuses two copies; all sources stay, and the exit code is 1."""
    (tmp_path / "x").write_text("a file")
    assert run(["mv", url(memory, "d/"), f"{tmp_path}/"]) == 1
    assert keys(memory) == sorted(OBJECTS)


@pytest.mark.parametrize("target", ["", "d/x/"])
def test_mv_refuses_folders_inside_each_other(
    memory: MemoryStore, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy could otherwise replace what is still to be moved: d/d/a to d/a."""
    assert run(["mv", url(memory, "d/"), url(memory, target)]) == 2
    assert "one of them lies inside the other" in capsys.readouterr().err
    assert keys(memory) == sorted(OBJECTS)


@pytest.mark.parametrize("command", ["cp", "sync", "mv"])
def test_quiet_says_nothing_but_failures(
    memory: MemoryStore, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --quiet there is no summary, and a failure is still told."""
    assert run([command, "-q", url(memory, "d/"), f"{tmp_path}/one/"]) == 0
    assert capsys.readouterr() == ("", "")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "x").write_text("a file")
    memory.write("d/x/new", b"1")
    assert run([command, "-q", url(memory, "d/"), f"{tmp_path}/two/"]) == 1
    assert "d/x/new" in capsys.readouterr().err
