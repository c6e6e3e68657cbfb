"""Distributed checkpoints of one process: what is saved is loaded, by this reader and PyTorch's, and damage is an error."""

from __future__ import annotations

import io
import math
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, _load_state_dict_from_keys

import penstock as ps
from bounded import run_bounded
from penstock.checkpoints import CheckpointFile, CheckpointManifest, Checkpoints, layout
from penstock.checkpoints.manifest import BLOCK_BYTES
from penstock.checksums.crc32c import crc32c
from penstock.errors import CheckpointError, ConfigError, ObjectChangedError
from penstock.torch.checkpoint import (
    RoundRobinPrefixes,
    StorageReader,
    StorageWriter,
    items,
    plan_reading,
    storage_reader,
    storage_writer,
)
from penstock.torch.checkpoint.metadata import decode_metadata

dcp: Any = torch.distributed.checkpoint  # it exports nothing, as far as mypy can see

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:torch.distributed is")]

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
]  # fmt: skip


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def state(fill: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> dict[str, Any]:
    """A state dict of what models, optimisers and programs have: all kinds of tensors, nested objects, numbers and text."""
    return {
        "model": {
            "weight": fill(values(30, 50)),
            "bias": fill(values(30)),
            "scalar": fill(values()),
            "empty": fill(values(0, 3)),
        },
        "dtypes": {str(dtype): fill(values(5, dtype=dtype)) for dtype in DTYPES},
        "transposed": fill(values(6, 4).t()),
        "slice": fill(values(10, 10)[3:5]),
        "list": [fill(values(2)), {"y": fill(values(1))}],
        "step": 5,
        "name": "text",
    }


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[name], second[name]) for name in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return bool(first == second)


def zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor)


def empty_state() -> dict[str, Any]:
    return {**state(zeros), "step": 0, "name": ""}


def load(url: str) -> dict[str, Any]:
    target = empty_state()
    dcp.load(target, storage_reader=StorageReader(url))
    return target


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"{tmp_path}/run/step-0000000007"


@pytest.fixture
def saved(url: str) -> str:
    """The URL of a checkpoint of ``state()``."""
    dcp.save(state(), storage_writer=StorageWriter(url))
    return url


@pytest.mark.parametrize("block_bytes", [100, None])
@pytest.mark.parametrize(
    ("options", "files_count"),
    [({}, 1), ({"thread_count": 3}, 3), ({"files_per_rank": 4, "prefix_strategy": RoundRobinPrefixes(["ab"])}, 4)],
)
def test_saving_and_loading(
    url: str, options: Any, files_count: int, block_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of value survives, PyTorch's own reader loads the files, and every byte verifies."""
    if block_bytes:
        monkeypatch.setattr(storage_writer, "BLOCK_BYTES", block_bytes)
    with StorageWriter(url, **options) as writer:
        dcp.save(state(), storage_writer=writer)
    assert equal(load(url), state())
    theirs = empty_state()
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(url))
    assert equal(theirs, state())
    with Checkpoints(Path(url).parent) as run:
        assert run.verify(7).ok
        assert run.inspect(7).files_count == files_count + 1
        assert all(info.key.startswith("step-") for info in run.store.list(""))


def test_what_pytorch_wrote_is_loaded(tmp_path: Path) -> None:
    """A checkpoint of PyTorch's writer loads; without a manifest it is unchecked."""
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"))
    assert equal(load(f"{tmp_path}/theirs"), state())


def test_a_file_without_checksums_that_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of PyTorch's writer that changes after the plan was made is an error that names it, and never mixed."""
    for folder in ("theirs", "later"):
        dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / folder))
    reader = StorageReader(tmp_path / "theirs")
    read_data = reader.read_data

    def replaced(plan: Any, planner: Any) -> Any:
        name = "__0_0.distcp"
        (tmp_path / "later" / name).replace(tmp_path / "theirs" / name)
        return read_data(plan, planner)

    monkeypatch.setattr(reader, "read_data", replaced)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(empty_state(), storage_reader=reader)
    (failure,) = caught.value.failures.values()
    assert isinstance(failure[0], ObjectChangedError)
    assert "theirs/__0_0.distcp" in str(failure[0])


