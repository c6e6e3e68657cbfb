"""Which files below a directory this process uses."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from penstock.mount.own_files import own_files


def test_open_mapped_and_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are open or mapped are found, and the current directory; those of a directory beside it are not."""
    tmp_path = tmp_path.resolve()
    for name in ("m/inner/open", "m/inner/mapped", "m/closed", "m2/beside"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 5000)
    directory = str(tmp_path / "m")
    assert own_files(directory) == []
    with (tmp_path / "m/inner/open").open("rb"), (tmp_path / "m2/beside").open("rb"):
        with (tmp_path / "m/inner/mapped").open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with monkeypatch.context() as patch:
            patch.chdir(tmp_path / "m")
            assert own_files(directory) == [directory, f"{directory}/inner/mapped", f"{directory}/inner/open"]
    assert own_files(directory) == [f"{directory}/inner/mapped"]
    mapped.close()
    assert own_files(directory) == []
