"""The loader against a naive model: the same random jobs in each run. ``make fuzz`` tries others, as long as it is given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuzzing.case import Case, drawn_case
from fuzzing.jobs import check
from fuzzing.model import whole_job

FOUND = (
    Case(sources=(("tar", (2,), 1),), is_indexed=False, batch=("size", 1), evaluates=True),
    Case(
        sources=(("tar", (3, 0, 1), 1),), is_indexed=False, batch=("size", 2), evaluates=True, lanes=6, worlds=(2, 2),
        processes=(2, 1), agrees=True, stopped=3,
    ),
    Case(sources=(("tar", (2, 1, 1), 1),), stages=(("refill", "one"),), lanes=12, worlds=(3, 3), agrees=True, paused=1),
    # a rank that has run dry, and is resumed there, pads with a sample of its own until the others are through
    Case(sources=(("tar", (2, 30), 1),), is_indexed=False, lanes=2, worlds=(2, 2), agrees=True, stopped=5),
    Case(sources=(("tar", (2, 30), 1),), is_indexed=False, window=30, lanes=2, worlds=(2, 2), agrees=True, stopped=5),
    # a rank looks for a sample to pad with while the run of its batches waits for the same table of contents
    Case(
        sources=(("parquet", (1,), 2), ("tar", (3,), 1)), stop="repeat", stages=(("fail", "none"),), batch=("global", 6),
        lanes=6, worlds=(2, 1), stopped=7, paused=4,
    ),
)  # fmt: skip
"""Jobs that once gave something else, or are easily got wrong."""


@pytest.mark.parametrize("first", range(0, 160, 20))
def test_a_job_gives_what_the_model_says(first: int) -> None:
    """Any pipeline, on any number of ranks, stopped anywhere and gone on with as many ranks or others: the model's batches."""
    for number in range(first, first + 20):
        check(drawn_case(number))


@pytest.mark.server
@pytest.mark.parametrize("number", range(5))
def test_worker_processes_change_nothing(number: int) -> None:
    """The same with worker processes, one of which is killed under way, and gone on with another number of them."""
    check(drawn_case(number, with_processes=True))


@pytest.mark.server
@pytest.mark.parametrize("case", FOUND, ids=repr)
def test_what_was_found_stays_mended(case: Case) -> None:
    """What was got wrong once gives what the model says."""
    check(case)


def test_the_model_shuffles() -> None:
    """What the loader is compared with is not the stored order."""
    case = Case(sources=(("tar", (9, 9), 1),), window=12, lanes=2)
    for is_indexed in (True, False):
        [batches] = whole_job(replace(case, is_indexed=is_indexed))
        epochs = [
            [kept.number for batch in batches if batch.epoch == epoch for kept in batch.kept] for epoch in range(2)
        ]
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(18))
        assert len({tuple(epoch) for epoch in [*epochs, range(18)]}) == 3
