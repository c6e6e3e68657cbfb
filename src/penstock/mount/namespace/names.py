"""Which keys of a listing are entries of a directory, and under which names. Pure."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from penstock.store.sorted_pages import check_order
from penstock.types import ObjectInfo

if TYPE_CHECKING:
    from penstock.types import Page

NAME_BYTES_MAX = 255
"""Longest name of a directory entry in bytes, which is ``NAME_MAX`` of Linux."""

key_of = attrgetter("key")

_NO_NAMES = frozenset((b"", b".", b".."))


class PageEntries(NamedTuple):
    """The entries of one page of a listing, in the order of their keys.

    Attributes:
        names: Their names, as the kernel sees them.
        infos: Their objects, and prefixes for directories: as many as `names`.
        hidden_count: Number of keys and prefixes of the page that no path can express.
        last: The last key or prefix of the page, whether it is an entry or not; empty if the page is.
    """

    names: list[bytes]
    infos: list[ObjectInfo]
    hidden_count: int
    last: str


def is_name(name: bytes) -> bool:
    """Whether a directory entry can have this name."""
    return len(name) <= NAME_BYTES_MAX and name not in _NO_NAMES and b"\0" not in name and b"/" not in name


def page_entries(page: Page, *, prefix: str, after: str) -> PageEntries:
    """Return the entries of one page.

    The key that equals the prefix is a marker of the directory itself. It is neither an entry nor counted as hidden.

    Args:
        page: A page of the listing of `prefix` with the delimiter ``/``.
        prefix: Prefix of the directory: empty, or ends with a slash.
        after: The last key of the page before; empty for the first page.

    Raises:
        ProtocolError: The page is not in key order, repeats keys of the page before, or has keys of another prefix.

    Cost: About 0.4 µs per key.
    """
    infos = page.objects
    if page.prefixes:
        infos = infos + [ObjectInfo(key, 0, is_prefix=True) for key in page.prefixes]
        infos.sort(key=key_of)
    keys = [info[0] for info in infos]
    if not keys:
        return PageEntries([], [], 0, after)
    last = check_order(page, prefix, after=after)
    if keys[0] == prefix:
        infos, keys = infos[1:], keys[1:]
    start = len(prefix)
    texts = (
        [key[start:-1] if key[-1] == "/" else key[start:] for key in keys]
        if page.prefixes
        else [key[start:] for key in keys]
    )
    joined = "\0".join(texts).encode(errors="surrogateescape")
    names = joined.split(b"\0") if keys else []
    is_plain = len(names) == len(keys) and b"/" not in joined and _NO_NAMES.isdisjoint(names)
    if is_plain and (len(joined) <= NAME_BYTES_MAX or max(map(len, names)) <= NAME_BYTES_MAX):
        return PageEntries(names, infos, 0, last)
    names = [text.encode(errors="surrogateescape") for text in texts]
    kept = [pair for pair in zip(names, infos, strict=True) if is_name(pair[0])]
    return PageEntries([name for name, _ in kept], [info for _, info in kept], len(names) - len(kept), last)
