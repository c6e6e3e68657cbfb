from __future__ import annotations

import pytest

from penstock.formats.tar_header import byte_sum, is_harmless, number, pax_records


@pytest.mark.parametrize("data", [b"", b"\0", b"\xff" * 256, b"\xff" * 512, bytes(range(256)) * 3 + b"x"])
def test_byte_sum_is_the_sum(data):
    """The checksum trick is exact, at its worst case too: bytes of 255."""
    assert byte_sum(data) == sum(data)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (b"00000000017\0", 15),
        (b"000000000017", 15),
        (b"         17 ", 15),
        (b"17\0garbage ", 15),
        (bytes(12), 0),
        (b" " * 12, 0),
        (b"\x80" + (1 << 80).to_bytes(11, "big"), 1 << 80),
    ],
)
def test_numbers(field, value):
    """Octal with blanks or NULs on either side, and base 256."""
    assert number(field) == value


@pytest.mark.parametrize("field", [b"00000000018\0", b"x" * 12, b"\xff" * 12, b"-0000000001\0"])
def test_what_is_no_number(field):
    """Digits beyond 7, letters and negative numbers are refused."""
    with pytest.raises(ValueError, match="not an octal number"):
        number(field)


def test_pax_records_hold_any_bytes():
    """Values may hold equals signs, newlines and UTF-8; padding after the last record is no record."""
    data = b"12 path=a=b\n" + b"8 x=\n\xc3\xbc\n" + bytes(100)
    assert pax_records(data) == {b"path": b"a=b", b"x": b"\n\xc3\xbc"}
    assert not is_harmless(data)
    assert is_harmless(b"20 mtime=1700000.25\n")


@pytest.mark.parametrize(
    "data", [b"x", b"12", b"12 path", b"4 a=", b"0 a=b\n", b"-5 a=b\n", b"6 a=b\n", b"5 ab\n", b"7 a=b\n"]
)
def test_what_is_no_pax_record(data):
    """Wrong lengths, no newline, no equals sign: refused, never looped over."""
    if data == b"6 a=b\n":
        assert pax_records(data) == {b"a": b"b"}
    else:
        with pytest.raises(ValueError, match="PAX record"):
            pax_records(data)
