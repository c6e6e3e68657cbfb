"""``Members``: where the members of a tar's samples lie, so that those nobody wants need not be read.

Kept for shards whose samples all have the same fields in the same order and the same bytes of headers before each, as
every writer of data sets makes them; of others nothing is kept. Positions follow from the sizes: a member is its
headers and its value, padded to a block, and the last one ends where its sample does.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from penstock.errors import ConfigError, DataError
from penstock.formats.sample import Sample, decode_name, split_name
from penstock.formats.tar_header import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.types import Buffer

ITEM_BYTES = (1, 2, 4, 8)
NAME_BYTES = 100
_PREFIX = 345  # where in a header the first half of a long name begins


class Members(NamedTuple):
    """The members of one shard's samples.

    Attributes:
        names: Of the fields, in stored order.
        head_bytes: Of the headers before each value, long-name and PAX headers included.
        sizes: int64[samples, fields], bytes of each value.
    """

    names: tuple[str, ...]
    head_bytes: int
    sizes: NDArray[np.int64]

    def spans(self, ends: NDArray[np.int64], wanted: Sequence[str]) -> NDArray[np.int64]:
        """The bytes of the wanted members, headers included: fed to a parser, they are samples of these fields alone.

        Args:
            ends: int64[samples], where the samples end in the shard; the last ones of ``sizes`` may be left out.
            wanted: Names of fields.

        Returns:
            int64[samples, wanted, 2]: start and end of each, in stored order.

        Raises:
            ConfigError: a field that the samples do not have.
        """
        if missing := [name for name in wanted if name not in self.names]:
            raise ConfigError(f"field {missing[0]!r} is not one of {', '.join(self.names)}")
        chosen = [at for at, name in enumerate(self.names) if name in wanted]
        blocks = self.head_bytes + _padded(self.sizes[: len(ends)])
        behind = np.cumsum(blocks[:, ::-1], axis=1)[:, ::-1]  # from the start of each member to the end of its sample
        starts = ends[:, None] - behind
        return np.stack([starts[:, chosen], (starts + blocks)[:, chosen]], axis=-1)

    def cut(self, number: int, extent: memoryview, *, offset_bytes: int) -> Sample | None:
        """A sample, cut out of its extent without parsing it: a third of the time. Of bytes that have their checksum only.

        Args:
            number: Of the sample, in the shard.
            extent: uint8[n], as stored.
            offset_bytes: Of the extent, in the shard.

        Returns:
            As the parser gives it; None where only that can: more than one header for a member, or bytes before them.
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
        """As stored, and bytes per item: a line of JSON, then the sizes, field by field."""
        most = int(self.sizes.max()) if self.sizes.size else 0
        item_bytes = next(size for size in ITEM_BYTES if most < 1 << (8 * size))
        head = json.dumps({"names": self.names, "head_bytes": self.head_bytes}).encode() + b"\n"
        return head + np.ascontiguousarray(self.sizes.T).astype(f"<u{item_bytes}").tobytes(), item_bytes


def members_of(names: Sequence[str], values: Sequence[Sequence[int]], sample_sizes: Sequence[int]) -> Members | None:
    """What is to be kept of samples of these fields; None where their layout is not the same throughout.

    Args:
        names: Of the fields, in stored order.
        values: Bytes of each sample's values.
        sample_sizes: Bytes of each sample, from its first header to the end of its last block.
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
    """What ``Members.encode`` gave.

    Raises:
        DataError: it is not that.
    """
    try:
        line, _, items = bytes(data).partition(b"\n")
        head = json.loads(line)
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
