"""The file system on a store in memory and on a directory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import io
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import penstock as ps
from penstock.errors import ConfigError
from penstock.fsspec import PenstockFileSystem, moving, register
from penstock.store.memory import MemoryStore

TREE = {"a": b"0123456789", "b/c": b"c", "b/d/e": b"e", "b/d/f": b"f", "b.txt": b"text"}


@pytest.fixture
def files() -> PenstockFileSystem:
    """A file system."""
    register("penstock")
    return PenstockFileSystem()


@pytest.fixture
def top(files: PenstockFileSystem) -> str:
    """A directory of a store in memory, with a few objects."""
    folder = f"memory/{uuid.uuid4().hex}"
    files.pipe({f"{folder}/{name}": data for name, data in TREE.items()})
    return folder


def below(top: str, found: Any) -> list[str]:
    """Paths relative to a directory."""
    return [name.removeprefix(top).lstrip("/") for name in found]


def test_listings(files: PenstockFileSystem, top: str) -> None:
    """``ls``, ``find``, ``glob``, ``walk`` and ``du`` see objects, and the directories that their keys imply."""
    assert sorted(below(top, files.ls(top, detail=False))) == ["a", "b", "b.txt"]
    assert below(top, files.ls(f"{top}/b.txt", detail=False)) == ["b.txt"]
    assert below(top, files.find(top)) == sorted(TREE)
    assert below(top, files.find(f"{top}/b", withdirs=True)) == ["b", "b/c", "b/d", "b/d/e", "b/d/f"]
    assert below(top, files.find(top, maxdepth=1)) == ["a", "b.txt"]
    assert below(top, files.find(top, maxdepth=2, withdirs=True)) == ["", "a", "b", "b.txt", "b/c", "b/d"]
    assert below(top, files.find(f"{top}/a")) == ["a"]
    assert files.find(f"{top}/none") == []
    assert below(top, files.glob(f"{top}/b*")) == ["b", "b.txt"]
    assert below(top, files.glob(f"{top}/**/e")) == ["b/d/e"]
    assert below(top, files.glob(f"{top}/b/d/[ef]")) == ["b/d/e", "b/d/f"]
    walked = [(below(top, [path])[0], names, found) for path, names, found in files.walk(top)]
    assert [(path, sorted(names), sorted(found)) for path, names, found in walked] == [
        ("", ["b"], ["a", "b.txt"]),
        ("b", ["d"], ["c"]),
        ("b/d", [], ["e", "f"]),
    ]
    assert files.du(top) == sum(map(len, TREE.values()))
    assert files.du(f"{top}/b", total=False, maxdepth=1) == {f"{top}/b/c": 1}


def test_questions_about_one_path(files: PenstockFileSystem, top: str) -> None:
    """Objects and directories are told apart, and what is missing is a ``FileNotFoundError``."""
    assert (files.isfile(f"{top}/a"), files.isdir(f"{top}/a"), files.exists(f"{top}/a")) == (True, False, True)
    assert (files.isfile(f"{top}/b"), files.isdir(f"{top}/b"), files.exists(f"{top}/b")) == (False, True, True)
    assert (files.isfile(f"{top}/x"), files.isdir(f"{top}/x"), files.exists(f"{top}/x")) == (False, False, False)
    assert files.info(f"{top}/a")["size"] == files.size(f"{top}/a") == 10
    assert (files.info(f"{top}/b")["type"], files.info(f"{top}/b")["size"]) == ("directory", 0)
    assert files.sizes([f"{top}/a", f"{top}/b/c"]) == [10, 1]
    for call in (files.info, files.ls, files.open, files.cat_file, files.rm, files.rm_file, files.checksum):
        with pytest.raises(FileNotFoundError):
            call(f"{top}/x")
    with pytest.raises(FileNotFoundError):
        files.rm(f"{top}/b")  # a directory needs recursive=True
    assert files.exists(f"{top}/b/c")


def test_versions_are_told_apart(files: PenstockFileSystem, top: str) -> None:
    """``checksum`` and ``ukey`` change when an object is replaced, and only then."""
    before = files.checksum(f"{top}/a"), files.ukey(f"{top}/a")
    assert before == (files.checksum(f"{top}/a"), files.ukey(f"{top}/a"))
    files.pipe_file(f"{top}/a", b"other")
    after = files.checksum(f"{top}/a"), files.ukey(f"{top}/a")
    assert before[0] != after[0]
    assert before[1] != after[1]
    assert files.created(f"{top}/a") == files.modified(f"{top}/a")
    with pytest.raises(ps.ConfigError, match="is a directory"):
        files.modified(f"{top}/b")


@pytest.mark.parametrize("start", [None, 0, 3, -4, 10, 12, -20])
@pytest.mark.parametrize("end", [None, 0, 5, -2, 10, 99])
def test_ranges_are_slices(files: PenstockFileSystem, top: str, start: int | None, end: int | None) -> None:
    """``cat_file``, ``cat_ranges`` and ``_cat_file`` return what a slice of the bytes is."""
    expected = TREE["a"][start:end]
    assert files.cat_file(f"{top}/a", start, end) == expected
    assert files.cat_ranges([f"{top}/a"], [start], [end]) == [expected]
    assert asyncio.run(files._cat_file(f"{top}/a", start, end)) == expected


def test_positions_may_be_numpys(files: PenstockFileSystem, top: str) -> None:
    """Positions from an array, as Zarr and kerchunk have them, are taken."""
    starts = np.array([0, 5, -2])
    assert files.cat_ranges([f"{top}/a"] * 3, starts, starts + 2) == [b"01", b"56", b""]
    assert files.cat_file(f"{top}/a", np.int64(2), np.int64(4)) == b"23"


def test_errors_of_many_reads(files: PenstockFileSystem, top: str) -> None:
    """Of many reads, those that fail are raised, returned or left out, as the caller says; the others are there."""
    paths = [f"{top}/a", f"{top}/x", f"{top}/b/c"]
    found = files.cat_ranges(paths, 0, 4)
    assert (found[0], found[2]) == (b"0123", b"c")
    assert isinstance(found[1], FileNotFoundError)
    assert isinstance(files.cat_ranges(paths, -2, None)[1], FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        files.cat_ranges(paths, 0, 4, on_error="raise")
    assert files.cat(paths, on_error="omit") == {paths[0]: TREE["a"], paths[2]: b"c"}
    assert isinstance(files.cat(paths, on_error="return")[paths[1]], FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        files.cat(paths)
    with pytest.raises(ps.ConfigError, match="on_error"):
        files.cat(paths, on_error="ignore")
    with pytest.raises(ValueError, match="ends has 2 entries, and paths has 3"):
        files.cat_ranges(paths, 0, [1, 2])
    with pytest.raises(TypeError):
        files.cat_ranges(paths[0], 0, 1)  # type: ignore[arg-type]


def test_an_object_longer_than_the_budget_is_read(files: PenstockFileSystem, top: str) -> None:
    """What the engine does not hold whole is streamed into the result, by every way of reading."""
    data = bytes(range(256)) * (20 << 12)
    files.pipe_file(f"{top}/long", data)
    ps.set_process_budget(17 << 20)
    assert files.cat_file(f"{top}/long") == data
    assert files.cat_ranges([f"{top}/long", f"{top}/a"], [1, 2], [len(data), 4]) == [data[1:], b"23"]
    assert files.cat([f"{top}/long", f"{top}/a"]) == {f"{top}/long": data, f"{top}/a": TREE["a"]}
    assert asyncio.run(files._cat_file(f"{top}/long")) == data


def test_reading_a_file(files: PenstockFileSystem, top: str) -> None:
    """A file that is open has what fsspec's users expect of one, and pickles with its position."""
    with files.open(f"{top}/a") as file:
        assert (file.size, file.path, file.fs, file.mode, file.details["size"]) == (10, f"{top}/a", files, "rb", 10)
        assert file.read(3) == b"012"
        assert (file.loc, file.tell()) == (3, 3)
        again = pickle.loads(pickle.dumps(file))
        assert again.read() == b"3456789"
        assert file.readuntil(b"5", blocks=2) == b"345"
        assert file.readuntil(b"x") == b"6789"
        assert file.read_block(2, 3) == b"234"
        assert file.read_block(8, None) == b"89"
        assert file.full_name == f"penstock://{top}/a"
    assert file.closed
    assert files.read_text(f"{top}/b.txt") == "text"
    assert files.head(f"{top}/a", 2) == b"01"
    assert files.tail(f"{top}/a", 2) == b"89"
    assert files.read_block(f"{top}/a", 0, 4) == b"0123"
    for length in (3, None):
        assert files.read_block(f"{top}/a", 12, length) == b""


