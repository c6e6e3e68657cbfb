from __future__ import annotations

import io
import random
import struct
import zipfile

import pytest

from bounded import run_bounded
from penstock.errors import ConfigError, CorruptShardError, DataError, UnsupportedFormatError
from penstock.formats import detect, group_objects, parser_of, ranged_of, samples_of


def archive(members, *, method=zipfile.ZIP_STORED, comment=b"", before=b"") -> bytes:
    out = io.BytesIO()
    out.write(before)
    with zipfile.ZipFile(out, "a" if before else "w", method) as target:
        target.comment = comment
        for name, data in members:
            target.writestr(name, data)
    return out.getvalue()


def read(data, **options):
    asked = []

    def fetch(span):
        asked.append(span)
        return memoryview(data)[span.start : span.end]

    reader = ranged_of("zip", shard="s.zip", size_bytes=len(data), **options)
    samples = [sample for some in samples_of(reader, fetch) for sample in some]
    return reader, samples, asked


def plain(samples):
    return [(sample.key, {name: bytes(value) for name, value in sample.fields.items()}) for sample in samples]


MEMBERS = [
    ("a/1.jpg", b"one" * 50), ("a/1.TXT", b"1"), ("a/", b""), ("README", b"no dot"), ("a/.hidden.x", b""),
    ("__meta__/x.json", b"{}"), ("é/2.seg.png", b"two"), ("a/3.jpg", b""),
]  # fmt: skip
WANT = [("a/1", {"jpg": b"one" * 50, "txt": b"1"}), ("é/2", {"seg.png": b"two"}), ("a/3", {"jpg": b""})]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("around", [{}, {"comment": b"c" * 300}, {"before": b"#!/bin/sh\n" * 9}])
def test_members_are_samples(method, around):
    """WebDataset's rules, in the order of the bytes; a comment or a program around the archive is no obstacle."""
    data = archive(MEMBERS, method=method, **around)
    _, samples, _ = read(data)
    assert plain(samples) == WANT
    assert around.get("before") or detect("x", data[:512]) == "zip"


def test_members_far_apart_are_one_sample():
    """The directory names them all: two spans, and nothing between them is fetched."""
    noise = random.Random(0).randbytes(100_000)
    data = archive([("7.jpg", b"image"), ("8.jpg", noise), ("7.txt", b"label")])
    reader, samples, asked = read(data)
    assert plain(samples)[0] == ("7", {"jpg": b"image", "txt": b"label"})
    assert [len(unit.spans) for unit in reader.units] == [2, 1]
    assert samples[0].size_bytes is None
    _, samples, asked = read(data, fields=["txt"])
    assert plain(samples) == [("7", {"txt": b"label"}), ("8", {})]
    assert sum(span.end - span.start for span in asked) < 70_000
    assert reader.units[0].size_bytes - reader.units[0].spans[0].length_bytes == samples[0].offset_bytes + 35 + 5
    with pytest.raises(ConfigError, match=r"none of the fields \['cls'\].*it has jpg, txt"):
        read(data, fields=["cls"])


def test_stored_members_are_slices():
    """What is not compressed is not copied."""
    data = bytearray(archive([("a.x", b"abc")]))
    reader = ranged_of("zip", shard="s", size_bytes=len(data))
    [[sample]] = samples_of(reader, lambda span: memoryview(data)[span.start : span.end])
    data[data.index(b"abc")] = ord("z")
    assert bytes(sample.fields["x"]) == b"zbc"


