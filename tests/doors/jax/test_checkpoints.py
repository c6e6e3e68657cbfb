"""Checkpoints of JAX programs: Orbax's directories through a bucket, and Flax's bytes as one object."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from mounting import needs_fuse

jax = pytest.importorskip("jax")
import flax.serialization  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402

pytestmark = [
    pytest.mark.timeout(110, method="thread"),
    pytest.mark.filterwarnings("ignore"),  # Orbax's advice on shardings
]


def state_of(step: int) -> dict[str, Any]:
    return {"params": {"w": jax.numpy.arange(12.0).reshape(3, 4) + step}, "step": step}


def assert_equal(found: Any, step: int) -> None:
    assert np.array_equal(found["params"]["w"], state_of(step)["params"]["w"])
    assert int(found["step"]) == step


def save(state: Any, path: Path) -> Path:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    return path


def restore(path: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, state_of(0))


def test_orbax_does_not_save_to_s3(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for everything below: with fsspec, Orbax makes directories in a bucket, but its arrays are local files."""
    pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    ps.fsspec.register("s3")
    with pytest.raises(ValueError, match="should be absolute"):
        save(state_of(1), f"{url}/run/1")  # type: ignore[arg-type]


def test_a_checkpoint_of_orbax_comes_back(url: str, tmp_path: Path) -> None:
    """Saved locally, uploaded, downloaded, restored."""
    ps.upload_directory(save(state_of(1), tmp_path / "1"), f"{url}/run/1")
    ps.download_directory(f"{url}/run/1", tmp_path / "fetched")
    assert_equal(restore(tmp_path / "fetched"), 1)


def test_an_upload_that_was_not_finished_is_no_checkpoint(url: str, tmp_path: Path) -> None:
    """Without the files that are written last, Orbax has an error, never arrays of another save."""
    ps.upload_directory(save(state_of(1), tmp_path / "1"), f"{url}/run/1")
    with ps.connect(url) as store:
        store.delete(f"run/1/{name}" for name in ("manifest.ocdbt", "_CHECKPOINT_METADATA", "commit_success.txt"))
    ps.download_directory(f"{url}/run/1", tmp_path / "fetched")
    with pytest.raises((ValueError, FileNotFoundError)):
        restore(tmp_path / "fetched")


@needs_fuse
def test_orbax_restores_from_a_mount(url: str, mounted: Callable[[], Path], tmp_path: Path) -> None:
    """A checkpoint, and a read-only CheckpointManager of a run, which finds the steps."""
    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        for step in (1, 2):
            manager.save(step, args=ocp.args.StandardSave(state_of(step)))
            manager.wait_until_finished()
            ps.upload_directory(tmp_path / f"run/{step}", f"{url}/run/{step}")
    folder = mounted() / "run"
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        assert manager.all_steps() == [1, 2]
        for step in (2, 1):
            assert_equal(manager.restore(step, args=ocp.args.StandardRestore(state_of(0))), step)


def test_bytes_of_flax_are_one_object(url: str) -> None:
    """flax.serialization through ps.open: the object is there when all of it is, and restores."""
    with ps.open(f"{url}/run/1.msgpack", "wb") as file:
        file.write(flax.serialization.to_bytes(state_of(1)))
    with pytest.raises(ZeroDivisionError), ps.open(f"{url}/run/1.msgpack", "wb") as file:
        file.write(flax.serialization.to_bytes({"step": 1 // 0}))
    with ps.open(f"{url}/run/1.msgpack") as file:
        assert_equal(flax.serialization.from_bytes(state_of(0), file.read()), 1)
