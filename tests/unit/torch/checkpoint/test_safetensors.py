from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import (
    CheckpointError,
    ClosedError,
    ConfigError,
    ObjectChangedError,
    ObjectMissingError,
    StoreError,
)
from penstock.store.memory import MemoryStore
from penstock.types import Delete, Put

torch = pytest.importorskip("torch")
from penstock.torch.checkpoint import (  # noqa: E402 - imports torch
    SafetensorsReader,
    load_safetensors,
    open_safetensors,
    save_safetensors,
)
from penstock.torch.checkpoint.safetensors_reading import TORCH_DTYPES  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def state() -> dict[str, Any]:
    """Tensors of every dtype, and of awkward shapes."""
    state = {name: torch.randint(0, 2, (5, 3)).to(dtype) for name, dtype in TORCH_DTYPES.items()}
    state["scalar"] = torch.tensor(3.5)
    state["empty"] = torch.empty(0, 4)
    state["transposed"] = torch.arange(12.0).reshape(3, 4).t()
    state["large.ü"] = torch.randn(300_000)
    return state


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert found[name].reshape(-1).view(torch.uint8).tolist() == (
            tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
        ), name


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_comes_back(tmp_path: Path, state: dict[str, Any]) -> None:
    """Every dtype, scalars, empty and transposed tensors come back bit for bit; so does the metadata."""
    save_safetensors(state, tmp_path / "model.safetensors", metadata={"epoch": "3"})
    assert_same(load_safetensors(tmp_path / "model.safetensors"), state)
    with open_safetensors(tmp_path / "model.safetensors") as reader:
        assert reader.metadata() == {"format": "pt", "epoch": "3"}


@pytest.mark.parametrize("shard_bytes_max", [1, 200, 1_200_100, None])
def test_a_directory_comes_back(tmp_path: Path, state: dict[str, Any], shard_bytes_max: int | None) -> None:
    """One file if it suffices, otherwise files of at most the given size and an index: the same tensors."""
    save_safetensors(state, f"{tmp_path}/model/", shard_bytes_max=shard_bytes_max)
    assert_same(load_safetensors(f"{tmp_path}/model/"), state)
    names = names_in(tmp_path / "model")
    if shard_bytes_max is None:
        assert names == ["model.safetensors"]
        return
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(names) - {"model.safetensors.index.json"}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    assert_same(load_safetensors(tmp_path / "model/model.safetensors.index.json"), state)


def test_some_tensors_are_chosen(tmp_path: Path, state: dict[str, Any]) -> None:
    """By names, in their order, or by a function; a name that is not there is an error that says so."""
    save_safetensors(state, f"{tmp_path}/model/", shard_bytes_max=100)
    found = load_safetensors(f"{tmp_path}/model/", names=["scalar", "BF16", "scalar"])
    assert list(found) == ["scalar", "BF16"]
    assert set(load_safetensors(f"{tmp_path}/model/", names=lambda name: name.startswith("F8_E4"))) == {
        name for name in state if name.startswith("F8_E4")
    }
    assert load_safetensors(f"{tmp_path}/model/", names=[]) == {}
    with pytest.raises(CheckpointError, match=r"no such tensor.*'none'"):
        load_safetensors(f"{tmp_path}/model/", names=["scalar", "none"])
    with pytest.raises(ConfigError, match="names=\\['scalar'\\]"):
        load_safetensors(f"{tmp_path}/model/", names="scalar")


def test_only_the_files_that_are_needed_are_read(tmp_path: Path, state: dict[str, Any]) -> None:
    """Tensors of one file load although another file of the directory is gone; those of the other file do not."""
    save_safetensors(state, f"{tmp_path}/model/", shard_bytes_max=100)
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())["weight_map"]
    (tmp_path / "model" / index["BF16"]).unlink()
    chosen = [name for name in state if index[name] != index["BF16"]]
    assert_same(load_safetensors(f"{tmp_path}/model/", names=chosen), {name: state[name] for name in chosen})
    with pytest.raises(ObjectMissingError, match=index["BF16"]):
        load_safetensors(f"{tmp_path}/model/")


