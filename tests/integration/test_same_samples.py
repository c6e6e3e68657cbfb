"""The doors that need only PyTorch give the same samples; ``make test-doors`` tries all doors, and with faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from doors.matrix.measuring import Measurements
from doors.matrix.reading_process import ReadingProcess
from doors.matrix.table import ROWS, Row
from servers.faulty import FaultyServer

pytest.importorskip("torch")
pytestmark = [pytest.mark.server, pytest.mark.torch]

DOORS = ("plain_doors:LoaderDoor", "torch_doors:IterableDoor", "torch_doors:MapDoor")


@pytest.fixture
def rows() -> list[Row]:
    """The rows of these doors."""
    found = [row for row in ROWS if row.door in DOORS]
    assert len(found) == len(DOORS)
    return found


def test_the_same_samples(s3_endpoint: Any, faulty: FaultyServer, rows: list[Row], tmp_path: Path) -> None:
    """Every sample comes with every byte, in the order of the table: with workers, shuffled, resumed, and from a cache."""
    measurements = Measurements(s3_endpoint, faulty, tmp_path)
    with ReadingProcess(tmp_path, cache_home=tmp_path / "home") as process:
        measurements.build_index(process)
        for row in rows:
            assert measurements.cells(row, process)["order"].text == "the shards'"
