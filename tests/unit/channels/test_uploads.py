"""Results of a run on their way to their URLs."""

from __future__ import annotations

import os
import tarfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from penstock.channels.runner.uploads import CheckpointUploader, upload_folder
from penstock.errors import StoreError
from penstock.store.memory import MemoryStore

WAIT_S_MAX = 20


@pytest.fixture
def store() -> MemoryStore:
    """The store that results go to."""
    return MemoryStore()


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def keys(store: MemoryStore) -> dict[str, bytes]:
    return {info.key: bytes(store.read(info.key).data) for info in store.list()}


def test_folders_go_file_by_file(store: MemoryStore, tmp_path: Path) -> None:
    """Each file of a folder is an object below the URL; an empty or missing folder is none."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "sub" / "b").write_bytes(b"2" * (20 << 20))
    for url in ("memory://bucket/out", "memory://bucket/out/"):
        assert upload_folder(tmp_path, url, lambda _: store) == 2
        assert keys(store) == {"out/a": b"1", "out/sub/b": b"2" * (20 << 20)}
    assert upload_folder(tmp_path / "missing", "memory://bucket/none/", lambda _: store) == 0


def test_folders_go_as_an_archive(store: MemoryStore, tmp_path: Path) -> None:
    """A URL that ends with .tar.gz receives one archive with relative names; nothing, if there is no file."""
    (tmp_path / "model").mkdir()
    assert upload_folder(tmp_path / "model", "memory://bucket/m.tar.gz", lambda _: store) == 0
    assert keys(store) == {}
    (tmp_path / "model" / "weights").write_bytes(os.urandom(10 << 20))
    upload_folder(tmp_path / "model", "memory://bucket/m.tar.gz", lambda _: store)
    (tmp_path / "got").mkdir()
    with store.open("m.tar.gz") as file, tarfile.open(fileobj=file, mode="r:gz") as archive:
        archive.extractall(tmp_path / "got", filter="data")
    assert (tmp_path / "got" / "weights").read_bytes() == (tmp_path / "model" / "weights").read_bytes()


def test_checkpoints_go_while_they_are_written(
    store: MemoryStore, tmp_path: Path, nothing_left: Callable[[], AbstractContextManager[None]]
) -> None:
    """Files are uploaded when they have settled, again when they change, and the rest at the end; removed ones stay."""
    (tmp_path / "first").write_bytes(b"0")
    upload_folder(tmp_path, "memory://bucket/warm/", lambda _: store)  # the threads of the stores are there now
    store.delete("warm/first")
    with nothing_left():
        uploader = CheckpointUploader(tmp_path, "memory://bucket/c/", lambda _: store, scan_s=0.02)
        wait_until(lambda: keys(store) == {"c/first": b"0"})
        (tmp_path / "first").write_bytes(b"changed")
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "second").write_bytes(b"2")
        wait_until(lambda: keys(store) == {"c/first": b"changed", "c/sub/second": b"2"})
        (tmp_path / "first").unlink()
        (tmp_path / "last").write_bytes(b"3")
        uploader.close()
    assert keys(store) == {"c/first": b"changed", "c/sub/second": b"2", "c/last": b"3"}


def test_checkpoints_come_back(store: MemoryStore, tmp_path: Path) -> None:
    """A restart finds the checkpoints of the earlier run, and does not upload them again."""
    store.write("c/sub/epoch-3", b"weights")
    written = []
    submit = store.submit

    def noting(operation, sink):  # type: ignore[no-untyped-def]
        written.append(type(operation).__name__)
        return submit(operation, sink)

    store.submit = noting  # type: ignore[method-assign]
    uploader = CheckpointUploader(tmp_path, "memory://bucket/c/", lambda _: store, scan_s=1000)
    assert (tmp_path / "sub" / "epoch-3").read_bytes() == b"weights"
    uploader.close()
    assert "Put" not in written


def test_a_store_that_fails_for_a_while(store: MemoryStore, tmp_path: Path) -> None:
    """An upload that fails is tried again at the next look, and does not disturb the program."""
    submit = store.submit
    broken = threading.Event()
    broken.set()

    def failing(operation, sink):  # type: ignore[no-untyped-def]
        if broken.is_set() and type(operation).__name__ == "Put":
            raise StoreError("out of order")
        return submit(operation, sink)

    store.submit = failing  # type: ignore[method-assign]
    uploader = CheckpointUploader(tmp_path, "memory://bucket/c/", lambda _: store, scan_s=0.02)
    (tmp_path / "a").write_bytes(b"1")
    wait_until(lambda: uploader.failure is not None)
    broken.clear()
    wait_until(lambda: keys(store) == {"c/a": b"1"})
    broken.set()
    (tmp_path / "b").write_bytes(b"2")
    with pytest.raises(StoreError, match="out of order"):
        uploader.close()
