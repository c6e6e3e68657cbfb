"""The CRC of joined parts."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.checksums import algorithms
from penstock.checksums.combining import CRCS, combined_crc


@pytest.mark.parametrize("name", sorted(CRCS))
@given(parts=st.lists(st.binary(max_size=300), max_size=6))
def test_the_crc_of_joined_parts(name: str, parts: list[bytes]) -> None:
    """It is what the library computes over all bytes, for parts of any length, empty ones among them."""

    def crc(data: bytes) -> int:
        return int.from_bytes(base64.b64decode(algorithms.encode(name, data)), "big")

    joined = 0
    for part in parts:
        joined = combined_crc(joined, crc(part), len(part), algorithm=name)
    assert joined == crc(b"".join(parts))
