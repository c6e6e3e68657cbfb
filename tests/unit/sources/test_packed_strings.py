"""``PackedStrings``: any strings come out as they went in."""

from __future__ import annotations

import pickle

import hypothesis.strategies as st
from hypothesis import given

from penstock.sources.packed_strings import PackedStrings


@given(st.lists(st.text(st.characters(codec="utf-8"))))
def test_strings_are_kept(strings: list[str]) -> None:
    """By index and in order, also after pickling."""
    packed = pickle.loads(pickle.dumps(PackedStrings(strings)))
    assert len(packed) == len(strings)
    assert list(packed) == strings
    assert [packed[index] for index in range(len(strings))] == strings
