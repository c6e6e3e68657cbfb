"""The record of a result, which is kept beside its blocks: size, headers, checksum, and the run that produced them."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.types import Buffer

DEFAULT_TYPE = "application/octet-stream"


class BadRecordError(ValueError):
    """The bytes are not a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRecord:
    """A result that exists, or that is being produced.

    Attributes:
        scope: URL of the upstream.
        key: Key of the source in the upstream.
        etag: ETag of the result, with its quotes.
        run: Names the run that produced the blocks.
        headers: Headers of the result.
        size_bytes: Size of the result, or the size that the transform announced; None if neither is known.
        crc32c: CRC-32C of the whole result; None while it is being produced.
        last_modified_s: Time of the last change of the source, in seconds since 1970.
        transform: Name of the transform.
        arguments: Arguments of the transform.
        block_bytes: Size of a full block.
        is_complete: Whether the run has ended, and all blocks are stored.
    """

    scope: str
    key: str
    etag: str
    run: str
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": DEFAULT_TYPE})
    size_bytes: int | None = None
    crc32c: int | None = None
    last_modified_s: float = 0.0
    transform: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    block_bytes: int = 0
    is_complete: bool = False

    @property
    def blocks_count(self) -> int:
        """Number of blocks; 0 if the size is not known."""
        return -(-(self.size_bytes or 0) // self.block_bytes)

    def block_size_bytes(self, index: int) -> int:
        """Return the size of a block. The size of the result must be known."""
        assert self.size_bytes is not None
        return min(self.block_bytes, self.size_bytes - index * self.block_bytes)

    @property
    def sent_headers(self) -> dict[str, str]:
        """The headers of the result, with its checksum if that is known."""
        headers = dict(self.headers)
        if self.is_complete and self.crc32c is not None:
            headers["x-amz-checksum-crc32c"] = base64.b64encode(self.crc32c.to_bytes(4, "big")).decode()
            headers["x-amz-checksum-type"] = "FULL_OBJECT"
        return headers

    def encode(self) -> bytes:
        """Return the record as JSON, in half of the time that ``asdict``, which copies deeply, and ``json.dumps`` take."""
        values: dict[str, object] = {name: getattr(self, name) for name in _FIELDS}
        values |= {"headers": dict(self.headers), "arguments": dict(self.arguments)}
        return _ENCODER.encode(values).encode()


_FIELDS = tuple(each.name for each in fields(ResultRecord))
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def decode_record(data: Buffer) -> ResultRecord:
    """Return the record that `data` holds.

    Raises:
        BadRecordError: It holds none.
    """
    try:
        record = ResultRecord(**json.loads(bytes(data)))
    except (TypeError, ValueError) as error:
        raise BadRecordError(f"it is not a record: {error}") from error
    numbers = (record.block_bytes, record.size_bytes or 0, record.crc32c or 0)
    if not all(isinstance(number, int) and number >= 0 for number in numbers) or record.block_bytes == 0:
        raise BadRecordError("its sizes are not numbers")
    if record.is_complete and (record.size_bytes is None or record.crc32c is None):
        raise BadRecordError("a complete result has a size and a checksum")
    return record
