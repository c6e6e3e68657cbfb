"""The manifest of a checkpoint: every file with its size and checksums, and where each tensor's bytes lie in it.

It is strict JSON, written after the data and before the commit marker. It also holds the size and the checksum of the commit
marker, so that the manifest of another save is never mistaken for that of this save.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NoReturn

from penstock.config import GIB, MIB
from penstock.errors import CheckpointError
from penstock.text.json_text import parse_json

VERSION = 1

BLOCK_BYTES = 4 * MIB
"""Length of the blocks of a tensor that have a checksum each, so that a rank that needs a part of a tensor can verify what it
reads. It costs 2 MB of manifest for each TB of tensors; a tenth of it would cost a large checkpoint 20 MB."""

MANIFEST_BYTES_MAX = 256 * MIB
"""Longest manifest that is read: that of about a million tensors."""

FILES_MAX = 1_000_000
ITEMS_MAX = 10_000_000
NAME_CHARACTERS_MAX = 1024
_SIZE_BYTES_MAX = 5 * 1024 * GIB  # S3's largest object


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointItem:
    """A tensor, or another object, in a data file.

    Attributes:
        offset_bytes: Position of the item in the file.
        length_bytes: Length of the item as ``torch.save`` wrote it.
        data_offset_bytes: Position of the tensor's own bytes in the file, in row-major order.
        data_length_bytes: Length of the tensor's own bytes. For values that are not tensors, the whole item.
        block_crcs: CRC-32C of each block of ``block_bytes`` of the tensor's bytes; the last block may be shorter.
    """

    offset_bytes: int
    length_bytes: int
    data_offset_bytes: int
    data_length_bytes: int
    block_crcs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """A data file.

    Attributes:
        name: Name of the file in the checkpoint's directory; it may contain slashes.
        size_bytes: Size of the file in bytes.
        crc32c: CRC-32C of all its bytes.
        items: Contents of the file, in the order of the offsets.
    """

    name: str
    size_bytes: int
    crc32c: int
    items: tuple[CheckpointItem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """The files and tensors of a committed save.

    Attributes:
        save_id: ID of the save.
        step: Step of the training; None if the save was not given one.
        world_size: Number of ranks that saved.
        saved_s: When it was written, in seconds since the epoch, by the clock of the process that committed.
        versions: Versions of the programs that wrote it, such as ``{"penstock": "1.0", "torch": "2.13.0"}``.
        metadata_bytes: Size of the commit marker.
        metadata_crc32c: CRC-32C of the commit marker.
        block_bytes: Length of the blocks that have a checksum each.
        files: The data files.
    """

    save_id: str
    step: int | None
    world_size: int
    saved_s: float
    versions: dict[str, str] = field(default_factory=dict)
    metadata_bytes: int
    metadata_crc32c: int
    block_bytes: int = BLOCK_BYTES
    files: tuple[CheckpointFile, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Size of all data files and of the commit marker, in bytes."""
        return self.metadata_bytes + sum(file.size_bytes for file in self.files)

    def encode(self) -> bytes:
        """Return the manifest as JSON."""
        document = {
            "penstock_checkpoint": VERSION,
            "save_id": self.save_id,
            "step": self.step,
            "world_size": self.world_size,
            "saved_s": self.saved_s,
            "versions": self.versions,
            "metadata": {"size_bytes": self.metadata_bytes, "crc32c": _hex(self.metadata_crc32c)},
            "block_bytes": self.block_bytes,
            "files": [_file_row(file) for file in self.files],
        }
        return json.dumps(document, indent=1, allow_nan=False).encode() + b"\n"


def _file_row(file: CheckpointFile) -> dict[str, Any]:
    items = [
        {
            "offset": item.offset_bytes,
            "length": item.length_bytes,
            "data_offset": item.data_offset_bytes,
            "data_length": item.data_length_bytes,
            "crc32c": "".join(map(_hex, item.block_crcs)),
        }
        for item in file.items
    ]
    return {"name": file.name, "size_bytes": file.size_bytes, "crc32c": _hex(file.crc32c), "items": items}


def _hex(crc: int) -> str:
    return f"{crc:08x}"


# ── decoding ────────────────────────────────────────────────────────────────────────────────────────────────────────


def decode_manifest(data: bytes | memoryview, url: str) -> CheckpointManifest:
    """Decode and check a manifest.

    Args:
        data: The JSON text, uint8[any length].
        url: URL of the manifest, for messages.

    Raises:
        CheckpointError: It is too long, is not JSON, or a field is missing, unknown, of another type or out of its bounds; the
            error names the field.
    """
    if len(data) > MANIFEST_BYTES_MAX:
        raise CheckpointError(f"the manifest has {len(data)} bytes, more than {MANIFEST_BYTES_MAX}", url=url)
    try:
        document = parse_json(data, object_pairs_hook=_unique, parse_constant=_no_constant)
    except ValueError as error:
        raise CheckpointError(f"the manifest is not valid JSON: {error}", url=url) from None
    row = _Fields(document, "", url)
    if row.take("penstock_checkpoint", int, 0, 2**31) != VERSION:
        row.refuse("penstock_checkpoint", f"must be {VERSION}; a newer penstock may have written it")
    metadata = row.below("metadata")
    manifest = CheckpointManifest(
        save_id=row.text("save_id", 64),
        step=row.take("step", int, 0, 10**10) if row.value("step") is not None else None,
        world_size=row.take("world_size", int, 1, 10**7),
        saved_s=row.take("saved_s", float, 0, 10**12),
        versions=_versions(row),
        metadata_bytes=metadata.take("size_bytes", int, 1, _SIZE_BYTES_MAX),
        metadata_crc32c=metadata.crc("crc32c"),
        block_bytes=(block_bytes := row.take("block_bytes", int, 1, GIB)),
        files=_files(row, block_bytes),
    )
    row.done()
    metadata.done()
    return manifest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        raise ValueError("an object has two fields of one name")
    return row


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON")


