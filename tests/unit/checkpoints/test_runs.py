"""Checkpoints are found, verified, retained and removed; debris goes, and running saves stay."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from penstock.checkpoints import (
    STEP_MAX,
    CheckpointFile,
    Checkpoints,
    CheckpointSave,
    check_step,
    debris,
    directory,
    layout,
    remove,
    saving,
    step_directory,
    step_of,
    verify,
)
from penstock.checkpoints.directory import read_metadata
from penstock.checksums.crc32c import crc32c
from penstock.errors import BucketMissingError, CheckpointError, ClosedError, ConfigError
from penstock.store import Store
from penstock.store.faulty import Faulty
from penstock.store.memory import MemoryStore

if TYPE_CHECKING:
    from servers.faulty import FaultyServer


@pytest.fixture(params=["memory", "file"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Checkpoints]:
    """An empty run."""
    url = f"memory://{os.urandom(6).hex()}" if request.param == "memory" else f"{tmp_path}/run/"
    with Checkpoints(url) as checkpoints:
        yield checkpoints


def test_a_missing_bucket_is_not_a_missing_file() -> None:
    """The error of the store stays; a directory that is missing means that nothing was saved yet."""
    marker = layout.COMMIT_MARKER
    with MemoryStore() as store:
        absent = Faulty(store, fail_at_call=1, error=BucketMissingError("no such bucket"))
        with pytest.raises(BucketMissingError):
            read_metadata(absent, "step-0000000001/")
        with pytest.raises(CheckpointError, match=rf"{marker}: there is no checkpoint.*penstock checkpoint ls"):
            read_metadata(store, "step-0000000001/")
    with Checkpoints("/nonexistent/run/") as run, pytest.raises(CheckpointError, match="there is no checkpoint"):
        read_metadata(run.store, "")


def write(run: Checkpoints, save: CheckpointSave, directory: str, ranks: int = 2) -> list[CheckpointFile]:
    files = []
    for rank in range(ranks):
        name, data = (
            layout.data_name(save.save_id, rank=rank, index=0, prefix="ab/" if rank else ""),
            os.urandom(100 + rank),
        )
        run.store.write(directory + name, data)
        files.append(CheckpointFile(name=name, size_bytes=len(data), crc32c=crc32c(data)))
    return files


def save(run: Checkpoints, step: int, metadata: bytes = b"metadata") -> list[CheckpointFile]:
    directory = step_directory(step)
    with CheckpointSave(run.store, directory, world_size=2) as saving:
        files = write(run, saving, directory)
        saving.commit(metadata, files)
    return files


def names(run: Checkpoints) -> set[str]:
    return {info.key for info in run.store.list("")}


def test_names_of_steps() -> None:
    """A step's directory sorts like its number, and other names are no steps."""
    assert step_directory(1000) == "step-0000001000/"
    others = ("step-1000/", "epoch-1/", "step-00000010001", "")
    assert (step_of("step-0000001000/"), step_of("step-0000000000")) == (1000, 0)
    assert {step_of(name) for name in others} == {None}
    assert step_directory(9) < step_directory(10) < step_directory(STEP_MAX)


@pytest.mark.parametrize("step", [math.nan, -1, 1.0, True, "7", None, STEP_MAX + 1, math.inf])
def test_steps_that_are_none(step: Any) -> None:
    """A step must be a whole number within its bounds; the error shows what was given."""
    with pytest.raises(ConfigError, match=f"step={step!r}"):
        check_step(step)


def test_a_run_from_the_first_save_to_the_last(run: Checkpoints) -> None:
    """Saved steps are listed and found, the newest is the highest, and only committed ones count."""
    assert run.newest() is None
    assert run.all() == []
    assert run.steps() == []
    with pytest.raises(CheckpointError, match="no checkpoint that is whole"):
        run.find()
    for step in (20, 100, 3):
        save(run, step)
    assert run.steps() == [3, 20, 100]
    assert [(info.step, info.status, info.world_size, info.files_count) for info in run.all()] == [
        (3, "whole", 2, 3), (20, "whole", 2, 3), (100, "whole", 2, 3),
    ]  # fmt: skip
    newest = run.newest()
    assert newest is not None
    assert (newest.step, newest.size_bytes, newest.usable) == (100, 201 + 8, True)
    assert run.find(20).step == 20
    assert run.inspect(5).status == "missing"
    with pytest.raises(CheckpointError, match=r"there is no checkpoint of step 5\..*checkpoint ls"):
        run.find(5)
    assert not any("saving-" in name for name in names(run))


