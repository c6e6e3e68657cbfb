"""What is kept with a file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.store.records import (
    FileRecords,
    StoredRecord,
    decoded_record,
)

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = st.dictionaries(st.text(max_size=20), st.text(max_size=50), max_size=4)


@given(
    st.builds(
        StoredRecord,
        size_bytes=st.integers(0, 1 << 50),
        modified_ns=st.integers(0, 1 << 62),
        etag=st.text("0123456789abcdef-", max_size=40),
        headers=TEXTS,
        checksums=TEXTS,
        checksum_type=st.sampled_from(["FULL_OBJECT", "COMPOSITE"]),
        part_sizes_bytes=st.lists(st.integers(0, 9), max_size=20).map(tuple),
        part_checksums=st.lists(st.text(max_size=8), max_size=4).map(tuple),
        tags=TEXTS,
    )
)
def test_a_record_survives_encoding(record: StoredRecord) -> None:
    """Every field comes back as it was."""
    assert decoded_record(record.encoded()) == record


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"7", b'{"x": 1}', b"\xff", b"[" * 100_000, b'{"part_sizes_bytes": [1]}',
     b'{"part_sizes_bytes": [[1, 1000000000000]]}'],
    ids=lambda data: data[:30],
)  # fmt: skip
def test_damaged_records_are_none(data: bytes) -> None:
    """What is no record is ignored, as if another program had written the file."""
    assert decoded_record(data) is None


@pytest.mark.parametrize("parts_count", [2, 10_000])
def test_equal_parts_take_no_room(parts_count: int) -> None:
    """The record of an object of 10 000 parts fits into an attribute."""
    assert len(StoredRecord(part_sizes_bytes=(8 << 20,) * parts_count + (7,)).encoded()) < 100


@pytest.fixture(params=["attributes", "sidecars"])
def records(request: pytest.FixtureRequest, tmp_path: Path) -> FileRecords:
    """Both places for records."""
    return FileRecords(tmp_path / "hidden" / "records", has_attributes=request.param == "attributes")


@pytest.mark.parametrize("length", [1, 10_000], ids=["short", "long"])
def test_records_belong_to_one_version(records: FileRecords, tmp_path: Path, length: int) -> None:
    """A record is there as soon as its file is renamed, is replaced, and is of no use once another program changed the file."""
    path = tmp_path / "file"
    with path.open("wb+") as file:
        file.write(b"data")
        file.flush()
        records.save(file.fileno(), StoredRecord(etag="one", headers={"a": "x" * length}))
        saved = records.save(file.fileno(), StoredRecord(etag="two", headers={"a": "x" * length}))
    path = path.rename(tmp_path / "renamed")
    assert records.load(str(path), path.stat()) == saved
    fd = os.open(path, os.O_RDONLY)
    assert records.load(fd, os.fstat(fd)) == saved
    os.close(fd)
    path.write_bytes(b"changed")
    assert records.load(str(path), path.stat()) is None


def test_files_without_a_record(records: FileRecords, tmp_path: Path) -> None:
    """A file of another program has none, and dropping it is no error."""
    path = tmp_path / "file"
    path.write_bytes(b"data")
    assert records.load(str(path), path.stat()) is None
    records.drop(path.stat())
