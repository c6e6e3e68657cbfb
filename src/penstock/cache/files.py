"""Reading the entries of a cache directory, into the place where they are wanted. What cannot be read is a miss."""

from __future__ import annotations

import errno
import itertools
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

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
from penstock.cache.turns import Turns
from penstock.private import is_trusted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cache.config import CacheConfig
    from penstock.cache.statistics import Counts
    from penstock.cache.turns import Reader

_SEEN_COUNT_MAX = 1 << 18
_TOUCH_S = 600.0
"""A block that is used is marked so once per process and 10 minutes: what is least recently used is known to that."""


class Block(NamedTuple):
    """A block of an object, or a part of one, to be read.

    Attributes:
        name: Of the entry.
        number: That it must have.
        size_bytes: Of the whole block.
        start: First byte wanted, in the block.
        view: uint8[n], writable: where it goes, in the landing, so that nothing is copied.
    """

    name: Name
    number: int
    size_bytes: int
    start: int
    view: memoryview


class Files(Folder):
    """Entries of one cache directory.

    Args:
        config: See ``CacheConfig``.
        counts: Told of what happens.
    """

    def __init__(self, config: CacheConfig, counts: Counts) -> None:
        super().__init__(config, counts)
        self._seen: dict[str, float] = {}

    def _reset(self) -> None:
        super()._reset()
        self._turns = Turns()

    def read_blocks(self, identity: bytes, blocks: Sequence[Block]) -> list[bool]:
        """Fill the views of some blocks of one object; False for each that is not there, or not what it should be.

        Cost: four system calls each, six where the page cache does not have it: open, header, read, close; at the first read
            in this process also the checksum of all of it and a mark that it was used. All are open at the same time.
        """
        opened: list[int] = []
        found: list[bool | None] = []
        try:
            with self._turns:
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

    def _open(self, name: Name) -> int:
        """A descriptor of the entry; -1 where there is none."""
        try:
            return os.open(self.entries + name.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR):
                self.troubles.note("read", error)
            return -1

    def _read(self, fd: int, identity: bytes, block: Block, *, waits: bool) -> bool | None:
        """Fill a block's view; None: not without waiting for the disk, and `waits` is not set."""
        name = block.name
        seen_s = self._seen.get(name.file)
        read = self._read_first if seen_s is None else self._read_again
        try:
            if not read(fd, identity, block, self._turns.read_waiting if waits else self._turns.read_cached):
                return None
            now_s = time.monotonic()
            if seen_s is None or now_s - seen_s > _TOUCH_S:
                self._mark_used(fd, name.file, now_s)
        except CorruptEntryError as error:
            self._drop_corrupt(name, fd, error)
            return False
        except OSError as error:
            self.troubles.note("read", error)
            return False
        self.counts.hit_count += 1
        self.counts.hit_bytes += len(block.view)
        return True

    def _read_first(self, fd: int, identity: bytes, block: Block, read: Reader) -> bool:
        """Read the whole block, hold it against its checksums, and give the part asked for."""
        view, size_bytes = block.view, block.size_bytes
        whole = view if len(view) == size_bytes else small_buffer(size_bytes)[:size_bytes]
        head = bytearray(header_bytes_of(identity, size_bytes))

        def check(count: int) -> None:
            _refuse_strangers(fd)
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

    def _read_again(self, fd: int, identity: bytes, block: Block, read: Reader) -> bool:
        """Read the part asked for of a block that had its checksum before."""
        view, size_bytes = block.view, block.size_bytes
        header_bytes = header_bytes_of(identity, size_bytes)
        is_large = header_bytes == ROUND_BYTES and len(view) == size_bytes  # see Turns.read_waiting

        def check(count: int) -> None:
            if count != len(view):
                raise CorruptEntryError("the file is shorter than it was")

        return read(fd, bytearray(header_bytes if is_large else 0), view, header_bytes + block.start, check)

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
            _refuse_strangers(fd)
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
            _refuse_strangers(fd)
            header = decode(os.pread(fd, max(header_bytes_of(identity, 0), ROUND_BYTES), 0))
        except (OSError, CorruptEntryError):
            return None  # read_blocks will say what is wrong
        finally:
            os.close(fd)
        return header if header.identity == identity else None

    def exists(self, name: Name) -> bool:
        """Whether there is an entry of this name. Cost: one system call."""
        return os.access(self.entries + name.path, os.F_OK)


def _refuse_strangers(fd: int) -> None:
    """An entry that another user wrote is none. Cost: one system call, when this process first reads the entry.

    Raises:
        CorruptEntryError: it is one.
    """
    if not is_trusted(os.fstat(fd)):
        raise CorruptEntryError("another user wrote it")
