"""The record of a result, which is kept beside its blocks: size, headers, checksum, and the run that produced them."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from penstock.gateway.results.identity import ResultName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.types import Buffer

DEFAULT_TYPE = "application/octet-stream"
HEADERS_BYTES_MAX = 64 * 1024
SIZE_BYTES_MAX = 1 << 50
"""No store keeps a result this large: the largest object of S3 has 50 TB. Sizes are bounded before they are used."""
YEAR_10000_S = 253402300800.0
HEADERS_OF_GATEWAY = frozenset(
    {
        *("accept-ranges", "connection", "content-length", "content-range", "date", "etag", "keep-alive"),
        *("last-modified", "location", "proxy-authenticate", "proxy-connection", "server", "set-cookie", "te"),
        *("trailer", "transfer-encoding", "upgrade", "x-amz-mp-parts-count"),
    }
)
"""Headers, in lower case, that no result has: those of connections, and those that the gateway makes itself."""
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\x80-\U0010ffff]*")
_RUN = re.compile(r'[0-9a-z]+|"[^"]*"')  # a token, or in a pointer the ETag of the result that is held


class BadRecordError(ValueError):
    """The bytes are not a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRecord:
    """A result that exists, or that is being produced.

    Attributes:
        scope: The upstream, as ``scope_of`` names it.
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
    def name(self) -> ResultName:
        """The way in which the result is found."""
        return ResultName(self.scope, self.key, self.etag)

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
        BadRecordError: It holds none. Everybody who can write to a bucket of results may have written anything.
    """
    try:
        record = ResultRecord(**json.loads(bytes(data)))
        is_valid = _is_valid(record)
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BadRecordError(f"it is not a record: {type(error).__name__}") from error
    if not is_valid:
        raise BadRecordError("a value in it is not one that a record can have")
    return record


def _is_valid(record: ResultRecord) -> bool:
    """Whether all values have their types and lie within their bounds. May raise TypeError, ValueError or AttributeError."""
    texts = (record.scope, record.key, record.etag, record.transform, *record.arguments, *record.arguments.values())
    size_bytes = 0 if record.size_bytes is None else record.size_bytes
    crc = 0 if record.crc32c is None else record.crc32c
    "".join((*texts, *record.headers.values())).encode()  # half of a surrogate pair, or what is no text, is an error
    numbers = ((record.block_bytes, 1, SIZE_BYTES_MAX), (size_bytes, 0, SIZE_BYTES_MAX), (crc, 0, 0xFFFFFFFF))
    return (
        _RUN.fullmatch(record.run) is not None
        and type(record.is_complete) is bool
        and all(type(number) is int and low <= number <= high for number, low, high in numbers)
        and 0 <= record.last_modified_s < YEAR_10000_S
        and not (record.is_complete and None in (record.size_bytes, record.crc32c))
        and (size_bytes > 0 or crc == 0)
        and all(
            _HEADER_NAME.fullmatch(name) and name.lower() not in HEADERS_OF_GATEWAY and _HEADER_VALUE.fullmatch(value)
            for name, value in record.headers.items()
        )
        and sum(len(name) + len(value) for name, value in record.headers.items()) <= HEADERS_BYTES_MAX
    )


def is_pointer(record: ResultRecord) -> bool:
    """Whether a record is the pointer to a held result."""
    return record.run.startswith('"')
