"""safetensors: the header of a file, and the index of a directory whose tensors lie in several files.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name, dtype, shape and offsets of each tensor),
and the tensors, one after the other. A header decides how much memory is taken and which bytes become which tensor, so
everything in it is checked against the size of the file before anything is allocated. The rules are those of the
``safetensors`` library: tensors lie in the file without gaps and without overlaps, and end where the file ends.

The library itself reads only headers of files in memory, so it is not used here.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import CheckpointError, ConfigError, UnsupportedFormatError
from penstock.text.json_text import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.types import Buffer

LENGTH_BYTES = 8
"""Size of the field in front of the header."""

HEADER_BYTES_MAX = 32 * 1024 * 1024
"""Longest header, and longest index, that is read: about 250 000 tensors. Parsed, it takes up to 50 times as much memory."""

DIMENSIONS_MAX = 64
"""The most dimensions of a tensor; PyTorch has the same bound."""

ALIGNMENT_BYTES = 8
"""The tensors begin at a multiple of this."""

METADATA_KEY = "__metadata__"

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
"""Bytes per element of each dtype of the format."""

_PACKED_DTYPES = ("F4", "F6_E2M3", "F6_E3M2")
"""Dtypes of the format whose elements are shorter than a byte."""


class TensorEntry(NamedTuple):
    """One tensor of a file.

    Attributes:
        dtype: Name of the dtype in the format, such as ``"BF16"``.
        shape: Size of each dimension.
        start: Position of its first byte in the file.
        end: Position after its last byte in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """The contents of a file.

    Attributes:
        tensors: The tensors by name, in the order in which they lie in the file.
        metadata: The texts that were saved with them.
    """

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def header_end(head: Buffer, *, size_bytes: int, url: str) -> int:
    """Return the offset in the file after the header.

    Args:
        head: At least the first 8 bytes of the file, or all of it.
        size_bytes: Size of the file in bytes.
        url: URL of the file, for messages.

    Raises:
        CheckpointError: The file is too short, or says that its header is longer than a header may be.
    """
    if size_bytes < LENGTH_BYTES or len(head) < LENGTH_BYTES:
        raise CheckpointError(f"a file of {size_bytes} bytes is not a safetensors file", url=url)
    (length,) = struct.unpack_from("<Q", head)
    if length > HEADER_BYTES_MAX:
        what = f"its first 8 bytes announce a header of {length} bytes, more than {HEADER_BYTES_MAX}"
        raise CheckpointError(what, hint="this is probably not a safetensors file", url=url)
    if LENGTH_BYTES + length > size_bytes:
        what = f"the header has {length} bytes, but the file only {size_bytes}"
        raise CheckpointError(what, hint="the file is cut off, or is not a safetensors file", url=url)
    return LENGTH_BYTES + int(length)


