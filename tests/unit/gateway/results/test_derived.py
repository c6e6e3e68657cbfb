"""Finished results in a bucket: gateways that share nothing else transform each object once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway_support.results import BLOCK_BYTES, FunctionTransform, get, open_results, point_of, request_of, swap_case
from penstock.errors import ChecksumError, StoreError, UnavailableError
from penstock.gateway.results import derived
from penstock.gateway.results.derived import read_derived, remove_derived, remove_leftovers
from penstock.store import LocalStore
from penstock.types import ByteRange

TEXT = bytes(range(256)) * (5 * BLOCK_BYTES // 256) + b"end"


async def _read(folder: Path, bucket: Path, transform: FunctionTransform, span: ByteRange | None = None) -> bytes:
    """Read through a new gateway with a cache in `folder`, and close it."""
    results = open_results(folder, derived_store=LocalStore(bucket))
    data = await get(point_of(transform, results, {"a": TEXT}), "a", span)
    await results.close()
    return data


def test_a_cluster_transforms_once(tmp_path: Path) -> None:
    """A gateway with an empty cache takes the result from the bucket, with its headers, whole or by ranges."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    transform = FunctionTransform(swap_case)
    assert asyncio.run(_read(tmp_path / "1", bucket, transform)) == TEXT.swapcase()
    assert asyncio.run(_read(tmp_path / "2", bucket, transform)) == TEXT.swapcase()
    assert asyncio.run(_read(tmp_path / "3", bucket, transform, ByteRange(9, 99))) == TEXT.swapcase()[9:99]
    assert transform.runs_count == 1

    async def head() -> None:
        results = open_results(tmp_path / "4", derived_store=LocalStore(bucket))
        found = await point_of(transform, results, {"a": TEXT}).head(request_of("a"))
        assert (found.size_bytes, found.headers["Content-Type"]) == (len(TEXT), "text/plain")
        await results.close()

    asyncio.run(head())
    assert transform.runs_count == 1
    assert len(list(bucket.rglob("*.json"))) == 1


def test_two_gateways_at_once_keep_one_result(tmp_path: Path) -> None:
    """If both transform, both readers get the result, and the bucket has it once."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    transform = FunctionTransform(swap_case)

    async def both() -> list[bytes]:
        return await asyncio.gather(*(_read(tmp_path / str(number), bucket, transform) for number in range(2)))

    assert asyncio.run(both()) == [TEXT.swapcase()] * 2
    assert len([path for path in bucket.rglob("*") if path.is_file()]) == 2


@pytest.mark.parametrize("is_long", [False, True], ids=["one-part", "several-parts"])
@pytest.mark.parametrize("damage", ["changed", "cut", "removed"])
def test_damaged_bytes_are_not_sent_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str, is_long: bool
) -> None:
    """Bytes that do not match the record are found before anything is sent, or are an error before their end.

    Then the transform runs again, at once or for the next reader.
    """
    if is_long:
        monkeypatch.setattr(derived, "_PART_BYTES", BLOCK_BYTES)
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    transform = FunctionTransform(swap_case)
    asyncio.run(_read(tmp_path / "1", bucket, transform))
    data = next(path for path in bucket.rglob("*") if path.is_file() and path.suffix != ".json")
    if damage == "removed":
        data.unlink()
    else:
        data.write_bytes(TEXT.swapcase()[:-1] + (b"?" if damage == "changed" else b""))
    if is_long and damage != "removed":
        with pytest.raises(ChecksumError):
            asyncio.run(_read(tmp_path / "2", bucket, transform))
    assert asyncio.run(_read(tmp_path / "2", bucket, transform)) == TEXT.swapcase()
    assert asyncio.run(_read(tmp_path / "3", bucket, transform)) == TEXT.swapcase()
    assert transform.runs_count == 2


def test_a_bucket_that_fails_is_not_needed(tmp_path: Path) -> None:
    """If the bucket of results answers with errors, results are produced as without it."""

    class FailingStore(LocalStore):
        def submit(self, operation, sink):  # type: ignore[no-untyped-def]
            raise UnavailableError("the store is down")

    async def test() -> None:
        results = open_results(tmp_path, derived_store=FailingStore(tmp_path))
        assert await get(point_of(FunctionTransform(swap_case), results, {"a": TEXT}), "a") == TEXT.swapcase()
        await results.close()

    asyncio.run(test())


def test_derived_results_are_listed_and_removed(tmp_path: Path) -> None:
    """The records say what the bucket holds, and removing a result removes its bytes; objects of others are left alone."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    asyncio.run(_read(tmp_path / "1", bucket, FunctionTransform(swap_case)))
    (bucket / "mine.json").write_text("{}")
    store = LocalStore(bucket)
    found = read_derived(store)
    assert [(each.record.key, each.record.size_bytes, each.record.transform) for each in found.results] == [
        ("a", len(TEXT), "test")
    ]
    assert not found.leftovers
    remove_derived(store, [each.record for each in found.results])
    assert [path.name for path in bucket.rglob("*") if path.is_file()] == ["mine.json"]
    store.close()


