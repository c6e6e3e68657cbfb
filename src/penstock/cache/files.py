"""The directory of a cache: reading, writing and removing entries.

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

import errno
import itertools
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock import forks
from penstock.buffers import small_buffer
from penstock.cache.entry import (
    FIXED_BYTES,
    FOLDERS_COUNT,
    CorruptEntryError,
    Header,
    Name,
    allotted_bytes,
    check_data,
    decode,
    header_bytes_of,
)
from penstock.cache.leases import Leases
from penstock.cache.troubles import Troubles
from penstock.cache.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.config import CacheConfig
    from penstock.cache.statistics import Counts

LAYOUT = "v1"
TAG_NAME = "CACHEDIR.TAG"
TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# A cache of penstock: everything here can be fetched again.\n"

_SEEN_COUNT_MAX = 1 << 18
_TOUCH_S = 600.0
"""A block that is used is marked so once per process and 10 minutes: what is least recently used is known to that."""


class Files:
    """Entries of one cache directory.

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
        self.make_room: Callable[[int], bool] | None = None
        self.counts = counts
        self._numbers = itertools.count()
        self._seen: dict[str, float] = {}
        forks.register(self)
        forks.register(self.troubles)

    def after_fork_in_child(self) -> None:
        """Names of temporary files begin anew: the token is another one."""
        self._numbers = itertools.count()

    def prepare(self) -> None:
        """Have the directory there and open. Failures are noted, not raised."""
        try:
            self._make()
        except OSError as error:
            self.troubles.note("write", error)
            with suppress(OSError):  # what can only be read is read
                self.usage.open(empty=False)

    def _make(self) -> None:
        empty = not os.path.isdir(self.entries)  # noqa: PTH112 - paths are text here, on the way of every block
        os.makedirs(self.top, mode=0o700, exist_ok=True)  # noqa: PTH103
        for folder in (self.root, self.entries, f"{self.root}/temporary"):
            with suppress(FileExistsError):
                os.mkdir(folder, 0o700)  # noqa: PTH102
        tag = f"{self.top}/{TAG_NAME}"
        if not os.path.exists(tag):  # noqa: PTH110
            fd = os.open(tag, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, TAG)
            finally:
                os.close(fd)
        self.usage.open(empty=empty)
        self.leases.reopen()

    def close(self) -> None:
        """Let go of the descriptors; idempotent. Nothing is stored after it."""
        self.make_room = None
        self.leases.close()
        self.usage.close()

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    def read_block(
        self, name: Name, identity: bytes, view: memoryview, *, block_index: int, start: int, size_bytes: int
    ) -> bool:
        """Fill `view` with the bytes of a block from `start` on; False where it is not there, or not what it should be.

        Args:
            name: Of the entry.
            identity: That it must have.
            view: uint8[n], writable: of the landing, so that nothing is copied.
            block_index: That it must have.
            start: First byte wanted, in the block.
            size_bytes: Of the whole block.

        Cost: three system calls: open, read, close; at the first read in this process also the checksum of all of it
            and a mark that it was used.
        """
        path = self.entries + name.path
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                self.troubles.note("read", error)
            return False
        try:
            seen_s = self._seen.get(name.file)
            header_bytes = header_bytes_of(identity)
            if seen_s is None:
                self._read_first(fd, (identity, block_index), view, start, size_bytes)
                self.counts.verified_count += 1
            elif _read_all(fd, [view], header_bytes + start) != len(view):
                raise CorruptEntryError("the file is shorter than it was")
            now_s = time.monotonic()
            if seen_s is None or now_s - seen_s > _TOUCH_S:
                self._mark_used(fd, name.file, now_s)
        except CorruptEntryError as error:
            self._drop_corrupt(name, fd, error)
            return False
        except OSError as error:
            self.troubles.note("read", error)
            return False
        finally:
            os.close(fd)
        self.counts.hit_count += 1
        self.counts.hit_bytes += len(view)
        return True

    def _read_first(self, fd: int, block: tuple[bytes, int], view: memoryview, start: int, size_bytes: int) -> None:
        """Read the whole block, hold it against its checksums, and give the part asked for."""
        head = bytearray(header_bytes_of(block[0]))
        whole = view if len(view) == size_bytes else small_buffer(size_bytes)[:size_bytes]
        count = _read_all(fd, [memoryview(head), whole], 0)
        header = decode(head)
        if (header.identity, header.block_index) != block:
            raise CorruptEntryError("it is another block")
        check_data(header, whole[: max(0, count - len(head))])
        if whole is not view:
            view[:] = whole[start : start + len(view)]

    def _mark_used(self, fd: int, file: str, now_s: float) -> None:
        with suppress(OSError):  # read-only, or another user's: then others keep the order
            os.utime(fd)
        seen = self._seen
        if len(seen) >= _SEEN_COUNT_MAX:
            self._seen = dict(itertools.islice(seen.items(), _SEEN_COUNT_MAX // 2, None))  # verified again if need be
            seen = self._seen
        seen[file] = now_s

    def _drop_corrupt(self, name: Name, fd: int, error: Exception) -> None:
        self.counts.corrupt_count += 1
        self._seen.pop(name.file, None)
        self.troubles.say("corrupt", f"{name.path} is corrupt: {error}; it is removed and fetched again")
        self.remove(name, os.fstat(fd).st_size)

    def read_entry(self, name: Name, identity: bytes | None = None) -> tuple[Header, memoryview] | None:
        """A whole small entry, verified; None where it is not there or not of this identity. Cost: as a block's."""
        try:
            fd = os.open(self.entries + name.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                self.troubles.note("read", error)
            return None
        try:
            raw = memoryview(os.pread(fd, os.fstat(fd).st_size, 0))
            header = decode(raw)
            data = raw[header.header_bytes :]
            check_data(header, data)
        except CorruptEntryError as error:
            self._drop_corrupt(name, fd, error)
            return None
        except OSError as error:
            self.troubles.note("read", error)
            return None
        finally:
            os.close(fd)
        return (header, data) if identity is None or header.identity == identity else None

    def read_header(self, name: Name, identity: bytes) -> Header | None:
        """A block's header; None where it is not there. For the size of the object that it is of."""
        try:
            fd = os.open(self.entries + name.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            header = decode(os.pread(fd, max(header_bytes_of(identity), FIXED_BYTES), 0))
        except (OSError, CorruptEntryError):
            return None  # read_block will say what is wrong
        finally:
            os.close(fd)
        return header if header.identity == identity else None

    def exists(self, name: Name) -> bool:
        """Whether there is an entry of this name. Cost: one system call."""
        return os.access(self.entries + name.path, os.F_OK)

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, name: Name, header: bytes, data: memoryview) -> bool:
        """Store an entry, whole or not at all; False where there is no room for it or the disk will not.

        Cost: about 12 system calls, those of the accounting included; makes room first where that is needed.
        """
        if not self.troubles.writable():
            self.counts.refused_count += 1
            return False
        size_bytes = len(header) + len(data)
        try:
            try:
                kept = self._keep(name, header, data)
            except FileNotFoundError:  # a folder's first entry, or somebody removed the directory
                self._make()
                with suppress(FileExistsError):
                    os.mkdir(f"{self.entries}{name.folder:02x}", 0o700)  # noqa: PTH102
                kept = self._keep(name, header, data)
        except OSError as error:
            self.troubles.note("write", error)
            kept = False
        if not kept:
            self.counts.refused_count += 1
            return False
        self.usage.add(name.folder, allotted_bytes(size_bytes))
        self.counts.stored_count += 1
        self.counts.stored_bytes += size_bytes
        return True

    def _keep(self, name: Name, header: bytes, data: memoryview) -> bool:
        """Make room and write; False where there is no room."""
        if self.make_room is not None and not self.make_room(allotted_bytes(len(header) + len(data))):
            return False
        self._write(name, header, data)
        return True

    def _write(self, name: Name, header: bytes, data: memoryview) -> None:
        temporary = f"{self.root}/temporary/{self.leases.token}-{next(self._numbers)}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            try:
                _write_all(fd, header, data)
            finally:
                os.close(fd)
            os.rename(temporary, self.entries + name.path)  # noqa: PTH104
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
            raise

    def remove(self, name: Name, file_bytes: int | None = None) -> bool:
        """Remove an entry; those who read it keep their open file. False where there was none."""
        path = self.entries + name.path
        try:
            if file_bytes is None:
                file_bytes = os.stat(path).st_size  # noqa: PTH116
            os.unlink(path)  # noqa: PTH108
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                self.troubles.note("evict", error)
            return False
        self.usage.add(name.folder, -allotted_bytes(file_bytes))
        return True

    # ── looking around ─────────────────────────────────────────────────────────────────────────────────────────────

    def scan(self, folder: int) -> list[tuple[float, int, Name]]:
        """Entries of one folder as (last used, bytes of the file, name), and the folder's number set by them."""
        found: list[tuple[float, int, Name]] = []
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
        self.usage.set(folder, sum(allotted_bytes(size_bytes) for _, size_bytes, _ in found))
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
        """Bytes that the file system may still take, beyond the part that is to be left free; negative if less."""
        status = os.statvfs(self.top)
        return int(status.f_bavail * status.f_frsize - free_ratio_min * status.f_blocks * status.f_frsize)


def folders() -> range:
    """All folder numbers."""
    return range(FOLDERS_COUNT)


def _read_all(fd: int, views: list[memoryview], offset: int) -> int:
    """Fill the views in order as far as the file goes; bytes read. One system call unless a signal cuts it short."""
    wanted = sum(map(len, views))
    done = os.preadv(fd, views, offset)
    while 0 < done < wanted:
        rest = []
        skip = done
        for view in views:
            if skip < len(view):
                rest.append(view[skip:])
            skip = max(0, skip - len(view))
        count = os.preadv(fd, rest, offset + done)
        if count == 0:
            break
        done += count
    return done


def _write_all(fd: int, header: bytes, data: memoryview) -> None:
    done = os.writev(fd, [header, data])
    if done < len(header):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    while done < len(header) + len(data):
        done += os.write(fd, data[done - len(header) :])