@pytest.mark.parametrize("mode", ["ab", "r+b", "a", "w+"])
def test_other_modes_are_refused(files: PenstockFileSystem, top: str, mode: str) -> None:
    """Appending and changing in place are refused in words."""
    with pytest.raises(ps.ConfigError, match="written whole"):
        files.open(f"{top}/a", mode)


@pytest.mark.parametrize("compression", [None, "gzip", "bz2", "infer"])
def test_text_and_compression(files: PenstockFileSystem, top: str, compression: str | None) -> None:
    """Text and compressed files are written completely by ``close()`` and read back."""
    path = f"{top}/text.gz"
    with files.open(path, "w", compression=compression, encoding="latin-1", newline="") as file:
        file.write("grün\r\n" * 1000)
    with files.open(path, "r", compression=compression, encoding="latin-1", newline="") as file:
        assert file.read() == "grün\r\n" * 1000
    with pytest.raises(ps.ConfigError, match="compression"):
        files.open(path, "wb", compression="none-such")


WAYS: dict[str, Callable[[PenstockFileSystem, str], Any]] = {
    "fs.open binary": lambda files, path: files.open(path, "wb"),
    "fs.open text": lambda files, path: files.open(path, "w"),
    "fs.open compressed": lambda files, path: files.open(path, "wb", compression="gzip"),
    "fs.open compressed text": lambda files, path: files.open(path, "wt", compression="gzip"),
    "closing": lambda files, path: contextlib.closing(files.open(path, "wb")),
    "fsspec.open binary": lambda files, path: fsspec.open(f"penstock://{path}", "wb"),
    "fsspec.open text": lambda files, path: fsspec.open(f"penstock://{path}", "w"),
    "fsspec.open compressed text": lambda files, path: fsspec.open(f"penstock://{path}", "wt", compression="gzip"),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_exception_makes_nothing_visible(files: PenstockFileSystem, top: str, way: str) -> None:
    """However a file was opened, an exception inside ``with`` leaves no object, and a clean end leaves one."""
    path = f"{top}/half"
    data: Any = "half" if "text" in way else b"half"
    with pytest.raises(KeyError), WAYS[way](files, path) as file:  # noqa: PT012 - what follows the write matters
        file.write(data)
        raise KeyError("broken")
    assert not files.exists(path)
    try:
        raise KeyError("handled")
    except KeyError:  # a file may be written while an exception is being handled
        with WAYS[way](files, path) as file:
            file.write(data)
    assert files.exists(path)


def test_an_error_may_be_reported(files: PenstockFileSystem, top: str) -> None:
    """A file that is opened while an exception ends a ``with`` statement, and closed there, is written."""

    class Reporting:
        def __enter__(self) -> None: ...

        def __exit__(self, kind: object, error: object, trace: object) -> None:
            report = files.open(f"{top}/report", "wb")
            report.write(repr(error).encode())
            report.close()

    with pytest.raises(KeyError), Reporting():
        raise KeyError("x")
    assert files.cat_file(f"{top}/report") == b"KeyError('x')"


@pytest.mark.filterwarnings("ignore:unclosed GzipFile:ResourceWarning")  # Python's own, from 3.14 on
def test_a_dropped_file_makes_nothing_visible(files: PenstockFileSystem, top: str) -> None:
    """A file that nobody closed is discarded, also a compressed one."""
    for compression in (None, "gzip"):
        file = files.open(f"{top}/dropped", "wb", compression=compression)
        file.write(b"x")
        del file
        gc.collect()
        assert not files.exists(f"{top}/dropped")


def test_exclusive_modes(files: PenstockFileSystem, top: str) -> None:
    """``"xb"``, ``"x"`` and ``mode="create"`` never replace an object."""
    for call in (
        lambda: files.open(f"{top}/a", "xb"),
        lambda: files.open(f"{top}/a", "x"),
        lambda: files.pipe_file(f"{top}/a", b"", mode="create"),
        lambda: files.pipe({f"{top}/a": b""}, mode="create"),
        lambda: files.put_file(__file__, f"{top}/a", mode="create"),
    ):
        with pytest.raises(FileExistsError):
            call()
    assert files.cat_file(f"{top}/a") == TREE["a"]
    with files.open(f"{top}/new", "xb") as file:
        file.write(b"new")
        files.pipe_file(f"{top}/new2", b"", mode="create")
    with pytest.raises(ps.ConfigError, match="'overwrite' or 'create'"):
        files.pipe_file(f"{top}/a", b"", mode="append")


def test_transactions(files: PenstockFileSystem, top: str) -> None:
    """What is written in a transaction becomes visible together at its end, or not at all."""
    with files.transaction:
        for number in range(3):
            with files.open(f"{top}/t/{number}", "wb") as file:
                file.write(b"x")
        files.pipe_file(f"{top}/t/3", b"x")
        files.put_file(__file__, f"{top}/t/4")
        assert not files.exists(f"{top}/t")
        with pytest.raises(ValueError, match="closed"):
            file.write(b"more")
    assert len(files.ls(f"{top}/t")) == 5
    with pytest.raises(KeyError), files.transaction:  # noqa: PT012 - what follows the write matters
        files.pipe_file(f"{top}/u", b"x")
        raise KeyError
    assert not files.exists(f"{top}/u")
    with pytest.raises(KeyError), files.transaction, files.open(f"{top}/v", "wb"):
        raise KeyError
    assert not files.exists(f"{top}/v")
    files.pipe_file(f"{top}/w", b"x")
    assert files.exists(f"{top}/w")


def test_moving_between_machine_and_store(files: PenstockFileSystem, top: str, tmp_path: Path) -> None:
    """``get`` and ``put`` move trees, callbacks hear of every file, and file objects are taken."""
    heard = fsspec.Callback()
    files.get(f"{top}/", str(tmp_path / "down"), recursive=True, callback=heard)
    assert {
        str(path.relative_to(tmp_path / "down")): path.read_bytes()
        for path in (tmp_path / "down").rglob("*")
        if path.is_file()
    } == TREE
    assert heard.size == heard.value
    files.put(str(tmp_path / "down"), f"{top}/up/", recursive=True)
    assert below(f"{top}/up", files.find(f"{top}/up")) == sorted(f"down/{name}" for name in TREE)
    buffer = io.BytesIO()
    files.get_file(f"{top}/a", buffer)
    assert buffer.getvalue() == TREE["a"]
    one = fsspec.Callback()
    files.get_file(f"{top}/a", tmp_path / "one", callback=one)
    assert ((tmp_path / "one").read_bytes(), one.size, one.value) == (TREE["a"], 10, 10)
    files.put_file(tmp_path / "one", f"{top}/two", callback=one)
    assert files.cat_file(f"{top}/two") == TREE["a"]
    with pytest.raises(FileNotFoundError):
        files.put_file(tmp_path / "none", f"{top}/three")
    with pytest.raises(FileNotFoundError):
        files.get_file(f"{top}/none", tmp_path / "three")
    assert not (tmp_path / "three").exists()


def test_no_key_leads_out_of_the_target(files: PenstockFileSystem, tmp_path: Path) -> None:
    """A key with ``..`` is refused, whatever the caller's fsspec allows."""
    folder = f"memory/{uuid.uuid4().hex}"
    files.pipe_file(f"{folder}/x/../../evil", b"evil")
    with pytest.raises(ValueError, match=r"\.\."):
        files.get([f"{folder}/x/../../evil"], [str(tmp_path / "inside/evil")])
    assert list(tmp_path.rglob("evil")) == []


def test_copies_and_moves(files: PenstockFileSystem, top: str) -> None:
    """Copies stay inside a store or go through this process, and a move removes the original afterwards."""
    files.copy(f"{top}/b", f"{top}/copy", recursive=True)
    assert below(f"{top}/copy", files.find(f"{top}/copy")) == ["c", "d/e", "d/f"]
    other = f"memory/{uuid.uuid4().hex}"
    files.copy(f"{top}/b", f"{other}/b", recursive=True)
    assert files.cat(f"{other}/b", recursive=True) == {
        f"{other}/b/{name}": name[-1:].encode() for name in ("c", "d/e", "d/f")
    }
    files.mv(f"{other}/b", f"{other}/moved", recursive=True)
    assert below(other, files.find(other)) == ["moved/c", "moved/d/e", "moved/d/f"]
    files.mv(f"{other}/moved/c", f"{other}/moved/c")
    files.mv_file(f"{other}/moved/c", f"{other}/c")
    assert below(other, files.find(other)) == ["c", "moved/d/e", "moved/d/f"]
    with pytest.raises(FileNotFoundError):
        files.mv(f"{other}/none", f"{other}/x")
    with pytest.raises(FileNotFoundError):
        files.copy([f"{other}/none", f"{other}/c"], [f"{other}/x", f"{other}/y"])
    files.copy([f"{other}/none", f"{other}/c"], [f"{other}/x", f"{other}/y"], on_error="ignore")
    assert files.exists(f"{other}/y")


def test_a_range_from_the_end_is_of_the_version_that_was_measured(
    files: PenstockFileSystem, top: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an object is replaced after its size was asked for, a range that counts from its end is an error, no wrong bytes."""
    stat = MemoryStore._head

    def replaced(store: MemoryStore, key: str) -> Any:
        info = stat(store, key)
        with ps.connect(f"memory://{top.removeprefix('memory/')}") as other:
            other.write("a", b"another, longer object")
        return info

    for call in (
        lambda: files.cat_file(f"{top}/a", start=-3),
        lambda: files.cat_file(f"{top}/a", start=4),
        lambda: files.cat_ranges([f"{top}/a"], [-3], [None], on_error="raise"),
    ):
        files.pipe_file(f"{top}/a", b"0123456789")
        with monkeypatch.context() as patch:
            patch.setattr(MemoryStore, "_head", replaced)
            with pytest.raises(ps.ObjectChangedError, match="/a"):
                call()


def test_a_move_removes_only_what_it_has_copied(
    files: PenstockFileSystem, top: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object that appears below a directory while that is moved stays, and is not removed without a copy."""
    copy_files = moving.copy_files

    def copy_and_write(*arguments: Any) -> None:
        copy_files(*arguments)
        files.pipe_file(f"{top}/b/new", b"new")

    monkeypatch.setattr(moving, "copy_files", copy_and_write)
    files.mv(f"{top}/b", f"{top}/moved", recursive=True)
    assert below(top, files.find(top)) == ["a", "b.txt", "b/new", "moved/c", "moved/d/e", "moved/d/f"]


def test_a_move_into_itself(files: PenstockFileSystem, top: str) -> None:
    """A directory may be moved below itself, and what is named twice stays; a move over another source is refused."""
    files.mv(f"{top}/b/d", f"{top}/b/d/deeper", recursive=True)
    assert below(top, files.find(f"{top}/b")) == ["b/c", "b/d/deeper/e", "b/d/deeper/f"]
    files.mv([f"{top}/b/c", f"{top}/a"], f"{top}/b/")
    assert files.cat(f"{top}/b/c") == b"c"
    assert files.cat(f"{top}/b/a") == TREE["a"]
    assert not files.exists(f"{top}/a")
    before = {f"{top}/x/x/y": b"2", f"{top}/x/y": b"1"}
    files.pipe(before)
    for call in (files.mv, files.copy):
        with pytest.raises(ConfigError, match="would be replaced"):
            call(f"{top}/x/", f"{top}/x/x/", recursive=True)
        with pytest.raises(ConfigError, match="would be replaced"):
            call(list(before), [f"{top}/x/y", f"{top}/z"])
        assert files.cat(f"{top}/x", recursive=True) == before


def test_two_keys_that_become_one_file(files: PenstockFileSystem, tmp_path: Path) -> None:
    """Keys that differ in double slashes only would overwrite each other, which is refused before anything is written."""
    folder = f"memory/{uuid.uuid4().hex}"
    files.pipe({f"{folder}/x//y": b"1", f"{folder}/x/y": b"2"})
    with pytest.raises(ConfigError, match="both become the file"):
        files.get(f"{folder}/x", tmp_path / "to", recursive=True)
    assert list(tmp_path.rglob("y")) == []


def test_removing(files: PenstockFileSystem, top: str) -> None:
    """``rm`` removes objects, patterns and trees with the markers of their folders, or nothing if one is missing."""
    store = ps.connect(f"memory://{top.partition('/')[2]}")
    store.write("b/", b"")
    store.write("empty/", b"")
    assert files.isdir(f"{top}/empty")
    assert files.ls(f"{top}/empty") == []
    with pytest.raises(FileNotFoundError):
        files.rm([f"{top}/a", f"{top}/none"])
    assert files.exists(f"{top}/a")
    files.rm(f"{top}/b/d/*")
    assert below(top, files.find(top)) == ["a", "b.txt", "b/c"]
    files.rm(f"{top}/b", recursive=True)
    files.rmdir(f"{top}/empty")
    assert [info.key for info in store.list()] == ["a", "b.txt"]
    files.pipe_file(f"{top}/full/x", b"")
    with pytest.raises(FileExistsError, match="not empty"):
        files.rmdir(f"{top}/full")
    with pytest.raises(FileNotFoundError):
        files.rmdir(f"{top}/none")


@pytest.mark.parametrize("options", [{}, {"mode": "create"}, {"ContentType": "text/plain"}])
def test_callbacks_hear_of_uploads(
    files: PenstockFileSystem, top: str, tmp_path: Path, options: dict[str, Any]
) -> None:
    """However files are uploaded, a callback hears of every file of ``put`` and of every byte of ``put_file``."""
    (tmp_path / "folder" / "deeper").mkdir(parents=True)
    for name in ("one", "deeper/two"):
        (tmp_path / "folder" / name).write_bytes(b"12345")
    many, single = fsspec.Callback(), fsspec.Callback()
    files.put(str(tmp_path / "folder"), f"{top}/up", recursive=True, callback=many, **options)
    files.put_file(tmp_path / "folder" / "one", f"{top}/up/again", callback=single, **options)
    assert below(top, files.find(f"{top}/up")) == ["up/again", "up/deeper/two", "up/one"]
    assert many.value == many.size >= 2
    assert single.value == single.size == 5


@pytest.mark.parametrize("named", ["b", "b/", ["b"], "b*", ["b.t*", "b"]])
def test_removing_an_object_that_has_the_name_of_a_directory(files: PenstockFileSystem, top: str, named: Any) -> None:
    """``rm(recursive=True)`` removes it with the directory and its marker; without ``recursive``, the object alone."""
    store = ps.connect(f"memory://{top.partition('/')[2]}")
    for key in ("b", "b/", "c", "c/x"):
        store.write(key, b"")
    files.rm(f"{top}/{named}" if isinstance(named, str) else [f"{top}/{one}" for one in named], recursive=True)
    files.rm(f"{top}/c")
    left = [info.key for info in store.list()]
    assert left == (["a", "c/x"] if "*" in str(named) else ["a", "b.txt", "c/x"])


def test_directories_are_implied(files: PenstockFileSystem, top: str) -> None:
    """Making a directory makes nothing, unless an object is in its place."""
    files.mkdir(f"{top}/m")
    files.makedirs(f"{top}/m/n", exist_ok=True)
    assert not files.exists(f"{top}/m")
    with pytest.raises(FileExistsError):
        files.makedirs(f"{top}/a")


def test_touch(files: PenstockFileSystem, top: str) -> None:
    """``touch`` writes an empty object, and says that it cannot change a time."""
    files.touch(f"{top}/t")
    assert files.size(f"{top}/t") == 0
    with pytest.raises(ps.ConfigError, match="cannot change its time"):
        files.touch(f"{top}/t", truncate=False)
    files.touch(f"{top}/t2", truncate=False)
    assert files.exists(f"{top}/t2")


def test_unknown_options_of_calls_are_errors(files: PenstockFileSystem, top: str) -> None:
    """An option that a call does not have is an error, not a silent difference."""
    for call in (
        lambda: files.open(f"{top}/a", nonsense=1),
        lambda: files.ls(top, nonsense=1),
        lambda: files.cat_file(f"{top}/a", nonsense=1),
        lambda: files.find(top, nonsense=1),
        lambda: files.pipe({f"{top}/a": b""}, nonsense=1),
    ):
        with pytest.raises(ps.ConfigError, match="nonsense"):
            call()
    with pytest.raises(ps.ConfigError, match="version_id"):
        files.open(f"{top}/a", version_id="1")
    with pytest.raises(ps.ConfigError, match="acl='public-read' cannot be followed"):
        files.open(f"{top}/a", "wb", acl="public-read")
    with pytest.raises(ps.ConfigError, match="must be a media type"):
        files.pipe_file(f"{top}/a", b"", ContentType="text/plain\r\nx-amz-acl: public-read")
    assert files.cat_file(f"{top}/a") == TREE["a"]
    with pytest.raises(ps.ConfigError, match="only S3 has"):
        files.sign(f"{top}/a")
    for refuse in (
        files.cat_file,
        files.rm,
        files.rm_file,
        files.open,
        files.checksum,
        lambda path: files.sizes([path]),
    ):
        with pytest.raises(ps.ConfigError, match="does not name an object"):
            refuse(top)


def test_listings_are_kept_on_request_only(top: str) -> None:
    """By default another writer's object is seen at once; with ``use_listings_cache`` after it is invalidated or refreshed."""
    plain, kept = PenstockFileSystem(), PenstockFileSystem(use_listings_cache=True)
    store = ps.connect(f"memory://{top.partition('/')[2]}")
    count = len(kept.ls(top))
    assert len(plain.ls(top)) == count
    store.write("other", b"x")
    assert len(plain.ls(top)) == count + 1
    assert len(kept.ls(top)) == count
    assert len(kept.ls(top, refresh=True)) == count + 1
    kept.pipe_file(f"{top}/mine", b"x")
    assert len(kept.ls(top)) == count + 2
    store.delete("other")
    kept.invalidate_cache()
    assert len(kept.ls(top)) == count + 1


def test_it_pickles(files: PenstockFileSystem) -> None:
    """A file system pickles as its options, and is the same one again in the same process."""
    made = PenstockFileSystem(endpoint_url="http://h", key="AK", secret="x", fetch=ps.FetchConfig(requests_max=8))
    assert pickle.loads(pickle.dumps(made)) is made
    assert pickle.loads(pickle.dumps(files)) is files


def test_coroutines(files: PenstockFileSystem, top: str, tmp_path: Path) -> None:
    """The coroutines do what the methods do, and leave the event loop free."""

    async def use() -> None:
        made = PenstockFileSystem(asynchronous=True)
        assert made.loop is None
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        ticking = asyncio.ensure_future(tick())
        paths = [f"{top}/{name}" for name in TREE]
        assert await asyncio.gather(*(made._cat_file(path) for path in paths)) == list(TREE.values())
        assert below(top, await made._find(top)) == sorted(TREE)
        assert below(top, await made._glob(f"{top}/b/*")) == ["b/c", "b/d"]
        assert (await made._info(paths[0]))["size"] == 10
        await made._pipe_file(f"{top}/async", b"x")
        await made._get_file(f"{top}/async", str(tmp_path / "async"))
        await made._put_file(str(tmp_path / "async"), f"{top}/async2")
        await made._cp_file(f"{top}/async2", f"{top}/async3")
        await made._rm(f"{top}/async3")
        assert not await made._exists(f"{top}/async3")
        assert [path async for path, _, _ in made._walk(f"{top}/b")] == [f"{top}/b", f"{top}/b/d"]
        with pytest.raises(FileNotFoundError):
            await made._cat_file(f"{top}/none")
        with pytest.raises(FileNotFoundError):
            await made._info(f"{top}/none")
        async with await made.open_async(f"{top}/async4", "wb") as file:
            await file.write(b"abc")
        async with await made.open_async(f"{top}/async4") as file:
            file.seek(1)
            assert (await file.read(1), await file.read(), file.size, file.tell()) == (b"b", b"c", 3, 3)
        with pytest.raises(KeyError):  # noqa: PT012 - what follows the write matters
            async with await made.open_async(f"{top}/async5", "wb") as file:
                await file.write(b"half")
                raise KeyError
        assert not await made._exists(f"{top}/async5")
        ticking.cancel()
        assert ticks > 10

    asyncio.run(use())


def test_cancelled_reads_leave_the_others_alone(files: PenstockFileSystem, top: str) -> None:
    """Of reads that were collected together, one that is cancelled takes no other with it."""

    async def use() -> list[Any]:
        tasks = [asyncio.ensure_future(files._cat_file(f"{top}/{name}")) for name in TREE]
        await asyncio.sleep(0)
        tasks[1].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    found = asyncio.run(use())
    assert isinstance(found[1], asyncio.CancelledError)
    assert found[2:] == list(TREE.values())[2:]


def test_a_loop_that_was_closed_hurts_nobody(files: PenstockFileSystem, top: str) -> None:
    """Reads that an event loop left behind do not disturb the next one."""

    async def leave() -> None:
        asyncio.ensure_future(files._cat_file(f"{top}/a")).cancel()
        waiting = asyncio.ensure_future(files._info(f"{top}/a"))
        await asyncio.sleep(0)
        waiting.cancel()

    for _ in range(20):
        asyncio.run(leave())
    assert asyncio.run(files._cat_file(f"{top}/a")) == TREE["a"]


def test_fsspecs_caches_are_not_used(files: PenstockFileSystem, top: str) -> None:
    """Whatever cache a caller asks for, what is read is the object: fsspec's known parts are zeros in their gaps."""
    options = {"data": {(0, 4): b"ABCD"}, "strict": False}
    with files.open(f"{top}/a", cache_type="none") as file:
        assert (file.read(2), file.seek(-1, 2), file.read()) == (b"01", 9, b"9")
        files.pipe_file(f"{top}/a", b"abcdefghij")
        file.seek(0)
        with pytest.raises(ps.ObjectChangedError):
            file.read(2)
    files.pipe_file(f"{top}/a", TREE["a"])
    for cache in ("none", "readahead", "parts", "all", "mmap"):
        with files.open(f"{top}/a", block_size=2, cache_type=cache, cache_options=options, size=10) as file:
            assert file.read() == TREE["a"]


def test_a_directory_of_this_machine(files: PenstockFileSystem, tmp_path: Path) -> None:
    """``penstock://file/...`` is a directory of this machine."""
    with fsspec.open(f"penstock://file{tmp_path}/new/x", "wb") as file:
        file.write(b"x")
    assert (tmp_path / "new/x").read_bytes() == b"x"
    assert files.ls(f"file{tmp_path}/new", detail=False) == [f"file{tmp_path}/new/x"]


def test_closing_lets_go_of_the_stores(top: str) -> None:
    """``close()`` is idempotent, and the next use connects again."""
    made = PenstockFileSystem(skip_instance_cache=True)
    assert made.exists(f"{top}/a")
    made.close()
    made.close()
    assert made.exists(f"{top}/a")
