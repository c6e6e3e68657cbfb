"""Who may change the byte budget of a process: hypothesis against a model of one line."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from forking import exit_code_of, start_child
from penstock.config import MIB
from penstock.errors import ConfigError
from penstock.fetch import process_budget

SIZES = st.integers(1, 64).map(lambda count: count * MIB)
STEPS = st.lists(st.tuples(st.sampled_from(["connect", "set", "unpickle", "connect without"]), SIZES), max_size=12)


def pickled(size_bytes: int) -> bytes:
    """A store that was configured with a budget elsewhere."""
    store = ps.connect("memory://budget")
    store.fetch_config = ps.FetchConfig(budget_bytes_max=size_bytes)
    return pickle.dumps(store)


@given(first=SIZES, steps=STEPS)
def test_the_largest_number_since_the_budget_was_set_counts(first: int, steps: list[tuple[str, int]]) -> None:
    """Only an argument of this process's own calls changes the budget; what was unpickled never does."""
    ps.set_process_budget(first)
    expected, configured = first, 0
    for step, size_bytes in steps:
        if step == "set":
            ps.set_process_budget(size_bytes)
            expected, configured = size_bytes, 0
        elif step == "connect":
            ps.connect("memory://budget", fetch=ps.FetchConfig(budget_bytes_max=size_bytes))
            expected = configured = max(configured, size_bytes)
        elif step == "unpickle":
            store = pickle.loads(pickled(size_bytes))
            assert store.fetch_config.budget_bytes_max == size_bytes
        else:
            ps.connect("memory://budget", fetch=ps.FetchConfig(part_bytes=MIB))
        assert process_budget().bytes_max == expected


@given(sizes=st.lists(SIZES, min_size=1, max_size=6), shuffled=st.randoms())
def test_the_order_of_configurations_does_not_matter(sizes: list[int], shuffled: object) -> None:
    """Whichever store or loader comes first, the budget is the same."""
    found = set()
    for _ in range(2):
        ps.set_process_budget(MIB)
        for size_bytes in sizes:
            ps.connect("memory://budget", fetch=ps.FetchConfig(budget_bytes_max=size_bytes))
        found.add(process_budget().bytes_max)
        shuffled.shuffle(sizes)  # type: ignore[attr-defined]
    assert found == {max(sizes)}


def test_a_forked_child_may_be_configured_with_less() -> None:
    """A child begins with its parent's budget, and its own first configuration counts."""
    ps.set_process_budget(64 * MIB)
    ps.connect("memory://budget", fetch=ps.FetchConfig(budget_bytes_max=32 * MIB))

    def configures_less() -> bool:
        inherited = process_budget().bytes_max
        ps.connect("memory://budget", fetch=ps.FetchConfig(budget_bytes_max=8 * MIB))
        return (inherited, process_budget().bytes_max) == (32 * MIB, 8 * MIB)

    assert exit_code_of(start_child(configures_less)) == 0
    assert process_budget().bytes_max == 32 * MIB


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "1GB", None, True])
def test_what_is_no_number_of_bytes_is_refused(wrong: object) -> None:
    """And changes nothing."""
    before = process_budget().bytes_max
    with pytest.raises(ConfigError, match="bytes_max"):
        ps.set_process_budget(wrong)  # type: ignore[arg-type]
    assert process_budget().bytes_max == before
