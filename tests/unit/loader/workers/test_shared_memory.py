"""Values of any length cross from one process to another, and memory comes back when its batch is dropped."""

from __future__ import annotations

import gc
import logging
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forking import exit_code_of, start_child
from penstock.errors import ConfigError
from penstock.loader.workers.shared_memory import Heaps, Slots, map_memory, packed, unpacked
from penstock.samples.columns import Layout

BOX = np.dtype([("class", "<i4"), ("score", ">f4"), ("corner", "<i2", (2,))])
COLUMNS = st.one_of(
    st.lists(st.binary(max_size=50), min_size=1),
    st.lists(st.text(st.characters(), max_size=20), min_size=1),
    st.lists(st.lists(st.integers(-5, 5), max_size=4).map(lambda ids: np.array(ids, np.int32)), min_size=1),
    st.lists(st.integers(0, 3).map(lambda n: np.ones((n, 2, 1), np.float16)), min_size=1),
    st.lists(st.integers(0, 3).map(lambda n: np.array([(n, 0.5, (1, n))] * n, BOX)), min_size=1),
    st.lists(st.integers(0, 3).map(lambda n: np.arange(n).astype("datetime64[ns]")), min_size=1),
)


@given(st.lists(COLUMNS, max_size=4))
def test_values_come_back_as_they_were(columns: list[list[Any]]) -> None:
    """Any bytes, text (lone surrogates, too) and arrays, several columns behind each other: same values, own memory."""
    found = [packed("x", values) for values in columns]
    memory = b"".join(bytes(part) for _, parts in found for part in parts)
    assert len(memory) == sum(column.size_bytes for column, _ in found)
    for values, back in zip(columns, unpacked([column for column, _ in found], memory), strict=True):
        assert len(values) == len(back)
        for left, right in zip(values, back, strict=True):
            assert type(left) is type(right)
            assert getattr(left, "dtype", None) == getattr(right, "dtype", None)
            assert getattr(left, "shape", None) == getattr(right, "shape", None)
            np.testing.assert_array_equal(left, right)


def test_arrays_are_the_receivers() -> None:
    """An array that crossed can be written to: it is the batch's own."""
    column, parts = packed("x", [np.arange(3)])
    (back,) = unpacked([column], b"".join(bytes(part) for part in parts))
    back[0][0] = 7
    assert back[0].tolist() == [7, 1, 2]


def test_mapped_files_cross_as_arrays(tmp_path: Path) -> None:
    """A ``np.memmap`` is nothing but an array."""
    np.save(tmp_path / "x.npy", np.arange(3))
    column, parts = packed("x", [np.load(tmp_path / "x.npy", mmap_mode="r")])
    ((back,),) = unpacked([column], b"".join(bytes(part) for part in parts))
    assert type(back) is np.ndarray
    assert back.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "values",
    [
        [{"a": 1}],
        [b"x", "y"],
        [np.zeros(2), np.zeros(2, np.int8)],
        [np.array([{}])],
        [None],
        [np.ma.masked_array([1, 2], mask=[True, False])],
        [np.zeros(2), np.ma.masked_array([1.0, 2.0])],
        [np.zeros(2, BOX).view(np.recarray)],
    ],
)
def test_other_objects_are_refused(values: list[Any]) -> None:
    """Dicts, mixed columns, object arrays, masked arrays: an error that names the field and what can be done."""
    with pytest.raises(ConfigError, match=r"'thing'.*processes=0"):
        packed("thing", values)


def test_a_heap_is_replaced_when_it_is_too_small() -> None:
    """The same memory while it suffices; else a new one, whose descriptor maps what was written."""
    heaps = Heaps()
    first = heaps.write(3, [b"ab", b"c"], 3)
    assert first is not None
    other = map_memory(first.descriptor, len(first.mapping))
    assert other[:3] == b"abc"
    assert heaps.write(3, [b"xyz"], 3) is None
    assert other[:3] == b"xyz"
    size_bytes = len(other) + 1
    second = heaps.write(3, [bytes(size_bytes)], size_bytes)
    assert second is not None
    assert len(second.mapping) >= size_bytes
    os.close(second.descriptor)
    assert other[:3] == b"xyz"


def layout() -> Layout:
    return Layout({"picture": np.zeros((2, 3), np.uint8), "n": 1, "text": "t"})


def test_a_slot_comes_back_when_all_arrays_are_dropped() -> None:
    """Any view keeps it; after the last one it is used again."""
    slots = Slots(layout(), 4, prefetch_count=1)
    first = slots.take()
    memory = slots.memory(first)
    view = slots.layout.arrays(slots.lease(first))["picture"][1:2]
    assert slots.take() != first
    del view
    gc.collect()
    assert slots.take() == first
    assert slots.memory(first) is memory
    assert slots.layout.others == ["text"]
    slots.close()


def test_a_forked_child_keeps_what_was_leased() -> None:
    """What the child has never changes, whatever the parent does with the slot; the memory of the parent is freed."""
    before = len(os.listdir("/proc/self/fd"))
    slots = Slots(layout(), 4, prefetch_count=1)
    slot = slots.take()
    inherited = slots.memory(slot)
    held = [slots.layout.arrays(slots.lease(slot))["n"]]
    held[0][:] = 5
    reading, writing = os.pipe()

    def has_kept() -> bool:
        os.close(writing)
        os.read(reading, 1)  # until the parent closes it
        return bool(held[0].tolist() == [5] * 4)

    child = start_child(has_kept)
    held.clear()
    gc.collect()
    assert slots.take() == slot
    memory = slots.memory(slot)
    assert memory is not inherited
    del inherited
    held.append(slots.layout.arrays(slots.lease(slot))["n"])
    held[0][:] = 6
    os.close(writing)
    assert exit_code_of(child) == 0
    held.clear()
    gc.collect()
    assert slots.take() == slot
    assert slots.memory(slot) is memory
    os.close(reading)
    slots.close()
    del memory
    assert len(os.listdir("/proc/self/fd")) == before


def test_holding_all_slots_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """As many as prefetching needs come without a word, the next with one warning, more without another."""
    slots = Slots(layout(), 4, prefetch_count=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            slots.take()
        assert not caplog.records
        for _ in range(3):
            slots.take()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert slots.count == 7
    slots.close()


def test_closing_leaves_what_is_leased() -> None:
    """Descriptors are closed; arrays of batches stay valid, also when dropped later."""
    before = len(os.listdir("/proc/self/fd"))
    slots = Slots(layout(), 4, prefetch_count=1)
    arrays = slots.layout.arrays(slots.lease(slots.take()))
    arrays["n"][:] = 5
    slots.close()
    slots.close()
    assert arrays["n"].tolist() == [5] * 4
    assert arrays["picture"].shape == (4, 2, 3)
    del arrays
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_columns_do_not_share_cache_lines() -> None:
    """Workers write rows of columns beside each other: each column begins at a line of its own."""
    slots = Slots(layout(), 3, prefetch_count=1)
    memory = slots.lease(slots.take())
    begin = np.frombuffer(memory, np.uint8).ctypes.data
    assert begin % mmap.PAGESIZE == 0
    assert [(column.ctypes.data - begin) % 64 for column in slots.layout.arrays(memory).values()] == [0, 0]
    del memory
    slots.close()
