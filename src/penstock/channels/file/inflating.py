"""Writes objects to files and inflates them on the way."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from penstock.errors import CorruptShardError, DataError
from penstock.formats.compression import Gunzip
from penstock.transfer import ETAG_ATTRIBUTE, Download, is_downloaded

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.transfer import TransferItem, TransferListener
    from penstock.types import Chunk, ObjectInfo


def is_inflated(path: Path, info: ObjectInfo) -> bool:
    """Return whether `path` is the inflated file of this version of the object.

    Without the size, the ETag must be known. A file of the object's own size is taken for one that was not inflated.
    """
    try:
        size_bytes, etag = path.stat().st_size, os.getxattr(path, ETAG_ATTRIBUTE)
    except OSError:
        return False
    is_other_size = size_bytes != info.size_bytes
    return bool(etag) and is_other_size and is_downloaded(path, info._replace(size_bytes=size_bytes))


class InflatingReceiver:
    """Writes objects to files, inflated by gzip; see ``penstock.transfer.Receiver``.

    The files have the modification time and the ETag of their objects, but another size; ``is_inflated`` recognises them.

    Args:
        listener: Hears of each file.
    """

    def __init__(self, listener: TransferListener) -> None:
        self._listener = listener
        self._download: Download | None = None
        self._gunzip = Gunzip()

    def receive(self, item: TransferItem, chunk: Chunk) -> None:
        """Take the next chunk of an object.

        Raises:
            CorruptShardError: The object is not gzip, or is cut off.
        """
        if self._download is None:
            assert item.path is not None
            self._download, self._gunzip = Download(item.path, item.info), Gunzip()
        try:
            for piece in self._gunzip.pieces(chunk.data):
                self._download.write(memoryview(piece))
            if chunk.last:
                self._gunzip.end()
        except ValueError as error:
            if isinstance(error, DataError):
                raise
            raise CorruptShardError(
                str(error), shard=item.info.key, hint="compression=Gzip is for what gzip wrote"
            ) from None
        if chunk.last:
            self._commit(item)

    def receive_empty(self, item: TransferItem) -> None:
        """Make an empty file."""
        assert item.path is not None
        self._download = Download(item.path, item.info)
        self._commit(item)

    def abort(self) -> None:
        """Drop the file that is being written."""
        download, self._download = self._download, None
        if download is not None:
            download.abort()

    def _commit(self, item: TransferItem) -> None:
        assert self._download is not None
        self._download.info = item.info._replace(size_bytes=self._download.size_bytes)
        self._download.commit()
        self._download = None
        self._listener.moved(item)
