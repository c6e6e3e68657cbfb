"""Samples in columns go through the loader as lists of samples do."""

from __future__ import annotations

import io
import random

import pytest

from penstock.formats import Sample, Samples, TarParser, TarWriter, as_columns, interleaved, joined, reordered


def made(count: int, name: str = "x") -> list[Sample]:
    return [
        Sample(
            f"k{at}", {name: memoryview(bytes([at])), "n": memoryview(at.to_bytes(8, "little")).cast("q")}, 9 * at, 9
        )
        for at in range(count)
    ]


@pytest.mark.parametrize("columns", [True, False])
def test_both_kinds_are_moved_alike(columns: bool) -> None:
    """Cut, joined, permuted and woven: the samples that a list of them gives, in columns where they all were."""
    plain = made(20)
    given = as_columns(plain) if columns else plain[:]
    assert given is not None
    order = random.Random(0).sample(range(12), 12)
    moved = joined(reordered(given[2:14], order), given[:3])
    want = [plain[2 + at] for at in order] + plain[:3]
    assert list(moved) == want
    woven = interleaved([moved[:4], moved[4:8], moved[8:11]], 11)
    assert list(woven) == [want[4 * (at % 3) + at // 3] for at in range(11)]
    assert isinstance(woven, Samples) == columns


def test_unlike_ones_become_single_samples() -> None:
    """Other fields, or one kind behind the other: nothing is lost, in any order."""
    first, second = made(4), made(4, "y")
    columns, others = as_columns(first), as_columns(second)
    assert columns is not None
    assert others is not None
    assert as_columns([*first, *second]) is None
    assert list(joined(columns[:], others)) == list(joined(columns[:], second)) == first + second
    assert list(joined(first[:], others)) == first + second
    assert list(interleaved([columns, second], 8)) == [
        each for pair in zip(first, second, strict=True) for each in pair
    ]


def test_columns_stay_columns_where_a_chunk_ends_inside_a_sample() -> None:
    """What a parser gives one by one there joins what it gives in columns: runs of both are columns."""
    out = io.BytesIO()
    writer = TarWriter(out.write)
    for number in range(300):
        writer.add({"__key__": f"{number:04d}", "bin": bytes(300), "cls": b"%d" % number})
    writer.finish()
    data, parser = out.getvalue(), TarParser("s.tar")
    groups = [group for at in (0, 100_000, 200_000) for group in parser.feed_columns(data[at : at + 100_000])]
    groups += [parser.feed(data[300_000:]), parser.finish()]
    found = [columns for group in groups if group and (columns := as_columns(group)) is not None]
    assert {type(group) for group in groups if group} == {list, Samples}
    assert len({id(columns.kind) for columns in found}) == 1
    assert [key for columns in found for key in columns.keys] == [f"{number:04d}" for number in range(300)]
