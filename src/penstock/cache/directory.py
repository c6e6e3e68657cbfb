"""The directory of a cache: reading, writing, counting and removing its entries.

::

    PATH/                       0700
        CACHEDIR.TAG            tells backup tools to skip it, and ``clear`` that penstock created it
        v1/                     one folder for each layout; a penstock with another layout uses another folder
            entries/00 .. ff/   entries, by hash of their identity; consecutive blocks of an object in different folders
            temporary/          files named TOKEN-NUMBER that are being written
            leases              byte locks: which process fetches what, and which tokens are alive
            usage               int64[256]: bytes in each folder

Nothing is synced: after a power cut, checksums reveal a torn entry, and fetching it again costs one request. No failure of
the disk is raised: it is counted, logged once, and an entry that cannot be read counts as missing.

Not split because reading, writing and removing share the accounting and the list of verified blocks.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cache.cpu_slots import CpuSlots
from penstock.cache.entry import (
    DISK_PAGE_BYTES,
    FOLDERS_COUNT,
    CorruptEntryError,
    EntryHeader,
    EntryName,
    allotted_bytes,
    block_name,
    check_data,
    decode,
    encode,
    header_bytes_of,
    takes_direct_writes,
)
from penstock.cache.shared_files import Leases, Usage
from penstock.cache.statistics import DiskFailures
from penstock.errors import ConfigError
from penstock.memory.buffers import small_buffer
from penstock.system import forks
from penstock.system.private import check_private, is_trusted, open_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.cache.config import CacheConfig
    from penstock.cache.cpu_slots import ReadFunction
    from penstock.cache.statistics import Counts
    from penstock.types import ByteRange

_FREE_FILES_MIN = 32
"""With fewer free inodes the file system counts as full, whatever its free bytes are: small objects use up inodes."""

_SEEN_COUNT_MAX = 1 << 18
_UNSEEN = 0.0, -1
_TOUCH_S = 600.0
"""Each process marks a block as used at most once in 10 minutes, so the order of use is known to 10 minutes."""

LAYOUT = "v1"
TAG_NAME = "CACHEDIR.TAG"
TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# A cache of penstock: everything here can be fetched again.\n"


class NewEntry(NamedTuple):
    """An entry to store.

    Attributes:
        name: Name of the entry.
        data: uint8[n].
        file_bytes: Size of header and data in bytes.
        header: Computes the header. It is called just before the entry is written, so that its pass over the data leaves
            them in the processor's cache.
    """

    name: EntryName
    data: memoryview
    file_bytes: int
    header: Callable[[], bytes]


class BlockRead(NamedTuple):
    """A block of an object, or a part of a block, to read.

    Attributes:
        name: Name of the entry.
        number: Number of the block in its object, which the entry must confirm.
        size_bytes: Size of the whole block in bytes.
        start: First byte wanted, counted from the start of the block.
        view: uint8[n], writable: the destination. It is part of the caller's landing, so that nothing is copied.
    """

    name: EntryName
    number: int
    size_bytes: int
    start: int
    view: memoryview


def new_entry(kind: int, name: EntryName, identity: bytes, data: memoryview, **fields: Any) -> NewEntry:
    """Return an entry of which the header, with the checksum of the data, is made when it is stored; see ``entry.encode``."""
    file_bytes = header_bytes_of(identity, len(data)) + len(data)
    return NewEntry(name, data, file_bytes, partial(encode, kind, identity, data, **fields))


def block_read(
    digest: str, index: int, wanted: ByteRange, view: memoryview, *, size_bytes: int, block_bytes: int
) -> BlockRead:
    """Return the read that fills a view with the part of a range that one block has.

    Args:
        digest: Digest of the identity of the object's version.
        index: Number of the block.
        wanted: The range.
        view: uint8[wanted], writable.
        size_bytes: Size of the object.
        block_bytes: Size of a full block.
    """
    start, end = index * block_bytes, min((index + 1) * block_bytes, size_bytes)
    begin, stop = max(start, wanted.start), min(end, wanted.end)
    part = view[begin - wanted.start : stop - wanted.start]
    return BlockRead(block_name(digest, index), index, end - start, begin - start, part)


class CacheDirectory:
    """The entries of one cache directory. All threads may use it.

    Args:
        config: The path of the directory; see ``CacheConfig``.
        counts: Counters to update.
    """

    def __init__(self, config: CacheConfig, counts: Counts) -> None:
        self.top = str(config.path)
        self.root = f"{self.top}/{LAYOUT}"
        self.entries = f"{self.root}/entries/"
        self.failures = DiskFailures(self.top)
        self.leases = Leases(f"{self.root}/leases", self.failures)
        self.usage = Usage(f"{self.root}/usage")
        self.reserve: Callable[[Mapping[int, int]], bool] | None = None
        """Reserves room for entries, given as bytes by folder. Without it, nothing is stored."""
        self.counts = counts
        self._seen: dict[
            str, tuple[float, int]
        ] = {}  # by file name of a verified block: last marked as used, and its size
        self._reset()
        forks.register(self)
        forks.register(self.failures)

    def _reset(self) -> None:
        self._slots = CpuSlots()
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # entries and their accounting change together
        self._reserved_bytes: Counter[int] = Counter()  # by folder: counted, but not yet written
        self._pages = threading.local()
        self._writes_directly = True  # until the file system refuses direct I/O
        self.is_full = False
        """The file system refused bytes that it reported as free, because of a quota."""

    def after_fork_in_child(self) -> None:
        """Forget the parent's files. The names of temporary files start again, as the child has another token."""
        self._reset()

    def prepare(self) -> None:
        """Create the directory and open its shared files. Failures of the disk are counted, not raised.

        Raises:
            ConfigError: Other users could have put files into the directory.
        """
        try:
            self._make()
        except OSError as error:
            self.failures.note("write", error)
            with suppress(OSError):  # a directory that cannot be written may still be read
                self.usage.open(empty=False)

    def _make(self) -> None:
        os.makedirs(os.path.dirname(self.top), mode=0o700, exist_ok=True)  # noqa: PTH103, PTH120 - paths are text here
        for folder in (self.top, self.root, self.entries.rstrip("/"), f"{self.root}/temporary"):
            with suppress(FileExistsError):
                os.mkdir(folder, 0o700)  # noqa: PTH102
            check_private(folder, what="cache")
        for number in folders():
            check_private(f"{self.entries}{number:02x}", what="cache")
        tag = f"{self.top}/{TAG_NAME}"
        if not os.path.exists(tag):  # noqa: PTH110
            fd = open_private(tag, os.O_WRONLY | os.O_CREAT)
            try:
                os.write(fd, TAG)
            finally:
                os.close(fd)
        self.usage.open(empty=not os.listdir(self.entries))  # noqa: PTH208
        self.leases.open(anew=True)

    def close(self) -> None:
        """Close the shared files; nothing is stored afterwards. Idempotent."""
        self.reserve = None
        self.leases.close()
        self.usage.close()

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    def read_blocks(self, identity: bytes, blocks: Sequence[BlockRead]) -> list[bool]:
        """Fill the views of several blocks of one object.

        Args:
            identity: Identity of the object's version, which the entries must confirm.
            blocks: Blocks to read; all of their entries are open at the same time.

        Returns:
            For each block, whether its view was filled; False if the entry is missing or wrong.

        Cost: four system calls for each block (open, header, read, close), or six if the page cache lacks it. The first read
            of a block in this process also computes its checksum and marks it as used.
        """
        opened: list[int] = []
        found: list[bool | None] = []
        try:
            with self._slots:
                for block in blocks:
                    opened.append(fd := self._open(block.name))
                    found.append(fd >= 0 and self._read(fd, identity, block, waits=False))
            return [
                self._read(fd, identity, block, waits=True) is True if hit is None else hit
                for hit, fd, block in zip(found, opened, blocks, strict=True)
            ]
        finally:
            for fd in opened:
                if fd >= 0:
                    os.close(fd)

    def read_blocks_nowait(self, identity: bytes, blocks: Sequence[BlockRead]) -> bool:
        """Fill the views of several blocks of one object if the page cache has all of them.

        Args:
            identity: Identity of the object's version, which the entries must confirm.
            blocks: Blocks to read.

        Returns:
            Whether all views were filled; if not, some of them may have been.

        Cost: as ``read_blocks``. It never waits for a disk, nor for another thread.
        """
        for block in blocks:
            fd = self._open(block.name)
            if fd < 0:
                return False
            try:
                if not self._read(fd, identity, block, waits=False):
                    return False
            finally:
                os.close(fd)
        return True

    def _open(self, name: EntryName) -> int:
        """Return a descriptor of the entry, or -1 if there is none."""
        try:
            return os.open(self.entries + name.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                self.failures.note("read", error)
            return -1

    def _read(self, fd: int, identity: bytes, block: BlockRead, *, waits: bool) -> bool | None:
        """Fill a block's view; None if that would wait for the disk and `waits` is false."""
        name = block.name
        seen_s, seen_bytes = self._seen.get(name.file, _UNSEEN)
        is_verified = seen_bytes == block.size_bytes  # a store may state two sizes for one version
        read = self._read_again if is_verified else self._read_first
        try:
            if not read(fd, identity, block, self._slots.read_waiting if waits else self._slots.read_cached):
                return None
            now_s = time.monotonic()
            if not is_verified or now_s - seen_s > _TOUCH_S:
                self._mark_used(fd, block, now_s)
        except CorruptEntryError as error:
            self._drop_corrupt(name, fd, error)
            return False
        except OSError as error:
            self.failures.note("read", error)
            return False
        self.counts.hit_count += 1
        self.counts.hit_bytes += len(block.view)
        return True

    def _read_first(self, fd: int, identity: bytes, block: BlockRead, read: ReadFunction) -> bool:
        """Read the whole block, verify it, and fill the view."""
        view, size_bytes = block.view, block.size_bytes
        whole = view if len(view) == size_bytes else small_buffer(size_bytes)[:size_bytes]
        head = bytearray(header_bytes_of(identity, size_bytes))

        def check(count: int) -> None:
            if count != size_bytes:  # the rest of the view would be what its memory held before
                raise CorruptEntryError(f"it holds {count} of {size_bytes} bytes")
            _refuse_other_users(fd)
            header = decode(head)
            if (header.identity, header.block_index) != (identity, block.number):
                raise CorruptEntryError("it is another block")
            check_data(header, whole[:count])

        if not read(fd, head, whole, len(head), check):
            return False
        if whole is not view:
            view[:] = whole[block.start : block.start + len(view)]
        self.counts.verified_count += 1
        return True

    def _read_again(self, fd: int, identity: bytes, block: BlockRead, read: ReadFunction) -> bool:
        """Read only the wanted part of a block that this process has verified."""
        view, size_bytes = block.view, block.size_bytes
        header_bytes = header_bytes_of(identity, size_bytes)
        is_large = header_bytes == DISK_PAGE_BYTES and len(view) == size_bytes  # CpuSlots.read_waiting tells why

        def check(count: int) -> None:
            if count != len(view):
                raise CorruptEntryError("the file is shorter than it was")

        return read(fd, bytearray(header_bytes if is_large else 0), view, header_bytes + block.start, check)

    def _mark_used(self, fd: int, block: BlockRead, now_s: float) -> None:
        with suppress(OSError):  # read-only, or another user's file: other processes then maintain the order of use
            os.utime(fd)
        seen = self._seen
        if len(seen) >= _SEEN_COUNT_MAX:
            # The others are verified again.
            self._seen = dict(itertools.islice(seen.items(), _SEEN_COUNT_MAX // 2, None))
            seen = self._seen
        seen[block.name.file] = now_s, block.size_bytes

    def _drop_corrupt(self, name: EntryName, fd: int, error: Exception) -> None:
        self.counts.corrupt_count += 1
        self._seen.pop(name.file, None)
        self.failures.note_corrupt(f"{name.path} is corrupt: {error}; it is removed and fetched again")
        self.remove(name, os.fstat(fd).st_size)

    def read_entry(self, name: EntryName, identity: bytes | None = None) -> tuple[EntryHeader, memoryview] | None:
        """Return a small entry as a whole, verified.

        Args:
            name: Name of the entry.
            identity: Identity that the entry must have; None accepts any.

        Returns:
            The header and the data, or None if the entry does not exist.

        Cost: as for a block.
        """
        fd = self._open(name)
        if fd < 0:
            return None
        try:
            _refuse_other_users(fd)
            raw = memoryview(os.pread(fd, os.fstat(fd).st_size, 0))
            header = decode(raw)
            data = raw[header.header_bytes :]
            check_data(header, data)
        except CorruptEntryError as error:
            self._drop_corrupt(name, fd, error)
            return None
        except OSError as error:
            self.failures.note("read", error)
            return None
        finally:
            os.close(fd)
        return (header, data) if identity is None or header.identity == identity else None

    def read_header(self, name: EntryName, identity: bytes | None = None) -> EntryHeader | None:
        """Return the header of an entry; None if it is missing, corrupt or of another identity. Cost: four system calls."""
        fd = self._open(name)
        if fd < 0:
            return None
        try:
            _refuse_other_users(fd)
            header = decode(os.pread(fd, max(header_bytes_of(identity or b"", 0), DISK_PAGE_BYTES), 0))
        except (OSError, CorruptEntryError):
            return None  # read_blocks reports the problem
        finally:
            os.close(fd)
        return header if identity is None or header.identity == identity else None

    def exists(self, name: EntryName) -> bool:
        """Whether there is an entry of this name. Cost: one system call."""
        return os.access(self.entries + name.path, os.F_OK)

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, entries: Sequence[NewEntry]) -> int:
        """Store entries, each completely or not at all, after making room if necessary.

        Returns:
            The number of entries stored. For the others there was no room, or the disk refused them.

        Cost: five system calls, and four for each entry.
        """
        stored_count = 0
        if self.failures.writable():
            try:
                stored_count = self._keep_where_it_fits(entries)
            except OSError as error:
                self.failures.note("write", error)
        self.counts.refused_count += len(entries) - stored_count
        return stored_count

    def _keep_where_it_fits(self, entries: Sequence[NewEntry]) -> int:
        try:
            stored_count = self._keep(entries)
        except FileNotFoundError:  # somebody removed the directory
            try:
                self._make()
            except ConfigError as error:  # and another user put one in its place
                raise PermissionError(errno.EPERM, error.what) from error
            stored_count = self._keep(entries)
        if stored_count is None and len(entries) > 1:
            return sum(map(self._keep_where_it_fits, ([entry] for entry in entries)))
        return stored_count or 0

    def _keep(self, entries: Sequence[NewEntry]) -> int | None:
        """Reserve room for all entries and write them.

        Returns:
            The number of entries written before the disk refused one; None if there is no room for all of them.
        """
        sizes_bytes: dict[int, int] = {}
        for entry in entries:
            folder = entry.name.folder
            sizes_bytes[folder] = sizes_bytes.get(folder, 0) + allotted_bytes(entry.file_bytes)
        if self.reserve is None or not self.reserve(sizes_bytes):
            return None
        stored_count = 0
        try:
            for entry in entries:
                self._write(entry)
                stored_count += 1
        except FileNotFoundError:
            raise
        except OSError as error:
            self.is_full = self.is_full or error.errno in (errno.ENOSPC, errno.EDQUOT)
            self.failures.note("write", error)
        finally:
            for entry in entries[stored_count:]:
                self._release(entry)
        return stored_count

    def _write(self, entry: NewEntry) -> None:
        temporary = f"{self.root}/temporary/{self.leases.token}-{next(self._numbers)}"
        try:
            self._write_file(temporary, entry.header(), entry.data)
            with self._lock:
                self._place(temporary, entry.name)
                self._reserved_bytes[entry.name.folder] -= allotted_bytes(entry.file_bytes)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
            raise
        self.counts.stored_count += 1
        self.counts.stored_bytes += entry.file_bytes

    def _write_file(self, path: str, header: bytes, data: memoryview) -> None:
        """Write a new file, with direct I/O if the alignment of the data and the file system allow it.

        Writing through the page cache costs a copy, and its pages stay in memory, at the job's expense, until the disk has
        them.
        """
        page = (
            self._page(header)
            if self._writes_directly and is_aligned(data) and takes_direct_writes(len(data))
            else None
        )
        # A new file in a private folder is this user's, so nothing about it has to be checked.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if page is not None else 0)
        try:
            fd = os.open(path, flags, 0o600)
            try:
                _write_all(fd, page if page is not None else header, data)
            finally:
                os.close(fd)
        except OSError as error:
            if page is None or error.errno != errno.EINVAL:
                raise
            self._writes_directly = False  # this file system does not support direct I/O
            with suppress(FileNotFoundError):  # it may have created the file all the same
                os.unlink(path)  # noqa: PTH108
            self._write_file(path, header, data)

    def _page(self, header: bytes) -> memoryview:
        """Return `header` in whole pages of memory that belong to this thread."""
        page: memoryview | None = getattr(self._pages, "page", None)
        if page is None or len(page) != len(header):
            page = self._pages.page = memoryview(mmap.mmap(-1, len(header)))
        page[:] = header
        return page

    def _place(self, temporary: str, name: EntryName) -> None:
        path = self.entries + name.path
        try:
            os.rename(temporary, path)  # noqa: PTH104
        except FileNotFoundError:  # the first entry of a folder
            with suppress(FileExistsError):
                os.mkdir(f"{self.entries}{name.folder:02x}", 0o700)  # noqa: PTH102
            os.rename(temporary, path)  # noqa: PTH104

    def _release(self, entry: NewEntry) -> None:
        """Give back the reservation of an entry that was not written."""
        size_bytes = allotted_bytes(entry.file_bytes)
        with self._lock:
            self._reserved_bytes[entry.name.folder] -= size_bytes
            self.usage.add({entry.name.folder: -size_bytes})

    def count(self, sizes_bytes: Mapping[int, int], total_bytes_max: int, *, free_ratio_min: float) -> bool:
        """Count entries that are about to be written.

        Args:
            sizes_bytes: Bytes that the entries take in each folder.
            total_bytes_max: Largest sum over all folders.
            free_ratio_min: Part of the file system that must remain free.

        Returns:
            False, with nothing counted, if the entries would exceed `total_bytes_max`, or the free space of the disk less
            what is being written.
        """
        with self._lock:
            if sum(sizes_bytes.values()) > self._free_bytes(free_ratio_min):
                return False
            if not self.usage.add(sizes_bytes, total_bytes_max):
                return False
            for folder, size_bytes in sizes_bytes.items():  # Counter.update looks up abstract classes, for 20 µs
                self._reserved_bytes[folder] += size_bytes
            return True

    def remove(self, name: EntryName, file_bytes: int | None = None) -> bool:
        """Remove an entry and return whether it existed. Readers keep the file that they have open."""
        try:
            if file_bytes is None:
                file_bytes = os.stat(self.entries + name.path).st_size  # noqa: PTH116
        except OSError:
            return False
        return bool(self.remove_all([(name, file_bytes)]))

    def remove_all(self, entries: Iterable[tuple[EntryName, int]]) -> list[tuple[EntryName, int]]:
        """Remove entries, given as names and sizes of their files in bytes, and return those that existed."""
        gone: list[tuple[EntryName, int]] = []
        sizes_bytes: Counter[int] = Counter()
        with self._lock:
            for name, file_bytes in entries:
                try:
                    os.unlink(self.entries + name.path)  # noqa: PTH108
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                        self.failures.note("evict", error)
                    continue
                gone.append((name, file_bytes))
                sizes_bytes[name.folder] -= allotted_bytes(file_bytes)
            if gone:
                self.usage.add(sizes_bytes)
        return gone

    # ── scanning ───────────────────────────────────────────────────────────────────────────────────────────────────

    def scan(self, folder: int) -> list[tuple[float, int, EntryName]]:
        """Return the entries of one folder, and set the folder's number in the accounting to their size.

        Args:
            folder: Number of the folder, from 0.

        Returns:
            For each entry the time of its last use, in seconds since 1970, the size of its file in bytes, and its name.
        """
        found: list[tuple[float, int, EntryName]] = []
        with self._lock:
            try:
                with os.scandir(f"{self.entries}{folder:02x}") as entries:
                    for entry in entries:
                        with suppress(OSError):
                            status = entry.stat(follow_symlinks=False)
                            found.append((status.st_mtime, status.st_size, EntryName(folder, entry.name)))
            except FileNotFoundError:
                pass
            except OSError as error:
                self.failures.note("read", error)
                return found
            there_bytes = sum(allotted_bytes(size_bytes) for _, size_bytes, _ in found)
            self.usage.set(folder, there_bytes + self._reserved_bytes[folder])
        return found

    def count_unknown(self) -> None:
        """Scan the folders whose number was lost. Cost: one scan for each of them."""
        for folder, number in enumerate(self.usage.numbers()):
            if number < 0:
                self.scan(folder)

    def remove_stale_temporaries(self) -> int:
        """Remove the temporary files of processes that have ended, and return their number."""
        removed_count = 0
        with suppress(OSError):
            for entry in list(os.scandir(f"{self.root}/temporary")):
                if not self.leases.is_alive(entry.name.partition("-")[0]):
                    with suppress(OSError):
                        os.unlink(entry.path)  # noqa: PTH108
                        removed_count += 1
        return removed_count

    def free_bytes(self, free_ratio_min: float) -> int:
        """Return the bytes that may be written in addition to those being written.

        Args:
            free_ratio_min: Part of the file system that must remain free.

        Returns:
            The number of bytes; negative if less than that part is free.
        """
        with self._lock:
            return self._free_bytes(free_ratio_min)

    def _free_bytes(self, free_ratio_min: float) -> int:
        status = os.statvfs(self.top)
        left_bytes = status.f_bavail * status.f_frsize - free_ratio_min * status.f_blocks * status.f_frsize
        coming_count = 2 * sum(map(bool, self._reserved_bytes.values()))  # files, and perhaps a new folder for each
        if status.f_files and status.f_favail - coming_count < _FREE_FILES_MIN:
            left_bytes = min(0.0, left_bytes)
        return int(left_bytes) - self._reserved_bytes.total()


def folders() -> range:
    """Return the numbers of all folders."""
    return range(FOLDERS_COUNT)


def is_aligned(data: memoryview) -> bool:
    """Whether `data` begins at the start of a page of memory."""
    try:
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(data)) % DISK_PAGE_BYTES == 0
    except (TypeError, ValueError):  # it is read-only or empty
        return False


def _write_all(fd: int, header: bytes | memoryview, data: memoryview) -> None:
    done = os.writev(fd, [header, data])
    if done < len(header):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    while done < len(header) + len(data):
        done += os.write(fd, data[done - len(header) :])


def _refuse_other_users(fd: int) -> None:
    """Treat an entry that another user wrote as corrupt. Cost: one system call, at the first read in this process.

    Raises:
        CorruptEntryError: Another user owns the file.
    """
    if not is_trusted(os.fstat(fd)):
        raise CorruptEntryError("another user wrote it")
