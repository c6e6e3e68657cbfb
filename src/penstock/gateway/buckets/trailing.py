"""``aws-chunked`` bodies whose checksum comes after the bytes, because it is known only then. Pure.

Source: Amazon S3 API reference, "Signature calculations: transferring a payload in multiple chunks", with unsigned chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

CHUNK_BYTES = 64 << 10
"""Length of all chunks but the last; S3 refuses those below 8 KiB."""

_END = b"\r\n"
CHECKSUM_CHARACTERS = {"crc32": 8, "crc32c": 8, "crc64nvme": 12, "sha1": 28, "sha256": 44}
"""Length of each checksum in base64."""


def encoded_length_bytes(length_bytes: int, algorithm: str) -> int:
    """Return the length of a body in chunks, which has a trailer with a checksum."""
    whole, rest = divmod(length_bytes, CHUNK_BYTES)
    total = whole * (len(f"{CHUNK_BYTES:x}") + CHUNK_BYTES + 4)
    if rest:
        total += len(f"{rest:x}") + rest + 4
    return total + 3 + len(f"x-amz-checksum-{algorithm}:") + CHECKSUM_CHARACTERS[algorithm] + 4


async def encoded(pieces: AsyncIterator[bytes], algorithm: str, checksum: Callable[[], str]) -> AsyncIterator[bytes]:
    """Iterate over a body in chunks, and its trailer.

    Args:
        pieces: The body.
        algorithm: Name of the checksum.
        checksum: Returns the checksum in base64, when the body has ended.
    """
    held = bytearray()
    async for piece in pieces:
        held += piece
        while len(held) >= CHUNK_BYTES:
            yield b"%x\r\n%b\r\n" % (CHUNK_BYTES, bytes(held[:CHUNK_BYTES]))
            del held[:CHUNK_BYTES]
    if held:
        yield b"%x\r\n%b\r\n" % (len(held), bytes(held))
    yield b"0\r\n" + f"x-amz-checksum-{algorithm}:{checksum()}".encode() + _END + _END
