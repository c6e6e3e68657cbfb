"""The option with which the matrix writes its page."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--write-page``."""
    parser.addoption("--write-page", action="store_true", help="write docs/reference/doors.md instead of comparing it")
