"""``tar2tfrecord`` and ``tfrecord2tar``, compared with tarfile, Pillow and protobuf messages of TensorFlow's definition."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from bounded import run_bounded
from penstock.checksums.crc32c import crc32c
from penstock.errors import CorruptShardError, DataError
from penstock.formats.tfrecord import parse_example
from penstock.gateway.transforms.builtin.shards import tar_to_tfrecord, tfrecord_to_tar
from transformed_sources import pieces, png_of, tar_of

if TYPE_CHECKING:
    from collections.abc import Iterator

MAPPING = "image=png:pixels,label=cls:int"


def cifar(count: int, *, prefix: str = "") -> tuple[dict[str, bytes], list[np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(0)
    pictures = [rng.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(count)]
    members = {}
    for index, picture in enumerate(pictures):
        members[f"{prefix}{index:05d}.cls"] = b"[%d]" % (index % 10)
        members[f"{prefix}{index:05d}.png"] = png_of(picture)
    return members, pictures


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(data: bytes) -> Iterator[bytes]:
    """The records of TFRecords, whose checksums are compared here by hand."""
    at = 0
    while at < len(data):
        size, crc = struct.unpack_from("<QI", data, at)
        assert masked(data[at : at + 8]) == crc
        record = data[at + 12 : at + 12 + size]
        assert struct.unpack_from("<I", data, at + 12 + size)[0] == masked(record)
        yield record
        at += 16 + size


def to_tfrecord(data: bytes, **arguments: Any) -> bytes:
    return b"".join(tar_to_tfrecord([data], source="train/0.tar", **arguments))


def to_tar(data: bytes, **arguments: Any) -> bytes:
    return b"".join(tfrecord_to_tar([data], source="train/0.tfrecord", **arguments))


@pytest.mark.parametrize("mapping", [MAPPING, "png=image:pixels,cls=label:int"])
@pytest.mark.parametrize("prefix", ["", "./"])
def test_decoded_pictures_and_labels(mapping: str, prefix: str) -> None:
    """Pictures become their pixels with their shape and labels numbers, in whichever order the mapping names both sides."""
    members, pictures = cifar(40, prefix=prefix)
    found = [parse_example(memoryview(record)) for record in records(to_tfrecord(tar_of(members), fields=mapping))]
    assert len(found) == 40
    for index, (fields, picture) in enumerate(zip(found, pictures, strict=True)):
        assert sorted(fields) == ["image", "image/channels", "image/height", "image/width", "label"]
        assert fields["image"] == picture.tobytes()
        shape = [fields[f"image/{name}"].tolist() for name in ("height", "width", "channels")]
        assert shape == [[32], [32], [3]]
        assert fields["label"].tolist() == [index % 10]


def test_all_members_as_bytes() -> None:
    """Without a mapping, every member is a feature of its bytes, whatever its extension."""
    members = {"a/0.jpg": b"\xff\xd8", "a/0.seg.png": b"2", "a/1.jpg": b"", "a/1.seg.png": b"x" * 70_000}
    first, second = (parse_example(memoryview(record)) for record in records(to_tfrecord(tar_of(members))))
    assert {name: bytes(value) for name, value in first.items()} == {"jpg": b"\xff\xd8", "seg.png": b"2"}
    assert {name: bytes(value) for name, value in second.items()} == {"jpg": b"", "seg.png": b"x" * 70_000}


@pytest.mark.parametrize("key", ["__key__", "id"])
@pytest.mark.parametrize("count", [1, 200])
def test_keys_as_a_feature(key: str, count: int) -> None:
    """The samples' keys are stored on request, without the ./ of tar, in columns as one by one."""
    members = {f"./d/{index:04d}.txt": b"%d" % index for index in range(count)}
    found = [parse_example(memoryview(each)) for each in records(to_tfrecord(tar_of(members), key=key))]
    assert [bytes(fields[key]).decode() for fields in found] == [f"d/{index:04d}" for index in range(count)]


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 1 << 20), max_size=6), st.booleans())
def test_cuts_change_nothing(cuts: list[int], is_compressed: bool) -> None:
    """The output does not depend on where the source is cut, in either direction, compressed or not."""
    data = _SHARD if not is_compressed else gzip.compress(_SHARD, mtime=0)
    out = b"".join(tar_to_tfrecord(pieces(data, cuts), source="s", fields=MAPPING, gzip=is_compressed))
    assert out == (_RECORDS if not is_compressed else _RECORDS_GZIP)
    back = b"".join(tfrecord_to_tar(pieces(out, cuts), source="s", fields=MAPPING))
    assert back == _BACK


_SHARD = tar_of(cifar(60)[0])
_RECORDS = to_tfrecord(_SHARD, fields=MAPPING)
_RECORDS_GZIP = to_tfrecord(_SHARD, fields=MAPPING, gzip=True)
_BACK = to_tar(_RECORDS, fields=MAPPING)


def test_gzip_is_what_gzip_reads() -> None:
    """Compressed output is one gzip member of the plain output."""
    assert gzip.decompress(_RECORDS_GZIP) == _RECORDS


def test_there_and_back() -> None:
    """Pixels become a PNG of equal pixels again, and labels text; keys come from their feature."""
    members, pictures = cifar(20)
    data = to_tfrecord(tar_of(members), fields=MAPPING, key="id")
    with tarfile.open(fileobj=io.BytesIO(to_tar(data, fields=MAPPING, key="id"))) as archive:
        found = {member.name: archive.extractfile(member).read() for member in archive.getmembers()}  # type: ignore[union-attr]
    assert sorted(found) == sorted(members)
    for index, picture in enumerate(pictures):
        assert np.asarray(Image.open(io.BytesIO(found[f"{index:05d}.png"]))).tolist() == picture.tolist()
        assert found[f"{index:05d}.cls"] == b"%d" % (index % 10)


