"""Positions of fields in a tar's samples, and reading some of them by range."""

from __future__ import annotations

import io
import random
import tarfile

import pytest

from penstock.errors import ConfigError, DataError
from penstock.formats import TarParser
from penstock.index import ShardIndex, ShardRecorder, VersionedShard
from penstock.index.shard_index import decode as decode_index
from penstock.index.shard_index import decode_members, members_of

FIELDS = ("jpg", "cls", "depth.npy")


def packed(*, fraction: bool | None, count: int = 25) -> bytes:
    """Return a tar by ``tarfile``; `fraction` puts a PAX header before every member, as WebDataset does; None before some."""
    source = random.Random(1)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as file:
        for number in range(count):
            for field in FIELDS:
                member = tarfile.TarInfo(f"{number:03d}.{field}")
                data = source.randbytes(source.choice([0, 1, 511, 512, 513, 5000]))
                member.size, member.mtime = len(data), 1.5 if fraction or (fraction is None and number % 2) else 1
                file.addfile(member, io.BytesIO(data))
    return out.getvalue()


def indexed(data: bytes) -> ShardIndex:
    found = VersionedShard(None, "x", len(data), "e", "e")  # type: ignore[arg-type]
    recorder, parser = ShardRecorder(found, "tar"), TarParser("x")
    for start in range(0, len(data), 4000):
        piece = data[start : start + 4000]
        recorder.feed(piece, parser.feed(piece))
    return decode_index(recorder.finish(parser.finish()).encode(), "x")


@pytest.mark.parametrize("fraction", [False, True])
@pytest.mark.parametrize("wanted", [("jpg",), ("cls", "jpg"), ("depth.npy", "cls"), FIELDS])
def test_wanted_members_alone_are_the_samples_without_the_others(fraction: bool, wanted: tuple[str, ...]) -> None:
    """A parser of the wanted members' bytes gives every sample with these fields and its key."""
    data = packed(fraction=fraction)
    index = indexed(data)
    whole = TarParser("x")
    expected = (whole.feed(data) + whole.finish())[4:20]
    spans = index.member_spans(4, 16, wanted)
    assert spans is not None
    assert spans.shape == (16, len(wanted), 2)
    ranges = spans.reshape(-1, 2).tolist()
    parser = TarParser("x", start_offset_bytes=ranges[0][0])
    samples = [sample for start, end in ranges for sample in parser.feed(data[start:end])] + parser.finish()
    assert [sample.key for sample in samples] == [sample.key for sample in expected]
    for sample, full in zip(samples, expected, strict=True):
        assert sample.fields == {name: value for name, value in full.fields.items() if name in wanted}
    assert ranges == sorted(ranges)


def test_samples_that_differ_have_no_members(odd_tar: bytes) -> None:
    """If fields or headers differ between samples, no members are stored."""
    assert indexed(odd_tar).members is None
    assert indexed(odd_tar).member_spans(0, 2, ["jpg"]) is None
    assert indexed(packed(fraction=None)).members is None
    assert members_of([], [], []) is None
    assert members_of(["a"], [[5]], [512 + 512 + 1]) is None
    assert members_of(["a"], [[5]], [512]) is None
    assert members_of(["a", "b"], [[5, 5]], [2 * 512 + 3 * 512]) is None
    assert members_of(["a"], [[5], [5]], [2 * 512, 3 * 512]) is None


def test_a_field_that_is_not_there_is_named() -> None:
    """An unknown field is an error that lists the fields."""
    with pytest.raises(ConfigError, match=r"field 'png' is not one of jpg, cls, depth\.npy"):
        indexed(packed(fraction=False)).member_spans(0, 1, ["jpg", "png"])


def test_members_come_back_and_damage_is_noticed() -> None:
    """Sizes of any width are stored and read; an invalid column is refused."""
    for largest in (200, 60_000, 4_000_000_000, 1 << 33):
        members = members_of(["a", "b"], [[largest, 1]], [2 * 512 + -(-largest // 512) * 512 + 512])
        assert members is not None
        data, item_bytes = members.encode()
        again = decode_members(data, count=1, item_bytes=item_bytes, name="x")
        assert (again.names, again.head_bytes, again.sizes.tolist()) == (("a", "b"), 512, [[largest, 1]])
    for wrong, size in ((data[:-1], item_bytes), (b"{}\n", 1), (b"no", 1), (data, 3)):
        with pytest.raises(DataError, match="members cannot be read"):
            decode_members(wrong, count=1, item_bytes=size, name="x")


def test_a_cut_sample_is_the_parsed_one() -> None:
    """A sample cut from its extent equals the parser's; with PAX headers or a folder before it, it is not cut."""
    data = packed(fraction=False)
    index = indexed(data)
    parser = TarParser("x")
    assert index.members is not None
    assert index.offsets is not None
    for number, sample in enumerate(parser.feed(data) + parser.finish()):
        start, end = index.offsets[number : number + 2].tolist()
        cut = index.members.cut(number, memoryview(data)[start:end], offset_bytes=start)
        assert cut == sample
        assert cut.size_bytes == sample.size_bytes
        assert index.members.cut(number, memoryview(bytes(512) + data[start:end]), offset_bytes=start) is None
    with_pax = indexed(packed(fraction=True))
    assert with_pax.members is not None
    assert with_pax.members.cut(0, memoryview(packed(fraction=True)), offset_bytes=0) is None
