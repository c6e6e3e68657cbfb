"""Where samples come from: URLs and how to connect to them, recorded; nothing is looked at."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit, urlunsplit

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.config import HedgeConfig, RetryConfig, TransportConfig
    from penstock.store import Credentials

SHARDS_MAX = 1_000_000  # a brace pattern that gives more is a typing error
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The options of ``penstock.connect``, as they were given."""

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    credentials: Credentials | None = None
    anonymous: bool = False
    addressing: Literal["auto", "path", "virtual"] = "auto"
    transport: TransportConfig | None = None
    retry: RetryConfig | None = None
    hedge: HedgeConfig | None = None
    requester_pays: bool = False
    sse_customer_key: bytes | None = None
    expected_bucket_owner: str | None = None

    def given(self) -> dict[str, Any]:
        """Options that differ from their default."""
        return {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if getattr(self, entry.name) != entry.default
        }

    def __repr__(self) -> str:
        shown = {name: "..." if name in _SECRET else repr(value) for name, value in self.given().items()}
        return ", ".join(f"{name}={value}" for name, value in shown.items())


_SECRET = ("credentials", "sse_customer_key")


@dataclass(frozen=True, slots=True)
class Shards:
    """Shards by URL, in an order that the URLs fix: listings in key order, patterns as they unfold, lists as given.

    Attributes:
        urls: One pattern or prefix, or a list of URLs.
        is_list: Whether they were given as a list, and are taken literally.
        connection: How to reach them.
    """

    urls: tuple[str, ...]
    is_list: bool
    connection: Connection

    def __post_init__(self) -> None:
        if not self.urls:
            raise ConfigError("shards([]) needs at least one URL")
        for url in self.urls:
            if not isinstance(url, str) or not url:
                raise ConfigError(f"shards({url!r}) must be given a URL, a pattern, or a list of URLs")
        if not self.is_list:
            braces_unfolded(self.urls[0])

    def __repr__(self) -> str:
        urls = [repr(_public(url)) for url in self.urls]
        if len(urls) > 4:
            urls[2:] = [f"... {len(urls) - 2} more"]
        what = f"[{', '.join(urls)}]" if self.is_list else urls[0]
        options = repr(self.connection)
        return f"shards({what}{', ' + options if options else ''})"


def has_glob(url: str) -> bool:
    """Whether `url` is a shell pattern. Those of HTTP servers are not: they cannot be listed, and ``?`` is a query."""
    return not url.startswith(("http://", "https://")) and _GLOB.search(url) is not None


def braces_unfolded(pattern: str) -> list[str]:
    """``a-{00..02}.tar`` as ``a-00.tar``, ``a-01.tar``, ``a-02.tar``; ``{x,y}`` as ``x`` and ``y``; several multiply.

    Raises:
        ConfigError: it gives more than ``SHARDS_MAX``, or a brace is open, empty or runs backwards.
    """
    pieces = _BRACES.split(pattern)  # text, inside, text, inside, ..., text
    if any(brace in text for text in pieces[::2] for brace in "{}"):
        raise ConfigError(f"{pattern!r} has a brace that is not closed, or braces inside braces")
    results = [pieces[0]]
    for inside, text in zip(pieces[1::2], pieces[2::2], strict=True):
        words_count = _words_count(inside, pattern)
        if len(results) * words_count > SHARDS_MAX:
            raise ConfigError(f"{pattern!r} gives {len(results) * words_count} shards, more than {SHARDS_MAX}")
        words = list(_words(inside))
        results = [head + word + text for head in results for word in words]
    return results


def _words_count(inside: str, pattern: str) -> int:
    match = _RANGE.fullmatch(inside)
    if match is None:
        if "," not in inside:
            raise ConfigError(f"{pattern!r}: {{{inside}}} is neither a range {{000..009}} nor a list {{a,b}}")
        return inside.count(",") + 1
    count = int(match[2]) - int(match[1]) + 1
    if count < 1:
        raise ConfigError(f"{pattern!r}: the range {{{inside}}} runs backwards")
    return count


def _words(inside: str) -> Iterator[str]:
    match = _RANGE.fullmatch(inside)
    if match is None:
        yield from inside.split(",")
        return
    width = len(match[1]) if match[1].startswith("0") else 0  # as in bash: zeros in front keep the width
    for number in range(int(match[1]), int(match[2]) + 1):
        yield str(number).zfill(width)


def _public(url: str) -> str:
    """`url` without what may be secret: a presigned query, a password."""
    if "://" not in url:
        return url
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    query = "" if parts.scheme in ("http", "https") else parts.query
    return urlunsplit((parts.scheme, host, parts.path, query, parts.fragment))
