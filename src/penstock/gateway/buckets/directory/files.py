"""The objects of one bucket as files: written under hidden names, put in place, found, removed.

A key that is an ordinary path is the file of that path, so that other programs find it. Every other key of S3 (``//``, ``..``,
a trailing slash, a segment of more than 255 bytes, a hidden name of penstock) is percent-encoded and lies in a hidden folder.
A key lies there, too, while a file system cannot hold it beside another one: ``a`` and ``a/b`` cannot both be paths.

A file that is being written is locked by its descriptor. The kernel releases the lock when the writer ends, however it ends,
so whatever a new process can lock is debris of a killed one and is removed. A change holds the lock of its key while it
compares conditions and renames, so that of two writers one is the first. Reading locks nothing: an open file is one version,
whatever happens to its name. All methods block.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
import zlib
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Self
from urllib.parse import quote, unquote

from penstock.gateway.buckets.known_objects import content_type_of
from penstock.gateway.objects import ObjectHead, S3Error
from penstock.store.base import KEY_BYTES_MAX
from penstock.store.local import prune, sync_directory, write_all
from penstock.store.records import DEFAULT_TYPE, RECORDS_FOLDER, FileRecords, StoredRecord
from penstock.store.tree import HIDDEN, TEMPORARY_PREFIX, TEMPORARY_SUFFIX, info_of
from penstock.system.locks import try_lock_file
from penstock.types import lasting_etag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from penstock.types import Buffer


_RENAMES_MAX = 16  # attempts to make a folder that a concurrent removal keeps removing
_NO_SUCH_PATH = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO, errno.EISDIR)
_IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY, errno.ENAMETOOLONG)

_STRIPES = 256  # files that lock keys; two keys that share one wait for each other's rename and for nothing else
_ATTEMPTS_MAX = 16


# ── files that are being written, and locks of keys ──────────────────────────────────────────────────────────────────


class StagedFile:
    """A hidden file that becomes an object when it is renamed. Use it as a context manager.

    Args:
        path: Path of the temporary file.
        fd: Descriptor of the temporary file, open for writing, which this object closes.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        self.is_placed = False
        """Whether the file has been renamed, so that its hidden name is not to be removed."""

    def write(self, pieces: list[Buffer]) -> None:
        """Append pieces."""
        for piece in pieces:
            write_all(self.fd, memoryview(piece))

    def close(self) -> None:
        """Close the file, and remove it unless it was renamed; idempotent."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        if not self.is_placed:
            with suppress(FileNotFoundError):
                self.path.unlink()
        os.close(fd)  # after the name is gone, so that nobody takes the file for debris in between

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StagingArea:
    """The hidden folders of a bucket in which files are written, and in which keys are locked.

    Args:
        folder: The bucket's hidden folder; it is made when it is needed. The bucket's own folder must exist.
    """

    def __init__(self, folder: Path) -> None:
        self._staging = folder / "staging"
        self._locks = folder / "locks"

    def create(self) -> StagedFile:
        """Make a hidden file, locked until it is closed."""
        for _ in range(_ATTEMPTS_MAX):
            path = self._staging / os.urandom(12).hex()
            fd = _opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            if try_lock_file(fd) and os.fstat(fd).st_nlink:
                return StagedFile(path, fd)
            os.close(fd)  # another process that has just started took it for debris
        raise S3Error("SlowDown", "No file could be made; please try again.")

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Hold the lock of a key, among all threads and processes that use the bucket; for a rename, not for writing."""
        fd = _opened(self._locks / f"{zlib.crc32(key.encode()) % _STRIPES:02x}", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def remove_debris(self) -> None:
        """Remove the files of writers that no longer live."""
        try:
            names = os.listdir(self._staging)  # noqa: PTH208 - names are all that is needed
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            path = self._staging / name
            with suppress(OSError):  # another process removed it, or it may not be removed
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    if try_lock_file(fd):
                        path.unlink()
                finally:
                    os.close(fd)


def _opened(path: Path, flags: int) -> int:
    """Open a file below a bucket's hidden folder, which is made if it is missing.

    Raises:
        S3Error: The bucket's own folder does not exist.
    """
    for _ in range(_ATTEMPTS_MAX):
        try:
            return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            make_below(path.parent.parent.parent, path.parent)
    raise bucket_missing(path.parent.parent.parent.name)


def make_below(bucket: Path, folder: Path) -> None:
    """Make a folder and its parents below a bucket's folder, but never the bucket's folder itself.

    Raises:
        S3Error: The bucket's folder does not exist.
        FileExistsError, NotADirectoryError: A file is in the way.
    """
    missing = []
    while folder != bucket:
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        try:
            path.mkdir()
        except FileExistsError:
            if not path.is_dir():
                raise
        except FileNotFoundError as error:
            if not bucket.is_dir():
                raise bucket_missing(bucket.name) from error
            raise


def bucket_missing(name: str) -> S3Error:
    """Return the error of a bucket that does not exist."""
    return S3Error("NoSuchBucket", "The specified bucket does not exist", details={"BucketName": name})


# ── objects ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _version(status: os.stat_result) -> str:
    return lasting_etag(info_of("", status).etag) or ""


class StoredObject(NamedTuple):
    """One version of an object.

    Attributes:
        key: Key of the object.
        path: Path of its file.
        status: Status of the file.
        record: Metadata of the object; None if another program wrote the file.
    """

    key: str
    path: Path
    status: os.stat_result
    record: StoredRecord | None

    @property
    def size_bytes(self) -> int:
        """Size in bytes."""
        return self.status.st_size

    @property
    def etag(self) -> str:
        """ETag with its quotes.

        That of a file that another program wrote is made of size, modification time and inode, as ``LocalStore`` makes it:
        hashing terabytes before the first listing would take hours. It has a ``-``, so that nobody takes it for an MD5. Tags
        and other metadata do not change it.
        """
        if self.record is not None and self.record.etag:
            return f'"{self.record.etag}"'
        return _version(self.status)

    def is_still(self, fd: int) -> bool:
        """Return whether an open file is still this version."""
        return _version(os.fstat(fd)) == _version(self.status)

    @property
    def modified_s(self) -> float:
        """Time of the last change, in seconds since 1970."""
        return self.status.st_mtime_ns / 1e9

    def head(self, *, with_checksums: bool) -> ObjectHead:
        """Return the head that clients get."""
        record = self.record or StoredRecord()
        headers = {"Content-Type": DEFAULT_TYPE if record.etag else content_type_of(self.key), **record.headers}
        if record.tags:
            headers["x-amz-tagging-count"] = str(len(record.tags))
        if with_checksums and record.checksums:
            headers |= {f"x-amz-checksum-{name}": value for name, value in record.checksums.items()}
            headers["x-amz-checksum-type"] = record.checksum_type
        return ObjectHead(
            key=self.key,
            size_bytes=self.size_bytes,
            etag=self.etag,
            last_modified_s=self.modified_s,
            headers=headers,
            part_sizes_bytes=record.part_sizes_bytes,
            part_checksums=record.part_checksums if with_checksums else (),
        )


class BucketFiles:
    """The files of one bucket.

    Args:
        folder: The bucket's folder, which exists.
        is_durable: Whether a change is synced to the disk before it is confirmed.
    """

    def __init__(self, folder: Path, *, is_durable: bool) -> None:
        self.folder = folder
        self.hidden = folder / HIDDEN
        self.escaped = self.hidden / "keys"
        self.is_durable = is_durable
        self.staging = StagingArea(self.hidden)
        self.records = FileRecords(folder / RECORDS_FOLDER)

    # ── finding ────────────────────────────────────────────────────────────────────────────────────────────────────

    def places(self, key: str) -> list[Path]:
        """Return where the object of a key may lie, the place that counts first."""
        check_key(key)
        natural = natural_path(key)
        escaped = self.escaped / escaped_path(key)
        return [escaped] if natural is None else [self.folder / natural, escaped]

    @contextmanager
    def opened(self, key: str) -> Iterator[tuple[int, StoredObject]]:
        """Open the current version for reading, within the block.

        Raises:
            S3Error: There is none, or it may not be read.
        """
        fd, stored = self.open(key)
        try:
            yield fd, stored
        finally:
            os.close(fd)

    def open(self, key: str) -> tuple[int, StoredObject]:
        """Open the current version for reading, and return its descriptor, which the caller closes.

        Raises:
            S3Error: There is none, or it may not be read.
        """
        for path in self.places(key):
            found = self._opened(key, path)
            if found is not None:
                return found
        raise self.key_missing(key)

    def _opened(self, key: str, path: Path) -> tuple[int, StoredObject] | None:
        for _ in range(_RENAMES_MAX):
            try:
                # O_NONBLOCK keeps a FIFO of this name from blocking the thread; it changes nothing for regular files.
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError as error:
                if error.errno in _NO_SUCH_PATH:
                    return None
                raise
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    os.close(fd)
                    return None
                record = self.records.load(fd, status)
                if record is not None or _is_at(path, status):
                    return fd, StoredObject(key, path, status, record)
            except BaseException:
                with suppress(OSError):
                    os.close(fd)
                raise
            os.close(fd)  # it was replaced after it was opened, and its record may be gone with its name
        raise S3Error("SlowDown", "The object is being replaced too often; please try again.")

    def find(self, key: str) -> StoredObject | None:
        """Return the current version; None if the object does not exist."""
        try:
            fd, stored = self.open(key)
        except S3Error as error:
            if error.code == "NoSuchKey":
                return None
            raise
        os.close(fd)
        return stored

    def key_missing(self, key: str) -> S3Error:
        """Return the error of a key that does not exist, or of the bucket if that does not exist."""
        if not self.folder.is_dir():
            return bucket_missing(self.folder.name)
        return S3Error("NoSuchKey", "The specified key does not exist.", details={"Key": key})

    # ── changing ───────────────────────────────────────────────────────────────────────────────────────────────────

    def commit(
        self, key: str, staged: StagedFile, *, record: StoredRecord, check: Callable[[StoredObject | None], None]
    ) -> StoredObject:
        """Make a file the current version of a key.

        Args:
            key: The key.
            staged: The file, complete.
            record: Record to keep with the file.
            check: Raises ``S3Error`` if the current version, or its absence, forbids the change.
        """
        places = self.places(key)
        record = self.records.save(staged.fd, record)
        if self.is_durable:
            os.fsync(staged.fd)
        try:
            with self.staging.locked(key):
                current = self.find(key)
                check(current)
                is_last = current is not None and _is_only_name(current)
                path = self._place(staged, places)
                if current is not None and is_last:
                    self.records.drop(current.status)
                if path != places[-1]:
                    self._remove_escaped(places[-1])
        except BaseException:
            if not staged.is_placed:
                self.records.drop(os.fstat(staged.fd))
            raise
        if self.is_durable:
            sync_directory(path.parent)
        return StoredObject(key, path, os.fstat(staged.fd), record)

    def _place(self, staged: StagedFile, places: list[Path]) -> Path:
        for path in places:
            try:
                self._rename(staged, path)
            except OSError as error:
                if error.errno not in _IN_THE_WAY or path == places[-1]:
                    raise
            else:
                return path
        raise AssertionError(places)

    def _rename(self, staged: StagedFile, path: Path) -> None:
        for turn in range(_RENAMES_MAX):
            try:
                self._check_target(path)
                make_below(self.folder, path.parent)
                staged.path.rename(path)
                staged.is_placed = True
            except FileNotFoundError:  # a concurrent removal took the folder that was just made
                if turn == _RENAMES_MAX - 1:
                    raise
            else:
                return

    def _check_target(self, path: Path) -> None:
        """Refuse to write or remove through a link, and to replace what is not a file.

        Raises:
            S3Error: One of the parents is a link, or the path names a device, pipe or socket.
        """
        folder = path.parent
        while folder != self.folder.parent:
            if folder.is_symlink():
                raise S3Error("AccessDenied", "The key lies below a link, through which nothing is written.")
            folder = folder.parent
        with suppress(FileNotFoundError, NotADirectoryError):
            mode = path.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode)):
                raise S3Error("OperationAborted", "A device, pipe or socket has this name.")

    def _remove_escaped(self, path: Path) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
            prune(path.parent, below=self.escaped if self.escaped in path.parents else self.folder)

    def delete(self, key: str, *, check: Callable[[StoredObject | None], None]) -> Path | None:
        """Remove the current version of a key, if there is one.

        Args:
            key: The key.
            check: Raises ``S3Error`` if the current version, or its absence, forbids it.

        Returns:
            The folder to be synced, by ``sync``; None if nothing changed.
        """
        places = self.places(key)
        with self.staging.locked(key):
            current = self.find(key)
            check(current)
            if current is None:
                if not self.folder.is_dir():
                    raise bucket_missing(self.folder.name)
                return None
            is_last = _is_only_name(current)
            for path in places:
                if _is_file(path):
                    self._check_target(path)
                    path.unlink(missing_ok=True)
            if is_last:
                self.records.drop(current.status)
        for path in places:
            prune(path.parent, below=self.escaped if self.escaped in path.parents else self.folder)
        return current.path.parent

    def sync(self, folders: Iterable[Path]) -> None:
        """Make changes of folders survive a power cut, if that is promised."""
        if self.is_durable:
            for folder in folders:
                sync_directory(folder)

    def set_tags(self, key: str, tags: Mapping[str, str]) -> None:
        """Replace the tags of the current version, which stays the same version.

        Raises:
            S3Error: There is none.
        """
        with self.staging.locked(key), self.opened(key) as (fd, stored):
            self._check_target(stored.path)
            self.records.save(fd, replace(stored.record or StoredRecord(), tags=dict(tags)))


