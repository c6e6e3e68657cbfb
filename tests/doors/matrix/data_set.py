"""The data set that goes through every door: five shards with awkward samples, as tars and as TFRecords."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator
from typing import Any

from penstock.formats import TFRecordWriter

Sample = tuple[str, dict[str, bytes]]
"""Key, and the stored bytes of each field."""

Record = tuple[str, tuple[tuple[str, str], ...]]
"""Key, and the digest of each field in the order of the names: what the matrix compares."""

LARGE_BYTES = 9 * 1024 * 1024 + 1  # more than a part of 8 MiB, so that parts are put together
SMALL_SHARDS = ("s-000", "s-001", "s-002")
"""The shards that faults are tried on; the others only add time there."""


def samples_of(name: str) -> list[Sample]:
    """Return the samples of a shard in their stored order."""
    return _SHARDS[name]()


def shard_names() -> list[str]:
    """Return the names of all shards, without their extension, in order."""
    return sorted(_SHARDS)


def tar_of(samples: list[Sample]) -> bytes:
    """Return the samples as Python's own ``tarfile`` writes them, with a directory, which is no sample."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as archive:
        directory = tarfile.TarInfo("part/")
        directory.type = tarfile.DIRTYPE
        archive.addfile(directory)
        for key, fields in samples:
            for field, data in fields.items():
                member = tarfile.TarInfo(f"{key}.{field}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def tfrecord_of(samples: list[Sample]) -> bytes:
    """Return the samples as ``tf.train.Example`` records with the feature ``__key__``."""
    out = bytearray()
    writer = TFRecordWriter(out.extend, keeps_key=True)
    for key, fields in samples:
        writer.add({"__key__": key, **fields})
    writer.finish()
    return bytes(out)


def record_of(key: str, fields: dict[str, Any]) -> Record:
    """Return what is compared of a sample."""
    return key, tuple(sorted((name, digest(value)) for name, value in fields.items() if not name.startswith("__")))


def digest(value: Any) -> str:
    """Return the length of a value in bytes, and a hash of it."""
    data = bytes(value)
    return f"{len(data)}:{hashlib.blake2b(data, digest_size=8).hexdigest()}"


def as_record(sample: dict[str, Any]) -> dict[str, Any]:
    """Replace the fields of a sample, which differ from sample to sample, by one that a batch can hold."""
    return {"record": json.dumps(record_of(sample["__key__"], sample)).encode()}


def parsed(text: bytes | str) -> Record:
    """Return the record that ``as_record`` has written."""
    key, fields = json.loads(text)
    return key, tuple((name, value) for name, value in fields)


def records_of(names: list[str] | tuple[str, ...] | None = None) -> list[Record]:
    """Return the records of these shards, or of all, in their stored order."""
    return [record_of(key, fields) for name in names or shard_names() for key, fields in samples_of(name)]


def _ordinary() -> list[Sample]:
    return [
        (f"part/{number:04d}", {"jpg": bytes([number]) * 2000, "cls": str(number).encode(), "txt": b"text %d" % number})
        for number in range(7)
    ]


def _one_sample() -> list[Sample]:
    return [("part/f\u00fcrst \u65e5\u672c-\U0001f600", {"txt": "\u00e7\u00e0 \u65e5".encode(), "cls": b"7"})]


def _empty_and_missing() -> list[Sample]:
    return [
        ("part/empty", {"txt": b"", "cls": b"1"}),
        ("part/all-empty", {"txt": b"", "cls": b""}),
        ("part/no-cls", {"txt": b"x"}),
        ("part/only-cls", {"cls": b"2"}),
        ("part/0000", {"txt": b"the key of another shard's sample", "cls": b"3"}),
        ("part/dots", {"seg.png": b"\x00\xff", "a.b.c": b"\n"}),
        ("part/" + "long" * 40, {"txt": b"a name of more than a hundred bytes"}),
    ]


def _large() -> list[Sample]:
    block = hashlib.shake_256(b"large").digest(64 * 1024)
    data = (block * (LARGE_BYTES // len(block) + 1))[:LARGE_BYTES]
    return [("part/large", {"bin": data, "cls": b"8"}), ("part/after", {"bin": b"", "cls": b"9"})]


def _tiny() -> list[Sample]:
    return [(f"part/t{number:03d}", {"cls": b"%d" % (number % 10)}) for number in range(60)]


_SHARDS = {"s-000": _ordinary, "s-001": _one_sample, "s-002": _empty_and_missing, "s-003": _large, "s-004": _tiny}


def files_of(form: str, names: list[str] | tuple[str, ...] | None = None) -> Iterator[tuple[str, bytes]]:
    """Yield the file name and the bytes of each shard in a form, ``tar`` or ``tfrecord``."""
    write = {"tar": tar_of, "tfrecord": tfrecord_of}[form]
    for name in names or shard_names():
        yield f"{name}.{form}", write(samples_of(name))
