"""Stores that travel to other processes: what goes along."""

from __future__ import annotations

import pickle
import subprocess
import sys

import penstock as ps
from penstock.config import MIB, default_budget_bytes

CHILD = """
import pickle, sys
from penstock.fetch import process_budget, set_process_budget
if sys.argv[1] != "0":
    set_process_budget(int(sys.argv[1]))
store = pickle.load(sys.stdin.buffer)
print(process_budget().bytes_max, store.fetch_config.part_bytes)
"""


def seen_by_a_child(pickled: bytes, own_bytes: int) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(own_bytes)], input=pickled, capture_output=True, check=True, timeout=60
    )
    return [int(word) for word in done.stdout.split()]


def test_a_store_travels_with_its_configuration_and_leaves_the_budget_alone() -> None:
    """A store that was unpickled reads as it was configured, but the process that receives it keeps its own budget."""
    store = ps.connect("memory://travels", fetch=ps.FetchConfig(part_bytes=MIB, budget_bytes_max=77 * MIB))
    pickled = pickle.dumps(store)
    assert seen_by_a_child(pickled, 0) == [default_budget_bytes(), MIB]
    assert seen_by_a_child(pickled, 5 * MIB) == [5 * MIB, MIB]
