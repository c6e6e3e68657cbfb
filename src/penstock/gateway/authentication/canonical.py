"""Canonical requests: the one text that client and server hash for a signature, whichever way the client encoded the request.

Clients differ in what they send: ``~`` as ``%7E``, lower-case hexadecimal digits, ``+`` for a space, ``?uploads`` without an
equals sign. S3 therefore decodes path and query, and encodes them again by one rule. A few clients sign the characters as
they send them; for these clients, the characters as sent are tried as a second form. That is safe, because both forms name the
request completely: a client that signed either form meant the object that its decoded path names.

Source: Amazon S3 API reference, "Signature Calculations", "Task 1: create a canonical request".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote_to_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._~-]*")
_PLAIN_VALUE = re.compile(r"[A-Za-z0-9._~-]*")
_MANY_SPACES = re.compile(r"[ \t]+")

SIGNATURE_PARAMETER = "X-Amz-Signature"


def canonical_path(raw_path: str) -> str:
    """Return a path that was sent in S3's own encoding."""
    if _PLAIN_PATH.fullmatch(raw_path):
        return raw_path or "/"
    return quote(unquote_to_bytes(wire_bytes(raw_path)), safe="/-._~")


def canonical_query(raw_query: str) -> str:
    """Return the parameters of a query in S3's own encoding and in order, without the signature itself."""
    if not raw_query:
        return ""
    pairs = [part.partition("=") for part in raw_query.split("&") if part]
    encoded = sorted((_encoded(name), _encoded(value)) for name, _, value in pairs if name != SIGNATURE_PARAMETER)
    return "&".join([f"{name}={value}" for name, value in encoded])


def query_as_sent(raw_query: str) -> tuple[str, str]:
    """Return the parameters of a query as they were sent, without the signature itself: in order, and in their own order.

    curl 7 signs them in the order in which it sends them.
    """
    parts = [part for part in raw_query.split("&") if not part.startswith(SIGNATURE_PARAMETER + "=")]
    pairs = sorted(part.partition("=")[::2] for part in parts if part)
    return "&".join([f"{name}={value}" for name, value in pairs]), "&".join(parts)


def _encoded(text: str) -> str:
    if _PLAIN_VALUE.fullmatch(text):
        return text
    return quote(unquote_to_bytes(wire_bytes(text.replace("+", " "))), safe="-_.~")


def canonical_headers(headers: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the lines of the signed headers; a header that was not sent counts as empty."""
    get = headers.get
    return "".join([f"{name}:{_collapsed(get(name) or '')}\n" for name in names])


def headers_as_sent(headers: Mapping[str, str], names: Sequence[str]) -> str:
    """Return the lines of the signed headers with the spaces inside of their values."""
    return "".join([name + ":" + (headers.get(name) or "").strip(" \t") + "\n" for name in names])


def _collapsed(value: str) -> str:
    if "  " in value or "\t" in value:
        value = _MANY_SPACES.sub(" ", value)
    return value.strip(" ")


def wire_bytes(text: str) -> bytes:
    """Return the bytes that a part of a request had when it arrived; bytes that are not UTF-8 arrive as surrogates."""
    return text.encode("utf-8", "surrogateescape")
