"""The CRC of joined parts."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.buckets.directory.crc_arithmetic import CRCS, joined_crc
from penstock.store import checksums


@pytest.mark.parametrize("name", sorted(CRCS))
@given(parts=st.lists(st.binary(max_size=300), max_size=6))
def test_the_crc_of_joined_parts(name: str, parts: list[bytes]) -> None:
    """It is what the library computes over all bytes, for parts of any length, empty ones among them."""

    def crc(data: bytes) -> int:
        return int.from_bytes(base64.b64decode(checksums.encode(name, data)), "big")

    assert joined_crc(name, [(crc(part), len(part)) for part in parts]) == crc(b"".join(parts))
