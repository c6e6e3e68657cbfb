from __future__ import annotations

import io
import itertools
import re
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import CorruptShardError
from penstock.formats import TarParser, TarWriter

names = st.one_of(
    st.from_regex(r"(d(\.d)?/)?[ab][a-c]?\.[xyX](\.z)?", fullmatch=True),
    st.sampled_from(["README", ".h.x", "d/.h.x", "__m__", "__m__/a.x", "é/ü.x", "n" * 120 + ".x", "d/" * 60 + "n.x"]),
)
members = st.lists(
    st.tuples(
        names, st.binary(max_size=1500), st.sampled_from([tarfile.REGTYPE] * 5 + [tarfile.DIRTYPE, tarfile.SYMTYPE])
    ),
    max_size=12,
)
forms = st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


def archive(entries, form, mtime) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data, kind in entries:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mtime = kind, mtime
            entry.size = len(data) if kind == tarfile.REGTYPE else 0
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()


def expected(data: bytes) -> list[tuple[str, dict[str, bytes]]] | None:
    """WebDataset's rules over the standard library's reader; None where a sample has a field twice."""
    samples: list[tuple[str, dict[str, bytes]]] = []
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            parts = re.fullmatch(r"((?:.*/)?[^./]+)\.([^/]*)", member.name)
            if not member.isreg() or parts is None or re.match(r"__[^/]*__($|/)", member.name):
                continue
            key, field = parts[1], parts[2].lower()
            if not samples or samples[-1][0] != key:
                samples.append((key, {}))
            if field in samples[-1][1]:
                return None
            samples[-1][1][field] = tar.extractfile(member).read()
    return samples


def parse(data: bytes, cuts: list[int]) -> list[tuple[str, dict[str, bytes]]]:
    parser = TarParser("s.tar")
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    samples = [s for start, end in itertools.pairwise(edges) for s in parser.feed(data[start:end])]
    samples += parser.finish()
    return [(sample.key, {name: bytes(value) for name, value in sample.fields.items()}) for sample in samples]


@given(members, forms, st.sampled_from([0, 1.25]), st.lists(st.integers(0, 1 << 20), max_size=12))
@settings(max_examples=150, deadline=None)
def test_any_archive_reads_as_webdataset_reads_it(entries, form, mtime, cuts):
    """Any members, in both dialects, cut anywhere: the samples that tarfile and WebDataset's rules give."""
    data = archive(entries, form, mtime)
    want = expected(data)
    if want is None:
        with pytest.raises(CorruptShardError, match="a second field"):
            parse(data, cuts)
    else:
        assert parse(data, cuts) == want


@given(members, forms, st.integers(0), st.integers(1, 255), st.lists(st.integers(0, 1 << 20), max_size=4))
@settings(max_examples=150, deadline=None)
def test_a_flipped_byte_gives_an_answer_or_an_error(entries, form, spot, flip, cuts):
    """Whatever byte is damaged: samples or CorruptShardError, the same however it is cut, and never anything else."""
    data = bytearray(archive(entries, form, 0))
    data[spot % len(data)] ^= flip
    answers = []
    for cut in ([], cuts):
        try:
            answers.append(parse(bytes(data), cut))
        except CorruptShardError as error:
            answers.append((error.what, error.offset_bytes))
    assert answers[0] == answers[1]


keys = st.from_regex(r"(d\.e/)?[a-zé_]{1,4}", fullmatch=True).filter(lambda key: not key.startswith("__"))
fields = st.from_regex(r"[a-zß][a-z.]{0,3}", fullmatch=True)
values = st.one_of(st.binary(max_size=1200), st.text(max_size=20))


@given(st.lists(st.tuples(keys, st.dictionaries(fields, values, min_size=1, max_size=3)), max_size=8))
@settings(max_examples=100, deadline=None)
def test_what_is_written_is_read(samples):
    """The parser gives back what the writer took, sample for sample, and each span stands alone."""
    distinct = [pair for index, pair in enumerate(samples) if not index or pair[0] != samples[index - 1][0]]
    out = bytearray()
    writer = TarWriter(out.extend)
    spans = [writer.add({"__key__": key, **values}) for key, values in distinct]
    writer.finish()
    want = [(key, {n: v.encode() if isinstance(v, str) else v for n, v in vs.items()}) for key, vs in distinct]
    assert parse(bytes(out), []) == want
    for span, pair in zip(spans, want, strict=True):
        assert parse(bytes(out[span.start : span.end]), []) == [pair]
