"""What the parts of the contract suite share: capabilities, sinks that watch, and ways to fill a store."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

import pytest

from penstock.errors import ConfigError
from penstock.store.inflight import InFlight
from penstock.types import Put

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.store import Store
    from penstock.types import ByteRange, Completion, Core, Key, Landing, ObjectInfo, Operation, Transfer

WAIT_S_MAX = 60.0
"""Longest wait for anything; a store that takes longer hangs."""

ODD_KEYS = (
    "with space",
    " leading and trailing ",
    "plus+plus",
    "per%cent%20sign",
    "%2F",
    "tilde~tilde",
    "ünïcödé/日本語/\U0001f600",
    "e\u0301 decomposed",
    "a=b&c=d?e#f;g,h:i@j$k!l*m'n(o)p",
    'quo"te<less>and&amp;',
    "back\\slash",
    "[brackets]{braces}|pipe^caret`tick",
    "dots...and.dots",
    "k" * 200 + "/" + "k" * 200,
)
"""Keys that any store takes and gives back unchanged."""

NOT_PATHS = ("double//slash", "trailing/", "/leading", "//", "x/y//")
"""Legal S3 keys that name no file; a store whose keys are paths refuses them."""

LONGEST_KEY = "/".join(["0123456789abcde"] * 64) + "f"
"""1 024 bytes, S3's longest, in segments that a file system takes."""

DOT_KEYS = ("a/../b", "../a", "a/./b", "./a", "a/.", "a/..", ".", "..")
"""HTTP clients rewrite these silently; a store takes them exactly or refuses them by name."""


class Capabilities:
    """Where stores legitimately differ. Override in the subclass.

    Attributes:
        keys_are_paths: Refuses ``NOT_PATHS`` with ``ConfigError``.
        keys_are_files: The server keeps objects as files: ``NOT_PATHS`` may become other names or be refused, and of
            ``a`` and ``a/b`` it holds one.
        knows_if_absent: ``if_absent`` refuses to replace an object; a server without it replaces it and says nothing.
        copies_parts: It takes a part of an upload from an object (``CopyPart``).
        commits_tell_etags: The answer to a commit has the ETag that the object then has.
        part_bytes_min: The smallest part of a multipart upload, but for the last.
        atomic_if_absent: Of two concurrent writes with ``if_absent`` one fails.
        keys_many: Keys written where a listing must take several pages; more than 1 000 shows real pages.
        prefixes_vanish: A prefix is gone with the last object below it.
        has_etags: What it says of an object names the version by a strong ETag. Where it does not, versions are told
            apart by size and modification time, and ``if_match`` has nothing to hold on to.
        tells_lengths: The answer to a ``Get`` of a whole object tells its length before the body; else the sink hears
            ``UNKNOWN_BYTES``.
    """

    keys_are_paths = False
    keys_are_files = False
    knows_if_absent = True
    copies_parts = True
    commits_tell_etags = True
    part_bytes_min = 1
    atomic_if_absent = True
    keys_many = 1200
    prefixes_vanish = True
    has_etags = True
    tells_lengths = True

    def seed(self, store: Store, objects: Mapping[Key, bytes]) -> None:
        """Have `store` hold `objects`."""
        put_all(store, objects)

    def uploads_left(self, store: Store) -> int | None:
        """Multipart uploads that were begun and neither committed nor dropped; None where the store does not tell."""
        return None


def put_all(core: Core, objects: Mapping[Key, bytes]) -> None:
    """Put many small objects, 32 at a time."""
    in_flight: InFlight[str] = InFlight(core)
    for key, data in objects.items():
        if len(in_flight) >= 32:
            raise_error(in_flight.wait()[1])
        in_flight.submit(Put(key, data), key)
    for _, completion in in_flight.drain():
        raise_error(completion)


def raise_error(completion: Completion) -> None:
    """Raise the completion's error, if it has one."""
    if completion.error is not None:
        raise completion.error


def one_version(*etags: str | None) -> bool:
    """Whether all ETags that were told are the same: some answers tell none where others do."""
    return len({*etags} - {None}) <= 1


def keys_of(infos: Iterable[ObjectInfo]) -> list[Key]:
    """Their keys."""
    return [info.key for info in infos]


def content(length_bytes: int, seed: int = 0) -> bytes:
    """Bytes without a short period, so that a shifted or repeated range shows."""
    block = bytes((index * 167 + index // 251 + seed * 31) % 256 for index in range(min(length_bytes, 64_007)))
    return (block * (length_bytes // max(1, len(block)) + 1))[:length_bytes]


class WatchingSink:
    """Counts what it hears, and on which thread.

    Args:
        landing: Where a body goes.
        beforehand: The store may know that before there is an answer, and then skip ``head``.
        refuse: Error that ``head`` raises.
    """

    def __init__(
        self, landing: Landing | None = None, *, beforehand: bool = False, refuse: Exception | None = None
    ) -> None:
        self.landing = landing if beforehand else None
        self.given = landing
        self.refuse = refuse
        self.heads: list[tuple[ObjectInfo, ByteRange]] = []
        self.completions: list[Completion] = []
        self.thread_ids: set[int] = set()
        self._ended = threading.Event()

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        """See ``Sink``."""
        self.heads.append((info, span))
        self.thread_ids.add(threading.get_ident())
        if self.refuse is not None:
            raise self.refuse
        return self.given

    def done(self, completion: Completion) -> None:
        """See ``Sink``."""
        self.completions.append(completion)
        self.thread_ids.add(threading.get_ident())
        self._ended.set()

    def wait(self, wait_s_max: float = WAIT_S_MAX) -> Completion:
        """The first completion."""
        assert self._ended.wait(wait_s_max), f"no answer within {wait_s_max} s"
        return self.completions[0]


def submit(store: Core, operation: Operation, sink: WatchingSink | None = None) -> tuple[Transfer, WatchingSink]:
    """Submit with a sink that watches."""
    sink = sink or WatchingSink()
    return store.submit(operation, sink), sink


def refused(store: Store, key: Key) -> bool:
    """Whether `store` refuses `key` by name; else it holds it now, exactly."""
    try:
        store.write(key, b"exact")
    except ConfigError:
        with pytest.raises(ConfigError, match=re.escape(repr(key)[1:20])):
            store.stat(key)
        return True
    return False


def short(key: str) -> str:
    """A test's name for a key."""
    return ascii(key)[:40]
