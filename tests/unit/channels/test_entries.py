"""The table of entries: what was appended comes back, in a fraction of the memory."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.channels.entries import ChannelObject, Entry, EntryTable

TEXTS = st.text(max_size=12)
OBJECTS = st.builds(
    ChannelObject,
    TEXTS,
    TEXTS,
    st.one_of(st.none(), st.integers(0, 2**62)),
    st.one_of(st.none(), TEXTS.filter(bool)),
    st.one_of(st.none(), st.floats(allow_nan=False)),
)
SUFFIXED = st.builds(lambda each, at: each._replace(name=each.key[at:]), OBJECTS, st.integers(0, 12))
ENTRIES = st.one_of(
    st.tuples(SUFFIXED), st.tuples(OBJECTS), st.tuples(st.binary(max_size=3)), st.tuples(OBJECTS, st.binary(max_size=3))
)


@given(entries=st.lists(ENTRIES, max_size=20))
def test_entries_come_back(entries: list[Entry]) -> None:
    """Each entry has its number, whatever pieces it has and whatever is not known of them."""
    table = EntryTable()
    for entry in entries:
        table.append(entry)
    assert len(table) == len(entries)
    assert [table[number] for number in range(len(table))] == entries
    with pytest.raises(IndexError):
        table[len(entries)]


def test_names_that_are_no_text() -> None:
    """The name of a file may have bytes that are not UTF-8, which Python shows as surrogates."""
    table = EntryTable()
    table.append((ChannelObject("folder/\udcff", "\udcff"),))
    assert table[0] == (ChannelObject("folder/\udcff", "\udcff"),)


def test_memory() -> None:
    """An object costs 36 bytes and its texts, with an eighth of both to spare for what comes next."""
    table = EntryTable()
    tracemalloc.start()
    try:
        for number in range(20_000):
            table.append((ChannelObject(f"data/{number:025}", f"{number:025}", 100, f'"{number:032x}"', 1e9),))
        size_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size_bytes < 20_000 * 1.25 * (36 + 30 + 34)
