from __future__ import annotations

import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import penstock as ps
from loading import index, index_beside, numbers, pipeline, write_counted
from penstock.errors import ConfigError
from penstock.samples.columns import Ragged

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def test_tensors_share_the_arrays_memory() -> None:
    """No copy: what is written to the array is seen in the tensor; lists stay what they are."""
    batch = {"x": np.zeros((2, 3), np.uint8), "flag": np.zeros(2, np.bool_), "__key__": ["a", "b"]}
    made = ps.torch.as_tensors(batch)
    batch["x"][1, 2] = 7
    assert made["x"][1, 2] == 7
    assert made["x"].data_ptr() == batch["x"].ctypes.data
    assert (made["x"].dtype, made["flag"].dtype) == (torch.uint8, torch.bool)
    assert made["__key__"] is batch["__key__"]


def test_tensors_of_a_loader(tmp_path: Path) -> None:
    """The loader's batches, in its order, epoch after epoch."""
    total = write_counted(tmp_path, (9, 4, 7))
    index_beside(tmp_path)
    with ps.Loader(pipeline(tmp_path)) as one, ps.Loader(pipeline(tmp_path)) as two:
        for _ in range(2):
            seen = 0
            for arrays, tensors in zip(one, ps.torch.Tensors(two), strict=True):
                assert torch.equal(tensors["cls"], torch.from_numpy(arrays["cls"]))
                assert tensors["txt"] == arrays["txt"]
                seen += len(tensors["cls"])
            assert seen == total


def test_what_is_no_number_stays() -> None:
    """Arrays of strings have no tensor and pass through."""
    batch = {"name": np.array(["a", "b"])}
    assert ps.torch.as_tensors(batch)["name"] is batch["name"]


def test_ragged_columns_and_collated_batches() -> None:
    """A ragged column's data and offsets become tensors under their names; so do arrays in what collate made."""
    ragged = Ragged(np.arange(5), np.array([0, 2, 5]))
    made = ps.torch.as_tensors({"tokens": ragged})["tokens"]
    assert made.data.tolist() == [0, 1, 2, 3, 4]
    nested = torch.nested.nested_tensor_from_jagged(made.data, made.offsets)
    assert [each.tolist() for each in nested.unbind()] == [[0, 1], [2, 3, 4]]
    pair = ps.torch.as_tensors((np.zeros(2), ["a", "b"]))
    assert isinstance(pair[0], torch.Tensor)
    assert pair[1] == ["a", "b"]


def test_tensors_have_the_loaders_state(tmp_path: Path) -> None:
    """Saved and restored through the wrapper, the loader continues where it was."""
    write_counted(tmp_path, (9, 4, 7))
    with ps.Loader(pipeline(tmp_path)) as one, ps.Loader(pipeline(tmp_path)) as two:
        first = ps.torch.Tensors(one)
        next(batches := iter(first))
        second = ps.torch.Tensors(two)
        second.load_state_dict(first.state_dict())
        assert numbers(second) == numbers(batches)
    with pytest.raises(ConfigError, match="state_dict"):
        ps.torch.Tensors([]).state_dict()


def test_a_trainer_that_counts_gets_every_epoch(tmp_path: Path) -> None:
    """Who takes ``len()`` batches and never sees the end of an epoch gets the next one, also after restoring its last batch."""
    total = write_counted(tmp_path, (9, 4, 7))
    index_beside(tmp_path)
    with ps.Loader(pipeline(tmp_path)) as one, ps.Loader(pipeline(tmp_path)) as two:
        expected = [numbers(one) for _ in range(4)]
        for epoch in range(3):
            made = ps.torch.Tensors(two)  # those of another call of the trainer
            assert numbers(islice(made, len(made))) == expected[epoch]
        state = made.state_dict()
        with ps.Loader(pipeline(tmp_path)) as three:
            restored = ps.torch.Tensors(three)
            restored.load_state_dict(state)
            iter(restored)  # trainers make iterators that they do not use
            assert numbers(restored) == expected[3]
            assert len(expected[3]) == total


def test_the_rest_of_an_epoch_stays_a_rest(tmp_path: Path) -> None:
    """Tensors of a loader that was restored at the end of an epoch in a plain loop have nothing, as the loader has."""
    write_counted(tmp_path, (9, 4, 7))
    with ps.Loader(pipeline(tmp_path)) as one, ps.Loader(pipeline(tmp_path)) as two:
        for _ in one:
            state = one.state_dict()
        two.load_state_dict(state)
        seen = {epoch: len(numbers(ps.torch.Tensors(two))) for epoch in two.epochs(2)}
        assert seen == {0: 0, 1: 20}


@pytest.mark.server
@pytest.mark.filterwarnings("ignore:.*slot")  # holding every batch is what is tested
def test_tensors_hold_shared_memory(tmp_path: Path) -> None:
    """Tensors of batches in worker processes' memory keep it: neither later batches nor close() change them."""
    total = write_counted(tmp_path / "data", (30, 20))
    made = pipeline(tmp_path / "data", batch=3)
    index(made, tmp_path / "index")
    with ps.Loader(made, processes=2, index_dir=tmp_path / "index") as loader:
        held = [batch["cls"] for batch in ps.torch.Tensors(loader)]
    assert sorted(int(number) for column in held for number in column) == list(range(total))


@pytest.mark.server
def test_processes_below_a_dataset(tmp_path: Path) -> None:
    """IterableDataset takes processes= too, in this process and in a DataLoader's worker: the same batches."""
    write_counted(tmp_path / "data", (9, 4, 7))
    made = pipeline(tmp_path / "data", batch=3)
    index(made, tmp_path / "index")
    with ps.Loader(made, index_dir=tmp_path / "index") as loader:
        expected = numbers(loader)
    for workers in (0, 1):
        dataset = ps.torch.IterableDataset(made, processes=1, index_dir=tmp_path / "index")
        batches = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers)
        assert numbers(batches) == expected
        dataset.close()


@pytest.mark.server
def test_torch_is_imported_by_its_own_door_only() -> None:
    """Neither the package, nor its loader, nor its pipeline imports torch; naming penstock.torch does."""
    code = (
        "import sys, penstock as ps; ps.Loader, ps.shards, ps.connect; before = 'torch' in sys.modules; ps.torch;"
        "print(before, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
