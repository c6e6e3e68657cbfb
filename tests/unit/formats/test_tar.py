from __future__ import annotations

import io
import pickle
import tarfile
from typing import get_args

import pytest

from penstock.errors import ClosedError, CorruptShardError, UnsupportedFormatError
from penstock.formats import OnCorrupt, Sample, TarParser, TarWriter
from penstock.formats.tar import FIELDS_KNOWN_MAX, META_BYTES_MAX


def archive(*members, form=tarfile.USTAR_FORMAT, end=True, **info) -> bytes:
    """A tar of (name, data) or TarInfo, by the standard library."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for member in members:
            name, data = member if isinstance(member, tuple) else (member, b"")
            entry = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            entry.size = len(data)
            for key, value in info.items():
                setattr(entry, key, value)
            tar.addfile(entry, io.BytesIO(data))
    whole = out.getvalue()
    return whole if end else whole.rstrip(b"\0") + bytes(-len(whole.rstrip(b"\0")) % 512)


def header(name=b"a.x", *, size=b"%011o\0" % 0, kind=b"0", magic=b"ustar\x0000", prefix=b"", chksum=None) -> bytes:
    """One raw header, for what the standard library does not write."""
    block = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" * 2 + size + b"%011o\0" % 0 + b" " * 8 + kind
    block += bytes(100) + magic + bytes(64) + b"0000000\0" * 2 + prefix.ljust(155, b"\0") + bytes(12)
    assert len(block) == 512
    digits = b"%06o\0 " % sum(block) if chksum is None else chksum(block)
    return block[:148] + digits + block[156:]


def parse(data, cut=None, **kwargs) -> list[tuple[str, dict[str, bytes]]]:
    """All samples as (key, fields), fed in chunks of `cut` bytes."""
    return [(sample.key, {n: bytes(v) for n, v in sample.fields.items()}) for sample in samples_of(data, cut, **kwargs)]


def samples_of(data, cut=None, **kwargs) -> list[Sample]:
    parser = TarParser("s.tar", **kwargs)
    samples = []
    for start in range(0, len(data), cut or len(data) or 1):
        samples += parser.feed(data[start : start + (cut or len(data))])
    return samples + parser.finish()


def block(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


# ── WebDataset's rules ──────────────────────────────────────────────────────────────────────────────────────────────


def test_neighbours_with_one_key_are_one_sample():
    """The key goes up to the first dot of the basename, directory kept; the field is the rest, in lower case."""
    data = archive(("a.b/0.JPG", b"1"), ("a.b/0.Seg.png", b"2"), ("1.jpg", b"3"), ("a.b/0.jpg", b"4"), ("./2.x", b"5"))
    assert parse(data) == [
        ("a.b/0", {"jpg": b"1", "seg.png": b"2"}),
        ("1", {"jpg": b"3"}),
        ("a.b/0", {"jpg": b"4"}),
        ("./2", {"x": b"5"}),
    ]


@pytest.mark.parametrize(
    "name", ["README", ".hidden", "d/.hidden.jpg", "d/._0.jpg", "__meta__", "__meta__/x.json", "__a.b__", "____/0.x"]
)
def test_members_that_belong_to_no_sample_are_passed_over(name):
    """Names without a dot, hidden files and metadata neither make a sample nor cut one in two."""
    data = archive(("0.a", b"1"), (name, b"junk" * 1000), ("0.b", b"2"))
    assert parse(data) == parse(data, 7) == [("0", {"a": b"1", "b": b"2"})]


@pytest.mark.parametrize("name", ["__a__.json", "__a/b__.json", "a__/b.x", "__a.b"])
def test_names_that_only_look_like_metadata_are_samples(name):
    """Only a whole first path component of the form __x__ is metadata, as in WebDataset."""
    assert [key for key, _ in parse(archive((name, b"1")))] == [name.rpartition(".")[0]]


def test_a_key_with_underscores_does_not_hide_metadata():
    """After the sample __a, the member __a.b__ is metadata though it begins with that sample's key and dot."""
    data = archive(("0.b__", b"0"), ("__a.x", b"1"), ("__a.b__", b"2"), ("__a.y", b"3"))
    assert parse(data) == [("0", {"b__": b"0"}), ("__a", {"x": b"1", "y": b"3"})]


