"""Patterns of names: the one implementation of ``*``, ``**``, ``?``, ``[ab]`` and ``{000..009}``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NAMES_MAX = 1_000_000  # a brace pattern that gives more is a typing error
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_GLOB = re.compile(r"[*?\[]")


def is_pattern(url: str) -> bool:
    """Whether `url` has wildcards or braces; those of HTTP servers cannot be listed, so that theirs are names."""
    return not url.startswith(("http://", "https://")) and re.search(r"[*?\[{]", url) is not None


def has_glob(url: str) -> bool:
    """Whether `url` is a shell pattern. Those of HTTP servers are not: they cannot be listed, and ``?`` is a query."""
    return not url.startswith(("http://", "https://")) and _GLOB.search(url) is not None


def braces_unfolded(pattern: str) -> list[str]:
    """``a-{00..02}.tar`` as ``a-00.tar``, ``a-01.tar``, ``a-02.tar``; ``{x,y}`` as ``x`` and ``y``; several multiply.

    Raises:
        ConfigError: it gives more than ``NAMES_MAX``, or a brace is open, empty or runs backwards.
    """
    pieces = _BRACES.split(pattern)  # text, inside, text, inside, ..., text
    if any(brace in text for text in pieces[::2] for brace in "{}"):
        raise ConfigError(f"{pattern!r} has a brace that is not closed, or braces inside braces")
    results = [pieces[0]]
    for inside, text in zip(pieces[1::2], pieces[2::2], strict=True):
        words_count = _words_count(inside, pattern)
        if len(results) * words_count > NAMES_MAX:
            raise ConfigError(f"{pattern!r} gives {len(results) * words_count} names, more than {NAMES_MAX}")
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


def matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a key, relative to what `pattern` is relative to, is one that the pattern names, braces and wildcards alike.

    Raises:
        ConfigError: braces or brackets that mean nothing.
    """
    unfolded = braces_unfolded(pattern)
    names = frozenset(name for name in unfolded if not _GLOB.search(name))
    globs = [glob_matcher(each) for each in unfolded if _GLOB.search(each)]
    return lambda key: key in names or any(matches(key) for matches in globs)


def glob_parts(url: str) -> tuple[str, str]:
    """The folder above the first wildcard or brace, which is listed, and the pattern below it."""
    match = re.search(r"[*?\[{]", url)
    at = url.rfind("/", 0, match.start() if match else None) + 1
    return url[:at] or "./", url[at:]


def glob_matcher(pattern: str) -> Callable[[str], object]:
    """What says whether a key matches `pattern`, which has no braces.

    Raises:
        ConfigError: brackets that mean nothing.
    """
    try:
        return re.compile(_regex(pattern)).fullmatch
    except re.error as error:
        hint = "several URLs are given as a list, not as text" if pattern.startswith("[") else None
        raise ConfigError(f"{pattern!r} is no pattern: {error}", hint=hint) from None


def _regex(pattern: str) -> str:
    """`pattern` as a regular expression: ``*`` and ``?`` stay inside a path segment, ``**`` does not."""
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
