"""Channels in File mode: downloads, what is kept, what is refused."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.channels import InputChannel
from penstock.channels import file as file_channel
from penstock.channels.entries import Entries, EpochOrder, name_below, objects_of, open_source
from penstock.channels.file import link_file, open_file_channel
from penstock.errors import ConfigError, CorruptShardError, ObjectMissingError
from penstock.store.memory import MemoryStore


class Progress:
    """What a run heard of its downloads."""

    def __init__(self) -> None:
        self.plans: list[tuple[int, int]] = []
        self.count = self.size_bytes = 0

    def planned(self, channel: InputChannel, count: int, size_bytes: int) -> None:
        self.plans.append((count, size_bytes))

    def progressed(self, channel: InputChannel, count: int, size_bytes: int) -> None:
        self.count += count
        self.size_bytes += size_bytes


@pytest.fixture
def store() -> MemoryStore:
    """The store of the channel."""
    return MemoryStore()


@pytest.fixture
def download(store: MemoryStore, tmp_path: Path) -> Callable[..., Progress]:
    """Makes the files of a channel in ``tmp_path/train``."""

    def download_it(
        *, downloads: Path | None = None, order: EpochOrder | None = None, path: Path | None = None, **fields: Any
    ) -> Progress:
        channel = InputChannel(**({"name": "train", "url": "memory://bucket/train/"} | fields))
        entries = Entries(open_source(channel, lambda _: store))
        progress = Progress()
        opened = open_file_channel(
            channel, entries, path=path or tmp_path / "train", order=order or EpochOrder(), progress=progress,
            downloads=downloads,
        )  # fmt: skip
        opened.check()
        opened.close()
        return progress

    return download_it


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_inflated_files_are_kept(store: MemoryStore, download: Callable[..., Progress], tmp_path: Path) -> None:
    """A second run downloads no inflated file again, but for one that changed in the store, or was never inflated."""
    for name in ("a", "b", "c"):
        store.write(f"train/{name}", gzip.compress(name.encode() * 1000))
    (tmp_path / "probe").touch()
    try:
        os.setxattr(tmp_path / "probe", "user.penstock.probe", b"x")
    except OSError:
        pytest.skip("needs a file system with extended attributes")
    assert download(compression="Gzip").plans[0][0] == 3
    assert download(compression="Gzip").plans[0][0] == 0
    store.write("train/b", gzip.compress(b"x" * 1000))
    assert download(compression="Gzip").plans[0][0] == 1
    assert tree(tmp_path / "train") == {"a": b"a" * 1000, "b": b"x" * 1000, "c": b"c" * 1000}
    assert download().plans[0][0] == 3
    assert download(compression="Gzip").plans[0][0] == 3
    assert tree(tmp_path / "train")["a"] == b"a" * 1000


def test_all_objects_are_files(store: MemoryStore, download: Callable[..., Progress], tmp_path: Path) -> None:
    """Files lie below the channel's directory as the keys say, large and empty ones too; progress counts them."""
    objects = {"a": b"1", "sub/b": b"", "sub/deep/large": os.urandom(20 << 20)}
    for key, data in objects.items():
        store.write(f"train/{key}", data)
    store.write("trainer", b"another prefix")
    progress = download()
    assert tree(tmp_path / "train") == objects
    assert progress.plans == [(3, (20 << 20) + 1)]
    assert (progress.count, progress.size_bytes) == (3, (20 << 20) + 1)


def test_files_that_are_there_are_kept(store: MemoryStore, download: Callable[..., Progress], tmp_path: Path) -> None:
    """A second run downloads only what changed or is missing."""
    for key in "abc":
        store.write(f"train/{key}", key.encode())
    download()
    store.write("train/b", b"B")
    (tmp_path / "train" / "c").unlink()
    assert download().plans == [(2, 2)]
    assert tree(tmp_path / "train") == {"a": b"a", "b": b"B", "c": b"c"}
    assert download().plans == [(0, 0)]


