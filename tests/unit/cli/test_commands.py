"""The commands on directories and memory stores, in this process."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import tarfile
import uuid
from pathlib import Path
from types import ModuleType

import pytest

from penstock.cli import main
from penstock.cli.app import run
from penstock.cli.options import ConnectionGroup, Stores
from penstock.errors import ConfigError, StoreError
from penstock.store.memory import MemoryStore
from penstock.transfer.download import Download, is_downloaded
from penstock.types import ObjectInfo

MIB = 1 << 20


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore(name=f"cli-{uuid.uuid4().hex}")


def url(store: MemoryStore, key: str = "") -> str:
    return f"memory://{store.name}/{key}"


def records(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def objects(memory: MemoryStore) -> dict[str, bytes]:
    objects = {f"d/{n:02d}": bytes([n]) * 1000 * n for n in range(20)}  # the first is empty
    objects |= {"d/sub/é +%": b"odd", "d/large": os.urandom(20 * MIB + 7), "other": b"other"}
    for key, data in objects.items():
        memory.write(key, data)
    return objects


def below(objects: dict[str, bytes], prefix: str) -> dict[str, bytes]:
    return {key.removeprefix(prefix): data for key, data in objects.items() if key.startswith(prefix)}


# ── ls ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("objects")
def test_ls_shows_objects_and_prefixes(memory: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    """There is one line per object or prefix of the level; a folder may be named without its slash."""
    assert run(["ls", url(memory)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-1] for line in lines] == ["d/", "other"]
    assert lines[1][0] == "5"
    assert run(["ls", url(memory, "d/sub")]) == 0
    assert capsys.readouterr().out.endswith("d/sub/é +%\n")


def test_ls_recursive_json(memory: MemoryStore, objects: dict[str, bytes], capsys: pytest.CaptureFixture[str]) -> None:
    """All keys below are listed in order with sizes, as one JSON object per line."""
    assert run(["ls", "-r", "--json", url(memory)]) == 0
    found = records(capsys.readouterr().out)
    assert [each["key"] for each in found] == sorted(objects)
    assert {each["key"]: each["size_bytes"] for each in found} == {key: len(data) for key, data in objects.items()}
    assert all(each["last_modified"].endswith("Z") and each["etag"] for each in found)


def test_ls_of_a_bare_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A bucket without ``s3://`` is a path; the hint explains both."""
    monkeypatch.chdir(tmp_path)
    assert run(["ls", "my-bucket"]) == 1
    assert "a path on this machine; a bucket is s3://my-bucket" in capsys.readouterr().err