@pytest.mark.parametrize("kind", [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_directories_links_and_devices_are_passed_over(kind):
    """Only regular files hold data, whatever the others are called."""
    odd = tarfile.TarInfo("0.dir")
    odd.type, odd.linkname = kind, "0.a"
    assert parse(archive(("0.a", b"1"), odd, ("0.b", b"2"))) == [("0", {"a": b"1", "b": b"2"})]


def test_a_field_twice_in_one_sample_is_an_error():
    """0.jpg and 0.JPG would be one field; the error names sample, shard and the second header's offset."""
    for data in (archive(("0.jpg", b"1"), ("0.JPG", b"2")), archive(("0.jpg", b"1"), ("0.jpg", b"2"))):
        with pytest.raises(CorruptShardError, match="second field 'jpg'") as caught:
            parse(data)
        assert (caught.value.shard, caught.value.offset_bytes, caught.value.sample_key) == ("s.tar", 1024, "0")


def test_reserved_fields_are_an_error():
    """A stored field can never pose as what the loader adds."""
    with pytest.raises(CorruptShardError, match="'__position__'"):
        parse(archive(("0.__position__", b"1")))


def test_names_that_are_no_utf8_survive():
    """Bytes of a name that are no UTF-8 come back through surrogateescape."""
    assert parse(header(b"\xff\xfe.x"))[0][0].encode("utf-8", "surrogateescape") == b"\xff\xfe"


# ── chunks ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("cut", [1, 2, 511, 512, 513, 1000, 4096])
def test_chunks_may_be_cut_anywhere(form, cut):
    """Samples, fields and offsets do not depend on where the bytes are cut."""
    long = "" if form == tarfile.USTAR_FORMAT else "x" * 200
    members = [(f"d/{i:03}{long * (i % 2)}.{field}", b"%d" % i * i * 9) for i in range(12) for field in ("cls", "jpg")]
    data = archive(*members, form=form, mtime=1.5 if form == tarfile.PAX_FORMAT else 1)
    assert samples_of(data, cut) == samples_of(data)
    assert parse(data) == [
        (members[2 * i][0][:-4], {"cls": members[2 * i][1], "jpg": members[2 * i + 1][1]}) for i in range(12)
    ]


def test_values_inside_a_chunk_are_slices_of_it():
    """No copy: writing into the chunk shows in the value."""
    data = bytearray(archive(("0.x", b"abc")))
    (sample,) = TarParser("s.tar").feed(data)
    data[512:515] = b"xyz"
    assert sample.fields["x"] == b"xyz"
    assert sample.fields["x"].obj is data


def test_a_value_over_chunks_pins_none_of_them():
    """A value that spans chunks is copied out as it comes, so that earlier chunks can be reused at once."""
    data = archive(("0.x", b"abc" * 1000))
    parser = TarParser("s.tar")
    chunks = [bytearray(data[at : at + 600]) for at in range(0, len(data), 600)]
    samples = []
    for chunk in chunks:
        samples += parser.feed(chunk)
        chunk.clear()  # BufferError while anything exports it
    assert samples[0].fields["x"] == b"abc" * 1000


def test_any_buffer_is_taken():
    """bytes, bytearray and memoryviews of any item size are the same to the parser."""
    data = archive(("0.x", b"abc"))
    for form in (data, bytearray(data), memoryview(data), memoryview(data).cast("I")):
        assert TarParser("s.tar").feed(form)[0].fields["x"] == b"abc"


def test_every_sample_is_a_place_to_start():
    """A parser that starts at a sample's offset gives that sample and all after it, long names included."""
    members = [(f"d/{'n' * 120 * (i % 3 == 1)}{i}.{field}", b"v" * i * 50) for i in range(9) for field in ("a", "b")]
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        data = archive(*members, form=form, mtime=1.5)
        samples = samples_of(data)
        for index, sample in enumerate(samples):
            rest = data[sample.offset_bytes :]
            assert samples_of(rest, start_offset_bytes=sample.offset_bytes) == samples[index:]
            assert samples_of(rest, 100, start_offset_bytes=sample.offset_bytes) == samples[index:]


# ── dialects of tar ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("length", [99, 100, 101, 155, 255, 256, 3000])
def test_long_names(form, length):
    """GNU's L headers and PAX paths of any length, with and without long link names beside them."""
    name = "d/" * 20 + "n" * (length - 42) + ".x"
    link = tarfile.TarInfo("l" * 150)
    link.type, link.linkname = tarfile.SYMTYPE, "k" * 150
    data = archive(link, (name, b"1"), link, form=form)
    assert parse(data) == parse(data, 50) == [(name[:-2], {"x": b"1"})]


def test_ustar_prefix():
    """A name in two parts is joined by a slash; where the magic is GNU's, those bytes are no name."""
    assert parse(header(b"n.x", prefix=b"d/e")) == [("d/e/n", {"x": b""})]
    assert parse(header(b"n.x", prefix=b"123", magic=b"ustar  \0")) == [("n", {"x": b""})]


def test_v7():
    """No magic, blanks around numbers, kind NUL; a trailing slash is a directory."""
    v7 = {"kind": b"\0", "magic": bytes(8)}
    data = header(b"d.x/", **v7) + header(b"a.x", size=b"          3 ", **v7) + block(b"abc")
    assert parse(data) == [("a", {"x": b"abc"})]


@pytest.mark.parametrize("style", [b"%07o\0", b"%6o\0 ", b"%06o  ", b"%o\0\0\0\0", b" %o\0\0\0"])
def test_checksums_of_other_styles(style):
    """Blanks, zeros and NULs around the digits are all in use."""
    data = header(chksum=lambda raw: (style % sum(raw))[:8].ljust(8, b"\0")) * 1
    assert parse(data) == [("a", {"x": b""})]


def test_checksums_of_signed_bytes():
    """Some old archivers summed signed bytes; a name beyond ASCII shows it."""
    data = header("é.x".encode(), chksum=lambda raw: b"%06o\0 " % sum(b - 256 * (b > 127) for b in raw))
    assert [key for key, _ in parse(data)] == ["é"]


def test_base_256_sizes():
    """GNU's binary sizes are read, here of a member small enough to be there."""
    data = header(size=b"\x80" + (3).to_bytes(11, "big")) + block(b"abc")
    assert parse(data) == parse(data, 100) == [("a", {"x": b"abc"})]


def test_sizes_of_twelve_digits():
    """A size field without a terminator is 12 digits, not 11."""
    data = header(size=b"%012o" % 600) + block(b"z" * 600)
    assert parse(data) == [("a", {"x": b"z" * 600})]


@pytest.mark.parametrize("ending", [b"\0", b" "])
@pytest.mark.parametrize("name", [b"n" * 98 + b".x", b"n" * 97 + b".x", b"a.x\0" + b"j" * 96])
def test_sizes_and_names_of_other_archivers(ending, name):
    """libarchive ends sizes by a blank; a name may fill its field, or have garbage after its NUL."""
    data = (header(name, size=b"%011o" % 3 + ending) + block(b"abc")) * 2
    with pytest.raises(CorruptShardError, match="second field"):
        parse(data)
    assert parse(data[:1024]) == parse(data[:1024], 100) == [(name.split(b".")[0].decode(), {"x": b"abc"})]


def test_pax_size_wins():
    """Beyond 8 GiB the header's own size is 0 and the PAX record holds the true one."""
    records = b"12 size=700\n"
    data = header(b"p", kind=b"x", size=b"%011o\0" % len(records)) + block(records) + header() + block(b"z" * 700)
    assert parse(data) == parse(data, 99) == [("a", {"x": b"z" * 700})]


def test_global_pax_headers_are_passed_over():
    """A comment for all members (git archive writes one) changes none of them, and belongs to no sample."""
    data = archive(("0.x", b"1"), form=tarfile.PAX_FORMAT)
    records = b"18 comment=abcdef\n"
    glob = header(b"g", kind=b"g", size=b"%011o\0" % len(records)) + block(records)
    samples = samples_of(glob + data)
    assert [(sample.key, sample.offset_bytes) for sample in samples] == [("0", 1024)]


def test_unknown_kinds_are_passed_over_with_their_data():
    """As POSIX asks: a kind that nobody knows is skipped like a file."""
    data = header(b"v.x", kind=b"Z", size=b"%011o\0" % 700) + block(b"?" * 700) + header(b"a.x")
    assert parse(data) == parse(data, 300) == [("a", {"x": b""})]


def test_more_field_names_than_are_remembered():
    """Fields that differ in every sample are all read."""
    data = b"".join(header(b"a.%d" % i) for i in range(FIELDS_KNOWN_MAX + 10))
    ((_, fields),) = parse(data)
    assert list(fields) == [str(i) for i in range(FIELDS_KNOWN_MAX + 10)]


# ── ends ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("zeros", [0, 512, 1024, 1025, 5000, 20480])
def test_all_ends_are_accepted(zeros):
    """No mark, half a mark, a whole one, and any zeros after it."""
    data = archive(("0.x", b"1"), end=False) + bytes(zeros)
    assert parse(data) == parse(data, 300) == [("0", {"x": b"1"})]


@pytest.mark.parametrize("data", [bytes(512), bytes(10240)])
def test_empty_shards(data):
    """A shard without members has no samples and no error."""
    assert parse(data) == []


def test_an_object_of_no_bytes_is_no_tar():
    """Every writer ends a tar by its mark, so 0 bytes are an upload that was cut off."""
    with pytest.raises(CorruptShardError, match="0 bytes, too few"):
        parse(b"")


@pytest.mark.parametrize("cut", [None, 100])
def test_data_after_the_mark_is_an_error(cut):
    """cat a.tar b.tar must not silently lose b; the error names where b begins."""
    first = archive(("0.x", b"1"))
    with pytest.raises(CorruptShardError, match="after the end-of-archive mark") as caught:
        parse(first + archive(("1.x", b"1")), cut)
    assert caught.value.offset_bytes == len(first)


def test_every_truncation_inside_a_member_is_an_error():
    """Whatever byte the shard ends at, it is an error unless a member ends there too."""
    data = archive(("0.x", b"1" * 700), ("n" * 150 + ".y", b"2"), form=tarfile.PAX_FORMAT, end=False)
    boundaries = {512 + 1024, len(data)}
    for length in range(0, len(data), 3):
        if length in boundaries:
            continue
        with pytest.raises(CorruptShardError, match="cut off") as caught:
            parse(data[:length], 400)
        assert caught.value.offset_bytes == length


# ── garbage ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("data", "offset", "match"),
    [
        (b"\x1f\x8b\x08" + bytes(600), 0, "seems to be gzip"),
        (b"<html>" + b"x" * 600, 0, "seems to be text"),
        (archive(("0.x", b"1"), end=False) + b"junk" * 200, 1024, "checksum"),
        (header(size=b"-0000000001\0"), 0, "not an octal number"),
        (header(size=b"0000000x001\0"), 0, "not an octal number"),
        (header(size=b"\xff" * 12), 0, "not an octal number"),
        (header(kind=b"L", size=b"%011o\0" % (META_BYTES_MAX + 1)), 0, "more than 1048576"),
        (header(kind=b"x", size=b"%011o\0" % 11) + block(b"99 path=bc\n") + header(), 0, "PAX record"),
        (header(kind=b"x", size=b"%011o\0" % 7) + block(b"path=x\n") + header(), 0, "PAX record"),
        (header(kind=b"x", size=b"%011o\0" % 10) + block(b"10 size=x\n") + header(), 1024, "size of b'x'"),
        (header(kind=b"L", size=b"%011o\0" % 3) + block(b"a.x") + bytes(1024), 1024, "archive ends"),
    ],
)
def test_garbage_is_an_error_with_shard_and_offset(data, offset, match):
    """Every refusal is a CorruptShardError that says what, in which shard, and where; however the bytes are cut."""
    for cut in (None, 1, 200):
        with pytest.raises(CorruptShardError, match=match) as caught:
            parse(data, cut)
        assert (caught.value.shard, caught.value.offset_bytes) == ("s.tar", offset)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (header(kind=b"S"), "sparse"),
        (header(kind=b"M"), "another volume"),
        (header(kind=b"x", size=b"%011o\0" % 22) + block(b"22 GNU.sparse.size=12\n") + header(), "sparse"),
        (header(kind=b"g", size=b"%011o\0" % 11) + block(b"11 path=ab\n") + header(), "global"),
    ],
)
@pytest.mark.parametrize("on_corrupt", get_args(OnCorrupt))
def test_what_is_valid_and_not_supported_is_never_skipped(data, match, on_corrupt):
    """It is an error of its own under every policy, wherever the bytes are cut, and says so again when asked again."""
    for cut in (None, 1, 200):
        with pytest.raises(UnsupportedFormatError, match=match) as caught:
            parse(data, cut, on_corrupt=on_corrupt)
        assert (caught.value.shard, caught.value.offset_bytes) == ("s.tar", 0)


