"""The log of a mount: its warnings can be read back, whatever else it holds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock as ps
from penstock.mount import log_file
from penstock.mount.log_file import LOG_BYTES_MAX, LogPosition, start_logging


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """A log to which this process writes."""
    logger = logging.getLogger("penstock")
    before = logger.handlers[:], logger.level, logger.propagate
    path = tmp_path / "state" / "mount.log"
    start_logging(path, is_verbose=False)
    yield path
    for handler in set(logger.handlers) - set(before[0]):
        logger.removeHandler(handler)
        handler.close()
    logger.level, logger.propagate = before[1:]


def test_warnings_since_a_position(log: Path) -> None:
    """What was logged earlier, for information, or as a traceback is left out; of equal messages the last one stays."""
    logger = logging.getLogger("penstock")
    logger.warning("of an earlier mount")
    position = LogPosition.at_end(log)
    assert position.warnings(count_max=10) == []
    logger.warning("once and again")
    logger.info("nothing wrong")
    try:
        raise ValueError("private")
    except ValueError:
        logger.exception("two\nlines")
    logger.warning("once and again")
    assert position.warnings(count_max=10) == ["two lines", "once and again"]
    assert position.warnings(count_max=1) == ["once and again"]


def test_one_failure_again_and_again(log: Path) -> None:
    """Attempts, request ids and ranges do not make another message of a failure; another object or cause does."""
    position = LogPosition.at_end(log)
    for key, status, start in (("a", 500, 0), ("b", 500, 0), ("a", 500, 100), ("a", 403, 0), ("b", 500, 200)):
        facts = {"status": status, "attempts_count": 5, "elapsed_s": 1.5 + start, "request_id": f"R{start}"}
        error = ps.StoreError("it broke", operation="GET", url=f"s3://x/{key}", span=(start, start + 10), **facts)
        logging.getLogger("penstock").warning("failed: %s", error)
    assert [text.partition(", 5")[0] for text in position.warnings(count_max=10)] == [
        "failed: GET s3://x/a bytes [100, 110): it broke (500",
        "failed: GET s3://x/a bytes [0, 10): it broke (403",
        "failed: GET s3://x/b bytes [200, 210): it broke (500",
    ]


def test_a_log_that_was_put_aside(log: Path) -> None:
    """When the log has been replaced by a new file, warnings are those of the new one."""
    logger = logging.getLogger("penstock")
    logger.warning("a" * (LOG_BYTES_MAX - 100))
    position = LogPosition.at_end(log)
    logger.warning("b" * 100)
    logger.warning("short")
    assert position.warnings(count_max=10) == ["b" * 100, "short"]


def test_a_log_that_is_missing_or_long(tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log that cannot be read has no warnings, and only the end of a long one is read, from the next record on."""
    assert LogPosition.at_end(tmp_path / "none").warnings(count_max=10) == []
    monkeypatch.setattr(log_file, "READ_BYTES_MAX", 100)
    position = LogPosition.at_end(log)
    for number in range(100):
        logging.getLogger("penstock").warning("message %d", number)
    assert position.warnings(count_max=10) == ["message 98", "message 99"]
