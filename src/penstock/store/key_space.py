"""What a page of a listing says of the next ones, and where they begin. Pure arithmetic; nothing is asked here.

Names that programs give are numbers in some alphabet: counters padded with zeros, times, hashes. A page shows the
alphabet, where in the key the number is, and how many of its values a page covers; the pages after it then begin that
many values further on, each. That is exact for counters and right on average for hashes; for other names it is wrong,
which costs requests and nothing else, for a listing may be cut anywhere.
"""

from __future__ import annotations

from bisect import bisect_right
from os.path import commonprefix
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.types import ObjectInfo

FIRST_GUESSES = 5
"""Of a listing, on trust: a prefix of 6 000 keys takes two round trips, one that cannot be guessed five requests more."""

GUESSES_MAX = 64
"""Made at once: as many as there are requests in flight."""

_COLUMNS_MAX = 12  # that vary: more only tell apart what a page of 1 000 keys already does
_ALPHABETS = ("0123456789", "0123456789abcdef", "0123456789ABCDEF")


class Trust:
    """How many guesses may be made: each costs one, and gives back two if its page turns out full.

    So they double while they are right, are never more than the full pages and the first ones, and end for good where
    most are wrong.

    Args:
        first_count: That are made before any was right.
    """

    __slots__ = ("_left",)

    def __init__(self, first_count: int) -> None:
        self._left = first_count

    def allowed(self) -> int:
        """Guesses that may be made now."""
        return min(self._left, GUESSES_MAX)

    def spend(self, count: int) -> None:
        """So many are made."""
        self._left -= count

    def judge(self, keys_count: int, page_keys: int) -> None:
        """The first page of a guessed range had so many of the keys of a full page."""
        if 2 * keys_count >= page_keys:
            self._left += 2


def next_pages(keys: Sequence[str], *, start: int, high: str, count: int) -> list[str]:
    """Where the pages after the next one may begin: behind each of these, which need not be keys.

    Args:
        keys: Of a page, in order.
        start: Where in the keys names begin that differ: the length of the prefix that is listed.
        high: All of them lie below it; empty: nothing bounds them.
        count: The most wanted.

    Returns:
        In ascending order, each past the last key; none where the keys show no number, or the next page is the last.
    """
    keys = keys[1:]  # the first may be the folder's own marker, "train/"
    if len(keys) < 2:
        return []
    last = keys[-1]
    begin = commonprefix([keys[0], last])  # noqa: RUF071 - character by character is what is wanted
    end, letters = _varying(keys, len(begin))
    digits = {letter: value for value, letter in enumerate(letters)}
    first_column = len(begin)
    while first_column > start and last[first_column - 1] in digits:  # what the next pages carry into
        first_column -= 1

    def number(key: str) -> int:
        value = 0
        for letter in key[first_column:end]:
            value = value * len(letters) + digits[letter]
        return value

    at = number(last)
    width = at - number(keys[0])
    if width >= len(keys):  # not every value is taken: the next pages have so many on average, and should fit into one
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
    """The end of the columns from `begin` on in which every key has a letter and not all the same; and their alphabet."""
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
    """The sub-prefix in which a page ends, if its sub-prefixes hold `keys_min` keys each, on average; else None."""
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
