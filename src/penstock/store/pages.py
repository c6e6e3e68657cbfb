"""Pages of listings: of keys in memory, their order, and guesses where the next pages begin. Pure; no request is sent here.

Names that programs give are numbers in some alphabet: counters padded with zeros, times, hashes. A page shows the alphabet,
where in the key the number is, and how many of its values a page covers; each of the next pages then begins that many values
further on. The guess is exact for counters and right on average for hashes. For other names it is wrong, which only costs
requests, because a listing may be cut anywhere.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import attrgetter, lt
from os.path import commonprefix
from typing import TYPE_CHECKING

from penstock.errors import ProtocolError
from penstock.types import Page

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.types import ListPage, ObjectInfo


FIRST_GUESSES = 5
"""Guesses before any was right: a prefix of 6 000 keys then takes two round trips, and one that cannot be guessed costs five
requests more."""

GUESSES_MAX = 64
"""Number of guesses at a time, which is the number of requests that may be in flight."""

_COLUMNS_MAX = 12  # columns that vary; 1 000 keys of a page differ in fewer
_ALPHABETS = ("0123456789", "0123456789abcdef", "0123456789ABCDEF")


class GuessBudget:
    """How many guesses may be made: each costs one, and earns two if its page turns out to be full.

    So the guesses double while they are right, and end for good if most are wrong. There are never more of them than the full
    pages and the first ones together.

    Args:
        first_count: Guesses before any was right.
    """

    __slots__ = ("_left",)

    def __init__(self, first_count: int) -> None:
        self._left = first_count

    def allowed(self) -> int:
        """Return the number of guesses that may be made now."""
        return min(self._left, GUESSES_MAX)

    def spend(self, count: int) -> None:
        """Note that `count` guesses are made."""
        self._left -= count

    def judge(self, keys_count: int, page_keys: int) -> None:
        """Note that the first page of a guessed range had `keys_count` keys, where a full page has `page_keys`."""
        if 2 * keys_count >= page_keys:
            self._left += 2


def next_pages(keys: Sequence[str], *, start: int, high: str, count: int) -> list[str]:
    """Guess where the pages after the next one begin: after each of the strings returned, which need not be keys.

    Args:
        keys: Keys of a page, in order.
        start: Length of the prefix that is listed; the names begin there.
        high: Upper bound of the strings returned, exclusive; empty for none.
        count: The most strings to return.

    Returns:
        Strings in ascending order, each greater than the last key. Empty if the keys show no number, or the next page is
        the last.
    """
    keys = keys[1:]  # the first may be the folder's own marker, "train/"
    if len(keys) < 2:
        return []
    last = keys[-1]
    begin = commonprefix([keys[0], last])  # noqa: RUF071 - the comparison is to be character by character
    end, letters = _varying(keys, len(begin))
    digits = {letter: value for value, letter in enumerate(letters)}
    first_column = len(begin)
    while first_column > start and last[first_column - 1] in digits:  # columns that the next pages carry into
        first_column -= 1

    def number(key: str) -> int:
        value = 0
        for letter in key[first_column:end]:
            value = value * len(letters) + digits[letter]
        return value

    at = number(last)
    width = at - number(keys[0])
    if width >= len(keys):  # not every value is taken, so the width is an average, and a page should hold a little less
        width -= width // 8
    values_count = len(letters) ** (end - first_column)
    found: list[str] = []
    while width and len(found) < count and (at := at + width) < values_count:
        boundary = last[:first_column] + _text(at, letters, end - first_column)
        if high and boundary >= high:
            break
        found.append(boundary)
    return found


def _varying(keys: Sequence[str], begin: int) -> tuple[int, str]:
    """Return the end of the columns from `begin` on in which the keys differ, and the alphabet of these columns."""
    seen: set[str] = set()
    end = begin
    for column in zip(*(key[begin : begin + _COLUMNS_MAX] for key in keys), strict=False):
        letters = set(column)
        if len(letters) == 1:
            break
        seen |= letters
        end += 1
    known = next((alphabet for alphabet in _ALPHABETS if seen.issubset(alphabet)), None)
    return end, known or "".join(sorted(seen))


def _text(value: int, letters: str, length: int) -> str:
    found = []
    for _ in range(length):
        value, digit = divmod(value, len(letters))
        found.append(letters[digit])
    return "".join(reversed(found))


def dense_sub_prefix(objects: Sequence[ObjectInfo], prefix: str, *, keys_min: int) -> str | None:
    """Return the sub-prefix in which a page ends, if its sub-prefixes hold `keys_min` keys each on average; else None."""
    start, inside = len(prefix), None
    index = prefixes_count = keys_count = 0
    while index < len(objects):
        key = objects[index].key
        cut = key.find("/", start)
        if cut < 0:
            index, inside = index + 1, None
            continue
        inside = key[: cut + 1]
        end = bisect_right(objects, inside, index, key=lambda info, inside=inside: info.key[: len(inside)])  # type: ignore[misc]
        prefixes_count += 1
        keys_count += end - index
        index = end
    return inside if keys_count >= keys_min * prefixes_count else None


# ── pages of keys in memory, and the order of all pages ───────────────────────────────────────────────────────────────────


def sorted_page(keys: Sequence[str], info_of: Callable[[str], ObjectInfo], operation: ListPage) -> Page:
    """Return one page of a listing.

    Args:
        keys: All keys in order, without repetition.
        info_of: Returns the object of a key.
        operation: The page that is wanted.
    """
    prefix, delimiter = operation.prefix, operation.delimiter
    objects: list[ObjectInfo] = []
    prefixes: list[str] = []
    index = max(bisect_left(keys, prefix), _index_after(keys, operation))
    token = None
    while index < len(keys) and keys[index].startswith(prefix):
        if len(objects) + len(prefixes) >= operation.keys_max:
            return Page(objects, prefixes, token)
        key = keys[index]
        cut = key.find(delimiter, len(prefix)) if delimiter else -1
        if cut < 0:
            objects.append(info_of(key))
            token = f"k{key}"
            index += 1
        else:
            prefixes.append(key[: cut + len(delimiter)])
            token = f"p{prefixes[-1]}"
            index = _index_past(keys, prefixes[-1])
    return Page(objects, prefixes, None)


def _index_after(keys: Sequence[str], operation: ListPage) -> int:
    """Return the index at which a page begins: after the last entry of the page before, or after ``start_after``."""
    if operation.token is None:
        return bisect_right(keys, operation.start_after)
    kind, name = operation.token[:1], operation.token[1:]
    return bisect_right(keys, name) if kind == "k" else _index_past(keys, name)


def _index_past(keys: Sequence[str], prefix: str) -> int:
    """Return the index of the first key after all that begin with `prefix`."""
    return bisect_left(keys, True, bisect_left(keys, prefix), key=lambda key: not key.startswith(prefix))


def check_order(page: Page, prefix: str, *, after: str, url: str | None = None) -> str:
    """Return the last key or sub-prefix of a page, or `after` if the page is empty.

    Code that merges or compares two listings relies on their order.

    Args:
        page: A page of a listing of `prefix`.
        prefix: Prefix with which all keys begin.
        after: The last key or sub-prefix of the page before; empty for the first page.
        url: URL that is listed, for the error.

    Raises:
        ProtocolError: The page is not in key order, repeats keys of the page before, or has keys of another prefix.

    Cost: About 0.05 µs per key.
    """
    last = after
    for keys in (list(map(attrgetter("key"), page.objects)), page.prefixes):
        if not keys:
            continue
        if keys[0] <= after and after:
            what = f"a page of the listing begins at {keys[0]!r}, but the one before ended at {after!r}"
        elif not all(map(lt, keys, keys[1:])):
            what = "a page of the listing is not in the order of its keys"
        elif not (keys[0].startswith(prefix) and keys[-1].startswith(prefix)):
            what = f"the listing of {prefix!r} has keys from {keys[0]!r} to {keys[-1]!r}"
        else:
            last = max(last, keys[-1])
            continue
        raise ProtocolError(what, operation="LIST", url=url, hint="this server does not list as S3 does")
    return last
