"""Parses many tar members at once with NumPy, in a run of samples whose headers all have the same form.

`TarParser` uses this if its caller wants columns. The result is exactly that of the member-by-member parser: every checksum
is verified, every size is followed to the next header, and every name is split. This module handles only what is as regular
as the output of ``tarfile``, WebDataset or GNU tar for a folder of pairs. Everything else, such as other kinds of members,
long names, sizes in base 256, a sample that lacks a member, or a damaged header, is left to the other parser, which also
raises the errors.
"""

from __future__ import annotations

import re
from itertools import islice
from operator import eq
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.formats.columnar import Samples, kind_of
from penstock.formats.sample import RESERVED_FIELDS, decode_name
from penstock.formats.tar_header import BLOCK_BYTES, byte_sum

if TYPE_CHECKING:
    from numpy.typing import NDArray

REGULAR_BYTES_MIN = 64 << 10
"""Fewest bytes left in a chunk that are handled here. With fewer, NumPy's calls cost more than the loop that they replace."""

SHORT_BYTES_MAX = 32
"""Longest values that are gathered together, which is cheaper than slicing them one by one."""

_MARK = slice(256, 264)  # the magic string with the bytes around it, eight in total
_PAX_KIND = ord("x")
_REGULAR_KIND = ord("0")
_PREFIX = 189  # its offset, counted from the kind of the member
_POWERS = 8 ** np.arange(10, -1, -1)  # the values of the digits of a size
_SUM_POWERS = 8 ** np.arange(5, -1, -1)
_DOT_IN_BASENAME = re.compile(rb"\.[^/\n]*\n").search
# Keys that are metadata, empty, or without a basename; keys are separated by line ends.
_BAD_IN_KEYS = (
    b"\n__",
    b"\n\n",
    b"/\n",
    b"\0",
)


class Heads(NamedTuple):
    """Headers of consecutive regular members.

    Attributes:
        names: Names of the members, as stored.
        origins: int64[n]: offsets in the chunk at which the members begin, including their PAX headers.
        starts: int64[n]: offsets at which their values begin.
        ends: int64[n]: offsets at which their values end.
    """

    names: list[bytes]
    origins: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


def read_heads(view: memoryview, at: int) -> Heads | None:
    """Find the members from view[at] on, where a header begins. The last value may be cut off.

    Returns None if they are not regular.
    """
    count = (len(view) - at) // BLOCK_BYTES
    if count * BLOCK_BYTES < REGULAR_BYTES_MIN or bytes(view[at + 257 : at + 262]) != b"ustar":
        return None
    blocks = np.frombuffer(view, np.uint8, count * BLOCK_BYTES, at).reshape(count, BLOCK_BYTES)
    marks = blocks[:, _MARK].view(np.uint64)[:, 0]
    rows = np.flatnonzero(marks == marks[0])  # blocks that look like headers, some of which may be data
    heads = blocks.take(rows, axis=0)
    # They are valid only if `_are_sound` accepts the headers.
    sizes: NDArray[np.int64] = (heads[:, 124:135] ^ 0x30).astype(np.int64) @ _POWERS
    follow = rows + 1 + ((sizes + BLOCK_BYTES - 1) >> 9)
    broken = np.flatnonzero(follow[:-1] != rows[1:])  # up to here each header leads to the next
    if len(broken):
        kept = int(broken[0]) + 1
        rows, heads, sizes = rows[:kept], heads[:kept], sizes[:kept]
    is_pax = heads[:, 156] == _PAX_KIND
    if is_pax[-1]:  # it describes a member that is not in this chunk
        rows, heads, sizes, is_pax = rows[:-1], heads[:-1], sizes[:-1], is_pax[:-1]
    if len(rows) < 2 or not _are_sound(heads, is_pax) or not _are_harmless(blocks, rows, sizes, is_pax):
        return None
    members = np.flatnonzero(~is_pax)
    names = np.ascontiguousarray(heads[members, :100]).view("S100")[:, 0].tolist()
    # A PAX header of one block, followed by its records.
    origins = rows[members] - is_pax[members - 1] * (members > 0) * 2
    starts = at + BLOCK_BYTES * (rows[members] + 1)
    return Heads(names, at + BLOCK_BYTES * origins, starts, starts + sizes[members])


def _are_sound(heads: NDArray[np.uint8], is_pax: NDArray[np.bool_]) -> bool:
    """Whether all blocks are headers of regular members without a prefix, or PAX headers, with correct checksums."""
    if ((heads[:, 124:135] ^ 0x30) > 7).any() or (heads[:, 135] & 0xDF).any():
        return False
    if ((heads[:, 148:154] ^ 0x30) > 7).any() or heads[:, 154].any() or (heads[:, 155] != 0x20).any():
        return False
    stored = (heads[:, 148:154] ^ 0x30).astype(np.int64) @ _SUM_POWERS
    found = heads[:, :148].sum(axis=1, dtype=np.uint16) + np.int64(8 * 0x20)
    for pax in (False, True):
        chosen = is_pax == pax
        if not chosen.any():
            if not pax:
                return False
            continue
        rests = heads[:, 156:] if chosen.all() else heads[chosen, 156:]
        rest = bytes(rests[0])
        if not pax and (rest[0] != _REGULAR_KIND or rest[_PREFIX]):
            return False
        if not (rests == rests[0]).all():
            return False
        found[chosen] += byte_sum(rest)
    return bool((found == stored).all())


