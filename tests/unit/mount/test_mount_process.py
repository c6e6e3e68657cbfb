"""The process of a mount, as long as nothing is mounted: what it is asked for, and how its failure is told."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.errors import ConfigError, WorkerDiedError
from penstock.mount import MountConfig
from penstock.mount.mount_process import default_log_file


def test_a_process_that_dies_at_its_start_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If the process ends before it has answered, the error has the last line that it said, and its exit code."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho something before >&2\necho 'the last words' >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(WorkerDiedError, match="ended at its start: the last words") as caught:
        ps.mount("/", tmp_path)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"directory": "relative"}, "must be an absolute path"),
        ({"metadata_ttl_s": -1}, "metadata_ttl_s=-1 must be at least 0 seconds"),
        ({"metadata_ttl_s": math.nan}, "metadata_ttl_s=nan must be"),
        ({"negative_ttl_s": "5"}, "negative_ttl_s='5' must be"),
        ({"file_mode": 0o7777}, r"must lie in \[0o000, 0o777\]"),
        ({"directory_mode": "755"}, "directory_mode='755'"),
        ({"umask": 0o1000}, r"umask=512 must lie in \[0o000, 0o777\]"),
        ({"uid": -1}, "uid=-1 must be a number"),
        ({"gid": 1 << 32}, "gid=4294967296 must be a number"),
    ],
)
def test_wrong_values_are_refused(changes: dict[str, Any], said: str) -> None:
    """A mount that cannot be is refused before a process is started."""
    with pytest.raises(ConfigError, match=said):
        MountConfig(**{"url": "/", "directory": "/m", **changes})


def test_logs_are_named_after_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two mounts do not log into one file, and the name is not too long for a file."""
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    assert default_log_file("/mnt/a") == Path("/state/penstock/mount-mnt-a.log")
    assert len(default_log_file("/" + "\u6f22" * 5000).name.encode()) < 255
