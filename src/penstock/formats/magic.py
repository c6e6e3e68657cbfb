"""Recognises other kinds of files by their first bytes, so that an error can say what an object is instead of a shard."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.types import Buffer

_MAGIC = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"PK\x03\x04", "zip"),
    (b"PAR1", "Parquet"),
    (b"\x89HDF\r\n", "HDF5"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x0a\x23\xd7\xce", "RecordIO"),
)

CONTAINERS = frozenset({"bzip2", "xz", "lz4", "HDF5"})
"""Containers that may hold what the object's name says, in a way that is not supported."""


_LITDATA = re.compile(r"(?:^|/)chunk-\d+-\d+(?:\.\w+)?\.bin$").search


def conversion_hint(name: str) -> str | None:
    """Return how to convert the object called `name` if it is a shard that only another library reads, else None."""
    if _LITDATA(name) is None:
        return None
    url = name.rpartition("/")[0]
    return (
        'these are chunks of LitData, which only LitData reads. This converts them: python -c "import litdata, penstock; '
        f"penstock.pack(litdata.StreamingDataset('{url}/'), 's3://bucket/packed/')\""
    )


def look(head: Buffer) -> str | None:
    """Return what an object with the first bytes `head` seems to be, or None if that is unknown."""
    start = bytes(head[:16])
    for magic, name in _MAGIC:
        if start.startswith(magic):
            return name
    if start.lstrip().startswith((b"<", b"{", b"[")):
        return "text (HTML, XML or JSON)"
    return None
