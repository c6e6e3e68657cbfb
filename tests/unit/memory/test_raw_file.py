"""The position of raw files."""

from __future__ import annotations

import io

import pytest

from penstock.memory.raw_file import RawFile


class TenBytes(RawFile):
    """A file whose size may be asked for a limited number of times."""

    name = "ten"

    def __init__(self, asked_max: int) -> None:
        super().__init__()
        self._left = asked_max

    @property
    def size_bytes(self) -> int:
        assert self._left > 0
        self._left -= 1
        return 10


def test_a_position_is_relative_to_start_position_or_end() -> None:
    """Positions are counted as in every file, and may lie past the end."""
    file = TenBytes(asked_max=1)
    assert [file.seek(4), file.seek(-3, io.SEEK_CUR), file.seek(-2, io.SEEK_END), file.seek(100)] == [4, 1, 8, 100]
    assert file.tell() == 100


def test_the_size_is_asked_for_only_if_it_is_needed() -> None:
    """Moving from the start or the position does not need the size, which may cost a request."""
    assert TenBytes(asked_max=0).seek(2, io.SEEK_SET) == 2
    assert TenBytes(asked_max=0).seek(2, io.SEEK_CUR) == 2


@pytest.mark.parametrize(("offset", "whence"), [(-1, io.SEEK_SET), (-4, io.SEEK_CUR), (-11, io.SEEK_END), (0, 3)])
def test_what_leads_nowhere_is_refused(offset: int, whence: int) -> None:
    """A negative position and an unknown origin are a ``ValueError``, and the position stays."""
    file = TenBytes(asked_max=1)
    file.seek(3)
    with pytest.raises(ValueError, match=r"ten: seek to -1, before the start|whence=3"):
        file.seek(offset, whence)
    assert file.tell() == 3
