"""``LocalStore``: a directory as a store; a key is a path below it.

Decisions:

- *Keys are names of files.* ``..``, ``.`` and empty segments (``//``, a leading or trailing ``/``), NUL, names longer than
  255 bytes and the store's own temporary names are refused with ``ConfigError`` before anything is touched. A write whose
  key has a file as a parent, or names a directory, fails with a ``StoreError`` of status 409. No key leads out of the root.
- *Links* are followed, because data sets are often trees of links to other disks, and no key can make a link. A link to one
  of its own parents is left out of listings. Writing replaces the link and not its target.
- *Objects are visible whole or not at all.* Writes go to a file without a name (``O_TMPFILE``), are synced, get a hidden name
  and are renamed at once, so that a killed process leaves nothing. The parts of an upload are appended to one such file, in
  the order in which they come, and never while the upload is being completed or dropped; if that is not their order, they are
  copied to another one at the end. Where the file system has no such files, the file has the hidden name from its beginning.
  Hidden files that are left are never listed, read or written again.
- *Directories are not objects*: they are made when they are needed and removed when ``delete`` leaves them empty, and an
  empty one is not listed.
- *A record* (``records.py``) is kept of a file that was written with headers or tags. A file of another program has none.
  Only ``Head`` looks for it, so that reading costs no more.
- *Conditions*: of several writes with ``if_absent`` or ``if_match``, of any threads and processes, one succeeds. Writes with
  ``if_match`` hold a lock of the directory while they compare and rename. Other writes and deletions of this class wait for
  it (they share it), so none of them is lost; where the file system has no locks, they go on, and ``if_match`` fails.
- *Unfinished uploads* hold an open file from their first part on. They are dropped after a day without a part, when another
  one begins, and are at most a quarter of the files that the process may open.
- *A version is pinned* by size, modification time, inode and the time of the last change of status. All but the last one are
  compared again when a file's bytes have been read. Data sets pin without it (``types.lasting_etag``).
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.errors import (
    ConfigError,
    DirectoryMissingError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectMissingError,
    ShortReadError,
    SpanError,
    StoreError,
    ThrottledError,
)
from penstock.store.base import check_key
from penstock.store.records import RECORDS_FOLDER, FileRecords, copied_record, record_of
from penstock.store.threaded import ThreadedStore, check_ascending, span_within
from penstock.store.tree import TEMPORARY_PREFIX, TEMPORARY_SUFFIX, Tree, info_of
from penstock.types import ByteRange, Copy, CopyPart, Head, Part, lasting_etag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.store.records import StoredRecord
    from penstock.store.threaded import BlockingJob
    from penstock.types import CompleteMultipart, Get, Key, ListPage, ObjectInfo, Page, Put, PutPart

T = TypeVar("T")

SEGMENT_BYTES_MAX = 255
"""Longest name in bytes: ``NAME_MAX`` of every common file system."""

STEP_BYTES = 8 << 20
"""Bytes, read or written in a few milliseconds, after which a transfer checks whether it was cancelled."""

UPLOAD_IDLE_S_MAX = 24 * 3600.0
"""Seconds without a new part after which an upload is dropped when another one begins: its file is open until then."""

_NO_KERNEL_COPY = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY)
_RENAMES_MAX = 16  # attempts to make a directory that a concurrent delete keeps removing
_CAN_LINK = Path("/proc/self/fd").is_dir()  # by which a file without a name gets one
_NO_UNNAMED = frozenset(
    {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS}
)  # what file systems without them say


class LocalStore(ThreadedStore["_Upload"]):
    """Files below a directory.

    Args:
        root: Path of the directory; the first write makes it if it does not exist.
        threads_max: The most operations at the same time; at least 1.

    Cost: Threads while there is work; bytes read land in the caller's buffer without a copy.
    """

    pages_anywhere = False  # a directory is read whole, and kept for the next page
    keeps_headers = True
    keeps_records = True

    def __init__(self, root: str | os.PathLike[str], *, threads_max: int = 16) -> None:
        path = os.fspath(root)
        if "\0" in path:
            raise ConfigError(f"the directory {path!r} has a NUL in its name")
        super().__init__(threads_max=threads_max, name="local")
        self.root = Path(path).absolute()
        self._tree = Tree(self.root)
        self.records = FileRecords(self.root / RECORDS_FOLDER)

    def describe(self, key: Key) -> str:
        """Return ``file:///root/key``."""
        return f"file://{self.root}/{key}"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(LocalStore, threads_max=self._pool.threads_max), (str(self.root),)

    def __repr__(self) -> str:
        return f"<LocalStore {str(self.root)!r}>"

    def check_key(self, key: Key) -> None:
        """Refuse keys that cannot name a file below the root.

        Raises:
            ConfigError: The key breaks the rule that the message names.
        """
        check_key(key)
        if "\0" in key:
            raise ConfigError(f"key {key!r} has a NUL, which no file name may have")
        for segment in key.split("/"):
            if segment in ("", ".", ".."):
                what = f"a {segment!r} segment" if segment else "an empty segment (a leading, trailing or double slash)"
                raise ConfigError(f"key {key!r} has {what}; a local store's keys are paths below {self.root}")
            if len(segment.encode()) > SEGMENT_BYTES_MAX:
                raise ConfigError(f"key {key[:40]!r}... has a segment of more than {SEGMENT_BYTES_MAX} bytes")
            if segment.startswith(TEMPORARY_PREFIX) and segment.endswith(TEMPORARY_SUFFIX):
                raise ConfigError(f"key {key!r} has the form of this store's own temporary files")

    def path(self, key: Key) -> Path:
        """Return the path of the file that `key` names.

        Raises:
            ConfigError: The key cannot name a file.
        """
        self.check_key(key)
        return self.root / key

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _opened(self, key: Key, if_match: str | None = None) -> Iterator[tuple[int, ObjectInfo]]:
        """Open a file: its descriptor and record. If the file has changed after the block, ``ObjectChangedError`` is raised."""
        # O_NONBLOCK keeps a FIFO of this name from blocking the thread; it changes nothing for regular files.
        fd = os.open(self.root / key, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ObjectMissingError("no regular file has this name", status=404)
            info = info_of(key, status)
            if if_match is not None:
                _check_version(info, if_match)
                info = info._replace(etag=if_match)
            yield fd, info
            now = info_of(key, os.fstat(fd))
            if lasting_etag(now.etag) != lasting_etag(
                info.etag
            ):  # replacing an open file changes the time of its status
                raise ObjectChangedError(f"the file changed from {info.etag} to {now.etag} in between", status=412)
        finally:
            os.close(fd)

    def _get(self, operation: Get, job: BlockingJob) -> None:
        with self._opened(operation.key, operation.if_match) as (fd, info):
            job.completion.info = info
            span = span_within(operation, info.size_bytes)
            if span is None:
                return
            landing, view = job.land(info, span)
            done = 0
            while done < len(view):
                job.check()
                count = os.preadv(fd, [view[done : done + STEP_BYTES]], span.start + done)
                if count == 0:
                    now = info_of(operation.key, os.fstat(fd))
                    if now.size_bytes != info.size_bytes:
                        raise ObjectChangedError(f"the file shrank from {info.size_bytes} to {now.size_bytes} bytes")
                    raise ShortReadError(f"the file ends after {span.start + done} of {info.size_bytes} bytes")
                done += count
                landing.offset += count

    def perform(self, job: BlockingJob) -> None:
        """Perform ``job.operation``; a HEAD that names the version by a lasting ETag is answered with that."""
        super().perform(job)
        operation, info = job.operation, job.completion.info
        if isinstance(operation, Head) and info is not None and operation.etag == lasting_etag(info.etag):
            job.completion.info = info._replace(etag=operation.etag)

    def _head(self, operation: Head) -> ObjectInfo:
        path = self.root / operation.key
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ObjectMissingError("no regular file has this name", status=404)
        info = info_of(operation.key, status)
        if operation.etag is not None and not operation.headers:  # the caller wants to know whether it has changed
            return info
        record = self.records.load(str(path), status)
        return info if record is None else record.described(info)

    def with_record(self, info: ObjectInfo) -> ObjectInfo:
        """Return the description of a file with what its record has. Cost: blocks for two system calls, about 5 µs."""
        path = str(self.root / info.key)
        status = _status(path)
        record = self.records.load(path, status) if status is not None else None
        return info if record is None else record.described(info)

    def _list_page(self, operation: ListPage) -> Page:
        return self._tree.page(operation)

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _make_parent(self, key: Key) -> Path:
        parent = (self.root / key).parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise StoreError(
                f"{parent} is a file, or has a file in its path, so it cannot hold objects", status=409
            ) from error
        return parent

    @contextmanager
    def _staged(self, key: Key) -> Iterator[tuple[int, Path]]:
        """Make a file that ``_commit`` shows under `key`, and the hidden name that it has or gets; else it is removed."""
        fd, path = self._new_hidden(key, os.urandom(8).hex())
        try:
            yield fd, path
        except BaseException:
            with suppress(FileNotFoundError):
                path.unlink()
            prune(path.parent, below=self.root)
            raise
        finally:
            os.close(fd)

    def _new_hidden(self, key: Key, name: str) -> tuple[int, Path]:
        """Make a file in the directory of `key`, and the hidden name that it has or gets."""
        path = (self.root / key).parent / f"{TEMPORARY_PREFIX}{name}{TEMPORARY_SUFFIX}"
        return self._in_parent(key, lambda: _new_file(path)), path

    def _in_parent(self, key: Key, create: Callable[[], T]) -> T:
        """Create a name in the directory of `key`, which is made if a concurrent delete has removed it again."""
        for _ in range(_RENAMES_MAX):
            self._make_parent(key)
            with suppress(FileNotFoundError):
                return create()
        return create()

    def _commit(
        self, operation: Put | Copy | CompleteMultipart, fd: int, path: Path, record: StoredRecord | None
    ) -> ObjectInfo:
        """Sync the file, give it its hidden name if it has none, and rename it to its key if the conditions hold."""
        key, if_match = (operation.target, None) if isinstance(operation, Copy) else (operation.key, operation.if_match)
        if record is not None:
            self.records.save(fd, record)
        os.fsync(fd)
        if not os.fstat(fd).st_nlink:
            # Links are followed only if a directory is given, which an absolute path makes no use of.
            self._in_parent(key, lambda: os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd))
        target = self.root / key
        with locked_directory(target.parent, is_shared=if_match is None):
            replaced = _status(target)
            if replaced is not None and not (stat.S_ISREG(replaced.st_mode) or stat.S_ISDIR(replaced.st_mode)):
                raise StoreError(
                    f"{target} is not a regular file: a device, pipe or socket is never replaced", status=409
                )
            is_last = replaced is not None and replaced.st_nlink == 1 and not target.is_symlink()
            if if_match is not None:
                _check_version(info_of(key, replaced) if replaced is not None else None, if_match)
            try:
                if getattr(operation, "if_absent", False):
                    target.hardlink_to(path)
                    path.unlink()
                else:
                    path.replace(target)
            except FileExistsError as error:
                raise ObjectExistsError("an object with this key exists", status=412) from error
            except (IsADirectoryError, NotADirectoryError) as error:
                raise StoreError(f"{target} is a directory, so it cannot be an object", status=409,
                                 hint="choose another key, or remove it") from error  # fmt: skip
        if replaced is not None and is_last:
            self.records.drop(replaced)
        sync_directory(target.parent)
        return info_of(key, os.fstat(fd))

    def _put(self, operation: Put) -> ObjectInfo:
        with self._staged(operation.key) as (fd, path):
            write_all(fd, memoryview(operation.body).cast("B"))
            return self._commit(operation, fd, path, record_of(operation))

    def _delete(self, operation: Any, job: BlockingJob) -> dict[Key, str]:
        failed: dict[Key, str] = {}
        for key in operation.keys:
            job.check()
            path = self.root / key
            try:
                with locked_directory(path.parent, is_shared=True):
                    status = path.lstat()
                    path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                if not path.is_dir():  # a directory is not an object, so there is nothing to delete
                    failed[key] = error.strerror or str(error)
                continue
            if status.st_nlink == 1:
                self.records.drop(status)
            prune(path.parent, below=self.root)
        return failed

    def _copy(self, operation: Copy, job: BlockingJob) -> ObjectInfo:
        with (
            self._opened(operation.source, operation.if_match) as (source, info),
            self._staged(operation.target) as (fd, path),
        ):
            copy_range(source, ByteRange(0, info.size_bytes), fd, check=job.check)
            record = copied_record(self.records.load(source, os.fstat(source)), operation)
            return self._commit(operation, fd, path, record)

    # ── multipart: one file that no name shows, to which parts are appended as they come ────────────────────────────

    def _new_upload(self, key: Key, upload_id: str) -> _Upload:
        for old_id, (create, upload) in list(self._uploads.items()):
            if time.monotonic() - upload.used_s > UPLOAD_IDLE_S_MAX:
                with suppress(OSError):  # another thread ends it
                    self._end_upload(create.key, old_id)
        uploads_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        if len(self._uploads) >= uploads_max:
            raise ThrottledError(
                f"{len(self._uploads)} uploads have been begun, a quarter of the files that this process may open",
                hint="complete or abort uploads, or raise the limit of open files (ulimit -n)",
                status=503,
                code="SlowDown",
            )
        return _Upload(partial(self._new_hidden, key, upload_id))

    def _put_part(self, operation: PutPart | CopyPart, job: BlockingJob) -> Part:
        if isinstance(operation, CopyPart):
            upload = self._upload(operation.target, operation.upload_id)
            with self._opened(operation.source, operation.if_match) as (source, info):
                if operation.span.end > info.size_bytes:
                    raise SpanError(f"the range ends at byte {operation.span.end} of {info.size_bytes}", status=416)
                with upload.appended(operation.part_number, operation.span.length_bytes) as (fd, part):
                    copy_range(source, operation.span, fd, check=job.check)
            return part
        body = memoryview(operation.body).cast("B")
        with self._upload(operation.key, operation.upload_id).appended(operation.part_number, len(body)) as (fd, part):
            write_all(fd, body)
        return part

    def _end_upload(self, key: Key, upload_id: str) -> None:
        """Forget an upload, whose parts disappear."""
        with self._ending(key, upload_id):
            pass

    @contextmanager
    def _ending(self, key: Key, upload_id: str) -> Iterator[_Upload]:
        """Let no other operation use an upload. After the block it is forgotten, and stays only if there was an error."""
        upload = self._upload(key, upload_id)
        with upload.lock:
            upload.check()
            upload.is_ending = True
        try:
            yield upload
        except BaseException:
            upload.is_ending = False
            raise
        del self._uploads[upload_id]
        if upload.file is not None:
            fd, path = upload.file
            os.close(fd)
            with suppress(FileNotFoundError):
                path.unlink()
            prune(path.parent, below=self.root)

    def _complete(self, operation: CompleteMultipart, job: BlockingJob) -> ObjectInfo:
        with self._ending(operation.key, operation.upload_id) as upload:
            record = record_of(self._uploads[operation.upload_id][0])
            check_ascending(operation)
            spans = [upload.span_of(part) for part in operation.parts]
            assert upload.file is not None  # there are parts
            source, source_path = upload.file
            starts = [0, *(span.end for span in spans)]
            # The file is the object, unless there are further parts, also those that are still being written.
            if starts == [*(span.start for span in spans), upload.end]:
                return self._commit(operation, source, source_path, record)
            with self._staged(operation.key) as (fd, path):
                for span in spans:
                    copy_range(source, span, fd, check=job.check)
                return self._commit(operation, fd, path, record)

    def close(self) -> None:
        """Finish what was submitted, and drop uploads that were not completed. Idempotent."""
        super().close()
        for upload_id, (create, _) in list(self._uploads.items()):
            self._end_upload(create.key, upload_id)

    def as_store_error(self, error: Exception, operation: Any) -> StoreError:
        """Map `error` as other stores do; a missing root is a ``DirectoryMissingError``."""
        mapped = super().as_store_error(error, operation)
        if type(mapped) is ObjectMissingError and not self.root.is_dir():
            text = f"the directory {self.root} does not exist"
            missing = DirectoryMissingError(text, operation=mapped.operation, url=mapped.url)
            missing.__cause__ = error
            return missing
        return mapped


