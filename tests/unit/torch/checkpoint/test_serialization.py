"""``ps.torch.save`` and ``ps.torch.load``: what torch.save writes comes back, whatever it is, and damage is noticed."""

from __future__ import annotations

import ctypes
import io
import mmap
import os
import pickle
import resource
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.config import MIB
from penstock.errors import CheckpointError, ConfigError, ObjectExistsError, ObjectMissingError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")

from penstock.torch.checkpoint import serialization as prefaulting  # noqa: E402 - after the check
from penstock.torch.checkpoint.serialization import Prefaulting  # noqa: E402


def state() -> dict[str, Any]:
    """A state with every kind of storage: large, small, shared, empty, of odd types, and without bytes."""
    torch.manual_seed(0)
    a = torch.randn(300, 300)
    return {
        "a": a, "transposed": a.T, "row": a[5], "empty": torch.empty(0), "empty too": torch.empty(0, 3),
        "bf16": torch.randn(100, 7).bfloat16(), "bool": torch.ones(3, dtype=torch.bool), "int": torch.arange(5),
        "complex": torch.randn(9, dtype=torch.complex64), "large": torch.randn(1_000_000),
        "module": torch.nn.Sequential(torch.nn.Linear(400, 300), torch.nn.Linear(3, 4)).state_dict(),
        "ordered": OrderedDict(x=1), "plain": [1, "x", (2.0, None)], "parameter": torch.nn.Parameter(torch.randn(3)),
        "meta": torch.empty(3, device="meta"),
    }  # fmt: skip


