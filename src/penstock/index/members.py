"""``Members``: where the members of a tar's samples lie, so that only the wanted ones need to be read.

They are stored only for shards whose samples all have the same fields in the same order, with headers of the same length,
as usual writers of data sets make them. The positions follow from the sizes: a member is its headers and its value, padded
to a block, and the last one ends where its sample does.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.errors import ConfigError, DataError
from penstock.formats.sample import Sample, decode_name, split_name
from penstock.formats.tar_header import BLOCK_BYTES
from penstock.text.json_text import parse_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.types import Buffer

ITEM_BYTES = (1, 2, 4, 8)
NAME_BYTES = 100
_PREFIX = 345  # position of the first half of a long name in a header


class Members(NamedTuple):
    """The members of one shard's samples.

    Attributes:
        names: Names of the fields, in stored order.
        head_bytes: Size in bytes of the headers before each value, with long-name and PAX headers.
        sizes: int64[samples, fields], size of each value in bytes.
    """

    names: tuple[str, ...]
    head_bytes: int
    sizes: NDArray[np.int64]

    def spans(self, ends: NDArray[np.int64], wanted: Sequence[str]) -> NDArray[np.int64]:
        """Return the ranges of the wanted members with their headers. A parser reads them as samples of these fields only.

        Args:
            ends: int64[samples], ends of the samples in the shard; may be shorter than ``sizes``.
            wanted: Names of fields.

        Returns:
            int64[samples, wanted, 2], start and end of each member, in stored order.

        Raises:
            ConfigError: The samples do not have one of the fields.
        """
        if missing := [name for name in wanted if name not in self.names]:
            raise ConfigError(f"field {missing[0]!r} is not one of {', '.join(self.names)}")
        chosen = [at for at, name in enumerate(self.names) if name in wanted]
        blocks = self.head_bytes + _padded(self.sizes[: len(ends)])
        # Bytes from the start of each member to the end of its sample.
        after = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1]
        starts = ends[:, None] - after
        return np.stack([starts[:, chosen], (starts + blocks)[:, chosen]], axis=-1)

    def cut(self, number: int, extent: memoryview, *, offset_bytes: int) -> Sample | None:
        """Return a sample cut out of its extent, which takes a third of the time of parsing. Check the checksum before.

        Args:
            number: Number of the sample in the shard.
            extent: uint8[n], the stored bytes of the sample.
            offset_bytes: Position of the extent in the shard, in bytes.

        Returns:
            The sample, equal to the parser's. None if it must be parsed: a member has more than one header, or other bytes
            come before the first one.
        """
        fields, at = {}, 0
        for name, size in zip(self.names, self.sizes[number].tolist(), strict=True):
            at += BLOCK_BYTES
            fields[name] = extent[at : at + size]
            at += -(-size // BLOCK_BYTES) * BLOCK_BYTES
        plain = self.head_bytes == BLOCK_BYTES and at == len(extent) and not extent[_PREFIX]
        split = split_name(decode_name(bytes(extent[:NAME_BYTES]).split(b"\0", 1)[0])) if plain else None
        return Sample(split[0], fields, offset_bytes, at) if split is not None else None

    def encode(self) -> tuple[bytes, int]:
        """Return the stored form (a line of JSON, then the sizes, field by field), and the bytes per size."""
        most = int(self.sizes.max()) if self.sizes.size else 0
        item_bytes = next(size for size in ITEM_BYTES if most < 1 << (8 * size))
        head = json.dumps({"names": self.names, "head_bytes": self.head_bytes}).encode() + b"\n"
        return head + np.ascontiguousarray(self.sizes.T).astype(f"<u{item_bytes}").tobytes(), item_bytes


def members_of(names: Sequence[str], values: Sequence[Sequence[int]], sample_sizes: Sequence[int]) -> Members | None:
    """Return the members of samples with these fields; None if the samples do not all have the same layout.

    Args:
        names: Names of the fields, in stored order.
        values: Sizes in bytes of each sample's values.
        sample_sizes: Size in bytes of each sample, from its first header to the end of its last block.
    """
    if not values or not names:
        return None
    sizes = np.array(values, np.int64)
    heads = np.array(sample_sizes, np.int64) - _padded(sizes).sum(axis=1)
    head_bytes, odd = divmod(int(heads[0]), len(names))
    if odd or head_bytes < BLOCK_BYTES or head_bytes % BLOCK_BYTES or bool((heads != heads[0]).any()):
        return None
    return Members(tuple(names), head_bytes, sizes)


def decode(data: Buffer, *, count: int, item_bytes: int, name: str) -> Members:
    """Return the members that ``Members.encode`` stored.

    Args:
        data: uint8[n], the stored form.
        count: Number of samples.
        item_bytes: Bytes per size.
        name: Name of the shard, for errors.

    Raises:
        DataError: The data is not a stored form of members.
    """
    try:
        line, _, items = bytes(data).partition(b"\n")
        head = parse_json(line)
        names = tuple(map(str, head["names"]))
        if item_bytes not in ITEM_BYTES:
            raise ValueError(f"{item_bytes} bytes per item")
        sizes = np.frombuffer(items, f"<u{item_bytes}").astype(np.int64).reshape(len(names), count).T
        return Members(names, int(head["head_bytes"]), sizes)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"its members cannot be read ({error})", shard=name) from error


def _padded(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    padded: NDArray[np.int64] = -(-sizes // BLOCK_BYTES) * BLOCK_BYTES
    return padded