def test_a_directory_of_any_name(tmp_path: Path) -> None:
    """The marker of a save lies beside a step's directory, and inside a directory of another name."""
    dcp.save(state(), storage_writer=StorageWriter(tmp_path / "best", step=12))
    with Checkpoints(tmp_path) as run:
        assert [(info.name, info.step, info.status) for info in run.all()] == [("best/", 12, "whole")]
    assert equal(load(f"{tmp_path}/best/"), state())


def test_one_writer_saves_many_times(tmp_path: Path) -> None:
    """A writer is used again, for the same directory, which is replaced, or for another one."""
    writer = StorageWriter(tmp_path / "step-0000000001")
    for step in (1, 1, 2, 3):
        dcp.save(state(), storage_writer=writer, checkpoint_id=f"{tmp_path}/step-{step:010d}")
    dcp.save(state(), storage_writer=writer, checkpoint_id=f"{tmp_path}/other/best")
    reader = StorageReader(tmp_path / "step-0000000001")
    for name in ("step-0000000001", "step-0000000003", "other/best"):
        target = empty_state()
        dcp.load(target, storage_reader=reader, checkpoint_id=f"{tmp_path}/{name}")
        assert equal(target, state())
    assert len(list((tmp_path / "step-0000000001").iterdir())) == 3


def test_writer_and_reader_pickle(url: str) -> None:
    """Both travel to another process as their configuration."""
    writer = pickle.loads(pickle.dumps(StorageWriter(url, thread_count=2)))
    dcp.save(state(), storage_writer=writer)
    target = empty_state()
    dcp.load(target, storage_reader=pickle.loads(pickle.dumps(StorageReader(url))))
    assert equal(target, state())


def test_tensors_that_are_not_read_in_place(saved: str) -> None:
    """Destinations of another dtype, with gaps, or in another order get the same values."""
    target = empty_state()
    target["model"]["weight"] = torch.zeros(50, 30, dtype=torch.float64).t()
    target["model"]["bias"] = torch.zeros(30, 2)[:, 0]
    target["transposed"] = torch.zeros(4, 6, dtype=torch.int64)
    dcp.load(target, storage_reader=StorageReader(saved))
    expected = state()
    assert torch.equal(target["model"]["weight"], expected["model"]["weight"].double())
    assert torch.equal(target["model"]["bias"], expected["model"]["bias"])
    assert torch.equal(target["transposed"], expected["transposed"].long())


def test_parameters_are_loaded_in_place(tmp_path: Path) -> None:
    """A model and its optimiser get the saved values in the memory that they have."""
    torch.manual_seed(0)
    models = [torch.nn.Linear(20, 10) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.ones(20)).sum().backward()
        optimizer.step()
    both = [{"model": m.state_dict(), "optimizer": o.state_dict()} for m, o in zip(models, optimizers, strict=True)]
    dcp.save(both[0], storage_writer=StorageWriter(tmp_path / "c"))
    places = [parameter.data_ptr() for parameter in models[1].parameters()]
    dcp.load(both[1], storage_reader=StorageReader(tmp_path / "c"))
    assert all(torch.equal(*pair) for pair in zip(models[0].parameters(), models[1].parameters(), strict=True))
    assert places == [parameter.data_ptr() for parameter in models[1].parameters()]


class BoxPlanner(DefaultLoadPlanner):
    """Loads one box into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.target = target
        self.committed = 0

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        del read_item
        return self.target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        del read_item, tensor
        self.committed += 1


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """A size, and offsets and lengths of a box in it."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    offsets = [draw(st.integers(0, size - 1)) for size in sizes]
    lengths = [draw(st.integers(1, size - offset)) for size, offset in zip(sizes, offsets, strict=True)]
    return tuple(sizes), tuple(offsets), tuple(lengths)