@pytest.mark.parametrize("spot", [0, 50, 99, 124, 130, 147, 156, 257, 300, 344, 500, 511])
def test_every_flipped_byte_of_a_header_is_noticed(spot):
    """The checksum covers the whole header, in the hot loop too."""
    data = bytearray(archive(("0.x", b"1"), ("1.x", b"2"), ("2.x", b"3")))
    data[1024 + spot] ^= 0x41
    with pytest.raises(CorruptShardError) as caught:
        parse(data)
    assert caught.value.offset_bytes == 1024


def test_a_start_inside_a_member_says_so():
    """An offset of another version of the shard is the likely cause, so the error asks for it."""
    with pytest.raises(CorruptShardError, match="is it a sample's offset"):
        parse(b"j" * 512, start_offset_bytes=999)


def test_a_parser_in_error_stays_in_error():
    """After an error, and after the end, nothing more is parsed."""
    parser = TarParser("s.tar")
    with pytest.raises(CorruptShardError) as first:
        parser.feed(b"junk" * 128)
    for call in (lambda: parser.feed(b""), parser.finish):
        with pytest.raises(CorruptShardError) as again:
            call()
        assert again.value is first.value
    done = TarParser("s.tar")
    done.feed(bytes(1024))
    done.finish()
    with pytest.raises(ClosedError):
        done.feed(b"")


def test_samples_and_errors_travel():
    """A sample's repr is short, samples compare by value, and the error pickles with its fields."""
    data = bytearray()
    TarWriter(data.extend).add({"__key__": "k", "x": b"123"})
    (sample,) = samples_of(data)
    assert repr(sample) == "<Sample 'k' at 0: x 3 bytes>"
    assert sample != Sample("k", {"x": memoryview(b"124")}, 0)
    assert sample != "k"
    with pytest.raises(CorruptShardError) as caught:
        parse(b"junk")
    assert pickle.loads(pickle.dumps(caught.value)).offset_bytes == 4
