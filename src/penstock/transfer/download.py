"""Downloaded files: never partly visible, and recognised by the next run; ``FileReceiver`` writes objects to them.

A file is written under a temporary name beside its target, and renamed when it is complete. It gets the object's modification
time, and the ETag as an extended attribute if the file system has attributes; the next run recognises it by size, time and
ETag. The temporary name is derived from the target's, and the temporary file is locked. So a later run replaces the temporary
file of a killed run, and two runs never write the same file.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from penstock.config import MIB
from penstock.errors import StoreError
from penstock.memory.file_landings import LandingFile
from penstock.store.records import moved_record
from penstock.store.tree import TEMPORARY_PREFIX, TEMPORARY_SUFFIX
from penstock.system.locks import try_lock_file
from penstock.system.private import open_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from penstock.store.records import FileRecords
    from penstock.transfer.moving import TransferItem, TransferListener
    from penstock.types import Buffer, Chunk, ObjectInfo


ETAG_ATTRIBUTE = b"user.penstock.etag"

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

FATAL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE})
"""Errors of this machine that every other file would meet as well."""


class Download:
    """A file being written.

    Args:
        path: Target file; missing directories are made.
        info: Object to be downloaded.
        records: Keeps the object's headers, tags and checksums beside the file; None keeps none.

    Attributes:
        size_bytes: Bytes that are in the file.

    Raises:
        StoreError: There is a file where a directory is needed, or a directory where the file belongs; or another process
            is writing the file.
        OSError: The system failed, for example because the disk is full.
    """

    def __init__(self, path: Path, info: ObjectInfo, *, records: FileRecords | None = None) -> None:
        self.path = path
        self.info = info
        self._records = records
        self._target = os.fspath(path)
        name = path.name
        digest = hashlib.blake2b(os.fsencode(name), digest_size=12).hexdigest()
        self._temporary = f"{self._target.removesuffix(name)}{TEMPORARY_PREFIX}{digest}{TEMPORARY_SUFFIX}"
        refuse_special(path)
        self._fd = self._open_locked()
        self.size_bytes = 0

    def _open_locked(self) -> int:
        """Open the temporary file, empty, and lock it.

        With many small files, each system call costs ten times what it takes: meanwhile the interpreter goes to the thread
        that receives, and has to be had back. So nothing is asked that the system does not have to be asked.
        """
        while True:
            is_new = True
            try:
                fd = os.open(self._temporary, _FLAGS | os.O_EXCL, 0o666)
            except FileExistsError:
                is_new, fd = False, open_private(self._temporary, _FLAGS, 0o666)
            except (FileNotFoundError, NotADirectoryError):
                self._make_folder()
                continue
            try:
                if not try_lock_file(fd):
                    raise StoreError(f"{self.path} is being written by another process")
                if is_new and self.info.size_bytes:
                    if not os.fstat(fd).st_size:
                        return fd
                elif os.path.samestat(os.fstat(fd), os.stat(self._temporary)):  # noqa: PTH116
                    os.ftruncate(fd, 0)
                    return fd
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # another process finished and renamed it before it was locked here

    def _make_folder(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise StoreError(
                f"{self.path.parent} is a file, or has a file in its path",
                hint="keys 'a' and 'a/b' cannot both become files",
            ) from error

    def write(self, data: memoryview) -> None:
        """Append `data`."""
        self.size_bytes += len(data)
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            error.filename = str(self.path)  # the system knows only the descriptor
            raise

    def landing_file(self) -> LandingFile:
        """Return the file for bodies that land in it; whoever receives them adds them to ``size_bytes``."""
        return LandingFile(self._fd, self.path)

    def commit(self) -> None:
        """Rename the file to its target.

        Raises:
            StoreError: The file does not have the object's size, or there is a directory in its place by now.
        """
        if self.size_bytes != self.info.size_bytes:
            raise StoreError(f"{self.path}: {self.size_bytes} bytes arrived, but {self.info.size_bytes} were listed")
        if self.info.etag:
            with suppress(OSError):  # without attributes, size and time must suffice
                os.setxattr(self._fd, ETAG_ATTRIBUTE, self.info.etag.encode())
        if self.info.last_modified_s is not None:
            os.utime(self._fd, (self.info.last_modified_s, self.info.last_modified_s))
        if self._records is not None and (record := moved_record(self.info)) is not None:
            with suppress(OSError):  # the file system has no attributes, and no folder can be made
                self._records.save(self._fd, record)
        try:
            os.replace(self._temporary, self._target)  # noqa: PTH105
        except IsADirectoryError:
            refuse_special(self.path)
            raise
        os.close(self._fd)

    def abort(self) -> None:
        """Remove the bytes that were written."""
        with suppress(FileNotFoundError):
            os.unlink(self._temporary)  # noqa: PTH108
        os.close(self._fd)  # which releases the lock


def refuse_special(path: Path) -> None:
    """Refuse a target that exists and is not a regular file: renaming a download to it would remove a device.

    Raises:
        StoreError: `path` is a directory, a device, a pipe or the like.
    """
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISDIR(mode):
        raise StoreError(f"{path} is a directory", hint="keys 'a' and 'a/b' cannot both become files")
    if not stat.S_ISREG(mode):
        raise StoreError(f"{path} is not a regular file", hint="`penstock cat URL > path` writes to devices and pipes")


def is_downloaded(path: Path, info: ObjectInfo) -> bool:
    """Return whether `path` is a file that was downloaded from this version of the object and not changed since."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    if info.last_modified_s is None or status.st_size != info.size_bytes:
        return False
    if int(status.st_mtime) != int(info.last_modified_s):
        return False
    try:
        return os.getxattr(path, ETAG_ATTRIBUTE) == (info.etag or "").encode()
    except OSError:
        return True


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
        records: Keeps headers, tags and checksums of objects that are written as they are; None keeps none.
    """

    def __init__(
        self,
        listener: TransferListener,
        *,
        decoder: Callable[[TransferItem], Decoder] | None = None,
        records: FileRecords | None = None,
    ) -> None:
        self._records = records if decoder is None else None
        self.keeps_records = self._records is not None
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
            download = Download(item.path, item.info, records=self._records)
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
            download.size_bytes += len(chunk.data)
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
            self._download = Download(item.path, item.info, records=self._records)
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
        self._download = prepared or Download(item.path, item.info, records=self._records)
        self._decoder = self._make_decoder(item) if self._make_decoder is not None else None

    def _commit(self, item: TransferItem) -> None:
        download = self._download
        assert download is not None
        is_decoded = self._decoder is not None
        download.info = item.info._replace(size_bytes=download.size_bytes) if is_decoded else item.info
        download.commit()
        self._download = self._decoder = None
        self._listener.moved(item)