@dataclass(slots=True)
class _Upload:
    """A multipart upload.

    Attributes:
        make_file: Makes that file, and returns its descriptor and the hidden name that it has or gets.
        file: The open file to which parts are appended, and its hidden name; None before the first part.
        end: Offset of the next part in the file, in bytes, from 0.
        parts: Span in the file and ETag of each part, by its number, from 1.
        used_s: When the last part began to come, or the upload, in seconds of the monotonic clock.
        is_ending: Whether an operation is completing or dropping it, so that no other may use it.
        lock: Held while a part begins, and while `is_ending` is set, after which the descriptor may be closed.
    """

    make_file: Callable[[], tuple[int, Path]]
    file: tuple[int, Path] | None = None
    end: int = 0
    parts: dict[int, tuple[ByteRange, str]] = field(default_factory=dict)
    used_s: float = field(default_factory=time.monotonic)
    is_ending: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        """Raise a StoreError if the upload is completed or dropped by another operation; the caller holds the lock."""
        if self.is_ending:
            raise StoreError("the upload is being completed or aborted, or was", status=404, code="NoSuchUpload")

    @contextmanager
    def appended(self, number: int, size_bytes: int) -> Iterator[tuple[int, Part]]:
        """Open the file at the place of a new part, which belongs to the upload if the block ends without an error."""
        with self.lock:
            self.check()
            self.used_s = time.monotonic()
            self.file = self.file or self.make_file()
            source, path = self.file
            # Another open file has a position of its own, so that parts are written at the same time.
            fd = os.open(f"/proc/self/fd/{source}" if _CAN_LINK else path, os.O_WRONLY | os.O_CLOEXEC)
            span = ByteRange(self.end, self.end + size_bytes)
            self.end = span.end
        try:
            os.lseek(fd, span.start, os.SEEK_SET)
            part = Part(number, f'"{path.name}-{span.start}-{span.end}"')
            yield fd, part
            self.parts[number] = span, part.etag
        finally:
            os.close(fd)

    def span_of(self, part: Part) -> ByteRange:
        """Return where a part lies. Raises a StoreError if it was not sent, or another one of its number."""
        if part.part_number not in self.parts:
            raise StoreError(f"part {part.part_number} was not sent", status=400, code="InvalidPart")
        span, etag = self.parts[part.part_number]
        if etag != part.etag:
            raise StoreError(f"part {part.part_number} is not the one that was sent", status=400, code="InvalidPart")
        return span


