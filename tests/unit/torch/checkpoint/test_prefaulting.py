"""Pages that are touched ahead of the bytes that arrive in them."""

from __future__ import annotations

import ctypes
import mmap
import resource
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from penstock.config import MIB
from penstock.torch.checkpoint import prefaulting
from penstock.torch.checkpoint.prefaulting import Prefaulting


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
