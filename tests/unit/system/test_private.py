"""Files that another user could have put somewhere are neither trusted nor overwritten."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import penstock as ps
from penstock.cache.directory import LAYOUT
from penstock.index.place import in_directory
from penstock.sources.shards import Shard
from penstock.store.local import LocalStore
from penstock.system.private import check_private, open_private, others_can_read

STRANGER = 54_321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a").write_bytes(b"right" * 1000)
    return folder


def read(data: Path, cache: Path) -> bytes:
    with ps.connect(str(data), cache=f"{cache}:1GB") as store:
        return bytes(store.read("a").data)


def give_away(path: Path) -> None:
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


LEVELS = ["", LAYOUT, f"{LAYOUT}/entries", f"{LAYOUT}/temporary", "entry's folder"]


def level(cache: Path, name: str) -> Path:
    return next((cache / LAYOUT / "entries").iterdir()) if name == "entry's folder" else cache / name


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_cache_that_others_may_write_to_is_refused(data: Path, tmp_path: Path, name: str, mode: int) -> None:
    """At any level of a cache, a mode that lets others write is refused, with the command that changes it."""
    cache = tmp_path / "cache"
    read(data, cache)
    level(cache, name).chmod(mode)
    with pytest.raises(ps.ConfigError, match=rf"mode {mode:04o}.*chmod go-w"):
        read(data, cache)


@as_root
@pytest.mark.parametrize("name", LEVELS)
def test_a_cache_of_another_user_is_refused(data: Path, tmp_path: Path, name: str) -> None:
    """At any level of a cache, another owner is refused, and the message names both users."""
    cache = tmp_path / "cache"
    read(data, cache)
    give_away(level(cache, name))
    with pytest.raises(ps.ConfigError, match=f"belongs to user {STRANGER}, and you are user {os.geteuid()}"):
        read(data, cache)


@pytest.mark.parametrize("name", LEVELS[:-1])
def test_links_are_refused(data: Path, tmp_path: Path, name: str) -> None:
    """A cache that is or contains a symbolic link to a directory is refused, and nothing is written to its target."""
    cache, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    read(data, cache)
    level(cache, name).rename(elsewhere)
    level(cache, name).symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    with pytest.raises(ps.ConfigError, match=f"symbolic link.*{elsewhere}"):
        read(data, cache)
    assert sorted(elsewhere.rglob("*")) == before


@as_root
def test_a_strangers_link_on_the_way_is_refused(data: Path, tmp_path: Path) -> None:
    """A path through another user's link is refused; a path through one's own link is not."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert read(data, tmp_path / "link" / "cache") == b"right" * 1000
    give_away(tmp_path / "link")
    with pytest.raises(ps.ConfigError, match="link"):
        read(data, tmp_path / "link" / "cache")


def test_planted_links_are_not_written_through(data: Path, tmp_path: Path) -> None:
    """A symbolic or hard link in place of a cache file does not change the file that it names, and the job goes on."""
    for kind in ("symbolic", "hard"):
        for file in ("leases", "usage"):
            cache, victim = tmp_path / f"{kind}-{file}", tmp_path / "victim"
            victim.write_bytes(b"precious" * 500)
            (cache / LAYOUT).mkdir(parents=True)
            cache.chmod(0o700)
            (cache / LAYOUT).chmod(0o700)
            planted = cache / LAYOUT / file
            planted.symlink_to(victim) if kind == "symbolic" else planted.hardlink_to(victim)
            assert read(data, cache) == b"right" * 1000
            assert victim.read_bytes() == b"precious" * 500


@as_root
def test_a_planted_entry_is_not_served(data: Path, tmp_path: Path) -> None:
    """An entry that another user wrote is fetched again, even if its checksum matches."""
    cache = tmp_path / "cache"
    read(data, cache)
    for entry in (cache / LAYOUT / "entries").glob("*/*"):
        give_away(entry)
    with ps.connect(str(data), cache=f"{cache}:1GB") as store:
        assert bytes(store.read("a").data) == b"right" * 1000
        assert store.statistics().corrupt_count >= 1


def test_new_directories_are_private(data: Path, tmp_path: Path) -> None:
    """Only its user can access the files of a cache, whatever the umask."""
    before = os.umask(0)
    try:
        read(data, tmp_path / "new" / "cache")
    finally:
        os.umask(before)
    for path in (tmp_path / "new" / "cache").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


@as_root
def test_an_index_of_another_user_is_refused(data: Path, tmp_path: Path) -> None:
    """An index directory that others could have written is refused as well, since it tells what to read."""
    shards = [Shard(LocalStore(data), "a")]
    folder = in_directory(shards, tmp_path / "index").store.root  # type: ignore[attr-defined]
    folder.mkdir(parents=True)
    give_away(folder)
    with pytest.raises(ps.ConfigError, match="index directory"):
        in_directory(shards, tmp_path / "index")


@as_root
def test_only_ones_own_files_are_opened_to_be_written(tmp_path: Path) -> None:
    """A file of another user, a link, a second name and a pipe are refused; nothing is truncated."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.write_bytes(b"x")
    give_away(theirs)
    ours.write_bytes(b"x")
    (tmp_path / "soft").symlink_to(ours)
    (tmp_path / "second").hardlink_to(ours)
    os.mkfifo(tmp_path / "pipe")
    for name in ("theirs", "soft", "second", "pipe"):
        with pytest.raises(OSError):
            open_private(tmp_path / name, os.O_WRONLY | os.O_CREAT)
    assert ours.read_bytes() == theirs.read_bytes() == b"x"


def test_nothing_there_is_nothing_to_refuse(tmp_path: Path) -> None:
    """A directory that does not or cannot exist passes the check."""
    check_private(tmp_path / "no" / "where", what="cache")
    (tmp_path / "file").touch()
    check_private(tmp_path / "file" / "x", what="cache")


@pytest.mark.parametrize(
    ("mode", "owner", "reader", "expected"),
    [
        (0o600, STRANGER, STRANGER, False),
        (0o640, STRANGER, STRANGER, True),
        (0o440, 0, STRANGER, False),  # what systemd and Kubernetes mount
        (0o444, 0, STRANGER, True),
        (0o440, 0, 0, True),
    ],
)
def test_a_secret_may_be_shown_to_this_user_by_root_alone(mode: int, owner: int, reader: int, expected: bool) -> None:
    """The group's bits of a file of root's are for the service that reads it; those of one's own file are for others."""
    status = os.stat_result((stat.S_IFREG | mode, 1, 1, 1, owner, 0, 0, 0, 0, 0))
    assert others_can_read(status, reader) == expected