def _versions(row: _Fields) -> dict[str, str]:
    versions = row.below("versions")
    return {name: versions.text(name, 100) for name in versions.names(100)}


def _files(row: _Fields, block_bytes: int) -> tuple[CheckpointFile, ...]:
    files, names, items_count = [], set(), 0
    for each in row.rows("files", FILES_MAX):
        name = each.text("name", NAME_CHARACTERS_MAX)
        if name in names or name.startswith("/") or {"", ".", ".."} & set(name.split("/")):
            each.refuse("name", f"{name!r} is not a name of its own below the directory")
        names.add(name)
        size_bytes = each.take("size_bytes", int, 0, _SIZE_BYTES_MAX)
        items = tuple(_items(each, size_bytes, block_bytes))
        items_count += len(items)
        if items_count > ITEMS_MAX:
            each.refuse("items", f"the manifest has more than {ITEMS_MAX} items")
        files.append(CheckpointFile(name=name, size_bytes=size_bytes, crc32c=each.crc("crc32c"), items=items))
        each.done()
    return tuple(files)


def _items(row: _Fields, size_bytes: int, block_bytes: int) -> list[CheckpointItem]:
    items, end = [], 0
    for each in row.rows("items", ITEMS_MAX):
        offset = each.take("offset", int, end, size_bytes)
        length = each.take("length", int, 0, size_bytes - offset)
        end = offset + length
        data_offset = each.take("data_offset", int, offset, end)
        data_length = each.take("data_length", int, 0, end - data_offset)
        item = CheckpointItem(
            offset_bytes=offset,
            length_bytes=length,
            data_offset_bytes=data_offset,
            data_length_bytes=data_length,
            block_crcs=each.crcs("crc32c", -(-data_length // block_bytes)),
        )
        each.done()
        items.append(item)
    return items


class _Fields:
    """The fields of one JSON object; every mistake is an error that names the field."""

    __slots__ = ("_read", "_row", "_url", "_where")

    def __init__(self, row: Any, where: str, url: str) -> None:
        self._where, self._url = where, url
        if not isinstance(row, dict):
            self.refuse("", f"must be an object, not {type(row).__name__}")
        self._row: dict[str, Any] = row
        self._read: set[str] = set()

    def refuse(self, name: str, what: str) -> NoReturn:
        where = f"{self._where}{name}".rstrip(".")
        raise CheckpointError(f"the manifest is damaged: {where or 'it'} {what}", url=self._url, field=where or None)

    def value(self, name: str) -> Any:
        self._read.add(name)
        if name not in self._row:
            self.refuse(name, "is missing")
        return self._row[name]

    def take(self, name: str, kind: type, low: int, high: int) -> Any:
        """Return a number in [low, high]; an int is a valid float."""
        value = self.value(name)
        kinds = (int,) if kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            self.refuse(name, f"is {_short(value)}, and must be a number in [{low}, {high}]")
        return value

    def text(self, name: str, characters_max: int) -> str:
        value = self.value(name)
        if not isinstance(value, str) or not 0 < len(value) <= characters_max:
            self.refuse(name, f"is {_short(value)}, and must be text of 1 to {characters_max} characters")
        return value

    def crcs(self, name: str, count: int) -> tuple[int, ...]:
        value = self.value(name)
        if not isinstance(value, str) or len(value) != 8 * count or value.strip("0123456789abcdef"):
            self.refuse(name, f"is {_short(value)}, and must be {8 * count} hexadecimal digits")
        return tuple([int(value[at : at + 8], 16) for at in range(0, len(value), 8)])

    def crc(self, name: str) -> int:
        return self.crcs(name, 1)[0]

    def below(self, name: str) -> _Fields:
        return _Fields(self.value(name), f"{self._where}{name}.", self._url)

    def rows(self, name: str, rows_max: int) -> list[_Fields]:
        value = self.value(name)
        if not isinstance(value, list) or len(value) > rows_max:
            self.refuse(name, f"must be a list of at most {rows_max} objects")
        return [_Fields(row, f"{self._where}{name}[{index}].", self._url) for index, row in enumerate(value)]

    def names(self, names_max: int) -> list[str]:
        if len(self._row) > names_max:
            self.refuse("", f"has more than {names_max} fields")
        return list(self._row)

    def done(self) -> None:
        """Refuse fields that were not read."""
        if unknown := sorted(self._row.keys() - self._read):
            self.refuse(unknown[0][:100], "is not a field of a manifest")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
