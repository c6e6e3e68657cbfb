"""The same samples through every door, whatever reads them; and an error that names the object when something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from doors.matrix.measuring import Cells, Measurements
from doors.matrix.page import PAGE, render
from doors.matrix.reading_process import ReadingProcess
from doors.matrix.table import ROWS, Row
from mounting import HAS_FUSE
from penstock.testing.ministack import Ministack
from servers.faulty import FaultyServer

pytestmark = pytest.mark.timeout(200, method="thread")


@pytest.fixture(scope="module")
def measurements(ministack: Ministack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measurements]:
    """The data set on an S3 server, and a server that misbehaves."""
    with FaultyServer() as faulty:
        yield Measurements(ministack, faulty, tmp_path_factory.mktemp("caches"))


@pytest.fixture(scope="module")
def process_of(
    measurements: Measurements, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Row], ReadingProcess]]:
    """Return a function that returns the process in which a row's door runs; doors of one module share it."""
    processes: dict[str, ReadingProcess] = {}
    cache_home = tmp_path_factory.mktemp("cache-home")
    with ReadingProcess(tmp_path_factory.mktemp("indexing"), cache_home=cache_home) as process:
        measurements.build_index(process)
    with ExitStack() as stack:

        def started(row: Row) -> ReadingProcess:
            if row.module not in processes:
                folder = tmp_path_factory.mktemp(row.module)
                processes[row.module] = stack.enter_context(ReadingProcess(folder, cache_home=cache_home))
            return processes[row.module]

        yield started


@pytest.fixture(scope="module")
def measured() -> dict[str, Cells]:
    """What was measured of each row so far."""
    return {}


@pytest.fixture(scope="module")
def faults() -> dict[str, Cells]:
    """What each row has said to faults so far."""
    return {}


@pytest.fixture(params=ROWS, ids=[row.door.partition(":")[2] for row in ROWS], scope="module")
def row(request: pytest.FixtureRequest) -> Row:
    """Each door."""
    found: Row = request.param
    if found.needs == "fuse" and not HAS_FUSE:
        pytest.skip("needs /dev/fuse")
    return found


def test_the_same_samples(
    row: Row,
    measurements: Measurements,
    process_of: Callable[[Row], ReadingProcess],
    measured: dict[str, Cells],
) -> None:
    """A door gives every sample with every byte, in the table's order: with workers, shuffled, resumed, and from a cache."""
    measured[row.name] = measurements.cells(row, process_of(row))


def test_what_is_wrong_is_named(
    row: Row,
    measurements: Measurements,
    process_of: Callable[[Row], ReadingProcess],
    faults: dict[str, Cells],
) -> None:
    """A shard that is replaced, cut off, deleted, denied or damaged gives an error that names it, never fewer samples."""
    faults[row.name] = measurements.faults(row, process_of(row))


def test_the_page_is_what_was_measured(
    request: pytest.FixtureRequest, measured: dict[str, Cells], faults: dict[str, Cells]
) -> None:
    """The page in the documentation is the one that these measurements make; ``--write-page`` writes it."""
    missing = [row.name for row in ROWS if row.name not in measured or row.name not in faults]
    if missing:
        pytest.skip(f"not measured in this run: {', '.join(missing)}")
    text = render(measured, faults)
    page = Path(PAGE)
    if request.config.getoption("--write-page"):
        page.write_text(text)
    assert page.read_text() == text, "make test-doors WRITE=--write-page writes the page"
