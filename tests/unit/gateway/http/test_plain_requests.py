"""Which bytes are a plain request, and what is read from them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_parser import HttpRequestParser
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.gateway.http.plain_requests import parse_plain

LINE = b"GET /data/a%20b?x-id=GetObject HTTP/1.1\r\n"
HOST = b"Host: localhost:9000\r\n"


def test_target_and_headers_are_read_as_they_were_sent() -> None:
    """Names keep their case and ignore it when they are looked up; white space around values is gone, that inside stays."""
    found = parse_plain(LINE + HOST + b"X-Amz-Date:20260102T030405Z\r\nX-Two: a  b \t\r\nEmpty:\r\n\r\n")
    assert found is not None
    target, headers = found
    assert target == "/data/a%20b?x-id=GetObject"
    assert list(headers.items()) == [
        ("Host", "localhost:9000"),
        ("X-Amz-Date", "20260102T030405Z"),
        ("X-Two", "a  b"),
        ("Empty", ""),
    ]
    assert headers["x-two"] == "a  b"


@pytest.mark.parametrize("value", [b"keep-alive", b"Keep-Alive"])
def test_a_connection_that_is_kept_is_plain(value: bytes) -> None:
    """``Connection: keep-alive`` says what is true without it."""
    assert parse_plain(LINE + HOST + b"Connection: " + value + b"\r\n\r\n") is not None


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(LINE + HOST, id="no-end"),
        pytest.param(LINE + b"\r\n", id="no-headers"),
        pytest.param(LINE + HOST + b"\r\nG", id="more-after-it"),
        pytest.param((LINE + HOST + b"\r\n") * 2, id="two-requests"),
        pytest.param(b"\r\n" + LINE + HOST + b"\r\n", id="empty-line-before"),
        pytest.param(b"HEAD /d HTTP/1.1\r\n" + HOST + b"\r\n", id="head"),
        pytest.param(b"POST /d HTTP/1.1\r\n" + HOST + b"\r\n", id="post"),
        pytest.param(b"get /d HTTP/1.1\r\n" + HOST + b"\r\n", id="lower-case-method"),
        pytest.param(b"GET  /d HTTP/1.1\r\n" + HOST + b"\r\n", id="two-spaces"),
        pytest.param(b"GET /d e HTTP/1.1\r\n" + HOST + b"\r\n", id="space-in-target"),
        pytest.param(b"GET /d\x7f HTTP/1.1\r\n" + HOST + b"\r\n", id="control-in-target"),
        pytest.param(b"GET http://a/d HTTP/1.1\r\n" + HOST + b"\r\n", id="absolute-target"),
        pytest.param(b"GET * HTTP/1.1\r\n" + HOST + b"\r\n", id="asterisk"),
        pytest.param(b"GET /d HTTP/1.0\r\n" + HOST + b"\r\n", id="http-1.0"),
        pytest.param(b"GET /d\r\n" + HOST + b"\r\n", id="http-0.9"),
        pytest.param(b"GET /d HTTP/1.1\n" + HOST + b"\r\n", id="bare-newline-in-line"),
        pytest.param(LINE + HOST + b"A: b\nC: d\r\n\r\n", id="bare-newline-in-value"),
        pytest.param(LINE + HOST + b"A: b\rC: d\r\n\r\n", id="bare-return-in-value"),
        pytest.param(LINE + HOST + b"A: b\r\n c\r\n\r\n", id="folded"),
        pytest.param(LINE + HOST + b" A: b\r\n\r\n", id="space-before-name"),
        pytest.param(LINE + HOST + b"A : b\r\n\r\n", id="space-after-name"),
        pytest.param(LINE + HOST + b": b\r\n\r\n", id="no-name"),
        pytest.param(LINE + HOST + b"A\r\n\r\n", id="no-colon"),
        pytest.param(LINE + HOST + b"A: \x00\r\n\r\n", id="nul"),
        pytest.param(LINE + HOST + "A: ä\r\n\r\n".encode(), id="not-ascii"),
        pytest.param(LINE + HOST + b"host: b\r\n\r\n", id="two-hosts"),
        pytest.param(LINE + HOST + b"A: b\r\nA: b\r\n\r\n", id="repeated-header"),
        pytest.param(LINE + HOST + b"".join(b"A%d: b\r\n" % n for n in range(64)) + b"\r\n", id="many-headers"),
        pytest.param(LINE + HOST + b"Content-Length: 0\r\n\r\n", id="length"),
        pytest.param(LINE + HOST + b"Transfer-Encoding: chunked\r\n\r\n", id="chunked"),
        pytest.param(LINE + HOST + b"Connection: close\r\n\r\n", id="close"),
        pytest.param(LINE + HOST + b"Connection: keep-alive, A\r\nA: b\r\n\r\n", id="hop-by-hop"),
        pytest.param(LINE + HOST + b"Connection: keep-alive\r\nUpgrade: h2c\r\n\r\n", id="upgrade"),
        pytest.param(LINE + HOST + b"Expect: 100-continue\r\n\r\n", id="expect"),
        pytest.param(LINE + b"A: b\r\n\r\n", id="no-host"),
        pytest.param(LINE + b"Host: \r\n\r\n", id="empty-host"),
        pytest.param(LINE + HOST + b"Proxy-Connection: close\r\n\r\n", id="proxy-connection"),
        pytest.param(LINE + HOST + b"TE: trailers\r\n\r\n", id="te"),
    ],
)
def test_everything_else_is_left_to_the_complete_parser(data: bytes) -> None:
    """A request with a body, with anything unusual in it, or that is not the only thing that came, is not plain."""
    assert parse_plain(data) is None


PIECES = st.sampled_from(
    [
        LINE,
        HOST,
        b"GET ",
        b"/data/d",
        b" HTTP/1.1",
        b"\r\n",
        b"\n",
        b"\r",
        b"\t",
        b" ",
        b":",
        b"\x00",
        b"\xff",
        b"A",
        b"Content-Length: 3\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Connection: keep-alive\r\n",
        b"Connection: close\r\n",
        b"Upgrade: h2c\r\n",
        b"Proxy-Connection: close\r\n",
        b"Keep-Alive: 5\r\n",
        b"X-A: b\r\n",
        b"X-B:  b c \r\n",
    ]
)


async def read_by_aiohttp(data: bytes) -> list[tuple[Any, Any]]:
    """The messages that aiohttp's parser finds, with a plain request after the bytes to show that it is between two."""
    loop = asyncio.get_running_loop()
    parser = HttpRequestParser(BaseProtocol(loop), loop, 2**16, max_line_size=8190, max_field_size=8190)
    messages, _, _ = parser.feed_data(data)
    following, _, _ = parser.feed_data(b"GET /following HTTP/1.1\r\nHost: a\r\n\r\n")
    assert [message.path for message, _ in following] == ["/following"]
    return list(messages)


@given(begin=st.sampled_from([LINE + HOST, LINE, b""]), pieces=st.lists(PIECES, max_size=6))
@example(begin=LINE + HOST, pieces=[])
@example(begin=LINE + HOST, pieces=[b"X-B:  b c \r\n", b"Connection: keep-alive\r\n"])
def test_the_complete_parser_agrees_about_every_plain_request(begin: bytes, pieces: list[bytes]) -> None:
    """Whatever is plain is, for aiohttp, one whole request with the same target and headers, and without a body."""
    data = begin + b"".join(pieces) + b"\r\n"
    found = parse_plain(data)
    if found is None:
        return
    messages = asyncio.run(read_by_aiohttp(data))
    assert len(messages) == 1
    message, body = messages[0]
    assert (message.method, message.path) == ("GET", found[0])
    assert list(message.headers.items()) == list(found[1].items())
    assert (message.should_close, message.upgrade, message.chunked) == (False, False, False)
    assert body.is_eof()