@pytest.mark.parametrize("left", ["bytes", "record", "note"])
def test_leftovers_are_found_and_removed(tmp_path: Path, left: str) -> None:
    """Bytes without a record, a damaged record and the note about an upload are leftovers; the upload is dropped."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    asyncio.run(_read(tmp_path / "1", bucket, FunctionTransform(swap_case)))
    store = LocalStore(bucket)
    (record_path,) = bucket.rglob("*.json")
    if left == "bytes":
        record_path.unlink()
    elif left == "record":
        record_path.write_bytes(b"{}")
    else:
        writer = store.writer(f"{'0' * 2}/{'0' * 32}-run", part_bytes=1 << 20)
        writer.write(bytes(3 << 20))
        store.write(f"uploads/{'0' * 32}-run", json.dumps([f"{'0' * 2}/{'0' * 32}-run", writer.upload_id]).encode())
    found = read_derived(store)
    assert len(found.leftovers) == {"bytes": 1, "record": 2, "note": 1}[left]
    remove_leftovers(store, found.leftovers)
    again = read_derived(store)
    assert (len(again.results), again.leftovers) == (1 if left == "note" else 0, [])
    if left == "note":
        with pytest.raises(StoreError, match="NoSuchUpload"):
            writer.close()
    store.close()


def _deep(text: str) -> str:
    return text.replace('"a"', "[" * 100_000 + "]" * 100_000, 1)


@pytest.mark.parametrize(
    "damage",
    [
        _deep,
        lambda text: json.dumps(json.loads(text) | {"size_bytes": 1 << 55}),
        lambda text: json.dumps(json.loads(text) | {"size_bytes": 1 << 49}),
        lambda text: json.dumps(json.loads(text) | {"crc32c": 1 << 32}),
        lambda text: json.dumps(json.loads(text) | {"run": 7}),
        lambda text: json.dumps(json.loads(text) | {"run": "../../other"}),
        lambda text: json.dumps(json.loads(text) | {"headers": None}),
        lambda text: json.dumps(json.loads(text) | {"headers": {"Content-Length": "3"}}),
        lambda text: json.dumps(json.loads(text) | {"headers": {"x": "a\r\nb"}}),
        lambda text: json.dumps(json.loads(text) | {"headers": {"x": "\ud800"}}),
        lambda text: json.dumps(json.loads(text) | {"etag": "\ud800"}),
        lambda text: json.dumps(json.loads(text) | {"size_bytes": 0}),
        lambda text: json.dumps(json.loads(text) | {"last_modified_s": float("inf")}),
        lambda text: json.dumps(json.loads(text) | {"is_complete": False}),
        lambda text: json.dumps(json.loads(text) | {"key": "another"}),
        lambda _: "null",
    ],
)
def test_a_record_that_is_not_valid_is_made_again(tmp_path: Path, damage: Callable[[str], str]) -> None:
    """A result whose record cannot be right is produced and stored again, and is then copied by the next gateway."""
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    transform = FunctionTransform(swap_case)
    asyncio.run(_read(tmp_path / "1", bucket, transform))
    (record,) = bucket.rglob("*.json")
    record.write_text(damage(record.read_text()))
    assert asyncio.run(_read(tmp_path / "2", bucket, transform)) == TEXT.swapcase()
    assert transform.runs_count == 2
    assert asyncio.run(_read(tmp_path / "3", bucket, transform)) == TEXT.swapcase()
    assert transform.runs_count == 2


@pytest.mark.parametrize(
    "note", ["[" * 100_000, "[1, 2]", '["mine", "id"]', '{"a": 1, "b": 2}', "7", '[null, {"a": 1}]']
)
def test_a_note_that_is_not_valid_is_removed(tmp_path: Path, note: str) -> None:
    """Any text in the place of a note about an upload is removed with the other leftovers."""
    store = LocalStore(tmp_path)
    names = [f"uploads/{digit * 32}-run" for digit in "01"]
    for name, text in zip(names, [note, "{}"], strict=True):
        store.write(name, text.encode())
    remove_leftovers(store, read_derived(store).leftovers)
    assert list(store.list()) == []
    store.close()
