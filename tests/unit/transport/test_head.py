"""Heads and chunks of HTTP/1: what is read, what is refused, whatever the cuts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.transport.http import Chunked, parse_head


def test_the_last_of_several_heads_counts() -> None:
    """Names come in lower case, values stripped, of the last answer only; an empty line ends a head."""
    lines = [
        b"HTTP/1.1 100 Continue\r\n",
        b"A: 1\r\n",
        b"\r\n",
        b"HTTP/1.1 206 Partial\r\n",
        b'ETag:  "x" \r\n',
        b"\r\n",
    ]
    assert parse_head(lines) == (206, {b"etag": b'"x"'})


@pytest.mark.parametrize(
    "line",
    [b"no colon", b": no name", b"a b: space in the name", b"\xff: x", b" folded", b"HTTP/1.1 abc", b"HTTP/1.1"],
)
def test_a_line_that_is_none_is_refused(line: bytes) -> None:
    """Anything but name, colon and value makes the whole answer unreadable."""
    with pytest.raises(ValueError, match="not a"):
        parse_head([b"HTTP/1.1 200 OK", line])


def test_two_content_lengths_are_refused() -> None:
    """Nobody can say where such a body ends; the same length said twice is harmless."""
    with pytest.raises(ValueError, match="two content lengths"):
        parse_head([b"HTTP/1.1 200 OK", b"Content-Length: 1", b"content-length: 2"])
    assert parse_head([b"HTTP/1.1 200 OK", b"Content-Length: 1", b"content-length: 1"])[1] == {b"content-length": b"1"}


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(place, len(data)) for place in cuts} | {0, len(data)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


@given(
    st.lists(st.binary(min_size=1, max_size=300), max_size=6),
    st.lists(st.integers(0, 2000), max_size=12),
    st.binary(max_size=9),
)
def test_chunks_are_put_together_whatever_the_cuts(pieces: list[bytes], cuts: list[int], after: bytes) -> None:
    """The body comes out byte for byte, its end is seen, and what follows it is counted, not taken."""
    encoded = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nTrailer: x\r\n\r\n"
    chunks = Chunked()
    body, leftover = b"", 0
    for data in cut(encoded + after, cuts):
        if chunks.done:
            leftover += len(data)
            continue
        got, leftover = chunks.feed(data)
        body += b"".join(got)
    assert chunks.done
    assert body == b"".join(pieces)
    assert leftover == len(after)


@pytest.mark.parametrize("data", [b"zz\r\n", b"-1\r\n", b"1" * 20 + b"\r\n", b"\r\n", b"a" * 9000])
def test_sizes_that_are_none_are_refused(data: bytes) -> None:
    """A chunk's size is hexadecimal, short, and ends."""
    with pytest.raises(ValueError, match="size"):
        Chunked().feed(data)


def test_what_frames_a_body_is_never_overwritten() -> None:
    """Repeated ``Connection`` and ``Transfer-Encoding`` lines are one list; of others the last line counts."""
    lines = [b"HTTP/1.1 200 OK", b"Connection: close", b"X: 1", b"Transfer-Encoding: gzip"]
    lines += [b"connection: x", b"X: 2", b"Transfer-Encoding: chunked"]
    assert parse_head(lines)[1] == {b"connection": b"close, x", b"x": b"2", b"transfer-encoding": b"gzip, chunked"}


def test_a_second_status_line_within_a_head_is_refused() -> None:
    """Only after the empty line that ends a head may another one begin."""
    with pytest.raises(ValueError, match="not a header line"):
        parse_head([b"HTTP/1.1 404 No", b"A: b", b"HTTP/1.1 200 OK"])


@pytest.mark.parametrize("cuts", [[], [21], [3, 9], list(range(30))])
def test_a_chunk_that_goes_on_beyond_its_size_is_refused(cuts: list[int]) -> None:
    """After a chunk comes a line break, wherever the data is cut."""
    chunks = Chunked()
    with pytest.raises(ValueError, match="longer than its size"):
        list(map(chunks.feed, cut(b"5\r\nhelloXX3\r\nabc\r\n0\r\n\r\n", cuts)))
