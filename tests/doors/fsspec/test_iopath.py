"""iopath's PathManager with penstock's handler, on a real S3 server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from iopath.common.file_io import PathManager

import penstock as ps
from penstock.iopath import PenstockPathHandler
from penstock.testing.s3_server import S3Server


@pytest.fixture
def manager(s3_endpoint: S3Server, tmp_path: Path) -> PathManager:
    """A path manager whose ``s3://`` is penstock's."""
    made = PathManager()
    keys = ps.Credentials(access_key=s3_endpoint.access_key, secret_key=s3_endpoint.secret_key)
    handler = PenstockPathHandler(
        cache_dir=str(tmp_path / "cache"), endpoint_url=s3_endpoint.endpoint_url, credentials=keys
    )
    made.register_handler(handler)
    return made


def test_files(manager: PathManager, bucket: str) -> None:
    """Text and bytes are written and read, and an exception makes nothing visible."""
    url = f"s3://{bucket}/a/text"
    with manager.open(url, "w") as file:
        file.write("grün\n")
    with manager.open(url) as file:
        assert file.read() == "grün\n"
    with manager.open(url, "rb") as file:
        file.seek(3)
        assert file.read(2) == "ü".encode()[1:] + b"n"
    for mode, data in (("w", "half"), ("wb", b"half")):
        with pytest.raises(KeyError), manager.open(f"s3://{bucket}/half", mode) as file:  # noqa: PT012
            file.write(data)
            raise KeyError
    assert not manager.exists(f"s3://{bucket}/half")
    with pytest.raises(ps.ConfigError, match="written whole"):
        manager.open(url, "a")
    with pytest.raises(FileNotFoundError):
        manager.open(f"s3://{bucket}/none")
    with pytest.raises(ValueError, match="nonsense"):
        manager.open(url, nonsense=1)


def test_names(manager: PathManager, bucket: str) -> None:
    """Objects and directories are told apart, listed, copied, moved and removed."""
    root = f"s3://{bucket}"
    for name in ("a", "b/c", "b/d/e"):
        with manager.open(f"{root}/{name}", "wb") as file:
            file.write(name.encode())
    assert manager.ls(root) == ["a", "b"]
    assert manager.ls(f"{root}/b/") == ["c", "d"]
    assert (manager.isfile(f"{root}/a"), manager.isdir(f"{root}/a"), manager.exists(f"{root}/a")) == (True, False, True)
    assert (manager.isfile(f"{root}/b"), manager.isdir(f"{root}/b"), manager.exists(f"{root}/b")) == (False, True, True)
    assert not manager.exists(f"{root}/none")
    manager.mkdirs(f"{root}/new")
    assert manager.copy(f"{root}/a", f"{root}/b/a")
    assert not manager.copy(f"{root}/a", f"{root}/b/c")
    assert manager.copy(f"{root}/a", f"{root}/b/c", overwrite=True)
    assert manager.mv(f"{root}/b/c", f"{root}/moved")
    assert manager.ls(root) == ["a", "b", "moved"]
    manager.rm(f"{root}/moved")
    for call in (manager.rm, manager.ls, manager.get_local_path):
        with pytest.raises(FileNotFoundError):
            call(f"{root}/moved")


def test_files_of_this_machine(manager: PathManager, bucket: str, tmp_path: Path) -> None:
    """Objects and directories are downloaded once for each version, and files are uploaded."""
    (tmp_path / "up").write_bytes(b"one")
    url = f"s3://{bucket}/tree/file"
    assert manager.copy_from_local(str(tmp_path / "up"), url)
    assert not manager.copy_from_local(str(tmp_path / "up"), url)
    local = Path(manager.get_local_path(url))
    assert local.read_bytes() == b"one"
    before = local.stat().st_ino
    assert Path(manager.get_local_path(url)).stat().st_ino == before
    assert Path(manager.get_local_path(url, force=True)).stat().st_ino != before
    (tmp_path / "up").write_bytes(b"other")
    assert manager.copy_from_local(str(tmp_path / "up"), url, overwrite=True)
    tree = Path(manager.get_local_path(f"s3://{bucket}/tree"))
    assert {str(path.relative_to(tree)): path.read_bytes() for path in tree.iterdir()} == {"file": b"other"}


def test_written_behind(manager: PathManager, bucket: str) -> None:
    """``opena`` writes on a thread of iopath's."""
    with manager.opena(f"s3://{bucket}/behind", "wb") as file:
        for _ in range(10):
            file.write(b"x" * 1000)
    assert manager.async_close()
    with manager.open(f"s3://{bucket}/behind", "rb") as read:
        assert read.read() == b"x" * 10_000


def test_other_buckets(manager: PathManager, bucket: str, s3_endpoint: Any) -> None:
    """A copy between buckets goes through this process."""
    other = s3_endpoint.create_bucket()
    with manager.open(f"s3://{bucket}/x", "wb") as file:
        file.write(b"x" * 3_000_000)
    assert manager.copy(f"s3://{bucket}/x", f"s3://{other}/y")
    with manager.open(f"s3://{other}/y", "rb") as file:
        assert len(file.read()) == 3_000_000


def test_no_key_leads_out_of_the_cache(manager: PathManager, bucket: str, s3_store: ps.Store, tmp_path: Path) -> None:
    """A key that begins with a slash, or has ``..``, is refused; objects that stand for folders are left out."""
    for key in ("a/", "a/b/", "a/b/c"):
        s3_store.write(key, b"" if key.endswith("/") else b"x")
    folder = Path(manager.get_local_path(f"s3://{bucket}/a"))
    assert [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()] == ["b/c"]
    evil = f"{tmp_path}/evil"
    s3_store.write(evil, b"evil")  # a key that begins with a slash
    for path in (f"s3://{bucket}/{evil}", f"s3://{bucket}"):
        with pytest.raises(ps.ConfigError, match="empty segment"):
            manager.get_local_path(path)
    assert not Path(evil).exists()


def test_a_move_to_itself(manager: PathManager, bucket: str, s3_store: ps.Store) -> None:
    """An object that is moved to where it is stays, and a missing one is an error."""
    s3_store.write("a", b"x")
    assert manager.mv(f"s3://{bucket}/a", f"s3://{bucket}/a")
    assert s3_store.read("a").data == b"x"
    with pytest.raises(FileNotFoundError):
        manager.mv(f"s3://{bucket}/none", f"s3://{bucket}/none")
