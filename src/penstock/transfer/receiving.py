"""Objects become files: as they are, or decoded on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.config import MIB
from penstock.errors import StoreError
from penstock.transfer.download import Download

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from penstock.memory.file_landings import LandingFile
    from penstock.transfer.moving import TransferItem, TransferListener
    from penstock.types import Buffer, Chunk

LANDED_BYTES_MIN = 1 * MIB
"""Smallest object that lands in its file: for smaller ones, another descriptor costs as much as the copy that is saved."""

PREPARED_MAX = 64
"""Files that are open before their objects arrive; each has two descriptors."""


class Decoder(Protocol):
    """Turns the stored bytes of one object into those of its file."""

    def pieces(self, data: Buffer) -> Iterable[Buffer]:
        """Yield what the next bytes become, in pieces of a bounded size."""

    def end(self) -> None:
        """Check that the object is complete."""


class FileReceiver:
    """Writes objects to files; see ``penstock.transfer.Receiver``.

    Decoded files have the modification time and the ETag of their objects, but another size.

    Args:
        listener: Hears of each file.
        decoder: Makes the decoder of an object; None writes objects as they are.
    """

    def __init__(self, listener: TransferListener, *, decoder: Callable[[TransferItem], Decoder] | None = None) -> None:
        self._listener = listener
        self._make_decoder = decoder
        self._decoder: Decoder | None = None
        self._download: Download | None = None
        self._prepared: dict[Path, Download] = {}

    def prepare(self, item: TransferItem) -> LandingFile | None:
        """Open the file of a large object that is written as it is; see ``Receiver.prepare``."""
        if self._make_decoder is not None or item.info.size_bytes < LANDED_BYTES_MIN:
            return None
        assert item.path is not None
        if len(self._prepared) >= PREPARED_MAX or item.path in self._prepared:
            return None
        try:
            download = Download(item.path, item.info)
        except (StoreError, OSError):
            return None  # it is reported when it is the object's turn
        self._prepared[item.path] = download
        try:
            return download.landing_file()
        except OSError:
            return None

    def receive(self, item: TransferItem, chunk: Chunk) -> None:
        """Take the next chunk; see ``Receiver.receive``."""
        if self._download is None:
            self._begin(item, in_file=chunk.in_file)
        download, decoder = self._download, self._decoder
        assert download is not None
        if chunk.in_file:
            download.note_landed(len(chunk.data))
        elif decoder is None:
            download.write(chunk.data)
        else:
            for piece in decoder.pieces(chunk.data):
                download.write(memoryview(piece))
        if chunk.last:
            if decoder is not None:
                decoder.end()
            self._commit(item)

    def receive_empty(self, item: TransferItem) -> None:
        """Make an empty file; a key that ends with a slash, as consoles make for folders, becomes a directory."""
        assert item.path is not None
        if item.info.key.endswith("/"):
            item.path.mkdir(parents=True, exist_ok=True)
            self._listener.moved(item)
        else:
            self._download = Download(item.path, item.info)
            self._commit(item)

    def abort(self) -> None:
        """Drop the file that is being written, and those that were prepared."""
        downloads = list(self._prepared.values())
        if self._download is not None:
            downloads.append(self._download)
        self._download = self._decoder = None
        self._prepared.clear()
        for download in downloads:
            download.abort()

    def _begin(self, item: TransferItem, *, in_file: bool) -> None:
        assert item.path is not None
        prepared = self._prepared.pop(item.path, None)
        if prepared is not None and not in_file:  # late bytes of requests that were given up may still reach this file
            prepared.abort()
            prepared = None
        self._download = prepared or Download(item.path, item.info)
        self._decoder = self._make_decoder(item) if self._make_decoder is not None else None

    def _commit(self, item: TransferItem) -> None:
        download = self._download
        assert download is not None
        is_decoded = self._decoder is not None
        download.info = item.info._replace(size_bytes=download.size_bytes) if is_decoded else item.info
        download.commit()
        self._download = self._decoder = None
        self._listener.moved(item)
