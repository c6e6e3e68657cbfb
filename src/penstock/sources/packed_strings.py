"""``PackedStrings``: many strings in one block of memory, whose pages forked processes share."""

from __future__ import annotations

from array import array
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class PackedStrings:
    """An immutable sequence of strings.

    Args:
        strings: The strings, in order.

    Cost: the bytes of each string as UTF-8, and 8 bytes more.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [each.encode("utf-8", "surrogateescape") for each in strings]
        self._block = b"".join(encoded)
        self._bounds = array("q", accumulate(map(len, encoded), initial=0))

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> str:
        return self._block[self._bounds[index] : self._bounds[index + 1]].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))
