from __future__ import annotations

import io
import itertools
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptShardError
from penstock.formats import Samples, TFRecordWriter, feed_in_columns, parser_of, tar_columns, tfrecord_columns

fields = st.lists(st.sampled_from(["x", "y", "Y", "tar.gz", "z"]), min_size=1, max_size=3, unique=True)
keys = st.builds(
    "{}{}{}".format, st.sampled_from(["", "d/", "./", "d.d/", "__m__/"]), st.sampled_from("abé"), st.integers(0, 999)
)
sizes = st.one_of(st.integers(0, 1500), st.integers(0, 8))
cuts = st.lists(st.integers(0, 1 << 20), max_size=4)
damage = st.one_of(st.none(), st.tuples(st.integers(0), st.integers(1, 255)))


@pytest.fixture(autouse=True)
def at_any_size(monkeypatch):
    """Columns are looked for in the few kilobytes that these tests can afford."""
    monkeypatch.setattr(tar_columns, "REGULAR_BYTES_MIN", 2048)
    monkeypatch.setattr(tfrecord_columns, "RECORDS_MIN", 2)


def seen(name: str, data: bytes, edges: list[int], policy: str, *, columns: bool):
    """(samples, what was skipped, the error), read either way; with how many of the samples came in columns."""
    parser = parser_of(name, shard="s", on_corrupt=policy)
    found, in_columns, error = [], 0, None
    try:
        for start, end in itertools.pairwise(edges):
            for group in feed_in_columns(parser, data[start:end]) if columns else [parser.feed(data[start:end])]:
                in_columns += len(group) if isinstance(group, Samples) else 0
                found += group
        found += parser.finish()
    except CorruptShardError as failure:
        error = (str(failure), failure.offset_bytes)
        found = found[
            :0
        ]  # what came with the chunk of the error is lost either way, and chunks before are not compared
    told = [(one.key, one.offset_bytes, one.size_bytes, list(one.fields.items())) for one in found]
    return (told, parser.skipped_samples, parser.skipped_bytes, error), in_columns


def agree(name: str, data: bytes, cuts: list[int], hit: tuple[int, int] | None, policy: str) -> int:
    if hit is not None and data:
        spot = hit[0] % len(data)
        data = data[:spot] + bytes([data[spot] ^ hit[1]]) + data[spot + 1 :]
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    singly, _ = seen(name, data, edges, policy, columns=False)
    together, in_columns = seen(name, data, edges, policy, columns=True)
    assert together == singly
    return in_columns


@given(
    st.lists(st.tuples(keys, sizes), max_size=12),
    fields,
    st.one_of(st.none(), st.tuples(st.integers(0, 30), keys)),
    st.sampled_from([(tarfile.GNU_FORMAT, 0), (tarfile.PAX_FORMAT, 0), (tarfile.PAX_FORMAT, 1.25)]),
    cuts,
    damage,
    st.sampled_from(["raise", "skip_sample", "skip_shard"]),
)
@settings(max_examples=150, deadline=None)
def test_a_tar_gives_the_same_in_columns(samples, fields, odd, form, cuts, hit, policy):
    """Regular tars with one odd member, cut and damaged anywhere: the samples, counts and errors of the other parser."""
    out = io.BytesIO()
    names = [(f"{key}.{field}", size) for key, size in samples for field in fields]
    if odd is not None:
        names.insert(odd[0] % (len(names) + 1), (odd[1], 10))
    with tarfile.open(fileobj=out, mode="w", format=form[0]) as tar:
        for number, (name, size) in enumerate(names):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = size, form[1]
            tar.addfile(entry, io.BytesIO(bytes([number % 251]) * size))
    agree("tar", out.getvalue(), cuts, hit, policy)


@given(
    st.lists(st.tuples(sizes, st.integers(-(1 << 63), (1 << 63) - 1)), max_size=12),
    st.sampled_from([("image", "label"), ("label", "image"), ("label",), ("image",), ("image", "image2", "label")]),
    st.one_of(st.none(), st.tuples(st.integers(0, 12), st.sampled_from(["image", "other"]))),
    cuts,
    damage,
    st.sampled_from(["raise", "skip_sample", "skip_shard"]),
)
@settings(max_examples=150, deadline=None)
def test_tfrecords_give_the_same_in_columns(samples, names, odd, cuts, hit, policy):
    """Examples that are alike, but perhaps one, cut and damaged anywhere: what the other parser gives."""
    out = io.BytesIO()
    writer = TFRecordWriter(out.write)
    made = [
        {name: label if name == "label" else bytes([size % 251]) * size for name in names} for size, label in samples
    ]
    if odd is not None:
        made.insert(odd[0] % (len(made) + 1), {odd[1]: b"one"})
    for fields in made:
        writer.add(fields)
    writer.finish()
    agree("tfrecord", out.getvalue(), cuts, hit, policy)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_regular_tar_is_read_in_columns(form):
    """What ``tarfile`` and WebDataset write for pairs is found at once, but for samples at the ends of the chunk."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for number in range(200):
            for field in ("jpg", "cls"):
                entry = tarfile.TarInfo(f"./d/{number:04d}.{field}")
                entry.size, entry.mtime = number, 1.5
                tar.addfile(entry, io.BytesIO(bytes(number)))
    assert agree("tar", out.getvalue(), [100_000], None, "raise") >= 195


def test_regular_tfrecords_are_read_in_columns():
    """All whole records of each chunk."""
    out = io.BytesIO()
    writer = TFRecordWriter(out.write)
    for number in range(200):
        writer.add({"image": bytes(number * 3), "label": number - 100})
    writer.finish()
    assert agree("tfrecord", out.getvalue(), [20_000], None, "raise") >= 199