def copy_range(source: int, span: ByteRange, target: int, *, check: Callable[[], None] | None = None) -> None:
    """Append a range of an open file to another one inside the kernel; some file systems share the blocks.

    Args:
        source: Descriptor of the file to read.
        span: The range.
        target: Descriptor of the file to write, at its position.
        check: Called between the steps of a long range; it may raise to end it.

    Raises:
        ShortReadError: The file ends before the range.
    """
    offset, is_shared = span.start, True
    while offset < span.end:
        if check is not None:
            check()
        count = min(STEP_BYTES, span.end - offset)
        try:
            if is_shared:
                copied = os.copy_file_range(source, target, count, offset)
            else:
                copied = os.sendfile(target, source, offset, count)
        except OSError as error:
            if not is_shared or error.errno not in _NO_KERNEL_COPY:
                raise
            is_shared = False
            continue
        if copied == 0:
            raise ShortReadError(f"the file ends after {offset} of {span.end} bytes")
        offset += copied


def write_all(fd: int, view: memoryview) -> None:
    """Append all of a buffer to a file."""
    while view:
        view = view[os.write(fd, view[:STEP_BYTES]) :]


def _new_file(path: Path) -> int:
    """Open a new file without a name in the directory of `path`; if there can be none, with this name."""
    flags = os.O_RDWR | os.O_CLOEXEC
    if _CAN_LINK:
        try:
            return os.open(path.parent, flags | os.O_TMPFILE, 0o666)
        except OSError as error:
            if error.errno not in _NO_UNNAMED:
                raise
    return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)