@pytest.mark.parametrize("downloads", [False, True])
def test_the_channel_is_exactly_its_objects(
    store: MemoryStore, download: Callable[..., Progress], tmp_path: Path, downloads: bool
) -> None:
    """What an earlier run has put there leaves: another prefix, deleted objects, another host's share, a killed download."""
    for key in ("train/a", "train/sub/b", "train/gone/c", "other/d", "other/sub"):
        store.write(key, key.encode())
    kept = tmp_path / "kept" if downloads else None
    download(downloads=kept)
    store.delete("train/gone/c")
    download(downloads=kept)
    assert sorted(path.name for path in (tmp_path / "train").rglob("*")) == ["a", "b", "sub"]
    (tmp_path / "train" / ".penstock-0123.tmp").touch()
    download(downloads=kept, url="memory://bucket/other/")
    assert tree(tmp_path / "train") == {"d": b"other/d", "sub": b"other/sub"}
    for rank in range(2):
        download(downloads=kept, order=EpochOrder(part=rank, parts_count=2))
        assert list(tree(tmp_path / "train")) == [["a"], ["sub/b"]][rank]


@pytest.mark.parametrize(
    "plant",
    [
        lambda file: file.write_text("somebody's"),
        lambda file: file.symlink_to("/etc", target_is_directory=True),
        lambda file: file.symlink_to("/etc/hostname"),
        os.mkfifo,
    ],
    ids=["file", "directory link", "link", "fifo"],
)
@pytest.mark.parametrize("name", ["a", "sub", "other", "deep/other"])
def test_files_of_others_are_refused(
    store: MemoryStore, download: Callable[..., Progress], tmp_path: Path, plant: Callable[[Path], None], name: str
) -> None:
    """What somebody else has put into the directory is an error that names it, and neither changed, followed nor removed."""
    store.write("train/a", b"a")
    store.write("train/sub/b", b"b")
    planted = tmp_path / "train" / name
    planted.parent.mkdir(parents=True)
    plant(planted)
    before = planted.lstat()
    with pytest.raises(ConfigError, match=rf"channel 'train': .*train/{name} .*no run"):
        download()
    assert planted.lstat() == before
    planted.unlink()
    download()
    planted.parent.mkdir(parents=True, exist_ok=True)
    if name != "sub":
        planted.unlink(missing_ok=True)
        plant(planted)  # a name that the run has written is its own
        if name == "a":
            download()
            assert tree(tmp_path / "train") == {"a": b"a", "sub/b": b"b"}


def test_files_that_were_copied_there_are_kept(
    store: MemoryStore, download: Callable[..., Progress], tmp_path: Path
) -> None:
    """Without a record of earlier runs, files that are the objects as they are now are kept, and become the channel's own."""
    for key in "ab":
        store.write(f"train/{key}", key.encode())
    download()
    (tmp_path / ".train.files").unlink()
    assert download().plans == [(0, 0)]
    (tmp_path / ".train.files").write_text('["../kept", 3, {"x": []}, "b"]')  # a damaged record is none
    (tmp_path / "kept").touch()
    store.delete("train/b")
    with pytest.raises(ConfigError, match="train/b"):
        download()
    assert (tmp_path / "kept").exists()


def test_downloads_of_earlier_runs(store: MemoryStore, download: Callable[..., Progress], tmp_path: Path) -> None:
    """With a directory for downloads, the files of a later run are links to those of an earlier one."""
    for key in ("a", "sub/b"):
        store.write(f"train/{key}", key.encode())
    assert download(downloads=tmp_path / "kept").plans == [(2, 6)]
    assert download(downloads=tmp_path / "kept", path=tmp_path / "second").plans == [(0, 0)]
    assert tree(tmp_path / "second") == {"a": b"a", "sub/b": b"sub/b"}
    assert (tmp_path / "second" / "a").samefile(tmp_path / "train" / "a")