def test_bytes_there_and_back_are_the_same_shard() -> None:
    """Without a mapping, a shard that penstock wrote comes back byte for byte, its keys from ``__key__``."""
    shard = to_tar(to_tfrecord(_SHARD, key="__key__"))
    assert to_tar(to_tfrecord(shard, key="__key__")) == shard


@pytest.mark.parametrize(
    ("members", "fields", "message"),
    [
        ({"0.png": b"no picture", "0.cls": b"1"}, MAPPING, "'png' is not of type pixels"),
        ({"0.png": png_of(np.zeros((2, 2), np.uint16)), "0.cls": b"1"}, MAPPING, "more than 8 bits"),
        ({"0.cls": b"[1, 2]"}, "cls:int", "'cls' is not of type int"),
        ({"0.cls": b"1", "1.txt": b"1"}, "cls:int", "has no 'cls'"),
    ],
    ids=["no-picture", "16-bit", "two-labels", "missing"],
)
def test_bad_values_name_the_sample(members: dict[str, bytes], fields: str, message: str) -> None:
    """A value that cannot be converted is an error that names shard, sample and offset."""
    with pytest.raises(DataError, match=message) as raised:
        to_tfrecord(tar_of(members), fields=fields)
    assert raised.value.shard == "train/0.tar"
    assert raised.value.sample_key in {"0", "1"}
    assert raised.value.offset_bytes is not None


def test_one_bad_label_among_many() -> None:
    """Among many samples in columns, the error names the one sample whose label is bad."""
    members = cifar(60)[0] | {"00033.cls": b"cat"}
    with pytest.raises(DataError, match="'cls' is not of type int") as raised:
        to_tfrecord(tar_of(members), fields=MAPPING)
    assert raised.value.sample_key == "00033"


@pytest.mark.parametrize("cut_bytes", [1, 511, 513, 40_000])
def test_a_cut_off_shard_is_an_error(cut_bytes: int) -> None:
    """A shard that ends inside a member is an error, never a short output."""
    data = _SHARD.rstrip(b"\0")[:-cut_bytes] if cut_bytes == 1 else _SHARD[: cut_bytes + 100_000 // 512 * 512 + 7]
    with pytest.raises(CorruptShardError, match="cut off"):
        to_tfrecord(data)


def test_cut_off_records_are_an_error() -> None:
    """TFRecords that end inside a record, or whose checksum is wrong, are errors with their offset."""
    with pytest.raises(CorruptShardError, match="cut off"):
        to_tar(_RECORDS[:-1], fields=MAPPING)
    damaged = bytearray(_RECORDS)
    damaged[5000] ^= 1
    with pytest.raises(CorruptShardError, match="CRC32C") as raised:
        to_tar(bytes(damaged), fields=MAPPING)
    assert raised.value.offset_bytes is not None


def test_output_comes_before_the_end_of_the_source() -> None:
    """The first records are there before the source was read to its end."""
    taken = []

    def chunks() -> Iterator[bytes]:
        for at in range(0, len(_SHARD), 16384):
            taken.append(at)
            yield _SHARD[at : at + 16384]

    next(tar_to_tfrecord(chunks(), source="s"))
    assert len(taken) <= 3


@pytest.mark.server
def test_large_pictures_are_decoded_one_at_a_time() -> None:
    """Pictures that grow a thousandfold are decoded singly, so that a batch of them does not fill the memory."""
    run_bounded(
        f"""
        import sys
        sys.path.append({str(Path(__file__).parents[4])!r})
        """
        """
        import numpy as np
        from penstock.gateway.transforms.builtin.shards import tar_to_tfrecord
        from transformed_sources import png_of, tar_of

        def pixels(side, count):
            shard = tar_of({f"{index:02d}.png": png_of(np.zeros((side, side, 3), np.uint8)) for index in range(count)})
            return sum(map(len, tar_to_tfrecord([shard], source="s", fields="png=image:pixels")))

        pixels(40, 20)
        begin()
        assert pixels(2000, 12) > 12 * 12_000_000
        """,
        memory_bytes_max=100 << 20,
    )


@pytest.mark.parametrize(
    ("fields", "key", "message"),
    [("x=png,x=cls", "", "two fields become one|twice"), ("x=png,y=cls", "x", "already has a field 'x'")],
    ids=["turned", "key"],
)
def test_two_values_for_one_feature(fields: str, key: str, message: str) -> None:
    """Two values for one feature are an error, also if they meet only when the mapping is turned round."""
    with pytest.raises(DataError, match=message):
        to_tfrecord(_SHARD, fields=fields, key=key)


def test_memory_is_bounded() -> None:
    """Converting 50 MB of a shard takes no more memory than a few chunks."""
    run_bounded(
        """
        import io, tarfile
        from penstock.gateway.transforms.builtin.shards import tar_to_tfrecord, tfrecord_to_tar

        def shard():
            value = bytes(range(256)) * 400
            for index in range(500):
                info = tarfile.TarInfo(f"{index:06d}.jpg")
                info.size = len(value)
                yield info.tobuf(tarfile.GNU_FORMAT) + value
            yield bytes(1024)

        for _ in tfrecord_to_tar(tar_to_tfrecord(iter([next(shard()), bytes(1024)]), source="s"), source="s"):
            pass
        begin()
        total = 0
        for piece in tfrecord_to_tar(tar_to_tfrecord(shard(), source="s"), source="s"):
            total += len(piece)
        print(total)
        """,
        memory_bytes_max=24 << 20,
    )
