"""The loader against a naive model: the same random jobs in each run. ``make fuzz`` tries others, as long as it is given."""

from __future__ import annotations

import pytest

from fuzzing.case import Case, drawn_case
from fuzzing.jobs import check

FOUND = (
    Case(sources=(("tar", (2,), 1),), is_indexed=False, batch=("size", 1), evaluates=True),
    Case(
        sources=(("tar", (3, 0, 1), 1),), is_indexed=False, batch=("size", 2), evaluates=True, lanes=6, worlds=(2, 2),
        processes=(2, 1), agrees=True, stopped=3,
    ),
)  # fmt: skip
"""Jobs that once gave something else."""


@pytest.mark.parametrize("first", range(0, 160, 20))
def test_a_job_gives_what_the_model_says(first: int) -> None:
    """Any pipeline, on any number of ranks, stopped anywhere and gone on with as many ranks or others: the model's batches."""
    for number in range(first, first + 20):
        check(drawn_case(number))


@pytest.mark.server
@pytest.mark.parametrize("number", range(8))
def test_worker_processes_change_nothing(number: int) -> None:
    """The same with worker processes, one of which is killed under way, and gone on with another number of them."""
    check(drawn_case(number, with_processes=True))


@pytest.mark.server
@pytest.mark.parametrize("case", FOUND, ids=repr)
def test_what_was_found_stays_mended(case: Case) -> None:
    """What the fuzzer found gives what the model says."""
    check(case)
