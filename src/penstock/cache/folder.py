"""The directory of a cache: writing, counting and removing entries.

::

    PATH/                       0700
        CACHEDIR.TAG            tells backups to pass over it, and ``clear`` that it is ours
        v1/                     one per layout: another penstock with another layout has another folder
            entries/00 .. ff/   entries, by hash of their identity; consecutive blocks of an object in different folders
            temporary/          TOKEN-NUMBER: being written
            leases              byte locks: who fetches what, which tokens are alive
            usage               int64[256]: bytes in each folder

Nothing is synced: after a power cut a torn entry is found by its checksum, and costs one request. Failures of the disk reach
nobody: they are counted, said once, and taken for a miss.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import threading
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from penstock import forks
from penstock.cache.entry import FOLDERS_COUNT, ROUND_BYTES, Name, allotted_bytes, takes_direct_writes
from penstock.cache.leases import Leases
from penstock.cache.troubles import Troubles
from penstock.cache.usage import Usage
from penstock.errors import ConfigError
from penstock.private import check_private, open_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from penstock.cache.config import CacheConfig
    from penstock.cache.statistics import Counts

_FREE_FILES_MIN = 32
"""With fewer free files the file system is full, whatever its free bytes are: small objects use up inodes."""

LAYOUT = "v1"
TAG_NAME = "CACHEDIR.TAG"
TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# A cache of penstock: everything here can be fetched again.\n"


class Entry(NamedTuple):
    """What is to be stored.

    Attributes:
        name: Where.
        data: uint8[n].
        file_bytes: Of header and data.
        header: Makes it, just before it is written: its pass over the data leaves them in the core's cache.
    """

    name: Name
    data: memoryview
    file_bytes: int
    header: Callable[[], bytes]


class Folder:
    """One cache directory.

    Args:
        config: See ``CacheConfig``.
        counts: Told of what happens.
    """

    def __init__(self, config: CacheConfig, counts: Counts) -> None:
        self.top = str(config.path)
        self.root = f"{self.top}/{LAYOUT}"
        self.entries = f"{self.root}/entries/"
        self.troubles = Troubles(self.top)
        self.leases = Leases(f"{self.root}/leases", self.troubles)
        self.usage = Usage(f"{self.root}/usage")
        self.reserve: Callable[[Mapping[int, int]], bool] | None = None  # without it, nothing is stored
        self.counts = counts
        self._reset()
        forks.register(self)
        forks.register(self.troubles)

    def _reset(self) -> None:
        self._numbers = itertools.count()
        self._lock = threading.Lock()  # what is there and what is counted change together
        self._reserved_bytes: Counter[int] = Counter()  # by folder: counted, and not yet there
        self._pages = threading.local()
        self._writes_directly = True  # until the file system refuses
        self.is_full = False  # it refused more bytes than it said it had no room for: a quota

    def after_fork_in_child(self) -> None:
        """Names of temporary files begin anew: the token is another one. What is being written is the parent's."""
        self._reset()

    def prepare(self) -> None:
        """Have the directory there and open. Failures of the disk are noted, not raised.

        Raises:
            ConfigError: other users could have put files into it.
        """
        try:
            self._make()
        except OSError as error:
            self.troubles.note("write", error)
            with suppress(OSError):  # what can only be read is read
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
        self.leases.reopen()

    def close(self) -> None:
        """Let go of the descriptors; idempotent. Nothing is stored after it."""
        self.reserve = None
        self.leases.close()
        self.usage.close()

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, entries: Sequence[Entry]) -> int:
        """Store entries, each whole or not at all; how many: the rest had no room, or the disk will not.

        Cost: five system calls, and four for each entry; makes room first where that is needed.
        """
        stored_count = 0
        if self.troubles.writable():
            try:
                stored_count = self._keep_where_it_fits(entries)
            except OSError as error:
                self.troubles.note("write", error)
        self.counts.refused_count += len(entries) - stored_count
        return stored_count

    def _keep_where_it_fits(self, entries: Sequence[Entry]) -> int:
        try:
            stored_count = self._keep(entries)
        except FileNotFoundError:  # somebody removed the directory
            try:
                self._make()
            except ConfigError as error:  # and somebody else put one in its place
                raise PermissionError(errno.EPERM, error.what) from error
            stored_count = self._keep(entries)
        if stored_count is None and len(entries) > 1:
            return sum(map(self._keep_where_it_fits, ([entry] for entry in entries)))
        return stored_count or 0

    def _keep(self, entries: Sequence[Entry]) -> int | None:
        """Have room, and write; how many until the disk would not, None where there is no room for all."""
        sizes_bytes: Counter[int] = Counter()
        for entry in entries:
            sizes_bytes[entry.name.folder] += allotted_bytes(entry.file_bytes)
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
            self.troubles.note("write", error)
        finally:
            for entry in entries[stored_count:]:
                self._forget(entry)
        return stored_count

    def _write(self, entry: Entry) -> None:
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
        """Write a new file; whole pages past the page cache, where memory and file system allow.

        Pages of that cache cost a copy, and are dirty until the disk has them, at the expense of the job's memory.
        """
        page = (
            self._page(header)
            if self._writes_directly and is_aligned(data) and takes_direct_writes(len(data))
            else None
        )
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if page is not None else 0)
        try:
            fd = open_private(path, flags)
            try:
                _write_all(fd, page if page is not None else header, data)
            finally:
                os.close(fd)
        except OSError as error:
            if page is None or error.errno != errno.EINVAL:
                raise
            self._writes_directly = False  # this file system does not
            self._write_file(path, header, data)

    def _page(self, header: bytes) -> memoryview:
        """`header` in whole pages of memory, this thread's own."""
        page: memoryview | None = getattr(self._pages, "page", None)
        if page is None or len(page) != len(header):
            page = self._pages.page = memoryview(mmap.mmap(-1, len(header)))
        page[:] = header
        return page

    def _place(self, temporary: str, name: Name) -> None:
        path = self.entries + name.path
        try:
            os.rename(temporary, path)  # noqa: PTH104
        except FileNotFoundError:  # a folder's first entry
            with suppress(FileExistsError):
                os.mkdir(f"{self.entries}{name.folder:02x}", 0o700)  # noqa: PTH102
            os.rename(temporary, path)  # noqa: PTH104

    def _forget(self, entry: Entry) -> None:
        """It was counted, and will not be there."""
        size_bytes = allotted_bytes(entry.file_bytes)
        with self._lock:
            self._reserved_bytes[entry.name.folder] -= size_bytes
            self.usage.add({entry.name.folder: -size_bytes})

    def count(self, sizes_bytes: Mapping[int, int], total_bytes_max: int, *, free_ratio_min: float) -> bool:
        """Count entries that are about to be written, by folder.

        False where all would be more than `total_bytes_max`, or these more than the disk has beside what is being written.
        """
        with self._lock:
            if sum(sizes_bytes.values()) > self._free_bytes(free_ratio_min):
                return False
            if not self.usage.add(sizes_bytes, total_bytes_max):
                return False
            self._reserved_bytes.update(sizes_bytes)
            return True

    def remove(self, name: Name, file_bytes: int | None = None) -> bool:
        """Remove an entry; those who read it keep their open file. False where there was none."""
        try:
            if file_bytes is None:
                file_bytes = os.stat(self.entries + name.path).st_size  # noqa: PTH116
        except OSError:
            return False
        return bool(self.remove_all([(name, file_bytes)]))

    def remove_all(self, entries: Iterable[tuple[Name, int]]) -> list[tuple[Name, int]]:
        """Remove entries, each with the bytes of its file; those that were there."""
        gone: list[tuple[Name, int]] = []
        sizes_bytes: Counter[int] = Counter()
        with self._lock:
            for name, file_bytes in entries:
                try:
                    os.unlink(self.entries + name.path)  # noqa: PTH108
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                        self.troubles.note("evict", error)
                    continue
                gone.append((name, file_bytes))
                sizes_bytes[name.folder] -= allotted_bytes(file_bytes)
            if gone:
                self.usage.add(sizes_bytes)
        return gone

    # ── looking around ─────────────────────────────────────────────────────────────────────────────────────────────

    def scan(self, folder: int) -> list[tuple[float, int, Name]]:
        """Entries of one folder as (last used, bytes of the file, name), and the folder's number set by them."""
        found: list[tuple[float, int, Name]] = []
        with self._lock:
            try:
                with os.scandir(f"{self.entries}{folder:02x}") as entries:
                    for entry in entries:
                        with suppress(OSError):
                            status = entry.stat(follow_symlinks=False)
                            found.append((status.st_mtime, status.st_size, Name(folder, entry.name)))
            except FileNotFoundError:
                pass
            except OSError as error:
                self.troubles.note("read", error)
                return found
            there_bytes = sum(allotted_bytes(size_bytes) for _, size_bytes, _ in found)
            self.usage.set(folder, there_bytes + self._reserved_bytes[folder])
        return found

    def count_unknown(self) -> None:
        """Count the folders whose number was lost. Cost: a scan of those, once per loss."""
        for folder, number in enumerate(self.usage.numbers()):
            if number < 0:
                self.scan(folder)

    def remove_stale_temporaries(self) -> int:
        """Remove temporary files of processes that are no more; how many there were."""
        removed_count = 0
        with suppress(OSError):
            for entry in list(os.scandir(f"{self.root}/temporary")):
                if not self.leases.is_alive(entry.name.partition("-")[0]):
                    with suppress(OSError):
                        os.unlink(entry.path)  # noqa: PTH108
                        removed_count += 1
        return removed_count

    def free_bytes(self, free_ratio_min: float) -> int:
        """Bytes that the file system may still take, beyond what is being written and is to be left free; negative if less."""
        with self._lock:
            return self._free_bytes(free_ratio_min)

    def _free_bytes(self, free_ratio_min: float) -> int:
        status = os.statvfs(self.top)
        left_bytes = status.f_bavail * status.f_frsize - free_ratio_min * status.f_blocks * status.f_frsize
        coming_count = 2 * sum(map(bool, self._reserved_bytes.values()))  # files, and perhaps the folder of each
        if status.f_files and status.f_favail - coming_count < _FREE_FILES_MIN:
            left_bytes = min(0.0, left_bytes)
        return int(left_bytes) - self._reserved_bytes.total()


def folders() -> range:
    """All folder numbers."""
    return range(FOLDERS_COUNT)


def is_aligned(data: memoryview) -> bool:
    """Whether `data` begins where a page of memory does."""
    try:
        return ctypes.addressof(ctypes.c_ubyte.from_buffer(data)) % ROUND_BYTES == 0
    except (TypeError, ValueError):  # it may only be read, or is empty
        return False


def _write_all(fd: int, header: bytes | memoryview, data: memoryview) -> None:
    done = os.writev(fd, [header, data])
    if done < len(header):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    while done < len(header) + len(data):
        done += os.write(fd, data[done - len(header) :])