def _status(path: Path | str) -> os.stat_result | None:
    """Return the status of what a path names or links to; None if there is nothing."""
    try:
        return os.stat(path)  # noqa: PTH116 - a `Path` for each of many files would cost more than the call
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return None


def _check_version(found: ObjectInfo | None, if_match: str) -> None:
    if found is None:
        raise ObjectMissingError("there is no object that could be replaced", status=404)
    if if_match not in (found.etag, lasting_etag(found.etag)):
        raise ObjectChangedError(f"the file is now version {found.etag}, not {if_match}", status=412)


@contextmanager
def locked_directory(path: Path, *, is_shared: bool) -> Iterator[None]:
    """Hold a lock of a directory, among all threads and processes, until the block ends; reading it needs none.

    A shared lock excludes only those that are not shared. If the directory cannot be locked, the block goes on without,
    because nobody else can hold a lock of it.
    """
    fd = -1
    try:
        with suppress(OSError) if is_shared else nullcontext():
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(fd, fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX)
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def prune(folder: Path, *, below: Path) -> None:
    """Remove a directory and then its parents, until one is not empty, but never `below`, in which they lie."""
    while folder != below and below in folder.parents:
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass  # somebody else has removed it
        except OSError:  # it is not empty, or may not be removed
            return
        folder = folder.parent


def sync_directory(path: Path) -> None:
    """Make a rename survive a power cut, if the file system lets directories be synced."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
