"""``aws-chunked`` bodies with a checksum after the bytes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from penstock.checksums import algorithms as checksums
from penstock.gateway.buckets.forwarding import CHECKSUM_CHARACTERS, CHUNK_BYTES, encoded, encoded_length_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.mark.parametrize("algorithm", sorted(CHECKSUM_CHARACTERS))
@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 17])
def test_the_length_is_known_beforehand(algorithm: str, size: int) -> None:
    """The body has the announced length, its chunks hold the bytes, and the trailer follows the last one."""
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    value = checksums.encode(algorithm, data)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, size, 10_001):
            yield data[start : start + 10_001]

    async def joined() -> bytes:
        return b"".join([piece async for piece in encoded(pieces(), algorithm, lambda: value)])

    body = asyncio.run(joined())
    assert len(body) == encoded_length_bytes(size, algorithm)
    found, rest = b"", body
    while True:
        length, _, rest = rest.partition(b"\r\n")
        if length == b"0":
            break
        found, rest = found + rest[: int(length, 16)], rest[int(length, 16) + 2 :]
    assert found == data
    assert rest == f"x-amz-checksum-{algorithm}:{value}\r\n\r\n".encode()
