"""Predicts which files a program that goes through a directory reads next.

``cp -r``, ``tar`` and most training scripts read the files of a directory in the order of its listing. With one round trip for
each file, 16 threads behind 30 ms get 533 files a second. A ``DirectoryWalk`` notices the order, and says which files to
request in advance: the more, the longer the order has held, and only while the program has to wait.

A program that reads in another order soon reads a file that was not predicted. Then the walk starts again, and useless requests
count against it, so the mount soon stops requesting files of a directory that is read at random.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from penstock.fetch.positioned import FIRST_BYTES, WHOLE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from penstock.mount.nodes import Node
    from penstock.types import Key

FollowingFiles: TypeAlias = "Callable[[Node, int], Sequence[Node]]"
"""Returns at most a number of the files that come after a file in the listing of its directory, without the directories between
them. It sends no request; fewer files than asked for may be known."""

NEAR_COUNT = 64
"""Files of one directory that several threads may read out of order."""
_SCORE_MIN = 3
"""Files in order before the next ones are requested."""
DEPTH_MAX = 256
"""Files to request ahead: 8 000 a second behind 30 ms."""
_KNOWN_COUNT = 64
_BEGIN_COUNT = 16
"""Files that are expected when a walk begins. Asking for them takes some microseconds for each, so a directory whose files are
read in another order is asked more and more rarely: after N such files, N / 4 are passed over, up to 64."""
_MISSES_PER_PAUSE = 4
_PAUSE_MAX = 64
_WASTED_MIN = 16
_WASTED_SHARE = 8
"""One file in 8, and 16 besides, may have been requested for nothing; with more the directory is left alone."""


class DirectoryWalk:
    """The files of one directory that are expected next.

    Args:
        following: Returns the files that come after one.
        bytes_max: Bytes of files that are requested and not yet read.
    """

    def __init__(self, following: FollowingFiles, *, bytes_max: int) -> None:
        self._following = following
        self._bytes_max = bytes_max
        self._expected: dict[str, Node] = {}  # by key, in the order of the listing
        self._requested: dict[str, int] = {}  # those of them that were requested, and how many bytes of each
        self._given_up: list[str] = []
        self._last: Node | None = None  # the last file that was predicted
        self._has_more = True  # as far as is known
        self._misses_count = 0  # files that were not expected, of late
        self._pause_count = 0  # files to pass over before a walk begins again
        self._score = 0
        self._depth = 0
        self._used_count = 0
        self._wasted_count = 0

    def read(self, node: Node, *, waits: bool) -> list[Node]:
        """Note that a file is read, and return those that should be requested now.

        Args:
            node: The file.
            waits: Whether the program has to wait for it.
        """
        if key_of(node) not in self._expected:
            self._restart(node)
        else:
            self._advance(node)
        if self._score < _SCORE_MIN or self._wasted_count > _WASTED_MIN + self._used_count // _WASTED_SHARE:
            return []
        if waits:
            self._depth = min(DEPTH_MAX, max(4, 2 * self._depth), 2 * self._score)
        return self._next()

    def dropped(self, node: Node) -> None:
        """Note that a file was requested for nothing, because its memory was needed."""
        if key_of(node) in self._requested:
            self._wasted_count += 1
            del self._requested[key_of(node)]

    def take_given_up(self) -> list[str]:
        """Return the keys of files that were requested for nothing since the last call, because the walk started again."""
        given_up, self._given_up = self._given_up, []
        return given_up

    def _restart(self, node: Node) -> None:
        self._expected.clear()
        self._given_up += self._requested
        self._wasted_count += len(self._requested)
        self._requested.clear()
        self._score = self._depth = 0
        if self._pause_count:
            self._pause_count -= 1
            return
        self._misses_count += 1
        self._pause_count = min(self._misses_count // _MISSES_PER_PAUSE, _PAUSE_MAX)
        self._last = node
        self._expect(_BEGIN_COUNT)

    def _advance(self, node: Node) -> None:
        """Take a file out of those that are expected; one that was far away means that those before it are not read."""
        if key_of(node) not in islice(self._expected, NEAR_COUNT):
            self._restart(node)
            return
        self._score += 1
        self._misses_count //= 2
        self._pause_count = 0
        del self._expected[key_of(node)]
        if self._requested.pop(key_of(node), None) is not None:
            self._used_count += 1
        if len(self._expected) < NEAR_COUNT + (self._depth if self._has_more else 0):
            self._expect(_KNOWN_COUNT + self._depth)

    def _expect(self, count: int) -> None:
        if self._last is None:
            return
        following = self._following(self._last, count)
        for node in following:
            self._expected[key_of(node)] = node
        self._has_more = bool(following)
        if following:
            self._last = following[-1]

    def _next(self) -> list[Node]:
        chosen: list[Node] = []
        if len(self._requested) > self._depth // 2:
            return chosen  # a few at a time
        room_bytes = self._bytes_max - sum(self._requested.values())
        for key, node in islice(self._expected.items(), NEAR_COUNT + self._depth):
            if key not in self._requested:
                room_bytes -= beginning_bytes(node)
                if len(self._requested) >= self._depth or room_bytes < 0:
                    break
                self._requested[key] = beginning_bytes(node)
                chosen.append(node)
        return chosen


def key_of(node: Node) -> Key:
    """Return the key of a file."""
    assert node.info is not None
    return node.info.key


def beginning_bytes(node: Node) -> int:
    """Return how many bytes are requested of a file before it is opened."""
    assert node.info is not None
    size_bytes = node.info.size_bytes
    return size_bytes if size_bytes <= WHOLE_BYTES_MAX else FIRST_BYTES