@given(
    box=boxes(), source=st.sampled_from(DTYPES), target=st.sampled_from([None, torch.float64]), gaps=st.booleans(),
    block_bytes=st.integers(1, 40), piece_bytes=st.integers(1, 60), staged_bytes=st.integers(1, 100),
)  # fmt: skip
@pytest.mark.server
def test_any_box_of_a_tensor(
    box: Any,
    source: torch.dtype,
    target: torch.dtype | None,
    gaps: bool,
    block_bytes: int,
    piece_bytes: int,
    staged_bytes: int,
) -> None:
    """Any box goes into any tensor, whatever the lengths of blocks, pieces and staged memory, and is committed once."""
    sizes, offsets, lengths = box
    tensor = values(*sizes, dtype=source)
    if source.is_complex and target is not None:
        target = torch.complex128
    into = torch.zeros([2 * length for length in lengths] if gaps else lengths, dtype=target or source)
    view = into[tuple(slice(0, 2 * length, 2) for length in lengths)] if gaps else into
    expected = tensor[tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))]
    url = f"memory://{os.urandom(8).hex()}/step-0000000001/"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage_writer, "BLOCK_BYTES", block_bytes)
        patch.setattr(plan_reading, "PIECE_BYTES", piece_bytes)
        patch.setattr(plan_reading, "STAGED_BYTES_MAX", staged_bytes)
        with StorageWriter(url) as writer, StorageReader(url) as reader:
            dcp.save({"t": tensor}, storage_writer=writer)
            reader.set_up_storage_reader(reader.read_metadata(), True)
            index = MetadataIndex("t", [0] * len(sizes))
            item = ReadItem(
                LoadItemType.TENSOR,
                index,
                torch.Size([0] * len(sizes)),
                index,
                torch.Size(offsets),
                torch.Size(lengths),
            )
            planner = BoxPlanner(view)
            reader.read_data(LoadPlan([item]), planner).wait()
    assert torch.equal(view, expected.to(view.dtype))
    assert planner.committed == 1


# ── bad input ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": ""}, "is not the URL of a checkpoint"),
        ({"url": 7}, "is not the URL of a checkpoint"),
        ({"url": "s3:bucket"}, "begins like a URL"),
        ({"url": "/tmp/c", "thread_count": 0}, "thread_count=0"),
        ({"url": "/tmp/c", "thread_count": 1.5}, "thread_count=1.5"),
        ({"url": "/tmp/c", "files_per_rank": 5000}, "files_per_rank=5000"),
        ({"url": "/tmp/c", "step": math.nan}, "step=nan"),
        ({"url": "/tmp/c", "step": -1}, "step=-1"),
        ({"url": "/tmp/c", "prefix_strategy": "hex"}, "must be a function"),
    ],
)
def test_invalid_arguments(arguments: dict[str, Any], message: str) -> None:
    """An invalid argument is refused when the writer is made, and shown."""
    with pytest.raises(ConfigError, match=message):
        StorageWriter(**arguments)


def test_a_tensor_on_meta(url: str) -> None:
    """A tensor without data is an error that names it, nothing is committed, and nothing is left after close()."""
    with StorageWriter(url) as writer:
        with pytest.raises(CheckpointException, match="'b' is a tensor on the meta device"):
            dcp.save({"a": values(3), "b": torch.empty(3, device="meta")}, storage_writer=writer)
        assert not (Path(url) / ".metadata").exists()
    assert [path for path in Path(url).parent.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("prefix", ["../", "/", "a//", "./", 7, "a" * 600])
def test_prefixes_that_are_none(url: str, prefix: Any) -> None:
    """A prefix that leads elsewhere is refused before anything is written."""
    with pytest.raises(CheckpointException, match="the prefix"):
        dcp.save(state(), storage_writer=StorageWriter(url, prefix_strategy=lambda rank, world_size: prefix))
    assert not Path(url).parent.exists()


def test_without_collectives(url: str) -> None:
    """A save without collectives, which has no one commit, is refused."""
    with pytest.raises(ConfigError, match="use_collectives"):
        StorageWriter(url).set_up_storage_writer(True, rank=0, use_collectives=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda target: target["model"].update(other=values(3)), "Missing key in checkpoint state_dict: model.other"),
        (lambda target: target["model"].update(bias=values(31)), "Size mismatch .* for model.bias"),
        (lambda target: target["model"].update(weight="text"), "Invalid checkpoint metadata for model.weight"),
    ],
)
def test_a_checkpoint_of_another_model(saved: str, change: Any, message: str) -> None:
    """A missing key and another size are errors that name the key, before anything is loaded."""
    target = empty_state()
    change(target)
    with pytest.raises(CheckpointException, match=message):
        dcp.load(target, storage_reader=StorageReader(saved))
    assert equal(target["dtypes"], empty_state()["dtypes"])