def test_ls_human_and_nothing(memory: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes have units; a prefix that matches nothing is an error, an empty store is not."""
    assert run(["ls", url(memory)]) == 0
    memory.write("k", bytes(1536 * 1024))
    assert run(["ls", "--human", url(memory)]) == 0
    assert "1.5 MiB" in capsys.readouterr().out
    assert run(["ls", url(memory, "nothing")]) == 1
    err = capsys.readouterr().err
    assert "no key begins with this" in err
    assert "Hint: " in err


# ── cat ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_cat_writes_in_order(
    memory: MemoryStore, objects: dict[str, bytes], tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Objects of several stores are written one after the other, byte for byte, also empty ones."""
    (tmp_path / "file").write_bytes(b"local")
    keys = ["d/large", "d/00", "d/05"]
    assert run(["cat", *(url(memory, key) for key in keys), str(tmp_path / "file"), url(memory, "other")]) == 0
    assert capfdbinary.readouterr().out == b"".join(objects[key] for key in keys) + b"local" + b"other"


@pytest.mark.usefixtures("objects")
def test_cat_stops_at_what_is_missing(memory: MemoryStore, capfd: pytest.CaptureFixture[str]) -> None:
    """Everything before a missing byte is written, nothing after it, and the exit code is 1."""
    assert run(["cat", url(memory, "other"), url(memory, "nothing"), url(memory, "other")]) == 1
    out, err = capfd.readouterr()
    assert out == "other"
    assert "no such object" in err
    assert err.count("\n") == 1
    assert run(["cat", url(memory, "d/")]) == 2
    assert "not one object" in capfd.readouterr().err


# ── cp ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_cp_folder_down_and_again(
    memory: MemoryStore, objects: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything below a prefix arrives under its name; a second run copies only changed objects."""
    assert run(["cp", url(memory, "d/"), str(tmp_path / "to")]) == 0
    assert tree(tmp_path / "to") == below(objects, "d/")
    assert capsys.readouterr().out == ""
    assert run(["cp", "--json", url(memory, "d"), str(tmp_path / "to")]) == 0
    summary = records(capsys.readouterr().out)[-1]
    assert (summary["copied"], summary["skipped"], summary["failed"]) == (0, 22, 0)
    memory.write("d/05", b"x" * 5000)
    assert run(["cp", "--json", url(memory, "d/"), str(tmp_path / "to")]) == 0
    copied = [each["source"] for each in records(capsys.readouterr().out) if each["action"] == "copied"]
    assert copied == [url(memory, "d/05")]
    assert (tmp_path / "to/05").read_bytes() == b"x" * 5000
    assert run(["cp", "--json", "--overwrite", url(memory, "d/"), str(tmp_path / "to")]) == 0
    assert records(capsys.readouterr().out)[-1]["copied"] == 22


def test_cp_folder_up_and_again(
    memory: MemoryStore, objects: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory becomes objects; a second run copies only newer files."""
    for name, data in below(objects, "d/").items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    assert run(["cp", str(tmp_path), url(memory, "up")]) == 0
    found = {info.key.removeprefix("up/"): bytes(memory.read(info.key).data[:100]) for info in memory.list("up/")}
    assert found == {name: data[:100] for name, data in below(objects, "d/").items()}
    with memory.open("up/large") as file:
        assert file.read() == objects["d/large"]
    capsys.readouterr()
    assert run(["cp", "--json", str(tmp_path), url(memory, "up/")]) == 0
    assert records(capsys.readouterr().out)[-1]["copied"] == 0
    later = memory.stat("up/07").last_modified_s + 10
    (tmp_path / "07").write_bytes(b"y" * 7000)
    os.utime(tmp_path / "07", (later, later))
    assert run(["cp", "--json", str(tmp_path), url(memory, "up/")]) == 0
    assert records(capsys.readouterr().out)[-1]["copied"] == 1
    assert bytes(memory.read("up/07").data) == b"y" * 7000


def test_cp_between_and_inside_stores(memory: MemoryStore, objects: dict[str, bytes]) -> None:
    """Between stores, bytes pass through this process; within one store, the store copies."""
    other = MemoryStore(name=f"cli-{uuid.uuid4().hex}")
    assert run(["cp", url(memory, "d/"), url(other, "x/")]) == 0
    assert run(["cp", url(memory, "d/"), url(memory, "copy/")]) == 0
    for store, prefix in ((other, "x/"), (memory, "copy/")):
        with store.open(prefix + "large") as file:
            assert file.read() == objects["d/large"]
        sizes = {info.key.removeprefix(prefix): info.size_bytes for info in store.list(prefix)}
        assert sizes == {name: len(data) for name, data in below(objects, "d/").items()}


@pytest.mark.usefixtures("objects")
def test_cp_one_object(memory: MemoryStore, tmp_path: Path) -> None:
    """An object is copied to a name, into a folder, and back into the store."""
    assert run(["cp", url(memory, "other"), str(tmp_path / "name")]) == 0
    assert run(["cp", url(memory, "other"), str(tmp_path)]) == 0
    assert run(["cp", url(memory, "other"), f"{tmp_path}/new/"]) == 0
    assert tree(tmp_path) == {"name": b"other", "other": b"other", "new/other": b"other"}
    assert run(["cp", str(tmp_path / "name"), url(memory, "into/")]) == 0
    assert bytes(memory.read("into/name").data) == b"other"


def test_cp_local_to_local(tmp_path: Path) -> None:
    """Plain paths and file URLs mean the same."""
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "f").write_bytes(b"data")
    assert run(["cp", f"file://{tmp_path}/a%20b/", str(tmp_path / "c")]) == 0
    assert (tmp_path / "c/f").read_bytes() == b"data"