def test_zip64_is_read():
    """Sizes, offsets and counts beyond 32 bits lie elsewhere; here they are small, but stored there."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target, target.open("a.x", "w", force_zip64=True) as member:
        member.write(b"abc")
    data = out.getvalue()
    end = data.index(b"PK\x05\x06")
    directory_bytes, offset_bytes = struct.unpack_from("<II", data, end + 12)
    record = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, directory_bytes, offset_bytes)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
    wide = (
        data[:end]
        + record
        + locator
        + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, *[0xFFFFFFFF] * 2, 0)
    )
    for each in (data, wide):
        assert plain(read(each)[1]) == [("a", {"x": b"abc"})]
    assert zipfile.ZipFile(io.BytesIO(wide)).read("a.x") == b"abc"


def test_a_large_directory_is_asked_for():
    """Where it does not come with the end, one more read gets it."""
    members = [(f"a-long-name-for-a-member/{index:08d}.x", b"%d" % index) for index in range(1500)]
    data = archive(members)
    _, samples, asked = read(data)
    assert plain(samples) == [(name[:-2], {"x": value}) for name, value in members]
    assert len(asked) == 2 + 1500


def test_what_is_corrupt_is_named_or_skipped():
    """A member without its CRC is one sample; a directory that is damaged is the shard."""
    data = bytearray(archive([("a.x", b"aaaa"), ("b.x", b"bbbb"), ("c.x", b"cccc")]))
    data[data.index(b"bbbb")] ^= 1
    with pytest.raises(CorruptShardError, match=r"'b\.x' of 4 bytes does not have.*s\.zip") as caught:
        read(data)
    assert caught.value.offset_bytes == data.index(b"PK\x03\x04", 5)
    reader, samples, _ = read(data, on_corrupt="skip_sample")
    assert [sample.key for sample in samples] == ["a", "c"]
    assert (reader.skipped_samples, reader.skipped_bytes) == (1, 37)
    reader, samples, _ = read(data, on_corrupt="skip_shard")
    assert ([sample.key for sample in samples], reader.skipped_bytes) == (["a"], 74)
    for bad in (b"", b"PK\x05\x06", bytes(data[:-1]), bytes(100), bytes(data).replace(b"PK\x01\x02", b"PK\x01\x03")):
        with pytest.raises(CorruptShardError, match=r"not a zip|directory is corrupt"):
            read(bad)
        assert read(bad, on_corrupt="skip_shard")[1] == []


def test_a_bomb_is_not_believed():
    """A member may not claim to grow more than deflate can, and is not decompressed beyond what it claims."""
    data = bytearray(archive([("a.x", bytes(1 << 20))], method=zipfile.ZIP_DEFLATED))
    at = data.index(b"PK\x01\x02")
    for claim, text in ((1 << 31, "claims to grow"), (5, "of 6 bytes does not have")):
        struct.pack_into("<I", data, at + 24, claim)
        with pytest.raises(CorruptShardError, match=text):
            read(data)


@pytest.mark.server
@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_bomb_takes_no_memory(method, tmp_path):
    """What a kilobyte of bzip2 or LZMA may grow to is bounded, and what it grows to beyond its claim is not held."""
    data = bytearray(archive([("a.x", bytes(40 << 20))], method=method))
    at = data.index(b"PK\x01\x02")
    for claim, text in ((1 << 31, "claims to grow"), (5, "of 6 bytes does not have")):
        struct.pack_into("<I", data, at + 24, claim)
        (tmp_path / "s.zip").write_bytes(data)
        code = f"""
            import bz2, lzma
            from penstock.errors import CorruptShardError
            from penstock.formats import ranged_of, samples_of
            data = open({str(tmp_path / "s.zip")!r}, "rb").read()
            reader = ranged_of("zip", shard="s", size_bytes=len(data))
            begin()
            try:
                list(samples_of(reader, lambda span: data[span.start : span.end]))
            except CorruptShardError as error:
                print(error)
        """
        assert text in run_bounded(code, memory_bytes_max=32 << 20)


@pytest.mark.parametrize("on_corrupt", ["raise", "skip_sample", "skip_shard"])
@pytest.mark.parametrize(("place", "value", "text"), [(6, 1, "encrypted"), (8, 9, "compressed by method 9")])
def test_what_is_valid_but_not_read_is_an_error_under_every_policy(place, value, text, on_corrupt):
    """Encrypted members, and those of other methods, are not damaged: they are never skipped."""
    data = bytearray(archive([("a.x", b"abc"), ("b.x", b"")]))
    struct.pack_into("<H", data, data.index(b"PK\x03\x04") + place, value)
    struct.pack_into("<H", data, data.index(b"PK\x01\x02") + place + 2, value)
    with pytest.raises(UnsupportedFormatError, match=rf"'a\.x' is {text}.*s\.zip"):
        read(data, on_corrupt=on_corrupt)


def test_parts_of_a_split_archive_are_not_corrupt():
    """An archive that is spread over several files is refused as such."""
    data = bytearray(archive([("a.x", b"abc")]))
    struct.pack_into("<4H2I", data, len(data) - 18, 2, 1, 1, 4, 300, 5000)
    with pytest.raises(UnsupportedFormatError, match="several files"):
        read(data, on_corrupt="skip_shard")


def test_a_second_field_is_refused():
    """Names that differ in case only, or are there twice, would hide each other."""
    data = archive([("a.JPG", b"1"), ("a.jpg", b"2")])
    with pytest.raises(CorruptShardError, match="a second field 'jpg'"):
        read(data)
    reader, samples, _ = read(data, on_corrupt="skip_sample")
    assert (plain(samples), reader.skipped_samples) == ([], 1)


def test_streamed_it_is_collected_whole():
    """Who only streams gets the same samples, at the end; nothing is one sample less."""
    data = archive(MEMBERS)
    parser = parser_of("zip", shard="s")
    assert parser.feed(data[:50]) + parser.feed(data[50:]) == []
    assert plain(parser.finish()) == WANT
    with pytest.raises(ConfigError, match="ranged_of"):
        parser_of("zip", shard="s", start_offset_bytes=3)
    with pytest.raises(ConfigError, match="not read by ranges"):
        ranged_of("tar", shard="s", size_bytes=1)


def test_objects_are_samples():
    """One each, or by stem; the order is that of the listing."""
    keys = ["x/1.jpg", "x/1.JSON", "x/2.seg.png", "x/.h", "x/README", "x/"]
    assert group_objects(keys, group_by="stem") == [
        ("x/1", {"jpg": "x/1.jpg", "json": "x/1.JSON"}),
        ("x/2", {"seg.png": "x/2.seg.png"}),
    ]
    alone = [(key, dict(members)) for key, members in group_objects(keys)]
    fields = ["jpg", "json", "png", "data", "data"]
    assert alone == [(key, {field: key}) for key, field in zip(keys, fields, strict=False)]
    with pytest.raises(DataError, match="a second field 'jpg'"):
        group_objects(["a.jpg", "a.JPG"], group_by="stem")
    with pytest.raises(ConfigError, match="neither None nor"):
        group_objects([], group_by="name")
