"""Cutting samples into shards: each sample once, the planned sizes, and the same result each time."""

from __future__ import annotations

import io

import hypothesis.strategies as st
import pytest
from hypothesis import given

from penstock.errors import DataError
from penstock.formats import TarWriter
from penstock.pack.entries import PlanEntry, PlanMember, split_of
from penstock.pack.options import PackOptions, number_in
from penstock.pack.plan import PackPlan, cut, decode

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="./\x7f", exclude_categories=("Cc", "Cs")), min_size=1)
KEYS = st.lists(
    st.lists(NAMES, min_size=1, max_size=3).map("/".join).filter(lambda key: not key.startswith("__")),
    min_size=1,
    max_size=30,
    unique=True,
)
FIELDS = st.dictionaries(st.sampled_from(["jpg", "json", "cls", "a.b", "txt"]), st.integers(0, 3000), min_size=1)


@st.composite
def entries(draw: st.DrawFn) -> list[PlanEntry]:
    """Return samples that consist of files of any size, some with a label."""
    made = []
    for key in draw(KEYS):
        sizes = draw(FIELDS)
        members = tuple(PlanMember(name, 0, f"{key}.{name}", size, '"e"') for name, size in sizes.items())
        made.append(PlanEntry(key, members, draw(st.just({}) | st.integers(0, 10**6).map(lambda n: {"label": n}))))
    return made


def options(draw: st.DrawFn) -> PackOptions:
    return PackOptions(
        bytes_max=draw(st.integers(30_000, 60_000)),  # five members and a label, with PAX headers, take 26 000
        samples_max=draw(st.none() | st.integers(1, 5)),
        shuffle=draw(st.booleans()),
        seed=draw(st.integers(0, 2**64 - 1)),
        split=draw(st.none() | st.just({"train": 0.8, "val": 0.2})),
    )


@given(entries(), st.data())
def test_shards_are_a_partition_with_the_sizes_that_were_said(samples: list[PlanEntry], data: st.DataObject) -> None:
    """Each sample is in one shard, shards stay within both limits, and a tar has exactly the planned size."""
    chosen = options(data.draw)
    shards = cut(samples, chosen, dict.fromkeys(chosen.patterns, 3))
    found = [entry.key for shard in shards for entry in shard.entries]
    assert sorted(found) == sorted(entry.key for entry in samples)
    if not chosen.shuffle and not chosen.split:
        assert found == [entry.key for entry in samples]
    assert len({shard.name for shard in shards}) == len(shards)
    for shard in shards:
        assert shard.entries
        assert shard.size_bytes <= chosen.bytes_max
        assert chosen.samples_max is None or len(shard.entries) <= chosen.samples_max
        writer = TarWriter(io.BytesIO().write)
        for entry in shard.entries:
            fields = {member.field: bytes(member.size_bytes) for member in entry.members}
            writer.add({"__key__": entry.key, **fields, **{name: str(value) for name, value in entry.values.items()}})
        assert writer.finish() == shard.size_bytes
        assert [number_in(pattern, shard.name) is None for pattern in chosen.patterns.values()].count(False) == 1


@given(entries(), st.data())
def test_a_plan_is_a_function_and_reads_back(samples: list[PlanEntry], data: st.DataObject) -> None:
    """A second plan has the same bytes, a decoded plan is equal, and a damaged plan is a DataError."""
    chosen = options(data.draw)
    plans = []
    for _ in range(2):
        roots = ["file:///source/"]
        plan = PackPlan(
            identity="0" * 16, kind="entries", format="tar", patterns=chosen.patterns, starts={}, roots=roots
        )
        plan.shards = cut(list(samples), chosen, dict.fromkeys(chosen.patterns, 0))
        plans.append(plan)
    stored = plans[0].encode()
    assert stored == plans[1].encode()
    assert decode(stored, "x") == plans[0]
    with pytest.raises(DataError):
        decode(stored[: data.draw(st.integers(0, len(stored) - 1))], "x")


@given(KEYS, st.integers(0, 2**64 - 1))
def test_a_split_is_the_keys_alone(keys: list[str], seed: int) -> None:
    """A key's split does not depend on other keys, and a key moves only into a split whose share grew."""
    for key in keys:
        before = split_of(key, {"train": 0.5, "val": 0.5}, seed)
        after = split_of(key, {"train": 0.8, "val": 0.2}, seed)
        assert after == before or (before, after) == ("val", "train")
