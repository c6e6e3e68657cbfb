"""Patterns of names: wildcards ``*``, ``**``, ``?`` and ``[ab]``, and braces ``{000..009}``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

NAMES_MAX = 1_000_000  # a brace pattern with more names is probably a typing error
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_GLOB = re.compile(r"[*?\[]")


def is_pattern(url: str) -> bool:
    """Whether a URL has wildcards or braces. In an ``http(s)`` URL they are ordinary characters, as it cannot be listed."""
    return not url.startswith(("http://", "https://")) and re.search(r"[*?\[{]", url) is not None


def has_glob(url: str) -> bool:
    """Whether a URL has wildcards. An ``http(s)`` URL has none: it cannot be listed, and ``?`` begins its query."""
    return not url.startswith(("http://", "https://")) and _GLOB.search(url) is not None


def common_folder(names: Collection[str]) -> str:
    """Return the common prefix of all `names`, up to its last slash; "" if that is nothing."""
    low, high = min(names, default=""), max(names, default="")
    equal = 0
    while equal < min(len(low), len(high)) and low[equal] == high[equal]:
        equal += 1
    return low[: low.rfind("/", 0, equal) + 1]


def expand_braces(pattern: str) -> list[str]:
    """Expand the braces of a pattern.

    ``a-{00..02}.tar`` becomes ``a-00.tar``, ``a-01.tar`` and ``a-02.tar``; ``{x,y}`` becomes ``x`` and ``y``. Several
    braces give every combination.

    Raises:
        ConfigError: There are more than ``NAMES_MAX`` names, or a brace is not closed, is empty or runs backwards.
    """
    pieces = _BRACES.split(pattern)  # text, inside, text, inside, ..., text
    if any(brace in text for text in pieces[::2] for brace in "{}"):
        raise ConfigError(f"{pattern!r} has a brace that is not closed, or braces inside braces")
    results = [pieces[0]]
    for inside, text in zip(pieces[1::2], pieces[2::2], strict=True):
        words_count = _words_count(inside, pattern)
        if len(results) * words_count > NAMES_MAX:
            raise ConfigError(f"{pattern!r} expands to {len(results) * words_count} names, more than {NAMES_MAX}")
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
    width = len(match[1]) if match[1].startswith("0") else 0  # as in bash, leading zeros keep the width
    for number in range(int(match[1]), int(match[2]) + 1):
        yield str(number).zfill(width)


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that tells whether a key matches a pattern with braces and wildcards.

    Keys and pattern are relative to the same folder.

    Raises:
        ConfigError: The pattern has invalid braces or brackets.
    """
    unfolded = expand_braces(pattern)
    names = frozenset(name for name in unfolded if not _GLOB.search(name))
    globs = [glob_matcher(each) for each in unfolded if _GLOB.search(each)]
    return lambda key: key in names or any(matches(key) for matches in globs)


def split_glob(url: str) -> tuple[str, str]:
    """Split a URL into the folder above its first wildcard or brace, which must be listed, and the pattern below it."""
    match = re.search(r"[*?\[{]", url)
    at = url.rfind("/", 0, match.start() if match else None) + 1
    return url[:at] or "./", url[at:]


def glob_matcher(pattern: str) -> Callable[[str], object]:
    """Return a function that tells whether a key matches a pattern without braces.

    Raises:
        ConfigError: The pattern has invalid brackets.
    """
    try:
        return re.compile(_regex(pattern)).fullmatch
    except re.error as error:
        hint = "give several URLs as a list, not as text" if pattern.startswith("[") else None
        raise ConfigError(f"{pattern!r} is not a valid pattern: {error}", hint=hint) from None


def _regex(pattern: str) -> str:
    """Return a pattern as a regular expression. ``*`` and ``?`` match inside a path segment, ``**`` across segments."""
    out = []
    for token in re.findall(r"\*\*/?|\*|\?|\[!?\]?[^\]]*\]|.", pattern, re.DOTALL):
        if token.startswith("**"):
            out.append("(?:.*/)?" if token.endswith("/") else ".*")
        elif token == "*":
            out.append("[^/]*")
        elif token == "?":
            out.append("[^/]")
        elif len(token) > 2 and token[0] == "[":
            inside = token[1:-1].replace("\\", "\\\\")
            out.append(f"[^{inside[1:]}]" if inside.startswith("!") else f"[{inside}]")
        else:
            out.append(re.escape(token))
    return "(?s:" + "".join(out) + ")"