def test_the_url_may_be_a_checkpoint(run: Checkpoints) -> None:
    """A checkpoint directly at the URL is listed, verified and removed, and other objects beside it stay."""
    with CheckpointSave(run.store) as saving:
        saving.commit(b"m", write(run, saving, ""))
    run.store.write("notes.txt", b"mine")
    assert [(info.name, info.step, info.status) for info in run.all()] == [("", None, "whole")]
    assert verify(run.store).ok
    assert remove(run.store) == 4
    assert names(run) == {"notes.txt"}


@pytest.mark.parametrize("damage", ["missing", "short", "longer"])
def test_a_file_of_another_size(run: Checkpoints, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """A missing, truncated or longer file makes the checkpoint damaged, names the file, and an earlier one is the newest."""
    save(run, 1)
    name = "step-0000000002/" + save(run, 2)[1].name
    if damage == "missing":
        run.store.delete(name)
    else:
        run.store.write(name, b"x" * (50 if damage == "short" else 150))
    info = run.inspect(2)
    assert info.status == "damaged"
    assert name in str(info.problem)
    assert run.newest().step == 1  # type: ignore[union-attr]
    assert "step 2 is damaged" in caplog.text
    assert name in caplog.text
    with pytest.raises(CheckpointError, match="step 2 is damaged"):
        run.find(2)
    found = run.verify(2)
    assert not found.ok
    assert [name in str(problem) for problem in found.problems] == [True]


def test_every_byte_is_verified(run: Checkpoints) -> None:
    """A changed byte is found with checksums and not without, and progress tells all bytes."""
    name = "step-0000000002/" + save(run, 2)[0].name
    told: list[tuple[int, int]] = []
    good = run.verify(2, progress=lambda done, total: told.append((done, total)))
    assert (good.ok, good.read_bytes, told[-1]) == (True, 201, (201, 201))
    data = bytearray(run.store.read(name).data)
    data[7] ^= 1
    run.store.write(name, data)
    assert run.verify(2, checksums=False).ok
    found = run.verify(2)
    assert [name in str(problem) and "crc32c" in str(problem) for problem in found.problems] == [True]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda run, manifest: run.store.delete(manifest), "the manifest is missing"),
        (lambda run, manifest: run.store.write(manifest, b"{}"), "damaged: penstock_checkpoint is missing"),
        (lambda run, manifest: run.store.write(manifest, b""), "not valid JSON"),
        (lambda run, manifest: run.store.write("step-0000000002/.metadata", b"other"), "of another save"),
        (lambda run, manifest: run.store.write("step-0000000002/.metadata", b""), "of another save"),
        (
            lambda run, manifest: run.store.write(
                manifest, bytes(run.store.read(manifest).data).replace(b'"save_id": "', b'"save_id": "f')
            ),
            "the manifest is that of the save",
        ),
    ],
)
def test_damaged_manifests(run: Checkpoints, change: Any, problem: str) -> None:
    """A missing or damaged manifest, and a commit marker of another save, make the checkpoint damaged."""
    save(run, 2)
    manifest = next(name for name in names(run) if "manifest" in name)
    change(run, manifest)
    info = run.inspect(2)
    assert info.status == "damaged"
    assert problem in str(info.problem)
    assert run.newest() is None
    assert not run.verify(2).ok


def test_a_marker_of_the_same_size_is_found_by_verify(run: Checkpoints) -> None:
    """A commit marker with other contents of the same size does not verify."""
    save(run, 2, b"metadata")
    run.store.write("step-0000000002/.metadata", b"metadatA")
    found = run.verify(2, checksums=False)
    assert ".metadata" in str(found.problems[0])


