from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import ConfigError, ObjectExistsError, ObjectMissingError, StoreError
from penstock.store.local import LocalStore
from penstock.store.memory import MemoryStore
from penstock.types import Delete, Get, Put

FILES = {
    "config.json": b"{}",
    "model-00001-of-00002.safetensors": b"1" * 3_000_000,
    "model-00002-of-00002.safetensors": b"2",
    "model.safetensors.index.json": b"[]",
    "tokenizer/ü vocab.txt": b"a b",
    "empty": b"",
}
LAST = {"config.json", "model.safetensors.index.json"}


def write_files(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def objects(store: ps.Store) -> dict[str, bytes]:
    return {info.key: bytes(store.read(info.key).data) for info in store.list()}


class Recorder:
    """A ``TransferListener``, and a patch of ``submit`` that writes down what is asked of a store and fails on request."""

    def __init__(self) -> None:
        self.moved_names: list[str] = []
        self.failed_names: list[str] = []
        self.moved_bytes = 0
        self.asked: list[tuple[str, str]] = []
        self.failing = ""

    def moved(self, item: Any) -> None:
        self.moved_names.append(item.key)

    def failed(self, item: Any, error: Exception) -> None:
        self.failed_names.append(item.key)

    def progressed(self, size_bytes: int) -> None:
        self.moved_bytes += size_bytes

    def patch(self, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
        real = kind.submit

        def submit(store: Any, operation: Any, sink: Any) -> Any:
            if isinstance(operation, Delete):
                self.asked += [("delete", key) for key in operation.keys]
            elif isinstance(operation, Put | Get):
                self.asked.append((type(operation).__name__.lower(), operation.key))
                if self.failing and operation.key.endswith(self.failing):
                    raise StoreError("no more space", url=store.describe(operation.key))
            return real(store, operation, sink)

        monkeypatch.setattr(kind, "submit", submit)


def test_a_directory_goes_up_and_comes_down(tmp_path: Path) -> None:
    """Every file arrives below the URL, and comes back equal, empty ones and those of folders included."""
    write_files(tmp_path / "a")
    ps.upload_directory(tmp_path / "a", "memory://directories-round/run/7")
    with ps.connect("memory://directories-round") as store:
        assert objects(store) == {f"run/7/{name}": data for name, data in FILES.items()}
    ps.download_directory("memory://directories-round/run/7/", tmp_path / "b")
    assert read_files(tmp_path / "b") == FILES


def test_nothing_is_left(tmp_path: Path, nothing_left: Callable[[], AbstractContextManager[None]]) -> None:
    """Neither a transfer nor one that fails leaves a thread or a descriptor, whoever keeps the error."""
    write_files(tmp_path / "a")
    kept = []
    with nothing_left():
        ps.upload_directory(tmp_path / "a", "memory://directories-left")
        ps.download_directory("memory://directories-left", tmp_path / "b")
        for folder in ("b", "c"):
            write_files(tmp_path / folder, {"extra": b""})
        for call in (ps.upload_directory, ps.download_directory):
            one, other = tmp_path / "b", "memory://directories-left"
            with pytest.raises(ObjectExistsError) as caught:
                call(*((other, one) if call is ps.download_directory else (tmp_path / "c", other)))
            kept.append(caught.value)


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_what_cannot_be_uploaded_is_refused(tmp_path: Path, kind: str) -> None:
    """A link that leads nowhere, or a special file, is an error before anything is changed; other links are followed."""
    write_files(tmp_path / "blobs", {"1": b"weights"})
    write_files(tmp_path / "a", {"config.json": b"{}"})
    (tmp_path / "a" / "model.safetensors").symlink_to("../blobs/1")
    url = f"memory://directories-{kind}"
    ps.upload_directory(tmp_path / "a", url)
    (tmp_path / "a" / "sub").mkdir()
    wrong = tmp_path / "a" / "sub" / "wrong"
    if kind == "link":
        wrong.symlink_to("../../blobs/2")
    else:
        os.mkfifo(wrong)
    with pytest.raises(ConfigError, match="sub/wrong"):
        ps.upload_directory(tmp_path / "a", url)
    with ps.connect(url) as store:
        assert objects(store) == {"config.json": b"{}", "model.safetensors": b"weights"}


def test_the_files_that_lead_to_others_are_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are removed first, and are back only when everything else is there; the listener hears of everything."""
    write_files(tmp_path / "a")
    ps.upload_directory(tmp_path / "a", "memory://directories-order")
    recorder = Recorder()
    recorder.patch(monkeypatch, MemoryStore)
    ps.upload_directory(tmp_path / "a", "memory://directories-order", listener=recorder)
    assert {name for kind, name in recorder.asked[:2] if kind == "delete"} == LAST
    assert {name for kind, name in recorder.asked[-2:] if kind == "put"} == LAST
    assert set(recorder.moved_names) == set(FILES)
    assert recorder.moved_bytes == sum(map(len, FILES.values()))


def test_an_upload_that_fails_leaves_nothing_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised, the others are uploaded, and those that lead to them are not; the next upload completes it."""
    write_files(tmp_path / "a")
    ps.upload_directory(tmp_path / "a", "memory://directories-failing")
    recorder = Recorder()
    recorder.failing = "00002-of-00002.safetensors"
    with monkeypatch.context() as patch:
        recorder.patch(patch, MemoryStore)
        with pytest.raises(StoreError, match=r"00002-of-00002\.safetensors: no more space"):
            ps.upload_directory(tmp_path / "a", "memory://directories-failing", listener=recorder)
    with ps.connect("memory://directories-failing") as store:
        assert LAST.isdisjoint(objects(store))
        assert recorder.failed_names == ["model-00002-of-00002.safetensors"]
        ps.upload_directory(tmp_path / "a", "memory://directories-failing")
        assert objects(store) == FILES


def test_an_upload_that_is_killed_never_leaves_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever operation is the last one: if the files that lead to others are there, all of one directory is there."""
    old, new = ({**FILES, "config.json": version, "empty": version} for version in (b"old", b"new"))
    write_files(tmp_path / "old", old)
    write_files(tmp_path / "new", new)
    real, left = MemoryStore.submit, 0

    def submit(self: MemoryStore, operation: Any, sink: Any) -> Any:
        nonlocal left
        if isinstance(operation, Put | Delete):
            left -= 1
            if left < 0:
                raise StoreError("the process is gone", url=self.describe(""))
        return real(self, operation, sink)

    found = []
    with ps.connect("memory://directories-killed") as store:
        for operations in range(100):
            ps.upload_directory(tmp_path / "old", "memory://directories-killed", delete=True)
            left = operations
            with monkeypatch.context() as patch:
                patch.setattr(MemoryStore, "submit", submit)
                with contextlib.suppress(StoreError):
                    ps.upload_directory(tmp_path / "new", "memory://directories-killed")
            stored = objects(store)
            found.append(stored)
            if left > 0:
                break
    assert all(stored in (old, new) for stored in found if set(stored) >= LAST)
    assert found[0] == old
    assert found[-1] == new
    assert len(found) > 5


def test_a_download_that_fails_leaves_nothing_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for a download; the next one fetches only what is missing."""
    write_files(tmp_path / "a")
    ps.upload_directory(tmp_path / "a", "memory://directories-cut")
    recorder = Recorder()
    recorder.failing = "00002-of-00002.safetensors"
    with monkeypatch.context() as patch:
        recorder.patch(patch, MemoryStore)
        with pytest.raises(StoreError, match="no more space"):
            ps.download_directory("memory://directories-cut", tmp_path / "b", listener=recorder)
    assert set(read_files(tmp_path / "b")) == set(FILES) - LAST - {"model-00002-of-00002.safetensors"}
    again = Recorder()
    ps.download_directory("memory://directories-cut", tmp_path / "b", listener=again)
    assert read_files(tmp_path / "b") == FILES
    assert len(again.moved_names) == 3
    whole = Recorder()
    ps.download_directory("memory://directories-cut", tmp_path / "b", listener=whole)
    assert whole.moved_names == []


def test_arguments_in_the_wrong_order(tmp_path: Path) -> None:
    """A URL in place of the local directory is refused with the order of the arguments, whatever its scheme."""
    for url in ("s3://bucket/a/", "memory://directories-swapped/a/"):
        with pytest.raises(ConfigError, match=r"path='\w+://.*/' must be a directory.*upload_directory\(path, url\)"):
            ps.upload_directory(url, str(tmp_path))
        with pytest.raises(ConfigError, match=r"path='\w+://.*/' must be a directory.*download_directory\(url, path\)"):
            ps.download_directory(str(tmp_path), url)


def test_what_the_source_lacks_is_an_error_unless_it_may_be_removed(tmp_path: Path) -> None:
    """A file of an earlier model is never left beside a new one in silence, in neither direction."""
    write_files(tmp_path / "a")
    with ps.connect("memory://directories-extra") as store:
        store.write("m/model.safetensors", b"old")
        store.write("m-other/model.safetensors", b"of somebody else")
        with pytest.raises(ObjectExistsError, match=r"is 1 other file: model\.safetensors.*delete=True"):
            ps.upload_directory(tmp_path / "a", "memory://directories-extra/m")
        assert len(objects(store)) == 2
        ps.upload_directory(tmp_path / "a", "memory://directories-extra/m", delete=True)
        assert set(objects(store)) == {f"m/{name}" for name in FILES} | {"m-other/model.safetensors"}
    write_files(tmp_path / "b", {"old/pytorch_model.bin": b"old"})
    with pytest.raises(ObjectExistsError, match=r"old/pytorch_model\.bin"):
        ps.download_directory("memory://directories-extra/m", tmp_path / "b")
    assert set(read_files(tmp_path / "b")) == {"old/pytorch_model.bin"}
    ps.download_directory("memory://directories-extra/m", tmp_path / "b", delete=True)
    assert read_files(tmp_path / "b") == FILES


def test_links_to_files_are_uploaded_as_files(tmp_path: Path) -> None:
    """The cache of Hugging Face's hub has links to blobs in the place of files."""
    blob = write_files(tmp_path / "blobs", {"abc": b"weights"}) / "abc"
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot/model.safetensors").symlink_to(blob)
    ps.upload_directory(tmp_path / "snapshot", f"{tmp_path}/up")
    assert read_files(tmp_path / "up") == {"model.safetensors": b"weights"}
    assert not (tmp_path / "up/model.safetensors").is_symlink()


@pytest.mark.parametrize("to", ["a", "a/below", "."])
def test_a_directory_is_not_copied_into_itself(tmp_path: Path, to: str) -> None:
    """Files would be removed from the target first; overlapping directories are an error, and remain as they are."""
    write_files(tmp_path / "a")
    for source, target in ((tmp_path / "a", f"{tmp_path}/{to}"), (tmp_path / "a", f"file://{tmp_path}/{to}/")):
        with pytest.raises(ConfigError, match="overlap"):
            ps.upload_directory(source, target, delete=True)
        with pytest.raises(ConfigError, match="overlap"):
            ps.download_directory(target, source, delete=True)
    assert read_files(tmp_path / "a") == FILES


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    """A missing or empty directory is an error, in the store and on disk."""
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "none", tmp_path / "empty"):
        with pytest.raises(ObjectMissingError, match=folder.name):
            ps.upload_directory(folder, "memory://directories-none")
        with pytest.raises(ObjectMissingError, match=folder.name):
            ps.download_directory(folder, tmp_path / "new")
    with pytest.raises(ObjectMissingError, match="directories-none"):
        ps.download_directory("memory://directories-none/x", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_keys_that_lead_out_of_the_directory_are_refused(tmp_path: Path) -> None:
    """A key is never a path outside of the directory, and nothing is written then."""
    with ps.connect("memory://directories-names") as store:
        store.write("m/config.json", b"{}")
        store.write("m/../../evil", b"x")
    with pytest.raises(ConfigError, match="evil"):
        ps.download_directory("memory://directories-names/m", tmp_path / "new")
    assert os.listdir(tmp_path) == []


def test_a_file_that_changes_while_it_is_uploaded_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload is of the files as they were listed, or fails."""
    write_files(tmp_path / "a")
    real = LocalStore.submit

    def submit(self: LocalStore, operation: Any, sink: Any) -> Any:
        if isinstance(operation, Get) and operation.key == "model-00002-of-00002.safetensors":
            (tmp_path / "a" / operation.key).write_bytes(b"trained further")
        return real(self, operation, sink)

    monkeypatch.setattr(LocalStore, "submit", submit)
    with pytest.raises(StoreError, match=r"model-00002-of-00002\.safetensors"):
        ps.upload_directory(tmp_path / "a", "memory://directories-changed")
    with ps.connect("memory://directories-changed") as store:
        assert LAST.isdisjoint(objects(store))


@pytest.mark.parametrize("scheme", ["memory://", "file://", ""])
def test_a_slash_at_the_end_makes_no_difference(scheme: str, tmp_path: Path) -> None:
    """With and without a slash at its end, a URL names the same directory."""
    pytest.importorskip("torch")
    url = f"{scheme}{tmp_path}/saved"
    ps.torch.upload_directory(write_files(tmp_path / "model"), url)
    ps.torch.upload_directory(write_files(tmp_path / "model", {"config.json": b"[]"}), f"{url}/")
    ps.torch.download_directory(url, tmp_path / "back")
    assert read_files(tmp_path / "back") == FILES | {"config.json": b"[]"}


def test_empty_names_are_refused(tmp_path: Path) -> None:
    """An empty URL or path is taken neither for the root directory nor for the current one."""
    pytest.importorskip("torch")
    folder = write_files(tmp_path / "model")
    for one, other in ((folder, ""), ("", f"{tmp_path}/to")):
        with pytest.raises(ConfigError, match="is empty"):
            ps.torch.upload_directory(one, other)
        with pytest.raises(ConfigError, match="is empty"):
            ps.torch.download_directory(other, one)
