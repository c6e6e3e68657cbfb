"""Files that bodies land in: on request, a store writes bodies there, with no memory of this process in between.

A large object that passes through memory on its way to a file is written twice, and the memory is fresh: for the first 500 MB
of a process that reads with 64 requests of 8 MiB, clearing pages takes more time than receiving.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, ClassVar, NoReturn

from penstock.errors import StoreError
from penstock.types import Landing

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.types import Buffer


class LandingFileError(StoreError):
    """The file that a body lands in cannot be written; the cause is the ``OSError``, which names the file."""


class LandingFile:
    """A file that several bodies may land in at the same time, each at its place.

    It has a descriptor of its own, which is closed when nothing refers to it any more: a late answer to a request that was
    given up writes to the file that was meant, and never to another one whose descriptor has the same number by then.

    Args:
        fd: Descriptor of the file, readable and writable.
        path: Path of the file, which error messages name.

    Attributes:
        fd: The descriptor of its own.
        takes_whole: False: it takes objects part by part.
        splices: Whether the kernel can move bytes from a pipe to it; few file systems cannot.
    """

    __slots__ = ("fd", "path", "splices")

    takes_whole: ClassVar[bool] = False

    def __init__(self, fd: int, path: Path) -> None:
        self.path = path
        self.splices = hasattr(os, "splice")
        self.fd = os.dup(fd)

    def __del__(self) -> None:
        if hasattr(self, "fd"):  # it is missing if the process has no more descriptors
            os.close(self.fd)

    def landing(self, start: int, length_bytes: int | None) -> FileLanding:
        """Return the place of `length_bytes` bytes from offset `start`; the length must be known."""
        assert length_bytes is not None
        return FileLanding(self, start, start + length_bytes)

    def write(self, data: Buffer, offset_bytes: int) -> None:
        """Write `data` at an offset.

        Raises:
            LandingFileError: The system failed, for example because the disk is full.
        """
        view = memoryview(data)
        while view:
            try:
                count = os.pwrite(self.fd, view, offset_bytes)
            except OSError as error:
                self.fail(error)
            offset_bytes += count
            view = view[count:]

    def fail(self, error: OSError) -> NoReturn:
        """Raise what `error`, which the system reported for this file, means to a store.

        Raises:
            LandingFileError: Always; its cause names the file.
        """
        what = f"{self.path}: {error.strerror}"
        raise LandingFileError(what, retryable=False) from OSError(error.errno, error.strerror, str(self.path))


class FileLanding(Landing):
    """The destination of a body in a file. ``start``, ``end`` and ``offset`` are offsets in the file.

    ``buffer`` is missing: bytes to write go through ``append``, or moves to ``file`` inside the kernel.

    Args:
        file: The file.
        start: Offset of the first byte.
        end: Offset after the last byte.
    """

    __slots__ = ("file",)

    def __init__(self, file: LandingFile, start: int, end: int) -> None:
        self.file = file
        self.start = self.offset = start
        self.end = end
        self.direct = None

    @property
    def view(self) -> memoryview:
        """The bytes that have arrived, read from the file: uint8[offset - start], read-only.

        Cost: 10 µs; reading them costs page faults.
        """
        if self.offset == self.start:
            return memoryview(b"")
        begin = self.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self.file.fd, self.offset - begin, access=mmap.ACCESS_READ, offset=begin)
        return memoryview(mapped)[self.start - begin :]

    def append(self, piece: Buffer) -> None:
        """Write bytes at ``offset``; see ``Landing.append``.

        Raises:
            OverflowError: There are more than fit; those that fit were written.
            LandingFileError: The system failed, for example because the disk is full.
        """
        fitting = memoryview(piece)[: self.end - self.offset]
        self.file.write(fitting, self.offset)
        self.offset += len(fitting)
        if len(fitting) < len(piece):
            raise OverflowError(f"the body is longer than its {self.length_bytes} bytes")
