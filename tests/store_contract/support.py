"""What the parts of the contract suite share: capabilities, recording sinks, and functions that fill a store."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

import pytest

from penstock.errors import ConfigError
from penstock.store.inflight import perform_many
from penstock.types import Put

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.store import Store
    from penstock.types import ByteRange, Completion, Core, Key, Landing, ObjectInfo, Operation, Transfer

WAIT_S_MAX = 60.0
"""Longest time to wait for an event, in seconds; a store that takes longer counts as hanging."""

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
"""Keys that every store must accept and return unchanged."""

NOT_PATHS = ("double//slash", "trailing/", "/leading", "//", "x/y//")
"""Valid S3 keys that are not valid file names; a store whose keys are paths refuses them."""

LONGEST_KEY = "/".join(["0123456789abcde"] * 64) + "f"
"""A key of 1 024 bytes, the longest that S3 allows, in segments that a file system allows."""

DOT_KEYS = ("a/../b", "../a", "a/./b", "./a", "a/.", "a/..", ".", "..")
"""Keys that HTTP clients silently rewrite; a store must keep them exactly, or refuse them with an error that names them."""


class Capabilities:
    """How stores may differ. Override attributes in the subclass.

    Attributes:
        keys_are_paths: Whether the store refuses ``NOT_PATHS`` with ``ConfigError``.
        keys_are_files: Whether the server keeps objects as files. It may then rename or refuse ``NOT_PATHS``, and cannot hold
            both ``a`` and ``a/b``.
        knows_if_absent: Whether ``if_absent`` prevents replacing an object. A server that ignores it replaces the object
            silently.
        knows_if_match: Whether ``if_match`` prevents replacing another version. A server that ignores it replaces any.
        keeps_headers: Whether a server keeps the headers that it is sent.
        copies_parts: Whether the store supports ``CopyPart``.
        commits_tell_etags: Whether the answer to a commit has the final ETag of the object.
        part_bytes_min: Smallest size of a part of a multipart upload, except the last, in bytes.
        atomic_if_absent: Whether only one of several concurrent writes with ``if_absent`` succeeds.
        keys_many: Number of keys written to test listings of several pages; S3 needs more than 1 000.
        prefixes_vanish: Whether a prefix disappears with the last object below it.
        has_etags: Whether the store identifies versions by strong ETags. Without them, versions are distinguished by size and
            modification time, and ``if_match`` cannot be tested.
        tells_lengths: Whether the answer to a ``Get`` of a whole object has its length before the body. Otherwise the
            sink gets ``UNKNOWN_BYTES``.
    """

    keys_are_paths = False
    keys_are_files = False
    knows_if_absent = True
    knows_if_match = True
    keeps_headers = True
    copies_parts = True
    commits_tell_etags = True
    part_bytes_min = 1
    atomic_if_absent = True
    keys_many = 1200
    prefixes_vanish = True
    has_etags = True
    tells_lengths = True

    def seed(self, store: Store, objects: Mapping[Key, bytes]) -> None:
        """Write `objects` to `store`."""
        put_all(store, objects)

    def uploads_left(self, store: Store) -> int | None:
        """Return the number of multipart uploads neither committed nor aborted; None if the store does not tell."""
        return None


def put_all(core: Core, objects: Mapping[Key, bytes]) -> None:
    """Write many small objects, 32 at a time."""
    for _ in perform_many(core, ((key, Put(key, data)) for key, data in objects.items()), requests_max=32):
        pass


def raise_error(completion: Completion) -> None:
    """Raise the completion's error, if it has one."""
    if completion.error is not None:
        raise completion.error


def one_version(*etags: str | None) -> bool:
    """Whether all ETags that are not None are equal, as some answers lack an ETag."""
    return len({*etags} - {None}) <= 1


def keys_of(infos: Iterable[ObjectInfo]) -> list[Key]:
    """Return the keys of objects."""
    return [info.key for info in infos]


def content(length_bytes: int, seed: int = 0) -> bytes:
    """Return bytes without a short period, so that a comparison reveals a shifted or repeated range."""
    block = bytes((index * 167 + index // 251 + seed * 31) % 256 for index in range(min(length_bytes, 64_007)))
    return (block * (length_bytes // max(1, len(block)) + 1))[:length_bytes]


class WatchingSink:
    """A sink that records its calls and their threads.

    Args:
        landing: Destination of the body.
        beforehand: Whether to name the landing before there is an answer; the store may then skip ``head``.
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
        """Record the call, and return the landing or raise the error."""
        self.heads.append((info, span))
        self.thread_ids.add(threading.get_ident())
        if self.refuse is not None:
            raise self.refuse
        return self.given

    def done(self, completion: Completion) -> None:
        """Record the completion."""
        self.completions.append(completion)
        self.thread_ids.add(threading.get_ident())
        self._ended.set()

    def wait(self, wait_s_max: float = WAIT_S_MAX) -> Completion:
        """Wait for the first completion and return it."""
        assert self._ended.wait(wait_s_max), f"no answer within {wait_s_max} s"
        return self.completions[0]


def submit(store: Core, operation: Operation, sink: WatchingSink | None = None) -> tuple[Transfer, WatchingSink]:
    """Submit an operation with a recording sink."""
    sink = sink or WatchingSink()
    return store.submit(operation, sink), sink


def refused(store: Store, key: Key) -> bool:
    """Write an object, and return whether the store refused its key with an error that names it."""
    try:
        store.write(key, b"exact")
    except ConfigError:
        with pytest.raises(ConfigError, match=re.escape(repr(key)[1:20])):
            store.stat(key)
        return True
    return False


def short(key: str) -> str:
    """Return a short name of a key for a test's id."""
    return ascii(key)[:40]