@pytest.mark.parametrize("size", [(4,), (3, 1)])
def test_a_destination_that_does_not_fit(saved: str, size: tuple[int, ...]) -> None:
    """A destination of another size, or without memory, is an error that names the tensor, and not a load of nothing."""
    reader = StorageReader(saved)
    reader.set_up_storage_reader(reader.read_metadata(), True)
    index = MetadataIndex("list.1.y", [0])
    plan = LoadPlan([ReadItem(LoadItemType.TENSOR, index, torch.Size([0]), index, torch.Size([0]), torch.Size([1]))])
    with pytest.raises(CheckpointError, match=r"'list\.1\.y' has the size \(1,\) in the checkpoint"):
        reader.read_data(plan, BoxPlanner(torch.zeros(size)))
    with pytest.raises(ConfigError, match=r"'list\.1\.y' is a tensor on the meta device"):
        reader.read_data(plan, BoxPlanner(torch.zeros(1, device="meta")))


def data_file(url: str) -> Path:
    return next(Path(url).glob("*.distcp"))


def rewrite(path: Path, change: Callable[[bytearray], Any]) -> None:
    data = bytearray(path.read_bytes())
    changed = change(data)
    path.write_bytes(data if changed is None else changed)


def flip(data: bytearray) -> None:
    at = data.find(values(30, 50).numpy().tobytes()[:400])
    assert at > 0
    data[at + 200] ^= 1


