"""Bodies that go from a socket to a file: the landing in the file, and the pipe in between."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.memory.file_landings import FileLanding, LandingFile, LandingFileError
from penstock.transport.plain import Splicer

DATA = b"".join(number.to_bytes(4, "big") for number in range(20_000))


@pytest.fixture
def splicer() -> Iterator[Splicer]:
    made = Splicer()
    yield made
    made.close()


def opened(path: Path, flags: int = 0) -> LandingFile:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | flags)
    try:
        return LandingFile(fd, path)
    finally:
        os.close(fd)


def received(splicer: Splicer, landing: FileLanding, data: bytes) -> None:
    """Send `data` through a socket and move all of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        for start in range(0, len(data), 10_000):
            piece = data[start : start + 10_000]
            theirs.sendall(piece)
            left = len(piece)
            while left:
                left -= splicer.move(ours.fileno(), landing, left)


@pytest.mark.parametrize("splices", [True, False])
def test_bytes_land_at_their_place(tmp_path: Path, splicer: Splicer, splices: bool) -> None:
    """The body lies from ``start`` on, also at odd offsets, and ``view`` has exactly what has arrived."""
    file = opened(tmp_path / "f")
    file.splices = splices
    landing = FileLanding(file, 4999, 4999 + len(DATA))
    received(splicer, landing, DATA[:30_000])
    assert landing.view == DATA[:30_000]
    received(splicer, landing, DATA[30_000:])
    assert landing.view == DATA
    assert landing.offset == landing.end
    assert (tmp_path / "f").read_bytes() == bytes(4999) + DATA


def test_a_file_to_which_the_kernel_moves_nothing(tmp_path: Path, splicer: Splicer) -> None:
    """If the kernel refuses to move bytes to a file, here because it is open for appending, they are copied."""
    file = opened(tmp_path / "f", os.O_APPEND)
    received(splicer, FileLanding(file, 0, len(DATA)), DATA)
    assert not file.splices
    assert (tmp_path / "f").read_bytes() == DATA


def test_an_end_and_a_pause_are_told_apart(tmp_path: Path, splicer: Splicer) -> None:
    """The end of a connection moves 0 bytes; while nothing arrives, the call says so."""
    landing = FileLanding(opened(tmp_path / "f"), 0, 100)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        with pytest.raises(BlockingIOError):
            splicer.move(ours.fileno(), landing, 100)
        theirs.close()
        assert splicer.move(ours.fileno(), landing, 100) == 0


@pytest.mark.parametrize("splices", [True, False])
def test_a_full_disk_names_the_file_and_leaves_nothing_in_the_pipe(
    tmp_path: Path, splicer: Splicer, splices: bool
) -> None:
    """The error has the system's reason and the path, and the next body is not mixed with what was left over."""
    fd = os.open("/dev/full", os.O_RDWR)
    full = LandingFile(fd, Path("/dev/full"))
    os.close(fd)
    full.splices = splices
    with pytest.raises(LandingFileError) as caught:
        received(splicer, FileLanding(full, 0, 100), b"x" * 100)
    cause = caught.value.__cause__
    assert isinstance(cause, OSError)
    assert (cause.errno, cause.filename) == (errno.ENOSPC, "/dev/full")
    assert not caught.value.retryable
    received(splicer, FileLanding(opened(tmp_path / "f"), 0, len(DATA)), DATA)
    assert (tmp_path / "f").read_bytes() == DATA


def test_appending_more_than_fits(tmp_path: Path) -> None:
    """What fits is written, nothing after it, and the rest is refused."""
    landing = FileLanding(opened(tmp_path / "f"), 2, 5)
    with pytest.raises(OverflowError):
        landing.append(b"abcdef")
    assert (tmp_path / "f").read_bytes() == b"\0\0abc"
    assert landing.view == b"abc"


def test_a_late_answer_reaches_no_other_file(tmp_path: Path) -> None:
    """The descriptor lives as long as a landing refers to it, whoever closes the file, and no longer."""
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    file = LandingFile(fd, tmp_path / "f")
    landing = FileLanding(file, 0, 3)
    os.close(fd)
    own = file.fd
    del file
    with (tmp_path / "other").open("wb") as other:
        landing.append(b"abc")
        assert other.fileno() != own
    assert (tmp_path / "f").read_bytes() == b"abc"
    assert (tmp_path / "other").read_bytes() == b""
    del landing
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(own)
