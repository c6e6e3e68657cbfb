"""Digests of a handler's code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.gateway.aws_lambda import transform
from penstock.gateway.aws_lambda.transform import digest_of_code


def test_names_and_contents_matter_and_times_do_not(tmp_path: Path) -> None:
    """Equal trees have equal digests, whenever they were written; a changed byte or name makes another one."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        (folder / "package").mkdir(parents=True)
        (folder / "app.py").write_text("x = 1")
        (folder / "package" / "data.json").write_text("{}")
    os.utime(other / "app.py", (1, 1))
    assert digest_of_code(one) == digest_of_code(other)
    (other / "package" / "data.json").write_text("[]")
    assert digest_of_code(one) != digest_of_code(other)
    (other / "package" / "data.json").write_text("{}")
    (other / "app.py").rename(other / "app2.py")
    assert digest_of_code(one) != digest_of_code(other)


def test_what_is_no_code_does_not_matter(tmp_path: Path) -> None:
    """Compiled files, hidden folders and virtual environments are left out, and pipes are not read."""
    (tmp_path / "app.py").write_text("x = 1")
    os.mkfifo(tmp_path / "pipe")
    before = digest_of_code(tmp_path)
    for name in ("__pycache__/app.cpython-311.pyc", ".git/config", "venv/pyvenv.cfg", "venv/lib/a.py", ".env"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("y")
    assert digest_of_code(tmp_path) == before


def test_a_folder_with_too_many_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to do."""
    monkeypatch.setattr(transform, "FILES_MAX", 2)
    for number in range(3):
        (tmp_path / f"{number}.py").touch()
    with pytest.raises(ConfigError, match=r"more than 2 files.*folder of its own"):
        digest_of_code(tmp_path)