def test_checkpoints_of_other_writers(run: Checkpoints) -> None:
    """Without a manifest a committed checkpoint is unchecked, and usable; without the commit marker it is unfinished."""
    run.store.write("step-0000000004/__0_0.distcp", b"data")
    assert run.inspect(4).status == "unfinished"
    run.store.write("step-0000000004/.metadata", b"data")
    assert (run.inspect(4).status, run.newest().step) == ("unchecked", 4)  # type: ignore[union-attr]
    assert not run.verify(4).ok
    run.store.write("epoch/.metadata", b"data")
    assert [(info.name, info.step) for info in run.all()] == [("step-0000000004/", 4), ("epoch/", None)]


def test_another_writer_replaces(run: Checkpoints) -> None:
    """If another writer commits in the same directory, its checkpoint counts, as unchecked, and the next save replaces it."""
    save(run, 4)
    run.store.write("step-0000000004/__0_0.distcp", b"data")
    run.store.write("step-0000000004/.metadata", b"theirs")
    assert (run.inspect(4).status, run.inspect(4).problem) == ("unchecked", None)
    save(run, 4)
    assert run.inspect(4).status == "whole"


def test_a_save_into_the_same_directory_replaces(run: Checkpoints) -> None:
    """Until the commit the earlier checkpoint is whole, and afterwards nothing is left of it."""
    save(run, 5, b"first")
    before = names(run)
    saving = CheckpointSave(run.store, step_directory(5))
    files = write(run, saving, step_directory(5))
    assert run.inspect(5).size_bytes == 201 + 5
    assert run.verify(5).ok
    saving.commit(b"second", files)
    assert run.inspect(5).size_bytes == 201 + 6
    assert run.verify(5).ok
    assert names(run) & before == {"step-0000000005/.metadata"}
    assert len(names(run)) == 4