def _is_at(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), status)
    except OSError:
        return False


def _is_file(path: Path) -> bool:
    """Whether a path is a regular file, or a link to one."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _is_only_name(stored: StoredObject) -> bool:
    """Whether a version has no other name: its path is neither a link nor one of several hard links."""
    return stored.status.st_nlink == 1 and not stored.path.is_symlink()


# ── where the object of a key lies ────────────────────────────────────────────────────────────────────────────────────────


REGION_FILE = f"{HIDDEN}/region"
"""File of a bucket that names its region, if its creator named one."""

_NAME_BYTES_MAX = 255
_CHUNK = 200  # characters of an encoded key in one name
_MORE, _END = "+", "!"  # end a chunk that another one follows, and the last one; both are percent-encoded in keys
_BUCKET = re.compile(
    r"(?!\d+\.\d+\.\d+\.\d+$)(?!xn--|sthree-|amzn-s3-demo-)[a-z0-9](?:[a-z0-9-]|\.(?!\.)){1,61}[a-z0-9]"
)
_RESERVED_ENDS = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3")


def check_key(key: str) -> None:
    """Refuse a key that S3 does not accept, or that contains NUL, which no file name can hold.

    Raises:
        S3Error: The key is too long, is not UTF-8, or holds a NUL.
    """
    try:
        length_bytes = len(key.encode())
    except UnicodeEncodeError as error:
        raise S3Error("InvalidURI", "The key is not UTF-8.") from error
    if length_bytes > KEY_BYTES_MAX:
        raise S3Error(
            "KeyTooLongError",
            "Your key is too long",
            details={"Size": str(length_bytes), "MaxSizeAllowed": str(KEY_BYTES_MAX)},
        )
    if not key or "\0" in key:
        raise S3Error("InvalidArgument", "A key must not be empty, and must not hold a NUL.")


def check_bucket_name(name: str) -> None:
    """Refuse a name that S3 does not allow for new buckets.

    Raises:
        S3Error: ``InvalidBucketName``.
    """
    if not _BUCKET.fullmatch(name) or name.endswith(_RESERVED_ENDS) or ".-" in name or "-." in name:
        raise S3Error("InvalidBucketName", "The specified bucket is not valid.", details={"BucketName": name})


def is_folder_name(name: str) -> bool:
    """Whether a folder of this name is served as a bucket; hidden folders are not, and no name leads elsewhere."""
    return bool(name) and not name.startswith(".") and "/" not in name and "\0" not in name and name.isprintable()


def natural_path(key: str) -> str | None:
    """Return the path of a key below the bucket's folder; None if no path of a file can express it."""
    for segment in key.split("/"):
        if segment in ("", ".", "..") or len(segment.encode()) > _NAME_BYTES_MAX:
            return None
        if segment.startswith(TEMPORARY_PREFIX) and segment.endswith(TEMPORARY_SUFFIX):
            return None
    return key


def escaped_path(key: str) -> str:
    """Return the path of a key below the folder of escaped keys: its percent-encoded text in names of 200 characters."""
    text = quote(key, safe="")
    chunks = [text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK)]
    return "/".join([chunk + _MORE for chunk in chunks[:-1]] + [chunks[-1] + _END])


def unescaped(path: str) -> str | None:
    """Return the key of a path that ``escaped_path`` returned; None for any other path."""
    *chunks, last = path.split("/")
    if not last.endswith(_END) or not all(chunk.endswith(_MORE) for chunk in chunks):
        return None
    try:
        key = unquote("".join(chunk[:-1] for chunk in chunks) + last[:-1], errors="strict")
    except UnicodeDecodeError:
        return None
    return key if escaped_path(key) == path else None
