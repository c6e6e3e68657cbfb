from __future__ import annotations

import io
import random
import struct
import zipfile

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptShardError, UnsupportedFormatError
from penstock.formats import ranged_of, samples_of

METHODS = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
END = struct.Struct("<4s4H2IH")
MARK = b"PK\x05\x06"


def read(data: bytes, **options):
    reader = ranged_of("zip", shard="s.zip", size_bytes=len(data), **options)
    return reader, [
        each for some in samples_of(reader, lambda span: memoryview(data)[span.start : span.end]) for each in some
    ]


def plain(samples):
    return {sample.key: {name: bytes(value) for name, value in sample.fields.items()} for sample in samples}


def by_zipfile(data: bytes):
    """The members of an archive, grouped as in a shard."""
    samples: dict[str, dict[str, bytes]] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            key, _, field = name.partition(".")
            samples.setdefault(key, {})[field] = archive.read(name)
    return samples


def archive(members, *, before: bytes = b"", comment: bytes = b"", zip64: bool = False) -> bytes:
    """(name, data, method) of each member, behind a prefix."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        for name, data, method in members:
            info = zipfile.ZipInfo(name)
            info.compress_type = method
            with target.open(info, "w", force_zip64=zip64) as member:
                member.write(data)
    data = out.getvalue()
    body, end = data[: -END.size], END.unpack(data[-END.size :])
    if zip64:
        count, size_bytes, offset_bytes = end[4:7]
        record = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size_bytes, offset_bytes)
        body += record + struct.pack("<4sIQI", b"PK\x06\x07", 0, len(body), 1)
        end = (MARK, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
    return before + body + END.pack(*end[:7], len(comment)) + comment


contents = st.one_of(st.binary(max_size=60), st.integers(0, 100_000).map(bytes), st.just(MARK + bytes(18)))
members = st.lists(st.tuples(contents, st.sampled_from(METHODS)), max_size=5).map(
    lambda pairs: [(f"k{index // 2}.f{index % 2}", data, method) for index, (data, method) in enumerate(pairs)]
)
marks = st.lists(st.sampled_from([MARK, MARK + bytes(18), b"PK\x01\x02", b"x", b"comment"]), max_size=5).map(b"".join)


@settings(max_examples=200, deadline=None)
@given(members, marks, st.sampled_from([b"", b"#!/bin/sh\n", bytes(70_000)]), st.booleans())
def test_archives_are_what_zipfile_reads(parts, comment, before, zip64) -> None:
    """Any method of the standard library, any comment, a prefix, zip64 or not: every member, and nothing else."""
    want = by_zipfile(archive(parts))
    assert plain(read(archive(parts, comment=comment, before=before, zip64=zip64))[1]) == want


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 20), st.integers(-20, 20), st.sampled_from([0, 1]))
def test_a_directory_that_is_not_where_it_should_be_is_an_error(count, by, which) -> None:
    """A directory of another size, or a wrong number of entries: an error and no sample fewer than there are."""
    data = bytearray(archive([(f"{index:02d}.x", b"v", 0) for index in range(count)]))
    at = len(data) - END.size
    if which:
        size_bytes, offset_bytes = struct.unpack_from("<2I", data, at + 12)
        shift_bytes = by * size_bytes // count  # whole entries
        if not size_bytes - shift_bytes >= 0:
            return
        struct.pack_into("<2I", data, at + 12, size_bytes - shift_bytes, max(0, offset_bytes + shift_bytes))
    else:
        struct.pack_into("<2H", data, at + 8, *[max(0, count + by)] * 2)
    try:
        assert len(read(bytes(data))[1]) == count
    except CorruptShardError:
        assert by


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(METHODS) - 1), st.booleans(), st.randoms(use_true_random=False))
def test_damage_is_samples_or_an_error(method, zip64, chance: random.Random) -> None:
    """Bytes changed anywhere, or the end cut off: our own errors, and under a policy that skips only samples that are right."""
    parts = [(f"{index}.x", b"value %d" % index * 20, METHODS[method]) for index in range(6)]
    good = archive(parts, zip64=zip64)
    bad = bytearray(good)
    for _ in range(chance.choice([1, 1, 2, 5])):
        bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
    data = bytes(bad[: chance.choice([len(bad), chance.randrange(len(bad))])])
    values = {bytes(value) for _, value, _ in parts}
    for on_corrupt in ("raise", "skip_sample", "skip_shard"):
        try:
            reader, samples = read(data, on_corrupt=on_corrupt)
        except CorruptShardError:
            assert on_corrupt == "raise"
        except UnsupportedFormatError:
            pass
        else:
            assert {value for fields in plain(samples).values() for value in fields.values()} <= values
            assert len(samples) + reader.skipped_samples >= 1