def same(one: Any, other: Any) -> bool:
    """Whether two states are equal, to the bit."""
    if isinstance(one, torch.Tensor):
        if one.device.type == "meta":
            return bool(other.device.type == "meta" and one.shape == other.shape)
        equal = torch.equal(one, other) and one.stride() == other.stride() and one.dtype == other.dtype
        return bool(equal and type(one) is type(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


@pytest.fixture
def url(tmp_path: Path) -> str:
    ps.torch.save(state(), f"{tmp_path}/x.pt")
    return f"{tmp_path}/x.pt"


@pytest.mark.parametrize("mmap", [False, True])
def test_what_was_saved_is_loaded(url: str, mmap: bool) -> None:
    """Tensors come back to the bit, with their strides; those that shared memory share it again, and it is aligned."""
    found = ps.torch.load(url, mmap=mmap)
    assert same(state(), found)
    assert same(state(), torch.load(url))
    assert found["a"].untyped_storage().data_ptr() == found["transposed"].untyped_storage().data_ptr()
    assert all(found[name].data_ptr() % 64 == 0 for name in ("a", "large", "bf16"))
    found["large"] += 1
    assert same(state(), ps.torch.load(url, mmap=mmap))


@pytest.mark.parametrize("kind", ["legacy", "protocol 4", "no crc", "rezipped", "compressed", "wide alignment"])
def test_files_of_others_are_loaded(tmp_path: Path, kind: str) -> None:
    """All formats and settings of torch.save, and archives that another program has written, are read."""
    saved, path = state(), f"{tmp_path}/{kind}.pt"
    if kind == "legacy":
        del saved["meta"]
        torch.save(saved, path, _use_new_zipfile_serialization=False)
    elif kind == "protocol 4":
        torch.save(saved, path, pickle_protocol=4)
    elif kind == "no crc":
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(saved, path)
        finally:
            torch.serialization.set_crc32_options(True)
    elif kind == "wide alignment":
        from torch.utils.serialization import config

        with config.patch("save.storage_alignment", 4096):
            torch.save(saved, path)
    else:
        torch.save(saved, f"{tmp_path}/first.pt")
        method = zipfile.ZIP_DEFLATED if kind == "compressed" else zipfile.ZIP_STORED
        with zipfile.ZipFile(f"{tmp_path}/first.pt") as source, zipfile.ZipFile(path, "w", method) as target:
            for info in source.infolist():
                target.writestr(info.filename, source.read(info))
    assert same(saved, ps.torch.load(path, weights_only=kind != "protocol 4"))  # torch warns of the two together


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("saved", [{}, None, 5, [torch.empty(0)], torch.ones(2, 3)], ids=repr)
def test_small_things(tmp_path: Path, saved: Any, mmap: bool) -> None:
    """What has no bytes in storages, or is a tensor itself, is saved and loaded."""
    ps.torch.save(saved, tmp_path / "x.pt")
    found = ps.torch.load(tmp_path / "x.pt", mmap=mmap)
    assert same(saved, found) if isinstance(saved, torch.Tensor) else str(found) == str(saved)


def test_objects_need_weights_only_to_be_false(tmp_path: Path) -> None:
    """A pickled module is refused with torch's own error and a note that names the object, and loaded if that is wanted."""
    module, path = torch.nn.Linear(3, 4), f"{tmp_path}/m.pt"
    ps.torch.save(module, path)
    with pytest.raises(pickle.UnpicklingError, match="eights only") as caught:
        ps.torch.load(path)
    assert any("m.pt" in note for note in caught.value.__notes__)
    assert same(module.state_dict(), ps.torch.load(path, weights_only=False).state_dict())


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_hostile_pickle_runs_nothing(tmp_path: Path) -> None:
    """With ``weights_only``, no code of the file runs, not even while the storages are looked for."""
    torch.save({"trap": Trap(tmp_path / "sprung"), "a": torch.ones(3)}, tmp_path / "x.pt")
    with pytest.raises(pickle.UnpicklingError):
        ps.torch.load(tmp_path / "x.pt")
    assert not (tmp_path / "sprung").exists()


def test_a_tar_archive_needs_weights_only_to_be_false(tmp_path: Path) -> None:
    """The format of PyTorch 0.1, which the guard of PyTorch before 2.6 does not cover, is refused by name."""
    with tarfile.open(tmp_path / "x.pt", "w", format=tarfile.USTAR_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("sys_info"))
    with pytest.raises(pickle.UnpicklingError, match=r"x\.pt: .*tar archive.*weights_only=False"):
        ps.torch.load(tmp_path / "x.pt")


def test_map_location(url: str) -> None:
    """All spellings of ``map_location`` mean what they mean to torch.load."""
    calls: list[tuple[int, str]] = []
    torch_calls: list[tuple[int, str]] = []
    assert same(state(), ps.torch.load(url, map_location=lambda s, at: calls.append((s.nbytes(), at))))
    torch.load(url, map_location=lambda s, at: torch_calls.append((s.nbytes(), at)))
    assert calls == torch_calls
    for location in ("cpu", torch.device("cpu"), {"cpu": "cpu"}, {}, lambda storage, _: storage):
        assert same(state(), ps.torch.load(url, location))
    found = ps.torch.load(url, "meta")
    assert {tensor.device.type for tensor in found["module"].values()} == {"meta"}
    assert found["large"].shape == (1_000_000,)
    with torch.device("meta"):
        found = ps.torch.load(url)
    assert same(state(), found)


def test_fake_tensors(url: str) -> None:
    """In a mode for fake tensors, shapes are loaded and no bytes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        found = ps.torch.load(url)
    assert type(found["a"]).__name__ == "FakeTensor"
    assert found["a"].shape == (300, 300)


@pytest.mark.parametrize("mmap", [False, True])
def test_truncated_files_are_errors(url: str, mmap: bool) -> None:
    """A file that was cut anywhere is an error that names it."""
    data = Path(url).read_bytes()
    for length in (0, 1, 10, 1000, 200_000, len(data) // 2, len(data) - 100, len(data) - 1):
        Path(url).write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"x\.pt: "):
            ps.torch.load(url, mmap=mmap)


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("rezipped", [False, True])
def test_a_flipped_bit_anywhere_is_an_error_or_changes_nothing(rezipped: bool, mmap: bool) -> None:
    """Headers, names, sizes, padding, the directory, the pickle and the storages: what is loaded is what was saved."""
    url = f"memory://{os.urandom(6).hex()}/x.pt"
    saved = {"w": torch.randn(4, 3), "b": torch.randn(5), "step": 7, "name": "text", "list": [0.5, None, True]}
    torch.save(saved, file := io.BytesIO())
    if rezipped:
        with zipfile.ZipFile(file) as source, zipfile.ZipFile(again := io.BytesIO(), "w") as target:
            for info in source.infolist():
                target.writestr(info.filename, source.read(info))
        file = again
    outcomes = {"error": 0, "same": 0}
    with ps.connect(url.removesuffix("x.pt")) as store:
        for bit in range(0, len(file.getvalue()) * 8, 61):
            damaged = bytearray(file.getvalue())
            damaged[bit // 8] ^= 1 << bit % 8
            store.write("x.pt", damaged)
            try:
                found = ps.torch.load(url, mmap=mmap)
            except CheckpointError:
                outcomes["error"] += 1
            else:
                assert same(saved, found), (bit, bytes(damaged[bit // 8 - 8 : bit // 8 + 8]))
                outcomes["same"] += 1
    assert min(outcomes.values()) > 30, outcomes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a file of torch.save"),
        (b"hello" * 1000, "not a file of torch.save"),
        (b"PK\x03\x04" + bytes(5000), "truncated or damaged"),
        (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.", "truncated or damaged"),
    ],
)
def test_what_is_no_checkpoint(tmp_path: Path, content: bytes, message: str) -> None:
    """Other content is an error that says so and names the object."""
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"x\.pt: .*{message}"):
        ps.torch.load(tmp_path / "x.pt")


def test_other_zip_archives(tmp_path: Path) -> None:
    """A zip archive without a pickle is an error that says so."""
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("a.txt", "x")
    with pytest.raises(CheckpointError, match=r"no data\.pkl"):
        ps.torch.load(tmp_path / "x.pt")


def test_a_pytorch_that_cannot_skip_the_bytes_of_storages(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch before 2.6 reads the file by itself, with the same result."""
    ps.torch.save({"a": torch.arange(1000)}, url)
    monkeypatch.delattr(torch.serialization, "skip_data")
    assert torch.equal(ps.torch.load(url)["a"], torch.arange(1000))


def test_bad_arguments(tmp_path: Path, url: str) -> None:
    """URLs that name no object, missing objects, and mmap of a legacy file are errors with a hint."""
    with pytest.raises(ObjectMissingError, match=r"none\.pt"):
        ps.torch.load(tmp_path / "none.pt")
    with pytest.raises(ConfigError, match="does not name an object"):
        ps.torch.load("s3://bucket/")
    for directory in ("s3://bucket/", "s3://bucket/run/"):
        with pytest.raises(ConfigError, match="does not name an object"):
            ps.torch.save({}, directory)
    wrong: Any = [
        ({}, "url= must be a URL or a path, not dict"),
        (io.BytesIO(), "torch.save and torch.load take file objects"),
    ]
    for target, message in wrong:
        with pytest.raises(ConfigError, match=message):
            ps.torch.save({}, target)
        with pytest.raises(ConfigError, match=message):
            ps.torch.load(target)
    with pytest.raises(ObjectExistsError):
        ps.torch.save({}, url, if_absent=True)
    torch.save({"a": torch.ones(3)}, url, _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigError, match="mmap=False"):
        ps.torch.load(url, mmap=True)


def test_a_failed_save_leaves_the_earlier_one(url: str) -> None:
    """What cannot be pickled raises, and the object stays as it was."""
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        ps.torch.save({"a": torch.ones(1_000_000), "b": lambda: None}, url)
    assert same(state(), ps.torch.load(url))


@pytest.mark.server
def test_memory_is_held_once(tmp_path: Path) -> None:
    """Loading 200 MB raises the peak of memory by little more, and dropping the tensors gives it back."""
    torch.save({str(index): torch.ones(5_000_000) for index in range(10)}, tmp_path / "x.pt")
    program = (
        "import sys, re, penstock as ps, torch\n"
        "def rss(): return int(open('/proc/self/statm').read().split()[1]) * 4096\n"
        "ps.torch.save({}, sys.argv[1] + '.small')\n"
        "ps.torch.load(sys.argv[1] + '.small')\n"
        "before = rss()\n"
        "found = ps.torch.load(sys.argv[1])\n"
        "held = int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) * 1024 - before\n"
        "assert sum(float(t.sum()) for t in found.values()) == 50_000_000\n"
        "del found\n"
        "print(held, rss() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "x.pt")], capture_output=True, text=True, check=True
    )
    held, left = map(int, done.stdout.split())
    assert held < 290_000_000
    assert left < 80_000_000


pytest.importorskip("torch")


def fresh(length_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, length_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def wait_until(is_true: Callable[[], bool]) -> None:
    until_s = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def faults_count() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_pages_are_there_when_bytes_arrive() -> None:
    """Whoever writes to the memory afterwards takes hardly a page fault, and what was written before is unchanged."""
    view = fresh(16 * MIB)
    view[: 4 * MIB] = b"x" * (4 * MIB)
    source = bytes(range(256)) * (12 * MIB // 256)
    with Prefaulting([view[:MIB], view[MIB + 1 : 5 * MIB + 7], view[5 * MIB + 7 :]]):
        wait_until(lambda: "penstock-prefaulting" not in names())
    assert view[: 4 * MIB] == b"x" * (4 * MIB)
    before = faults_count()
    view[4 * MIB :] = source
    assert faults_count() - before < 12 * MIB // mmap.PAGESIZE // 10


@pytest.mark.parametrize("length_bytes", [0, 1, mmap.PAGESIZE - 1, mmap.PAGESIZE, 3 * mmap.PAGESIZE + 5])
@pytest.mark.parametrize("start", [0, 1, mmap.PAGESIZE])
def test_only_whole_pages_of_the_memory_are_touched(
    monkeypatch: pytest.MonkeyPatch, start: int, length_bytes: int
) -> None:
    """The kernel is asked for pages that lie in the memory, and for nothing if there is none."""
    calls: list[tuple[int, int]] = []

    def madvise(address: ctypes.c_void_p, length: ctypes.c_size_t, _: int) -> int:
        calls.append((address.value or 0, length.value))
        return 0

    monkeypatch.setattr(prefaulting, "_libc", SimpleNamespace(madvise=madvise))
    view = fresh(8 * mmap.PAGESIZE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(view)) + start
    with Prefaulting([view[start : start + length_bytes]]):
        wait_until(lambda: "penstock-prefaulting" not in names())
    for address, length in calls:
        assert address % mmap.PAGESIZE == length % mmap.PAGESIZE == 0
        assert first <= address
        assert address + length <= first + length_bytes
    is_aligned = start % mmap.PAGESIZE == 0
    assert bool(calls) == (length_bytes >= mmap.PAGESIZE if is_aligned else length_bytes > 2 * mmap.PAGESIZE)


def test_a_kernel_that_refuses_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Linux 5.14 there is no such call: nothing fails, and it is not repeated."""
    calls: list[object] = []
    monkeypatch.setattr(prefaulting, "_libc", SimpleNamespace(madvise=lambda *call: calls.append(call) or -1))
    with Prefaulting([fresh(MIB), fresh(MIB)]):
        wait_until(lambda: "penstock-prefaulting" not in names())
    assert len(calls) == 1


def test_the_end_of_the_block_ends_it() -> None:
    """The thread has ended when the block has, also after an exception, however much memory is left."""
    with pytest.raises(ValueError, match="out"), Prefaulting([fresh(64 * MIB) for _ in range(40)]):
        raise ValueError("out")
    assert "penstock-prefaulting" not in names()