@pytest.mark.parametrize("linked", ["", "sub"])
def test_downloads_follow_no_link_out_of_their_directory(
    store: MemoryStore, download: Callable[..., Progress], tmp_path: Path, linked: str
) -> None:
    """A link in place of a directory that an earlier run has made among the downloads is an error, and nothing is written."""
    store.write("train/sub/b", b"b")
    download(downloads=tmp_path / "kept")
    (root,) = (tmp_path / "kept").iterdir()
    (root / linked).rename(tmp_path / "elsewhere")
    (root / linked).symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    store.write("train/sub/b", b"new")
    with pytest.raises(ConfigError, match=r"is a link, and files are written below .*kept"):
        download(downloads=tmp_path / "kept", path=tmp_path / "second")
    assert set(tree(tmp_path / "elsewhere").values()) == {b"b"}


def test_downloads_in_a_relative_directory(
    store: MemoryStore, download: Callable[..., Progress], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory for downloads may be relative, or reached through a link."""
    store.write("train/sub/b", b"b")
    monkeypatch.chdir(tmp_path)
    assert download(downloads=Path("kept")).plans == [(1, 1)]
    (tmp_path / "link").symlink_to("kept", target_is_directory=True)
    assert download(downloads=Path("link"), path=tmp_path / "second").plans == [(0, 0)]
    assert tree(tmp_path / "second") == tree(tmp_path / "train") == {"sub/b": b"b"}


def test_links_across_file_systems_are_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no hard link is possible, the file is copied with its times."""

    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    (tmp_path / "a").write_bytes(b"x" * 100_000)
    os.utime(tmp_path / "a", (1, 2))
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    link_file(tmp_path / "a", tmp_path / "sub" / "b")
    assert (tmp_path / "sub" / "b").read_bytes() == b"x" * 100_000
    assert (tmp_path / "sub" / "b").stat().st_mtime == 2
    assert not (tmp_path / "sub" / "b").samefile(tmp_path / "a")


def test_gzip_is_inflated(store: MemoryStore, download: Callable[..., Progress], tmp_path: Path) -> None:
    """With compression=Gzip the files hold what was compressed; an object that is no gzip leaves no file."""
    data = os.urandom(1000) * 5000
    store.write("train/a", gzip.compress(data))
    download(compression="Gzip")
    assert tree(tmp_path / "train") == {"a": data}
    store.write("train/b", b"not gzip at all")
    with pytest.raises(CorruptShardError, match="train/b"):
        download(compression="Gzip", path=tmp_path / "other")
    assert "b" not in tree(tmp_path / "other")
    assert not [path for path in (tmp_path / "other").iterdir() if path.name.startswith(".penstock")]


def test_shares_of_hosts(store: MemoryStore, download: Callable[..., Progress], tmp_path: Path) -> None:
    """Hosts that share a prefix have each object once, and about as many each."""
    for number in range(10):
        store.write(f"train/{number}", b"%d" % number)
    names: list[str] = []
    for rank in range(3):
        download(order=EpochOrder(part=rank, parts_count=3), path=tmp_path / f"{rank}")
        found = tree(tmp_path / f"{rank}")
        assert len(found) in (3, 4)
        names += found
    assert sorted(names) == [str(number) for number in range(10)]


def test_a_manifest(store: MemoryStore, download: Callable[..., Progress], tmp_path: Path) -> None:
    """The files of a manifest lie where its names say; a missing object is an error that names it."""
    for number in range(3):
        store.write(f"train/x/{number}", b"%d" % number)
    store.write("list", json.dumps([{"prefix": "memory://bucket/train/"}, "x/2", "x/0"]).encode())
    download(url="memory://bucket/list", data_type="ManifestFile")
    assert tree(tmp_path / "train") == {"x/0": b"0", "x/2": b"2"}
    store.write("list", json.dumps([{"prefix": "memory://bucket/train/"}, "x/9"]).encode())
    with pytest.raises(ObjectMissingError, match="x/9"):
        download(url="memory://bucket/list", data_type="ManifestFile")


@pytest.mark.parametrize(
    "key", ["../escape", "/absolute", "a/../../b", "./x", "a//b", "x" * 256, "a/é" * 100, "full/", "a\0"]
)
@pytest.mark.parametrize("mode", ["File", "Pipe"])
def test_objects_that_no_path_can_express(
    store: MemoryStore, download: Callable[..., Progress], tmp_path: Path, key: str, mode: Any, caplog: Any
) -> None:
    """An object whose key is no path below the channel's directory is left out in all modes, and a warning names it."""
    for name in ("fine", "é" * 127, "dots..", "a/...", key):
        store.write(f"train/{name}", b"x")
    entries = Entries(open_source(InputChannel(name="train", url="memory://bucket/train/", mode=mode), lambda _: store))
    names = ["a/...", "dots..", "fine", "é" * 127]
    expressible = [*names, key] if key.startswith("a/é") else names
    assert [piece.name for piece in objects_of(EpochOrder().entries(entries, epoch=0))] == sorted(expressible)
    assert (f"{'train/' + key!r} and others like it are left out" in caplog.text) == (key not in expressible)
    if mode == "File":
        download()
        assert sorted(tree(tmp_path)) == [".train.files", *(f"train/{name}" for name in sorted(expressible))]


def test_keys_that_cannot_both_be_files(
    store: MemoryStore, download: Callable[..., Progress], tmp_path: Path, caplog: Any
) -> None:
    """An object whose key is also a folder of others is left out, as a mount hides it, and a warning names it."""
    for key in ("a", "a-b", "a/b/c", "a/b", "d"):
        store.write(f"train/{key}", key.encode())
    download()
    assert tree(tmp_path / "train") == {"a-b": b"a-b", "a/b/c": b"a/b/c", "d": b"d"}
    assert "the objects 'a', 'a/b' are left out, because directories have the same names" in caplog.text


def test_a_manifest_with_a_name_that_is_no_path(store: MemoryStore, download: Callable[..., Progress]) -> None:
    """An object that a manifest names outside the channel's directory is refused before anything is downloaded."""
    store.write("list", json.dumps([{"prefix": "memory://bucket/train/"}, "../escape"]).encode())
    with pytest.raises(ConfigError, match=r"\.\./escape"):
        download(url="memory://bucket/list", data_type="ManifestFile")


def test_too_little_room(
    store: MemoryStore, download: Callable[..., Progress], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is too small is said before the download, with both sizes and what to do."""
    store.write("train/a", b"x" * 2000)
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(file_channel.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"'train' needs 1\.95 KiB, and .* has 0\.977 KiB.*mode=fastfile"):
        download()
    assert tree(tmp_path / "train") == {}


def test_a_directory_is_linked(store: MemoryStore, download: Callable[..., Progress], tmp_path: Path) -> None:
    """A directory of this machine takes the channel's place as it is, and that of files of earlier runs."""
    store.write("train/b", b"y")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("x")
    channel = InputChannel(name="train", url=str(tmp_path / "data"))
    entries = Entries(open_source(channel, lambda _: MemoryStore()))
    for _ in range(2):  # the link of an earlier run is replaced, and so are its files
        open_file_channel(channel, entries, path=tmp_path / "train", order=EpochOrder())
        assert (tmp_path / "train").is_symlink()
        assert tree(tmp_path / "train") == {"a": b"x"}
        download()
        assert tree(tmp_path / "train") == {"b": b"y"}
    (tmp_path / "train" / "mine").touch()
    with pytest.raises(ConfigError, match="train/mine is in the way"):
        open_file_channel(channel, entries, path=tmp_path / "train", order=EpochOrder())


@pytest.mark.parametrize(
    ("prefix", "key", "name"),
    [
        ("train/", "train/a/b", "a/b"),
        ("train", "train/a", "a"),
        ("data/train", "data/train-01/a", "train-01/a"),
        ("data/train.csv", "data/train.csv", "train.csv"),
        ("", "a/b", "a/b"),
        ("tra", "train", "train"),
    ],
)
def test_names_below_a_prefix(prefix: str, key: str, name: str) -> None:
    """Names are relative to a folder, also one named without its slash, and otherwise to the folder above."""
    assert name_below(prefix, key) == name
