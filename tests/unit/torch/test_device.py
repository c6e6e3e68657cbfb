from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from loading import index_beside, numbers, pipeline, write_counted
from penstock.errors import ConfigError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def counted(batches_count: int) -> list[dict[str, Any]]:
    """Batches whose every value is their number."""
    return [
        {"x": np.full((4, 3), index, np.int32), "y": torch.full((4,), index), "__key__": [str(index)] * 4}
        for index in range(batches_count)
    ]


def test_on_the_cpu_nothing_is_copied() -> None:
    """Without a device to copy to, tensors share the batches' memory, and lists pass through."""
    batches = counted(3)
    made = list(ps.torch.Prefetch(batches, device="cpu"))
    assert [batch["x"][0, 0].item() for batch in made] == [0, 1, 2]
    assert made[1]["x"].data_ptr() == batches[1]["x"].ctypes.data
    assert made[1]["__key__"] is batches[1]["__key__"]


def test_epochs_of_a_loader(tmp_path: Path) -> None:
    """Each iteration is one of the loader's: its batches, in its order."""
    write_counted(tmp_path, (9, 4, 7))
    index_beside(tmp_path)
    with ps.Loader(pipeline(tmp_path)) as one, ps.Loader(pipeline(tmp_path)) as two:
        ahead = ps.torch.Prefetch(two, device="cpu")
        for _ in range(2):
            assert numbers(ahead) == numbers(one)


def test_bounds_are_checked() -> None:
    """What cannot be is refused when it is made."""
    with pytest.raises(ConfigError, match="ahead=0"):
        ps.torch.Prefetch([], ahead=0)
    with pytest.raises(ConfigError, match="toaster"):
        ps.torch.Prefetch([], device="toaster")
    with pytest.raises(ConfigError, match="one entry per channel"):
        ps.torch.Normalize(mean=(0.5,), std=(0.5, 0.5))


def test_the_length_is_the_batches() -> None:
    """It has as many batches as what it is given, where that is known."""
    assert len(ps.torch.Prefetch(counted(3), device="cpu")) == 3
    with pytest.raises(TypeError):
        len(ps.torch.Prefetch(iter(counted(3)), device="cpu"))


@needs_cuda
def test_on_the_device_batches_are_the_same_in_order() -> None:
    """Copied ahead on another stream, every value arrives before the training stream reads it."""
    ahead = ps.torch.Prefetch(({**batch, "ragged": (batch["x"], [1])} for batch in counted(50)), device="cuda", ahead=3)
    for index, batch in enumerate(ahead):
        assert batch["x"].is_cuda
        assert bool((batch["ragged"][0] == index).all())
        assert bool((batch["x"] == index).all())
        assert bool((batch["y"] == index).all())


def test_pictures_are_normalised() -> None:
    """(x / 255 - mean) / std per channel, channels first, equal to the plain arithmetic."""
    images = torch.randint(0, 256, (2, 5, 4, 3), dtype=torch.uint8)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = ((images / 255 - mean) / std).permute(0, 3, 1, 2)
    made = ps.torch.Normalize()(images)
    assert made.shape == (2, 3, 5, 4)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, expected)
    assert made.is_contiguous(memory_format=torch.channels_last)


def test_grey_pictures_have_one_channel() -> None:
    """uint8[B, H, W] becomes dtype[B, 1, H, W]."""
    made = ps.torch.Normalize(mean=(0.5,), std=(0.25,), dtype=torch.bfloat16)(torch.zeros((2, 5, 4), dtype=torch.uint8))
    assert made.shape == (2, 1, 5, 4)
    assert made.dtype == torch.bfloat16
    assert bool((made == -2).all())


def test_a_normaliser_adds_nothing_to_a_checkpoint() -> None:
    """Its constants move with the module and are not part of its state."""
    assert ps.torch.Normalize().state_dict() == {}


def test_what_wraps_a_loader_shows_it() -> None:
    """In a notebook or a log, wrappers and checkpoints say what they are of."""
    loader = ps.Loader(ps.shards("s3://b/").batch(2))
    assert repr(ps.torch.Tensors(loader)) == f"Tensors({loader!r})"
    assert repr(ps.torch.Prefetch(loader, device="cpu")) == f"Prefetch({loader!r}, device='cpu', ahead=2)"
    assert repr(ps.torch.MapDataset(ps.objects("s3://b/"))) == "MapDataset(objects('s3://b/'))"
    assert repr(ps.torch.Checkpoint(model=torch.nn.Linear(1, 1))) == "<Checkpoint of Linear>"