def parse_header(head: Buffer, *, size_bytes: int, url: str) -> SafetensorsHeader:
    """Parse and check a header.

    Args:
        head: The file up to the end of its header (``header_end``), or more of it.
        size_bytes: Size of the file in bytes.
        url: URL of the file, for messages.

    Raises:
        CheckpointError: The header is not valid, or does not fit the size of the file.
        UnsupportedFormatError: A tensor has a dtype that penstock does not read.
    """
    data_start = header_end(head, size_bytes=size_bytes, url=url)
    content = _parse_json(memoryview(head)[LENGTH_BYTES:data_start], url=url)
    metadata = content.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{METADATA_KEY} of the header does not map names to texts", url=url)
    entries = {name: _entry(name, fields, data_start, url) for name, fields in content.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
    position = data_start
    for name, entry in ordered.items():
        if entry.start != position:
            relation = "overlaps" if entry.start < position else "does not begin at the end of"
            raise CheckpointError(f"the tensor {relation} the one before it", url=url, field=name)
        position = entry.end
    if position != size_bytes:
        what = f"the tensors end at byte {position}, but the file has {size_bytes} bytes"
        raise CheckpointError(what, hint="the file is cut off, or something was appended to it", url=url)
    return SafetensorsHeader(tensors=ordered, metadata=metadata)


def _entry(name: str, fields: Any, data_start: int, url: str) -> TensorEntry:
    """Check one tensor of a header by itself."""
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError("an entry must have a dtype, a shape and data_offsets", url=url, field=name)
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if dtype in _PACKED_DTYPES:
        raise UnsupportedFormatError(f"tensors of dtype {dtype} cannot be read", shard=url, field=name)
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"there is no dtype {str(dtype)[:40]!r}", url=url, field=name)
    if not _are_sizes(shape) or len(shape) > DIMENSIONS_MAX:
        what = f"a shape is a list of at most {DIMENSIONS_MAX} whole numbers, not {str(shape)[:80]}"
        raise CheckpointError(what, url=url, field=name)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        what = f"data_offsets are a start and an end, not {str(offsets)[:80]}"
        raise CheckpointError(what, url=url, field=name)
    if math.prod(shape) * DTYPE_BYTES[dtype] != offsets[1] - offsets[0]:
        what = f"{dtype}{shape} does not take the {offsets[1] - offsets[0]} bytes of data_offsets"
        raise CheckpointError(what, url=url, field=name)
    return TensorEntry(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _parse_json(text: Buffer, *, url: str) -> dict[str, Any]:
    """Parse a JSON object in which no name occurs twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for name, value in pairs:
            if name in content:
                raise CheckpointError("the name occurs twice", url=url, field=name)
            content[name] = value
        return content

    try:
        content = parse_json(bytes(text), object_pairs_hook=unique)
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"the JSON cannot be parsed: {str(error)[:120]}", url=url) from None
    if not isinstance(content, dict):
        raise CheckpointError("the JSON is not an object", url=url)
    return content


def encode_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Return the bytes of a file up to its first tensor.

    Args:
        tensors: Name, dtype and shape of each tensor, in the order in which their bytes follow.
        metadata: Texts to save with them.

    Raises:
        ConfigError: The header would be longer than ``HEADER_BYTES_MAX``.
    """
    content: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape in tensors:
        end = position + math.prod(shape) * DTYPE_BYTES[dtype]
        content[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT_BYTES)
    if len(text) > HEADER_BYTES_MAX:
        raise ConfigError(f"the names of the tensors need a header of {len(text)} bytes, more than {HEADER_BYTES_MAX}")
    return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsIndex:
    """Which file of a directory holds which tensor.

    Attributes:
        files: Name of the file by name of the tensor.
        metadata: Values saved beside it; ``total_size`` is the size of all tensors in bytes.
    """

    files: Mapping[str, str]
    metadata: Mapping[str, Any]


def parse_index(text: Buffer, *, url: str) -> SafetensorsIndex:
    """Parse and check the index of a directory.

    Args:
        text: The whole index.
        url: URL of the index, for messages.

    Raises:
        CheckpointError: The index is not valid, is longer than ``HEADER_BYTES_MAX``, or names a file that is not in its
            directory.
    """
    if len(text) > HEADER_BYTES_MAX:
        raise CheckpointError(f"an index of {len(text)} bytes is longer than {HEADER_BYTES_MAX}", url=url)
    content = _parse_json(text, url=url)
    files, metadata = content.get("weight_map"), content.get("metadata", {})
    if not isinstance(files, dict) or not isinstance(metadata, dict):
        raise CheckpointError("an index must have a weight_map", url=url)
    for name, file in files.items():
        if not isinstance(file, str) or not file or "/" in file or file in (".", "..") or not file.isprintable():
            what = f"{str(file)[:80]!r} is not the name of a file beside the index"
            raise CheckpointError(what, url=url, field=name)
    return SafetensorsIndex(files=files, metadata=metadata)


def encode_index(index: SafetensorsIndex) -> bytes:
    """Return the bytes of an index.

    Raises:
        ConfigError: It would be longer than ``HEADER_BYTES_MAX``.
    """
    content = {"metadata": dict(index.metadata), "weight_map": dict(sorted(index.files.items()))}
    text = json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"
    if len(text) > HEADER_BYTES_MAX:
        raise ConfigError(f"the names of the tensors need an index of {len(text)} bytes, more than {HEADER_BYTES_MAX}")
    return text