@pytest.mark.parametrize(
    "cut",
    [
        lambda t: t[2:4],
        lambda t: t[:, :2],
        lambda t: t[1:4:2, -1],
        lambda t: t[-1],
        lambda t: t[..., 1],
        lambda t: t[3, 1:, None],
        lambda t: t[4:2],
        lambda t: t[()],
        lambda t: t[True],
        lambda t: t[-100:100],
    ],
)
def test_a_slice_is_that_of_the_tensor(tmp_path: Path, cut: Callable[[Any], Any]) -> None:
    """get_slice(name)[index] is tensor[index], whatever the index."""
    tensor = torch.arange(15.0).reshape(5, 3)
    save_safetensors({"w": tensor, "v": torch.ones(3)}, tmp_path / "m.safetensors")
    with open_safetensors(tmp_path / "m.safetensors") as reader:
        found = cut(reader.get_slice("w"))
        assert reader.get_slice("w").get_shape() == [5, 3]
        assert reader.get_slice("w").get_dtype() == "F32"
    assert found.shape == cut(tensor).shape
    assert torch.equal(found, cut(tensor))


def test_bad_slices_are_refused(tmp_path: Path) -> None:
    """Indices out of range and steps backwards are errors, as with tensors."""
    save_safetensors({"w": torch.arange(15.0).reshape(5, 3)}, tmp_path / "m.safetensors")
    with open_safetensors(tmp_path / "m.safetensors") as reader:
        for index in (5, -6, (0, 9), (0, 0, 0)):
            with pytest.raises(IndexError):
                reader.get_slice("w")[index]
        with pytest.raises(ValueError, match="step -1"):
            reader.get_slice("w")[::-1]


def test_on_meta_nothing_but_headers_is_read(tmp_path: Path) -> None:
    """device="meta" gives the shapes of a checkpoint without its bytes."""
    save_safetensors({"w": torch.ones(4, 2, dtype=torch.float16)}, tmp_path / "m.safetensors")
    found = load_safetensors(tmp_path / "m.safetensors", device="meta")["w"]
    assert (found.is_meta, found.shape, found.dtype) == (True, (4, 2), torch.float16)


def test_each_tensor_has_memory_of_its_own(tmp_path: Path) -> None:
    """A loaded tensor can be changed, and keeps no other one in memory."""
    save_safetensors({"a": torch.zeros(3), "b": torch.zeros(3)}, tmp_path / "m.safetensors")
    found = load_safetensors(tmp_path / "m.safetensors")
    found["a"] += 1
    assert found["b"].tolist() == [0, 0, 0]
    assert found["a"].untyped_storage().nbytes() == 12


def test_a_save_takes_the_place_of_the_earlier_one(tmp_path: Path) -> None:
    """Whatever forms the two have, the directory loads as the newer one, and holds no file of the older one."""
    forms: list[int | None] = [None, 100, 40, 100, 100, None, 40]
    for number, shard_bytes_max in enumerate(forms):
        state = {name: torch.full((10,), float(number)) for name in "abc"}
        save_safetensors(state, f"{tmp_path}/m/", shard_bytes_max=shard_bytes_max)
        assert_same(load_safetensors(f"{tmp_path}/m/"), state)
        files = {None: 1, 100: 3, 40: 4}[shard_bytes_max]
        assert len(names_in(tmp_path / "m")) == files