def test_cp_dry_run_copies_nothing(
    memory: MemoryStore, objects: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run prints what would be done."""
    assert run(["cp", "--dry-run", url(memory), str(tmp_path / "to")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(objects)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("key", ["../up", "a/../../up", "/etc/name", "a//b", ".", "nul\0", "x" * 300])
def test_cp_refuses_keys_that_are_no_safe_names(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unsafe keys are reported and not written; the others are copied, and the exit code is 1."""
    name = f"cli-{uuid.uuid4().hex}"
    MemoryStore({key: b"bad", "good": b"good"}, name=name)
    assert run(["cp", f"memory://{name}/", str(tmp_path / "to" / "deep")]) == 1
    assert tree(tmp_path) == {"to/deep/good": b"good"}
    assert "1 copied" in capsys.readouterr().err


def test_cp_of_names_that_collide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys ``a`` and ``a/b`` cannot both be files: the second is an error, the first is complete."""
    name = f"cli-{uuid.uuid4().hex}"
    MemoryStore({"a": b"file", "a/b": b"below", "z": b"z"}, name=name)
    assert run(["cp", f"memory://{name}/", str(tmp_path)]) == 1
    assert tree(tmp_path) == {"a": b"file", "z": b"z"}
    assert "cannot both become files" in capsys.readouterr().err


def test_cp_makes_directories_of_markers(tmp_path: Path) -> None:
    """An empty object whose key ends with a slash, as consoles make for folders, becomes a directory."""
    name = f"cli-{uuid.uuid4().hex}"
    MemoryStore({"folder/": b"", "folder/x": b"x"}, name=name)
    assert run(["cp", f"memory://{name}/", str(tmp_path / "to")]) == 0
    assert tree(tmp_path) == {"to/folder/x": b"x"}


@pytest.mark.usefixtures("objects")
def test_cp_refuses_nonsense(memory: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    """Copying onto or into the source, and copying nothing, are errors of one line."""
    for arguments, message in (
        ([url(memory, "other"), url(memory, "other")], "the same object"),
        ([url(memory, "d/"), url(memory, "d/e/")], "lies inside"),
        ([url(memory, "nothing"), url(memory, "x")], "nor an object below it exists"),
        ([url(memory, "other"), ""], "neither a URL nor a path"),
    ):
        assert run(["cp", *arguments]) == (1 if "nor an object" in message else 2)
        err = capsys.readouterr().err
        assert message in err
        assert "Hint: " in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("to", ["d/e/", "d/e", "d/", "d", "link/e/", "other/../d/e/", "d/sub/"])
def test_cp_refuses_a_directory_into_itself(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Copying a directory into itself is refused by any of its names; beside it, and out of it, is allowed."""
    (tmp_path / "d/sub").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "d")
    (tmp_path / "d/sub/f").write_bytes(b"data")
    before = tree(tmp_path)
    assert run(["cp", f"{tmp_path}/d/", f"{tmp_path}/{to}"]) == 2
    assert "lies inside" in capsys.readouterr().err
    assert tree(tmp_path) == before
    assert run(["cp", f"{tmp_path}/d/", f"{tmp_path}/dd/"]) == 0
    assert run(["cp", f"{tmp_path}/d/sub/", f"{tmp_path}/d/"]) == 0
    assert (tmp_path / "dd/sub/f").read_bytes() == (tmp_path / "d/f").read_bytes() == b"data"