def _are_harmless(
    blocks: NDArray[np.uint8], rows: NDArray[np.int64], sizes: NDArray[np.int64], is_pax: NDArray[np.bool_]
) -> bool:
    """Whether no PAX header changes a name or a size, as for ``is_harmless``, and each is followed by a member."""
    described = np.flatnonzero(is_pax)
    if not len(described):
        return True
    lengths = sizes[described]
    if is_pax[described + 1].any() or lengths.min() < 1 or lengths.max() > BLOCK_BYTES:
        return False
    records = blocks[rows[described] + 1, : int(lengths.max())]
    if (records[np.arange(len(records)), lengths - 1] != 0x0A).any():
        return False
    text = records.tobytes()
    return b"path=" not in text and b"size=" not in text


class RegularSamples(NamedTuple):
    """Consecutive samples that all have the same fields.

    Attributes:
        heads: Headers of all members that were examined.
        first: Index of the member with which the samples begin.
        names: Field names.
        keys: Keys of the samples.
    """

    heads: Heads
    first: int
    names: tuple[str, ...]
    keys: list[str]

    @property
    def begin(self) -> int:
        """Position in the chunk of the first sample."""
        return int(self.heads.origins[self.first])

    def cut(self, view: memoryview, base_bytes: int) -> tuple[Samples, int]:
        """Return the samples, with values copied from `view`, and where in `view` they end.

        `base_bytes` is the offset of `view` in the shard.
        """
        each, first = len(self.names), self.first
        end = first + each * len(self.keys)
        bounds = self.heads.origins[first : end + 1 : each]
        columns: list[list[Any]] = [self.keys, (bounds[:-1] + base_bytes).tolist(), np.diff(bounds).tolist()]
        for number in range(each):
            members = slice(first + number, end, each)
            columns.append(_values(view, self.heads.starts[members], self.heads.ends[members]))
        return Samples(kind_of(self.names, frozenset()), columns), int(bounds[-1])


def _values(view: memoryview, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> list[bytes]:
    """Copy values from `view`. Short ones, mostly labels, are gathered together, because their blocks are padded with zeros."""
    sizes = ends - starts
    width = int(sizes.max())
    if 0 < width <= SHORT_BYTES_MAX:
        wide = np.frombuffer(view, np.uint8)[starts[:, None] + np.arange(width)]
        found: list[bytes] = wide.view(f"S{width}")[:, 0].tolist()
        if list(map(len, found)) == sizes.tolist():  # otherwise a value ends in zeros, or nonzero bytes follow it
            return found
    return [view[start:end].tobytes() for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def find_regular_samples(view: memoryview, at: int, prefix: bytes) -> RegularSamples | None:
    """Find the complete samples from view[at] on, where a header begins, except members of the sample with `prefix`.

    The last sample is left out, because it may have more members. Returns None if the members are not regular.
    """
    heads = read_heads(view, at)
    if heads is None:
        return None
    names, first = heads.names, 0
    while first < len(names) and names[first].startswith(prefix):
        first += 1
    if first == len(names):
        return None
    name = names[first]
    dot = name.find(b".", name.rfind(b"/") + 1)
    each = 1
    while first + each < len(names) and names[first + each].startswith(name[: dot + 1]):
        each += 1
    suffixes = [other[dot:] for other in names[first : first + each]]
    fields, keys = _field_names(suffixes), _keys(names, first, suffixes)
    texts = None if keys is None else _texts(keys)
    return None if dot <= 0 or fields is None or texts is None else RegularSamples(heads, first, fields, texts)


def _keys(names: list[bytes], first: int, suffixes: list[bytes]) -> list[bytes] | None:
    """Number of samples, from the first member on, whose members have exactly these suffixes."""
    each = len(suffixes)
    end = first + (len(names) - first - 1) // each * each
    firsts = names[first:end:each]
    if not firsts:
        return None
    length = len(suffixes[0])
    keys = [name[:-length] for name in firsts]
    for number, suffix in enumerate(suffixes):
        if [key + suffix for key in keys] != (names[first + number : end : each] if number else firsts):
            return None
    following = names[end]
    slash = following.rfind(b"/") + 1
    if following.find(b".", slash) <= slash or following.startswith((b"__", keys[-1] + b".")):
        return None  # bytes that belong to no sample count towards the sample before them
    return None if any(map(eq, keys, islice(keys, 1, None))) else keys


def _texts(keys: list[bytes]) -> list[str] | None:
    """Return the keys as text, or None if one of them is not a key or has a dot in its basename."""
    text = b"\n".join([b"", *keys, b""])
    if text.count(b"\n") != len(keys) + 1 or any(bad in text for bad in _BAD_IN_KEYS):
        return None
    if b"." in text and _DOT_IN_BASENAME(text):
        return None
    return decode_name(text[1:-1]).split("\n")


def _field_names(suffixes: list[bytes]) -> tuple[str, ...] | None:
    """Return field names for suffixes that begin with a dot, or None if the other parser must handle them."""
    fields = tuple(decode_name(suffix[1:]).lower() for suffix in suffixes)
    if any(b"/" in suffix or b"\0" in suffix for suffix in suffixes) or len(set(fields)) < len(fields):
        return None
    return fields if RESERVED_FIELDS.isdisjoint(fields) else None