def test_a_failed_save_leaves_the_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever write fails, the earlier checkpoint is loaded, and the next save removes what was left."""
    store, real, puts = MemoryStore(name="safetensors-failing"), MemoryStore.submit, 0

    def submit(self: MemoryStore, operation: Any, sink: Any) -> Any:
        nonlocal puts
        if isinstance(operation, Put):
            puts -= 1
            if puts == 0:
                raise StoreError("the bucket is full", url=self.describe(operation.key))
        return real(self, operation, sink)

    url = "memory://safetensors-failing/m/"
    states = [{name: torch.full((10,), value) for name in "abc"} for value in (1.0, 2.0)]
    for earlier in (None, 40):
        save_safetensors(states[0], url, shard_bytes_max=earlier)
        for failing in (1, 2, 3, 4):
            puts = failing
            with monkeypatch.context() as patch:
                patch.setattr(MemoryStore, "submit", submit)
                with pytest.raises(StoreError, match="the bucket is full"):
                    save_safetensors(states[1], url, shard_bytes_max=40)
            assert_same(load_safetensors(url), states[0])
            assert len(list(store.list())) == (1 if earlier is None else 4)
        store.write("m/model-0123abcd-00001-of-00002.safetensors", b"debris of a killed save")
        save_safetensors(states[1], url, shard_bytes_max=40)
        assert_same(load_safetensors(url), states[1])
        assert len(list(store.list())) == 4


@pytest.mark.parametrize("later", [None, 40, 60])
@pytest.mark.parametrize("earlier", [None, 40])
def test_a_save_that_is_killed_leaves_one_of_both(
    monkeypatch: pytest.MonkeyPatch, earlier: int | None, later: int | None
) -> None:
    """Whichever operation is the last one before a kill, what loads is all of the earlier state or all of the new one."""
    real, left = MemoryStore.submit, 0
    states = [{name: torch.full((10,), value) for name in "abc"} for value in (1.0, 2.0)]
    url = f"memory://safetensors-killed-{earlier}-{later}/m/"

    def submit(self: MemoryStore, operation: Any, sink: Any) -> Any:
        nonlocal left
        if isinstance(operation, Put | Delete):
            left -= 1
            if left < 0:  # as after kill -9, nothing is cleaned up either
                raise StoreError("the process is gone", url=self.describe(""))
        return real(self, operation, sink)

    loaded = []
    for operations in range(100):
        save_safetensors(states[0], url, shard_bytes_max=earlier)
        left = operations
        with monkeypatch.context() as patch:
            patch.setattr(MemoryStore, "submit", submit)
            with contextlib.suppress(StoreError):
                save_safetensors(states[1], url, shard_bytes_max=later)
        found = load_safetensors(url)
        loaded.append(int(found["a"][0]))
        assert_same(found, states[loaded[-1] - 1])
        if left > 0:  # nothing was left out
            break
    assert loaded == sorted(loaded)
    assert set(loaded) == {1, 2}


def test_other_files_of_the_directory_remain(tmp_path: Path) -> None:
    """A save removes nothing but files that safetensors checkpoints consist of."""
    others = ["config.json", "model.py", "model-card.safetensors", "models.safetensors"]
    for name in others:
        (tmp_path / name).write_text("mine")
    save_safetensors({"w": torch.ones(3)}, f"{tmp_path}/")
    assert names_in(tmp_path) == sorted([*others, "model.safetensors"])


def test_files_of_two_saves_are_not_mixed(tmp_path: Path) -> None:
    """A file from another save, in the place of one that the index names, is an error that names it."""
    for folder in "ab":
        save_safetensors({"v": torch.ones(9), "w": torch.ones(9)}, f"{tmp_path}/{folder}/", shard_bytes_max=36)
    name = "model-00002-of-00002.safetensors"
    (tmp_path / "a" / name).write_bytes((tmp_path / "b" / name).read_bytes())
    with pytest.raises(CheckpointError, match=f"a/{name}: .*not saved together"):
        load_safetensors(f"{tmp_path}/a/")


@pytest.mark.parametrize("replaced", ["one-1.safetensors", "model.safetensors.index.json"])
def test_files_that_are_replaced_are_not_mixed(tmp_path: Path, replaced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another program replaces a file that was read already, the files of its model are not mixed with those before."""
    for name in ("one-1.safetensors", "one-2.safetensors"):
        save_safetensors({name: torch.ones(9)}, tmp_path / name)
    names = ["one-1.safetensors", "one-2.safetensors"]
    index = {"metadata": {}, "weight_map": {name: name for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert list(load_safetensors(f"{tmp_path}/")) == names
    with open_safetensors(f"{tmp_path}/") as reader:
        read = reader._store.read_into

        def read_and_replace(requests: Any) -> Any:
            filled = read(list(requests))
            path = tmp_path / replaced
            path.with_name("new").write_bytes(path.read_bytes())

            class Replacing:
                def __enter__(self) -> Any:
                    yield from filled
                    path.with_name("new").replace(path)

                def __exit__(self, *_: object) -> None:
                    filled.close()

            return Replacing()

        monkeypatch.setattr(reader._store, "read_into", read_and_replace)
        with pytest.raises(ObjectChangedError, match=replaced):
            reader.load()
        monkeypatch.undo()
        assert list(reader.load(["one-2.safetensors"])) == ["one-2.safetensors"], "one file cannot be mixed"


def test_an_index_that_lies_is_an_error(tmp_path: Path) -> None:
    """A tensor that its file does not hold is an error that names file, tensor and index."""
    save_safetensors({"v": torch.ones(9)}, tmp_path / "x.safetensors")
    index = {"metadata": {}, "weight_map": {"v": "x.safetensors", "w": "x.safetensors"}}
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps(index))
    assert list(load_safetensors(tmp_path / "m.safetensors.index.json", names=["v"])) == ["v"]
    with pytest.raises(CheckpointError, match=r"/x\.safetensors: .*m\.safetensors\.index\.json says so.*'w'"):
        load_safetensors(tmp_path / "m.safetensors.index.json")


@pytest.mark.parametrize("size_bytes", [0, 5, 100, 4000])
def test_a_cut_file_is_an_error(tmp_path: Path, size_bytes: int) -> None:
    """Wherever a file is cut off, loading it is an error that names it, also for tensors before the cut."""
    save_safetensors({"v": torch.ones(9), "w": torch.ones(1000)}, tmp_path / "m.safetensors")
    whole = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "m.safetensors").write_bytes(whole[:size_bytes])
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        load_safetensors(tmp_path / "m.safetensors", names=["v"])