DAMAGES: dict[str, tuple[Callable[[str], Any], str]] = {
    "missing file": (lambda url: data_file(url).unlink(), r"__0_0-.*: the file is missing"),
    "truncated file": (
        lambda url: rewrite(data_file(url), lambda data: data[:-1]),
        r"__0_0-.*has \d+ bytes, and the manifest",
    ),
    "missing commit": (lambda url: (Path(url) / ".metadata").unlink(), r"\.metadata: there is no checkpoint"),
    "damaged commit": (lambda url: rewrite(Path(url) / ".metadata", lambda data: data[:-9]), r"\.metadata: the file"),
    "empty commit": (lambda url: (Path(url) / ".metadata").write_bytes(b""), r"\.metadata: the file cannot be decoded"),
    "missing manifest": (
        lambda url: next(Path(url).glob("manifest*")).unlink(),
        r"manifest-.*: the manifest is missing",
    ),
    "damaged manifest": (
        lambda url: rewrite(next(Path(url).glob("manifest*")), lambda data: data[:-9]),
        r"manifest-.*JSON",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_before_anything_is_loaded(saved: str, damage: str) -> None:
    """A missing, truncated or damaged file is an error that names it, and no tensor has changed."""
    inflict, message = DAMAGES[damage]
    inflict(saved)
    target = empty_state()
    with pytest.raises(CheckpointException, match=message):
        dcp.load(target, storage_reader=StorageReader(saved))
    assert equal(target, empty_state())


def test_a_changed_byte(saved: str) -> None:
    """A changed byte of a tensor is an error that names the file, the tensor and the place."""
    rewrite(data_file(saved), flip)
    with pytest.raises(CheckpointException, match=r"__0_0-.*damaged: the bytes of 'model.weight'.*offset_bytes"):
        load(saved)


def test_a_changed_byte_of_an_object(saved: str) -> None:
    """A changed byte of what is not a tensor is found, too, before it is unpickled."""
    rewrite(data_file(saved), lambda data: data.replace(b"text", b"tExt"))
    with pytest.raises(CheckpointException, match="damaged: the bytes of 'name'"):
        load(saved)


def test_files_of_two_saves(url: str) -> None:
    """A commit marker of one save with the manifest and data of another is an error, and never loads a mixture."""
    dcp.save(state(), storage_writer=StorageWriter(url))
    earlier = (Path(url) / ".metadata").read_bytes()
    dcp.save(state(), storage_writer=StorageWriter(url))
    (Path(url) / ".metadata").write_bytes(earlier)
    with pytest.raises(CheckpointException, match=r"manifest-.*the manifest is missing"):
        load(url)


@pytest.mark.parametrize(("holder", "moment"), [(plan_reading.PlanReader, "read"), (storage_reader, "list_directory")])
def test_a_checkpoint_that_is_replaced_while_it_is_loaded(
    saved: str, holder: Any, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says so, rather than that a file is missing."""
    whole = getattr(holder, moment)

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(holder, moment, whole)
        dcp.save(state(), storage_writer=StorageWriter(saved))
        return whole(*arguments)

    monkeypatch.setattr(holder, moment, meanwhile)
    with pytest.raises(CheckpointException, match=r"the checkpoint was replaced while it was loaded.*load it again"):
        load(saved)


@pytest.mark.parametrize("damage", ["missing", "truncated", "not a tensor"])
def test_damage_without_a_manifest(tmp_path: Path, damage: str) -> None:
    """Damage to a checkpoint of another writer is an error that names the file as well."""
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path))
    path = tmp_path / "__0_0.distcp"
    if damage == "missing":
        path.unlink()
    else:
        rewrite(path, lambda data: data[:-1] if damage == "truncated" else bytes(len(data)))
    with pytest.raises(CheckpointException, match=r"__0_0.distcp"):
        load(str(tmp_path))


class Evil:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("exit 7",)


PLANTED = [Evil(), print, eval, torch.load, torch.distributed.checkpoint.filesystem.FileSystemWriter, {"a": Evil()}]


@pytest.mark.parametrize("planted", PLANTED, ids=range(len(PLANTED)))
def test_metadata_runs_no_code(saved: str, planted: Any) -> None:
    """A .metadata file that names anything but the classes of metadata is refused, and runs nothing."""
    metadata = StorageReader(saved).read_metadata()
    assert decode_metadata(pickle.dumps(metadata), "u") == metadata
    metadata.planner_data = planted
    with pytest.raises(CheckpointError, match="does not belong into this file"):
        decode_metadata(pickle.dumps(metadata), "u")


def planted_item(folder: Path, value: Any, *, manifest: bool) -> str:
    """The URL of a checkpoint of tensor ``w`` in which somebody has put a pickled object in the tensor's place."""
    dcp.save({"w": torch.ones(3)}, storage_writer=StorageWriter(folder))
    with StorageReader(folder) as reader:
        metadata = reader.read_metadata()
    torch.save(value, data := io.BytesIO())
    name = data_file(str(folder)).name if manifest else "__0_0.distcp"
    metadata.state_dict_metadata = {"w": BytesStorageMetadata()}
    metadata.storage_data = {MetadataIndex("w"): filesystem._StorageInfo(name, 0, len(data.getvalue()))}
    for path in folder.iterdir():
        path.unlink()
    (folder / name).write_bytes(data.getvalue())
    (folder / ".metadata").write_bytes(marker := pickle.dumps(metadata))
    if manifest:
        save_id = str(layout.save_of_data(name))
        item = items.write_object(lambda _: None, 0, data, block_bytes=BLOCK_BYTES)
        file = CheckpointFile(name=name, size_bytes=item.item.length_bytes, crc32c=item.crc, items=(item.item,))
        described = CheckpointManifest(
            save_id=save_id, step=1, world_size=1, saved_s=0, files=(file,),
            metadata_bytes=len(marker), metadata_crc32c=crc32c(marker),
        )  # fmt: skip
        (folder / layout.manifest_name(save_id)).write_bytes(described.encode())
    return str(folder)


class Trap:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("flatten", [True, False])
def test_an_object_in_the_place_of_a_tensor_runs_no_code(tmp_path: Path, flatten: bool, manifest: bool) -> None:
    """PyTorch's planners would unpickle it without a limit; only ``weights_only=False`` lets them."""
    url = planted_item(tmp_path / "c", Trap(tmp_path / "sprung"), manifest=manifest)

    def load_it(**options: Any) -> None:
        reader = pickle.loads(pickle.dumps(StorageReader(url, **options)))
        planner = DefaultLoadPlanner(flatten_state_dict=flatten)
        dcp.load({"w": torch.zeros(3)}, storage_reader=reader, planner=planner)

    with pytest.raises(CheckpointException, match=r"'w' holds more than tensors and plain data.*weights_only=False"):
        load_it()
    assert not (tmp_path / "sprung").exists()
    load_it(weights_only=False)
    assert (tmp_path / "sprung").is_dir()


@pytest.mark.parametrize("data", [b"", b"x", pickle.dumps(7), pickle.dumps({"a": torch.Size([1])})])
def test_what_is_no_metadata(data: bytes) -> None:
    """Anything else than the metadata of a checkpoint is refused, with the file's URL."""
    with pytest.raises(CheckpointError, match=r"^s3://b/\.metadata: "):
        decode_metadata(data, "s3://b/.metadata")


def little(value: int, length_bytes: int) -> bytes:
    return value.to_bytes(length_bytes, "little")


_LIST = b"\x80\x04](" + b"K\x01" * 100_000 + b"e\x94("  # a list of 100 000 numbers, which the memo keeps as number 0
_DICT = b"\x80\x04}(" + b"".join(b"J" + little(number, 4) + b"N" for number in range(100_000)) + b"u\x94("
_CLASS = b"ctorch.distributed.checkpoint.metadata\n"
BOMBS = {
    "a number of the memo": b"\x80\x02}r" + little(1 << 27, 4) + b".",
    "a length of a bytearray": b"\x80\x05\x96" + little(1 << 36, 8),
    "a list of a range": b"\x80\x04cbuiltins\nlist\ncbuiltins\nrange\nJ" + little(1 << 26, 4) + b"\x85R\x85R.",
    "copies by calls": _LIST + b"cbuiltins\nlist\nh\0\x85R" * 500 + b"t.",
    "copies of a state": _DICT + (_CLASS + b"StorageMeta\n)\x81h\0b") * 100 + b"t.",
    "attributes of a class": b"\x80\x04" + _CLASS + b"Metadata\nN}Vbroken\nK\x01s\x86b.",
}


@pytest.mark.server
def test_a_small_file_asks_for_little_memory(tmp_path: Path) -> None:
    """Numbers, lengths and calls in a .metadata file reserve no memory for what is not in it, and change no class."""
    for name, bomb in BOMBS.items():
        (tmp_path / name).write_bytes(bomb)
    run_bounded(
        f"""
        import pathlib
        from penstock.errors import CheckpointError
        from penstock.torch.checkpoint.metadata import Metadata, decode_metadata
        begin()
        for path in pathlib.Path({str(tmp_path)!r}).iterdir():
            try:
                decode_metadata(path.read_bytes(), "u")
            except CheckpointError as error:
                print(error)
            else:
                raise AssertionError(path)
            assert not hasattr(Metadata, "broken")
            assert peak_bytes() - began_bytes < 64 << 20, path
        """,
        memory_bytes_max=64 << 20,
    )


def flipped(data: bytes, step: int) -> Iterator[bytes]:
    """`data` with one bit flipped, for each bit in steps of `step`."""
    for bit in range(0, len(data) * 8, step):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


def test_a_flipped_bit_of_metadata_with_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error, and nothing is decoded that differs from its checksum, unless the name of the data file is damaged."""
    dcp.save({"w": torch.ones(3)}, storage_writer=StorageWriter(tmp_path))
    decoded: list[Any] = []
    monkeypatch.setattr(
        storage_reader, "decode_metadata", lambda data, url: decoded.append(data) or decode_metadata(data, url)
    )
    path, name = tmp_path / ".metadata", data_file(str(tmp_path)).name.encode()
    whole = path.read_bytes()
    for damaged in flipped(whole, 29):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointException, match=r"\.metadata: |manifest-.*: |: the file is missing"):
            dcp.load({"w": torch.zeros(3)}, storage_reader=StorageReader(tmp_path))
    assert all(name not in bytes(data) for data in decoded)


@pytest.mark.server
def test_every_flipped_bit_of_metadata_without_a_manifest(tmp_path: Path) -> None:
    """It is an error or another metadata of the right types, in bounded memory and time."""
    dcp.save({"w": torch.ones(3), "step": 7}, storage_writer=dcp.FileSystemWriter(tmp_path))
    path = tmp_path / ".metadata"
    path.write_bytes(b"".join(flipped(path.read_bytes(), 1)))
    found = run_bounded(
        f"""
        import pathlib
        from penstock.errors import CheckpointError
        from penstock.torch.checkpoint.metadata import decode_metadata
        begin()
        data = pathlib.Path({str(path)!r}).read_bytes()
        length = int((len(data) / 8) ** 0.5)
        errors = 0
        for at in range(0, len(data), length):
            try:
                metadata = decode_metadata(data[at : at + length], "u")
            except CheckpointError:
                errors += 1
        print(errors / length / 8)
        """,
        memory_bytes_max=64 << 20,
    )
    assert float(found) > 0.5


def test_a_flipped_bit_of_an_item_without_a_manifest(tmp_path: Path) -> None:
    """What PyTorch's writer saved is compared with the checksums of its archives: it is an error, or nothing has changed."""
    tensor = values(40, 30)
    dcp.save({"w": tensor}, storage_writer=dcp.FileSystemWriter(tmp_path))
    path = tmp_path / "__0_0.distcp"
    errors = 0
    for damaged in flipped(path.read_bytes(), 211):
        path.write_bytes(damaged)
        target = {"w": torch.zeros(40, 30)}
        try:
            dcp.load(target, storage_reader=StorageReader(tmp_path))
        except CheckpointException:
            errors += 1
        else:
            assert torch.equal(target["w"], tensor)
    assert errors > 150


@pytest.fixture
def _opaque(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As with a PyTorch that cannot save a tensor without its data."""
    items._frame.cache_clear()
    monkeypatch.setattr(items, "_SKIP_DATA", None)
    yield
    items._frame.cache_clear()


@pytest.mark.usefixtures("_opaque")
def test_with_an_older_pytorch(saved: str) -> None:
    """Where frames cannot be made, tensors are written whole, and load with all their checks."""
    assert equal(load(saved), state())
    rewrite(data_file(saved), flip)
    with pytest.raises(CheckpointException, match=r"damaged: the bytes of 'model.weight'"):
        load(saved)


def test_a_planner_that_reuses_plans(tmp_path: Path) -> None:
    """A planner that hands out the plan of an earlier save is refused, because that plan names the earlier save's files."""
    planner = DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(state(), storage_writer=StorageWriter(tmp_path / "a"), planner=planner)
    with pytest.raises(CheckpointException, match="leave enable_plan_caching=True out"):
        dcp.save(state(), storage_writer=StorageWriter(tmp_path / "b"), planner=planner)
    assert equal(load(f"{tmp_path}/a"), state())


def test_all_of_a_checkpoint_without_a_model(saved: str, tmp_path: Path) -> None:
    """What reads a checkpoint without knowing what is in it, as PyTorch's converter does, gets all of it."""
    found: dict[str, Any] = {}
    _load_state_dict(found, StorageReader(saved), no_dist=True, planner=_EmptyStateDictLoadPlanner())
    assert equal(found, state())
    keys = _load_state_dict_from_keys({"model", "step"}, storage_reader=StorageReader(saved))
    assert equal(keys, {name: state()[name] for name in ("model", "step")})


def test_public_names() -> None:
    """Writer and reader are names of ``penstock.torch.checkpoint``."""
    assert ps.torch.checkpoint.StorageWriter is StorageWriter
    assert ps.torch.checkpoint.StorageReader is StorageReader
