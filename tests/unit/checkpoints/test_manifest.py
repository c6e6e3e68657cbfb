"""The manifest survives encoding, and every damage is an error that names the file and the field."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checkpoints import CheckpointFile, CheckpointItem, CheckpointManifest, decode_manifest
from penstock.checksums.combining import combined_crc
from penstock.checksums.crc32c import crc32c
from penstock.errors import CheckpointError

URL = "s3://bucket/run/step-0000000007/manifest-000000000000.json"


def manifest(**fields: Any) -> CheckpointManifest:
    items = (
        CheckpointItem(
            offset_bytes=0, length_bytes=30, data_offset_bytes=10, data_length_bytes=16, block_crcs=(1, 2**32 - 1)
        ),
        CheckpointItem(offset_bytes=30, length_bytes=5, data_offset_bytes=30, data_length_bytes=5, block_crcs=(0,)),
    )
    files = (
        CheckpointFile(name="01/__0_0-00000000000a.distcp", size_bytes=35, crc32c=77, items=items),
        CheckpointFile(name="__1_0-00000000000a.distcp", size_bytes=0, crc32c=0),
    )
    values: dict[str, Any] = {
        "save_id": "00000000000a",
        "step": 7,
        "world_size": 2,
        "saved_s": 1.5,
        "versions": {"torch": "2"},
        "metadata_bytes": 9,
        "metadata_crc32c": 5,
        "block_bytes": 8,
        "files": files,
    }
    return CheckpointManifest(**{**values, **fields})


@pytest.mark.parametrize("step", [None, 0, 7])
def test_it_survives(step: int | None) -> None:
    """Decoding what was encoded gives the same manifest."""
    assert decode_manifest(manifest(step=step).encode(), URL) == manifest(step=step)
    assert manifest().size_bytes == 44


def put(document: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """Change one field of a document; ``KeyError`` as the value removes it."""
    place = document
    for name in path[:-1]:
        place = place[name]
    if value is KeyError:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("penstock_checkpoint",), 2, "penstock_checkpoint"),
        (("save_id",), "", "save_id"),
        (("save_id",), 7, "save_id"),
        (("step",), KeyError, "step"),
        (("step",), -1, "step"),
        (("step",), True, "step"),
        (("step",), 1.0, "step"),
        (("world_size",), 0, "world_size"),
        (("saved_s",), "now", "saved_s"),
        (("versions",), [], "versions"),
        (("versions",), {"torch": 2}, "versions.torch"),
        (("metadata",), KeyError, "metadata"),
        (("metadata", "size_bytes"), 0, "metadata.size_bytes"),
        (("metadata", "crc32c"), "0000000G", "metadata.crc32c"),
        (("metadata", "extra"), 1, "metadata.extra"),
        (("block_bytes",), 0, "block_bytes"),
        (("files",), {}, "files"),
        (("files", 0), 3, "files[0]"),
        (("files", 0, "name"), "../x", "files[0].name"),
        (("files", 0, "name"), "/x", "files[0].name"),
        (("files", 0, "name"), "a" * 2000, "files[0].name"),
        (("files", 1, "name"), "01/__0_0-00000000000a.distcp", "files[1].name"),
        (("files", 0, "size_bytes"), 34, "files[0].items[1].length"),
        (("files", 0, "crc32c"), "", "files[0].crc32c"),
        (("files", 0, "items", 1, "offset"), 29, "files[0].items[1].offset"),
        (("files", 0, "items", 0, "data_offset"), 31, "files[0].items[0].data_offset"),
        (("files", 0, "items", 0, "data_length"), 21, "files[0].items[0].data_length"),
        (("files", 0, "items", 0, "crc32c"), "00000001", "files[0].items[0].crc32c"),
        (("more",), 1, "more"),
    ],
)
def test_each_damage_names_file_and_field(path: tuple[str | int, ...], value: Any, field: str) -> None:
    """A field that is missing, unknown, of another type or out of its bounds is named, and so is the file."""
    damaged = put(json.loads(manifest().encode()), path, value)
    with pytest.raises(CheckpointError) as raised:
        decode_manifest(json.dumps(damaged).encode(), URL)
    assert (raised.value.url, raised.value.field) == (URL, field)
    assert field in str(raised.value)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"7", b"{", b"\xff", b'{"step": NaN}', b'{"step": 1, "step": 2}', b"[" * 100_000], ids=str
)
def test_what_is_no_manifest(data: bytes) -> None:
    """Anything else than a JSON object of unique fields is refused, with the file's URL."""
    with pytest.raises(CheckpointError, match="manifest") as raised:
        decode_manifest(data[:1000] if data.startswith(b"[[") else data, URL)
    assert raised.value.url == URL


@given(cut=st.integers(0, 10_000), flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), max_size=3))
def test_damage_is_an_error_or_a_valid_manifest(cut: int, flips: list[tuple[int, int]]) -> None:
    """Whatever happens to the bytes, decoding returns a manifest within all bounds, or raises ``CheckpointError``."""
    data = bytearray(manifest().encode())
    for at, mask in flips:
        data[at % len(data)] ^= mask
    try:
        found = decode_manifest(bytes(data[: cut or None]), URL)
    except CheckpointError:
        return
    for file in found.files:
        assert sum(item.length_bytes for item in file.items) <= file.size_bytes


@given(first=st.binary(max_size=300), second=st.binary(max_size=300))
def test_checksums_combine(first: bytes, second: bytes) -> None:
    """The CRC-32C of two pieces follows from those of the pieces."""
    assert combined_crc(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)


def test_checksums_of_long_pieces_combine() -> None:
    """So it does for pieces of many megabytes."""
    first, second = os.urandom(5), bytes(9_000_001)
    assert combined_crc(crc32c(first), crc32c(second), len(second)) == crc32c(first + second)