def test_two_saves_of_one_step(run: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that commits and ends while another one, which committed before, looks for what it replaces keeps its files."""
    directory = step_directory(5)
    one, other = CheckpointSave(run.store, directory), CheckpointSave(run.store, directory)
    files, others = write(run, one, directory), write(run, other, directory)
    find_markers = debris.find_markers

    def commit_meanwhile(store: Store) -> list[debris.SaveMarker]:
        monkeypatch.setattr(debris, "find_markers", find_markers)
        other.commit(b"the last one", others)
        return find_markers(store)

    monkeypatch.setattr(debris, "find_markers", commit_meanwhile)
    one.commit(b"the first one", files)
    assert run.inspect(5).size_bytes == 201 + len(b"the last one")
    assert run.verify(5).ok
    assert len(names(run)) == 4, "the first one removed its files, because the other had seen its marker"


def test_two_saves_of_one_step_one_of_which_is_killed(run: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a replaced save could not remove any more are debris; the checkpoint's and newer ones are not."""
    at = step_directory(5)
    one, other = CheckpointSave(run.store, at), CheckpointSave(run.store, at)
    files, others = write(run, one, at), write(run, other, at)
    monkeypatch.setattr(saving.debris, "remove_replaced", lambda *_: None)
    monkeypatch.setattr(saving, "is_replaced", lambda *_: False)
    one.commit(b"the first one", files)
    assert run.debris() == []
    other.commit(b"the last one", others)
    with CheckpointSave(run.store, at) as running:
        write(run, running, at)
        kept = names(run)
        assert [found.save_id for found in run.remove_debris()] == [one.save_id]
        assert names(run) == {name for name in kept if one.save_id not in name}
    copied = at + layout.data_name("0123456789ab", rank=0, index=0)
    clock = run.store.stat(f"{at}.metadata").last_modified_s or 0
    run.store.write(copied, b"new")
    monkeypatch.setattr(debris, "list_directory", later(copied, clock + 1))
    assert run.remove_debris() == []
    assert copied in names(run)


def later(key: str, moment_s: float) -> Any:
    """``list_directory`` that says of an object that it was written at a moment: stores tell whole seconds."""

    def listed(store: Store, prefix: str) -> Any:
        infos = directory.list_directory(store, prefix)
        return {
            name: info._replace(last_modified_s=moment_s) if prefix + name == key else info
            for name, info in infos.items()
        }

    return listed


@pytest.mark.parametrize("meanwhile", ["read_manifest", "check_files"])
def test_a_checkpoint_that_is_replaced_is_found(
    run: Checkpoints, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """Whoever looks while a save replaces the only checkpoint finds the old or the new one, and not that there is none."""
    save(run, 5)
    real, times = getattr(directory, meanwhile), iter(range(3))

    def replaced(*arguments: Any) -> Any:
        if next(times, None) is not None:
            monkeypatch.setattr(directory, meanwhile, real)
            save(run, 5)
            monkeypatch.setattr(directory, meanwhile, replaced)
        return real(*arguments)

    monkeypatch.setattr(directory, meanwhile, replaced)
    newest = run.newest()
    assert newest is not None
    assert newest.status == "whole"
    if meanwhile == "read_manifest":
        assert next(times, None) is None, "it was looked for again, until it stayed"


def test_a_checkpoint_that_is_replaced_while_it_is_verified(run: Checkpoints) -> None:
    """The new one is verified instead, and files that are gone are no damage."""
    save(run, 5, b"first")
    replaced: list[Any] = []

    def progress(_: int, __: int) -> None:
        if not replaced:
            replaced.append(save(run, 5, b"the second"))

    found = run.verify(5, progress=progress)
    assert replaced
    assert found.ok
    assert found.info.size_bytes == 201 + len(b"the second")


def test_a_commit_marker_that_is_removed_at_once(run: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """If somebody removes the checkpoint while its save cleans up, the save ends all the same."""
    save(run, 5)
    saving = CheckpointSave(run.store, step_directory(5))
    files = write(run, saving, step_directory(5))
    find_markers = debris.find_markers

    def remove_meanwhile(store: Store) -> list[debris.SaveMarker]:
        store.delete("step-0000000005/.metadata")
        return find_markers(store)

    monkeypatch.setattr(debris, "find_markers", remove_meanwhile)
    saving.commit(b"m", files)
    assert run.inspect(5).status == "unfinished"


def test_killed_between_manifest_and_commit(run: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the manifests of two saves, the commit marker decides which checkpoint it is."""
    save(run, 5, b"first")
    saving = CheckpointSave(run.store, step_directory(5))
    files = write(run, saving, step_directory(5))
    write_object = run.store.write

    def interrupted(key: str, data: Any) -> None:
        if key.endswith(".metadata"):
            raise KeyboardInterrupt
        write_object(key, data)

    with monkeypatch.context() as patch:
        patch.setattr(run.store, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saving.commit(b"secnd", files)
    assert sum("manifest" in name for name in names(run)) == 2
    assert run.verify(5).ok
    saving.close()
    assert sum("manifest" in name for name in names(run)) == 1
    assert run.verify(5).ok


def test_nothing_is_committed_without_its_files(run: Checkpoints) -> None:
    """A save of which a file disappeared does not commit, names the file, and leaves nothing."""
    with CheckpointSave(run.store, step_directory(5)) as saving:
        files = write(run, saving, step_directory(5))
        run.store.delete(step_directory(5) + files[1].name)
        with pytest.raises(CheckpointError, match="missing") as raised:
            saving.commit(b"m", files)
        assert files[1].name in str(raised.value.url)
    assert names(run) == set()
    with pytest.raises(ClosedError, match="has ended"):
        saving.commit(b"m", files)


KILLED = """
import sys, os
from penstock.checkpoints import Checkpoints, CheckpointSave, layout
with Checkpoints(sys.argv[1]) as run:
    save = CheckpointSave(run.store, "step-0000000009/")
    run.store.write("step-0000000009/" + layout.data_name(save.save_id, rank=0, index=0), b"half")
    print(save.save_id, flush=True)
    sys.stdin.read()
"""


def test_debris_of_a_killed_process(tmp_path: Path) -> None:
    """While a save runs in another process its files stay; once that process was killed, the next save removes them."""
    url = f"{tmp_path}/run/"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        save_id = child.stdout.readline().strip()
        with Checkpoints(url) as run:
            save(run, 8)
            save(run, 10)
            assert [marker.over for marker in run.debris()] == []
            assert sum(save_id in name for name in names(run)) == 2
            assert run.retain(keep_last=1) == [8]  # and not 9, where a save is running
            child.kill()
            child.wait()
            assert [(marker.save_id, marker.directory) for marker in run.debris()] == [(save_id, "step-0000000009/")]
            assert run.inspect(9).status == "unfinished"
            save(run, 11)
            assert not [name for name in names(run) if save_id in name]
            assert run.steps() == [10, 11]


def test_leases(run: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """A marker of another machine keeps its save's files until it was not renewed for the length of the lease."""
    with CheckpointSave(run.store, step_directory(1)) as saving:
        write(run, saving, step_directory(1))
        marker = layout.saving_name(saving.save_id)
        body = json.loads(bytes(run.store.read(marker).data))
        run.store.write(marker, json.dumps({**body, "machine": "another"}).encode())
        assert run.remove_debris() == []
        monkeypatch.setattr("penstock.checkpoints.debris.running", set())
        assert run.remove_debris() == []
        monkeypatch.setattr("penstock.checkpoints.debris.time.time", lambda: 1e12)
        assert [found.save_id for found in run.remove_debris()] == [saving.save_id]
    assert names(run) == set()


@pytest.mark.server
@pytest.mark.parametrize("hours", [-5, 5])
def test_leases_by_the_clock_of_the_store(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, hours: int) -> None:
    """Whatever the clock of this machine says, the store's time decides when the lease of another machine's save is over."""
    with Checkpoints("s3://bucket/run/", endpoint_url=faulty.endpoint_url, anonymous=True) as run:
        marker = layout.saving_name(layout.new_save_id())
        run.store.write(
            marker, json.dumps({"penstock_save": 1, "directory": step_directory(1), "machine": "x"}).encode()
        )
        clock = SimpleNamespace(time=lambda: time.time() + hours * 3600)
        monkeypatch.setattr(debris, "time", clock)  # not the module's own function, by which the server tells the time
        assert [found.over for found in debris.find_markers(run.store)] == [False]
        faulty.clock_offset_s = debris.LEASE_S + 5
        assert [found.over for found in debris.find_markers(run.store)] == [True]


def test_markers_that_cannot_be_read(run: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """A marker without a directory never lets anything be removed."""
    for number, contents in enumerate((b"\xff not JSON", b"", b"[]", b'{"directory": 7}', b"{}" * 100_000)):
        run.store.write(layout.saving_name(f"0123456789a{number}"), contents)
    monkeypatch.setattr("penstock.checkpoints.debris.time.time", lambda: 1e12)
    assert run.remove_debris() == []


def test_retention(run: Checkpoints) -> None:
    """The newest whole checkpoints and the multiples stay; the newest whole one is never removed, nor what is newer."""
    for step in (0, 10, 20, 30, 40, 50, 60):
        save(run, step)
    run.store.delete(step_directory(60) + ".metadata")
    run.store.delete(step_directory(50) + next(name for name in names(run) if "50/__0" in name).partition("/")[2])
    assert run.retain(keep_last=2, keep_every=20) == [10]
    assert run.steps() == [0, 20, 30, 40, 50, 60]
    assert run.retain(keep_last=1) == [0, 20, 30]
    assert run.retain(keep_last=1) == []
    assert run.newest().step == 40  # type: ignore[union-attr]
    assert run.retain() == []


def test_retention_without_a_whole_checkpoint(run: Checkpoints) -> None:
    """If no checkpoint is whole, nothing is removed."""
    for step in (1, 2):
        save(run, step)
        run.store.delete(step_directory(step) + ".metadata")
    assert run.retain(keep_last=1) == []
    assert run.steps() == [1, 2]


@pytest.mark.parametrize(
    "options",
    [{"keep_last": 0}, {"keep_last": 1.5}, {"keep_last": 1, "keep_every": 0}, {"keep_every": 5}, {"keep_last": True}],
)
def test_retention_of_nonsense(run: Checkpoints, options: Any) -> None:
    """Numbers out of their bounds are refused before anything is removed."""
    save(run, 1)
    with pytest.raises(ConfigError, match="keep_"):
        run.retain(**options)
    assert run.newest() is not None


def test_removing_is_never_half(run: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit marker goes first and the manifest last, and removing what is not there removes nothing."""
    save(run, 1)
    order: list[str] = []
    delete = run.store.delete

    def recorded(keys: Any) -> None:
        keys = [keys] if isinstance(keys, str) else list(keys)
        order.extend(keys)
        delete(keys)

    monkeypatch.setattr(run.store, "delete", recorded)
    assert run.remove(1) == 4
    assert order[0].endswith(".metadata")
    assert "manifest" in order[-1]
    assert names(run) == set()
    assert run.remove(1) == 0
