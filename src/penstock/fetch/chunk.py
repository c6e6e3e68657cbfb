"""A part of an object on its way to whoever streams it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from penstock.redaction import public_key

if TYPE_CHECKING:
    from penstock.types import Key


class Chunk(NamedTuple):
    """Consecutive bytes of an object.

    Attributes:
        request_index: Position of the request in ``read_parts``'s input.
        key: Of the object.
        offset_bytes: Where in the object `data` begins.
        data: uint8[n]; its memory is charged to the budget until nothing refers to it, then used again.
        last: Whether it ends the request.
        etag: Of the version being read.
    """

    request_index: int
    key: Key
    offset_bytes: int
    data: memoryview
    last: bool
    etag: str | None

    def __repr__(self) -> str:
        end = self.offset_bytes + len(self.data)
        return f"<Chunk {public_key(self.key)!r} [{self.offset_bytes}, {end}){' last' if self.last else ''}>"
