"""Reading the entries of a cache directory, into the place where they are wanted. What cannot be read is a miss."""

from __future__ import annotations

import errno
import itertools
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.buffers import small_buffer
from penstock.cache.entry import (
    ROUND_BYTES,
    CorruptEntryError,
    Header,
    Name,
    check_data,
    decode,
    header_bytes_of,
)
from penstock.cache.folder import Folder

if TYPE_CHECKING:
    from penstock.cache.config import CacheConfig
    from penstock.cache.statistics import Counts

_SEEN_COUNT_MAX = 1 << 18
_TOUCH_S = 600.0
"""A block that is used is marked so once per process and 10 minutes: what is least recently used is known to that."""


class Files(Folder):
    """Entries of one cache directory.

    Args:
        config: See ``CacheConfig``.
        counts: Told of what happens.
    """

    def __init__(self, config: CacheConfig, counts: Counts) -> None:
        super().__init__(config, counts)
        self._seen: dict[str, float] = {}

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

        Cost: four system calls: open, header, read, close; at the first read in this process also the checksum of all of it
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
            header_bytes = header_bytes_of(identity, size_bytes)
            if seen_s is None:
                self._read_first(fd, (identity, block_index), view, start, size_bytes)
                self.counts.verified_count += 1
            else:
                if header_bytes == ROUND_BYTES and len(view) == size_bytes:
                    os.pread(fd, header_bytes, 0)  # see _read_first
                if _read_all(fd, view, header_bytes + start) != len(view):
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
        header_bytes = header_bytes_of(block[0], size_bytes)
        whole = view if len(view) == size_bytes else small_buffer(size_bytes)[:size_bytes]
        # by itself: what follows the first page the kernel then reads ahead in larger and larger folios. Read at once, all
        # pages of a block are single ones, and cost twice as much each time that they are copied (docs/LOG.md)
        head = os.pread(fd, header_bytes, 0)
        count = _read_all(fd, whole, header_bytes)
        header = decode(head)
        if (header.identity, header.block_index) != block:
            raise CorruptEntryError("it is another block")
        check_data(header, whole[:count])
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
            header = decode(os.pread(fd, max(header_bytes_of(identity, 0), ROUND_BYTES), 0))
        except (OSError, CorruptEntryError):
            return None  # read_block will say what is wrong
        finally:
            os.close(fd)
        return header if header.identity == identity else None

    def exists(self, name: Name) -> bool:
        """Whether there is an entry of this name. Cost: one system call."""
        return os.access(self.entries + name.path, os.F_OK)


def _read_all(fd: int, view: memoryview, offset: int) -> int:
    """Fill `view` as far as the file goes; bytes read. One system call unless a signal cuts it short."""
    done = os.preadv(fd, [view], offset)
    while 0 < done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
