"""How many event loops a process has."""

from __future__ import annotations

import os

import pytest

from penstock import config
from penstock.transport.engine import loops_count


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 1), (4, 1), (8, 2), (15, 3), (16, 4), (64, 4), (192, 4)])
def test_tls_has_a_loop_for_every_four_cores(cores: int, expected: int) -> None:
    """Over TLS the number of event loops follows the cores, between 1 and 4; plain HTTP has one on every machine."""
    assert loops_count(cores, tls=True) == expected
    assert loops_count(cores, tls=False) == 1


def test_processes_share_the_cores() -> None:
    """Processes that share the machine divide its cores, and each keeps at least one."""
    whole = config.cores_count()
    assert whole == len(os.sched_getaffinity(0))
    try:
        config.share_machine(2)
        assert config.cores_count() == max(1, whole // 2)
        config.share_machine(10_000)
        assert config.cores_count() == 1
    finally:
        config.share_machine(1)
