"""Sizes and times as people write and read them."""

from __future__ import annotations

import pytest

from penstock.errors import ConfigError
from penstock.text.sizes import format_bytes, parse_bytes, parse_seconds


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("200GB", 200 * 10**9),
        ("1.5TiB", 3 << 39),
        ("10 MB", 10**7),
        ("64k", 64_000),
        ("512KiB", 1 << 19),
        ("123456", 123456),
    ],
)
def test_a_size_is_parsed(text: str, size_bytes: int) -> None:
    """Decimal and binary units are understood, with or without a space and the B."""
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1XB", "1 GB 2", "inf"])
def test_another_text_is_refused(text: str) -> None:
    """A text that is not a size raises ``ConfigError``, which quotes the text and names the option."""
    with pytest.raises(ConfigError, match=f"--limit '{text}' is not a size"):
        parse_bytes(text, option="--limit")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1.5 * 2**20, "1.5 MiB"),
        (2**50, "1 PiB"),
        (2**62, "4.1e+03 PiB"),
    ],
)
def test_a_size_is_formatted(size_bytes: float, text: str) -> None:
    """A size has three significant digits and the binary unit that fits it."""
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("1.5s", 1.5), ("10min", 600.0), ("2h", 7200.0), ("250ms", 0.25)]
)
def test_durations(text: str, seconds: float) -> None:
    """A duration is a number with an optional unit."""
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "-1s", "1 year", "s", "1e3"])
def test_texts_that_are_no_duration(text: str) -> None:
    """Anything else is refused with the name of its option."""
    with pytest.raises(ConfigError, match=r"--timeout .* is not a duration"):
        parse_seconds(text, option="--timeout")
