from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from loading import index
from pages import write_pictures

jax = pytest.importorskip("jax")

EXAMPLE = Path(__file__).parents[3] / "examples" / "jax_mesh.py"


def test_the_example_learns_on_four_devices(tmp_path: Path) -> None:
    """Each batch lies on all four devices of the mesh, and the loss falls from epoch to epoch."""
    write_pictures(tmp_path, samples=300, shards=5)
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), f"{tmp_path}/"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+) on 4 devices", done.stdout)]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]


def test_arrays_are_taken_as_they_are(tmp_path: Path) -> None:
    """A batch's arrays go to jax.device_put and to numpy functions of JAX without conversion, dtype and bytes equal."""
    write_pictures(tmp_path, samples=20, shards=2)
    made = ps.shards(f"{tmp_path}/").decode(ps.Image("png", mode="L"), ps.Integer("cls")).batch(8)
    with ps.Loader(made) as loader:
        for batch in loader:
            images = jax.device_put(batch["png"])
            assert images.dtype == np.uint8
            assert (np.asarray(images) == batch["png"]).all()


@pytest.mark.parametrize("processes", [0, 2])
def test_what_jax_holds_outlives_the_loader(tmp_path: Path, processes: int) -> None:
    """JAX may keep a batch's memory as its own: later batches, slots used again and close() do not change it."""
    write_pictures(tmp_path / "data", samples=40, shards=2)
    made = (
        ps.shards(f"{tmp_path}/data/").shuffle(window=8).decode(ps.Image("png", mode="L"), ps.Integer("cls")).batch(4)
    )
    index(made, tmp_path / "index")
    held, copies = [], []
    with ps.Loader(made, processes=processes, index_dir=tmp_path / "index") as loader:
        for batch in loader:
            held.append(jax.device_put(batch["png"]))
            copies.append(batch["png"].copy())
            del batch
    assert len(held) == 10
    assert all((np.asarray(array) == copy).all() for array, copy in zip(held, copies, strict=True))