@pytest.mark.parametrize("to", ["f", "", "link/f", "link/", "../{name}/f", "file-link"])
def test_cp_refuses_a_file_onto_itself(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Copying a file onto itself is refused by any of its names, also with --overwrite; the file is unchanged."""
    (tmp_path / "f").write_bytes(b"data")
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file-link").symlink_to(tmp_path / "f")
    target = f"{tmp_path}/{to.format(name=tmp_path.name)}"
    assert run(["cp", "--overwrite", str(tmp_path / "f"), target]) == 2
    assert "the same object" in capsys.readouterr().err
    assert (tmp_path / "f").read_bytes() == b"data"


# ── one file ────────────────────────────────────────────────────────────────────────────────────────────────────────


INFO = ObjectInfo("k", 3, '"etag"', 1_700_000_000.0)


def test_download_is_visible_only_when_whole(tmp_path: Path) -> None:
    """Before the commit only a hidden file exists; after an abort there is none."""
    target = tmp_path / "sub" / "file"
    download = Download(target, INFO)
    download.write(memoryview(b"ab"))
    assert not target.exists()
    with pytest.raises(StoreError, match="2 bytes arrived, but 3"):
        download.commit()
    download.abort()
    assert tree(tmp_path) == {}
    download = Download(target, INFO)
    download.write(memoryview(b"abc"))
    download.commit()
    assert tree(tmp_path) == {"sub/file": b"abc"}


def test_download_is_recognised_until_it_changes(tmp_path: Path) -> None:
    """Size, time and ETag identify a download; a changed file or another version is not one."""
    target = tmp_path / "file"
    assert not is_downloaded(target, INFO)
    download = Download(target, INFO)
    download.write(memoryview(b"abc"))
    download.commit()
    assert is_downloaded(target, INFO)
    assert not is_downloaded(target, INFO._replace(size_bytes=4))
    assert not is_downloaded(target, INFO._replace(last_modified_s=1_700_000_001.0))
    try:
        os.getxattr(target, b"user.penstock.etag")
    except OSError:
        pass  # this file system keeps no attributes: size and time have to do
    else:
        assert not is_downloaded(target, INFO._replace(etag='"other"'))
    os.utime(target)
    assert not is_downloaded(target, INFO)


def test_two_downloads_of_one_file_do_not_mix(tmp_path: Path) -> None:
    """A second writer is refused while the first one writes; a killed writer's file is replaced."""
    first = Download(tmp_path / "file", INFO)
    first.write(memoryview(b"xx"))
    with pytest.raises(StoreError, match="written by another process"):
        Download(tmp_path / "file", INFO)
    os.close(first._fd)  # as a kill -9 would
    second = Download(tmp_path / "file", INFO)
    second.write(memoryview(b"abc"))
    second.commit()
    assert tree(tmp_path) == {"file": b"abc"}


def test_a_download_never_writes_to_what_another_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another writer finishes a file between opening and locking it, the finished file stays unchanged."""
    first = Download(tmp_path / "file", INFO)
    first.write(memoryview(b"abc"))
    lock = fcntl.flock

    def finish_first(fd: int, how: int) -> None:
        monkeypatch.undo()
        first.commit()
        lock(fd, how)

    monkeypatch.setattr("fcntl.flock", finish_first)
    second = Download(tmp_path / "file", INFO)
    assert (tmp_path / "file").read_bytes() == b"abc"
    second.abort()
    assert tree(tmp_path) == {"file": b"abc"}


def test_a_download_replaces_no_device(tmp_path: Path, memory: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    """``cp URL /dev/null`` must not replace the device: pipes and devices are refused by name."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    memory.write("a", b"x")
    for name in ("pipe", "link"):
        assert run(["cp", url(memory, "a"), str(tmp_path / name)]) == 1
        assert f"{name} is not a regular file. Hint: `penstock cat" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()


# ── around the commands ─────────────────────────────────────────────────────────────────────────────────────────────


def test_ctrl_c_while_it_starts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C during the import gives exit code 130 and no traceback, as it does later."""

    class Importing(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "penstock.cli.app", Importing("penstock.cli.app"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == ""


def test_info_without_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    """Versions and limits are shown for people and as JSON."""
    assert run(["info"]) == 0
    assert "libcurl" in capsys.readouterr().out
    assert run(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {"versions", "machine"}
    assert set(facts["versions"]) == {"penstock", "python", "pycurl", "libcurl", "tls", "platform"}


@pytest.mark.usefixtures("objects")
def test_info_shows_each_unit_once(memory: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
    """For people, a rate is ``one_connection ... MiB/s`` and a time ``first_byte_p50 ... ms``, without units in the names."""
    assert run(["info", "--seconds", "0.01", url(memory, "other")]) == 0
    probe = [line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.split()[0] == "probe"]
    units = {name: value[-1] for name, *value in probe}
    assert units["one_connection"].endswith("B/s")
    assert units["many_connections"].endswith("B/s")
    assert units["first_byte_p50"] == "ms"
    assert not [name for name in units if name.endswith(("_per", "_s"))]
    assert run(["info", url(memory, "nothing")]) == 1
    assert "Hint: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["cp", "--help"], 0),
        ([], 2),
        (["nonsense"], 2),
        (["ls", "--nonsense", "x"], 2),
        (["cp", "only-one"], 2),
        (["du", "s3://"], 2),
        (["ls", "file://host/path"], 2),
        (["presign", "/etc/passwd"], 2),
        (["presign", "s3://bucket/k", "--expires", "8d"], 2),
        (["mb", "s3://bucket/key", "--anonymous"], 2),
        (["rm", "/tmp/"], 2),
        (["verify", "/etc/nothing/"], 1),
    ],
)
def test_exit_codes(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit codes are 0 for success, 1 for failure and 2 for wrong usage, without a traceback."""
    assert run(arguments) == code
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["ls", "cat", "cp", "info"])
def test_helps_name_arguments_once(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Typer's brackets are not repeated in names: no ``[[URL]]``, no ``{URL...}...``."""
    assert run([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "URL" in out
    assert "[[" not in out
    assert "...}" not in out
    assert "......" not in out


def test_the_example_of_cat_lists_every_shard(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """The pipe into tar in the help shows the members of all shards, past each end-of-archive mark."""
    assert run(["cat", "--help"]) == 0
    command = re.search(rb"\.tar \| (tar .*)", capfdbinary.readouterr().out)
    assert command is not None
    for name in ("a", "b"):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as shard:
            shard.addfile(tarfile.TarInfo(name))
    assert run(["cat", str(tmp_path / "a.tar"), str(tmp_path / "b.tar")]) == 0
    both = capfdbinary.readouterr().out
    listed = subprocess.run(command[1].decode().split(), input=both, capture_output=True, check=True).stdout
    assert listed.split() == [b"a", b"b"]


def test_locations(tmp_path: Path) -> None:
    """A URL is a store and a key; a path also names its file."""
    with Stores(ConnectionGroup()) as stores:
        location = stores.locate(str(tmp_path / "x"))
        assert (location.root_url, location.key, location.path) == (str(tmp_path), "x", tmp_path / "x")
        assert stores.locate(str(tmp_path)).is_folder
        assert stores.locate(str(tmp_path)).store is location.store
        with pytest.raises(ConfigError):
            stores.locate("")


def test_importing_the_entry_point_is_light() -> None:
    """``penstock.cli`` imports neither typer nor rich, pycurl nor numpy."""
    code = "import sys, penstock.cli; print(sorted({'typer', 'rich', 'pycurl', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["ls", "s3://bucket/"], "choose a profile by AWS_PROFILE or --profile, or pass --anonymous for public data"),
        (["peek", "s3://bucket/"], "or pass --anonymous for public data"),
    ],
)
def test_hints_name_options(
    arguments: list[str], hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What Python calls ``profile=`` and ``anonymous=True`` are options of a command."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert run(arguments) == 1
    assert hint in capsys.readouterr().err
