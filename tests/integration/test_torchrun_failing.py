"""A rank that fails while the others wait for it to agree: all hear of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from integration.test_torchrun import HERE
from loading import write_counted
from ranks import run_ranks

pytest.importorskip("torch")
pytestmark = [pytest.mark.server, pytest.mark.torch]

WAIT_S_MAX = 20.0


def test_the_others_hear_of_a_rank_that_fails(tmp_path: Path) -> None:
    """They get an error in bounded time, although the rank that failed lives on; again at each further call. Twice: without
    worker processes and with.
    """
    write_counted(tmp_path / "data", (9, 4, 7, 5, 6))
    (tmp_path / "out").mkdir()
    run_ranks(2, HERE / "torchrun_failing.py", f"{tmp_path}/data/", str(tmp_path / "out"))
    other, failing = (json.loads((tmp_path / "out" / f"{rank}.json").read_text()) for rank in range(2))
    assert [kind for kind, _, _ in failing] == ["DecodeError"] * 4
    assert [kind for kind, _, _ in other] == ["PenstockError"] * 4
    assert all("another rank failed" in text for _, text, _ in other)
    assert all(seconds < WAIT_S_MAX for _, _, seconds in other + failing)
