"""The bytes of one epoch of a pipe, read ahead of their reader."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from penstock.channels.entry_table import ChannelObject
from penstock.errors import ObjectChangedError
from penstock.fetch import PlanItem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.channels.entries import Entries
    from penstock.channels.entry_table import Entry
    from penstock.channels.pipe.content import Content
    from penstock.types import Buffer, Chunk


class EpochStream:
    """The bytes of one epoch. The first requests are sent at once.

    Args:
        entries: All entries of the epoch.
        ordered: Those of this pipe, in the order of the epoch; pulled a little ahead of what is read.
        content: Makes the bytes of the pipe from each.

    Attributes:
        entries: All entries of the epoch.
        is_planned: Whether all entries have been pulled, so that the next epoch may begin.

    Cost: that of ``Store.read_parts``.
    """

    def __init__(self, entries: Entries, ordered: Iterator[Entry], *, content: Content) -> None:
        self.entries = entries
        self._store = entries.store
        self._content = content
        self.is_planned = False
        self._waiting: deque[ChannelObject | bytes] = deque()
        self._parts: Iterator[Chunk] = self._store.read_parts(self._requests(ordered))

    def __iter__(self) -> Iterator[Buffer]:
        for chunk in self._parts:
            yield from self._texts()
            piece = self._waiting[0]
            assert isinstance(piece, ChannelObject)
            yield from self._content.wrap(
                self._pieces(chunk), self._size_of(piece, chunk), self._store.describe(piece.key)
            )
            self._waiting.popleft()
        yield from self._texts()

    def close(self) -> None:
        """Cancel what is in flight; idempotent, and from any thread."""
        self._parts.close()  # type: ignore[attr-defined]

    def _requests(self, ordered: Iterator[Entry]) -> Iterator[PlanItem]:
        for entry in ordered:
            for piece in entry:
                self._waiting.append(piece)
                if isinstance(piece, ChannelObject):
                    yield PlanItem(
                        piece.key, etag=piece.etag, size_bytes=piece.size_bytes, last_modified_s=piece.modified_s
                    )
        self.is_planned = True

    def _texts(self) -> Iterator[Buffer]:
        """Yield the values that come before the next object."""
        while self._waiting and isinstance(text := self._waiting[0], bytes):
            self._waiting.popleft()
            yield from self._content.wrap_text(text)

    def _pieces(self, chunk: Chunk) -> Iterator[Buffer]:
        """Yield the bytes of the object that `chunk` begins."""
        yield chunk.data
        while not chunk.last:
            chunk = next(self._parts)
            yield chunk.data

    def _size_of(self, piece: ChannelObject, chunk: Chunk) -> int | None:
        """Return the size of the object that `chunk` begins, if the content needs it."""
        if not self._content.needs_size:
            return None
        if chunk.last:
            return len(chunk.data)
        if piece.size_bytes is not None:
            return piece.size_bytes
        info = self._store.stat(piece.key)
        if info.etag != chunk.etag:
            raise ObjectChangedError("the object changed while it was read", url=self._store.describe(piece.key))
        return info.size_bytes