def test_long_headers_are_read(tmp_path: Path) -> None:
    """A header longer than the first request is read whole."""
    state = {f"{'layer' * 20}.{number}": torch.tensor([number]) for number in range(3000)}
    save_safetensors(state, tmp_path / "m.safetensors")
    (length,) = struct.unpack("<Q", (tmp_path / "m.safetensors").read_bytes()[:8])
    assert length > 2**18
    found = load_safetensors(tmp_path / "m.safetensors")
    assert [int(tensor) for tensor in found.values()] == [int(found[name]) for name in found]
    assert {name: int(tensor) for name, tensor in found.items()} == {name: int(t) for name, t in state.items()}


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    """A missing file, an empty directory and a missing one are errors that name the URL."""
    for url in (tmp_path / "none.safetensors", f"{tmp_path}/", f"{tmp_path}/none/"):
        with pytest.raises(ObjectMissingError, match=str(tmp_path)):
            load_safetensors(url)


def test_a_closed_reader_says_so(tmp_path: Path) -> None:
    """Reading after close() is an error; closing twice is none."""
    save_safetensors({"w": torch.ones(3)}, tmp_path / "m.safetensors")
    reader = open_safetensors(tmp_path / "m.safetensors")
    assert isinstance(reader, SafetensorsReader)
    reader.close()
    reader.close()
    with pytest.raises(ClosedError):
        reader.get_tensor("w")


weight = torch.ones(4, 4)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([weight], "map names to tensors"),
        ({3: weight}, "3 cannot be the name"),
        ({"__metadata__": weight}, "cannot be the name"),
        ({"\ud800": weight}, "cannot be the name"),
        ({"epoch": 3}, "'epoch' is int"),
        ({"w": torch.empty(3, device="meta")}, "'w' is on 'meta'"),
        ({"w": weight.to_sparse()}, "'w' is sparse"),
        ({"w": torch.ones(3, dtype=torch.complex128)}, "'w' is torch.complex128"),
        ({"w": weight, "tied": weight}, "share memory"),
        ({"w": weight, "row": weight[1]}, "share memory"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path: Path, tensors: Any, message: str) -> None:
    """Each is an error that names the tensor, and nothing is written."""
    with pytest.raises(ConfigError, match=message):
        save_safetensors(tensors, tmp_path / "m.safetensors")
    assert names_in(tmp_path) == []


def test_rows_of_one_tensor_are_different_tensors(tmp_path: Path) -> None:
    """Views that do not overlap can be saved beside each other."""
    save_safetensors({"a": weight[:2], "b": weight[2:]}, tmp_path / "m.safetensors")
    assert load_safetensors(tmp_path / "m.safetensors")["b"].shape == (2, 4)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    """Sizes, metadata, devices and URLs that make no sense are errors that say what would."""
    file = tmp_path / "m.safetensors"
    for size in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="shard_bytes_max"):
            save_safetensors({"w": weight}, f"{tmp_path}/", shard_bytes_max=size)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="slash"):
        save_safetensors({"w": weight}, file, shard_bytes_max=10)
    with pytest.raises(ConfigError, match=r"not be Linear\. Hint: pass model\.state_dict\(\)"):
        save_safetensors(torch.nn.Linear(2, 2), file)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="metadata"):
        save_safetensors({"w": weight}, file, metadata={"epoch": 3})  # type: ignore[dict-item]
    save_safetensors({"w": weight}, file)
    with pytest.raises(ConfigError, match="device='gpu'"):
        load_safetensors(file, device="gpu")
    assert ps.torch.checkpoint.load_safetensors is load_safetensors
