"""Leases and accounting between processes. Two objects in one process stand for two processes, as each has a descriptor."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from forking import exit_code_of, start_child
from penstock.cache.shared_files import UNKNOWN, Leases, Usage
from penstock.cache.statistics import DiskFailures


def leases(folder: Path) -> Leases:
    return Leases(str(folder / "leases"), DiskFailures(str(folder)))


def test_a_lease_has_one_holder(tmp_path: Path) -> None:
    """A lease has one holder until it is released, and others are refused at once."""
    first, second = leases(tmp_path), leases(tmp_path)
    assert first.try_take(7) is True
    assert second.try_take(7) is False
    assert second.try_take(8) is True
    first.release(7)
    assert second.try_take(7) is True


def test_a_lease_dies_with_its_holder(tmp_path: Path) -> None:
    """A lease is free once its holder's descriptor is closed."""
    first, second = leases(tmp_path), leases(tmp_path)
    assert first.try_take(7)
    token = first.token
    assert second.is_alive(token)
    del first
    assert second.try_take(7) is True
    assert not second.is_alive(token)
    assert second.is_alive(second.token)
    assert not second.is_alive("no token")


def test_where_there_can_be_no_locks_nobody_waits(tmp_path: Path) -> None:
    """Without the file, ``try_take`` returns None and nothing raises."""
    (tmp_path / "file").write_bytes(b"")
    nowhere = leases(tmp_path / "file")
    assert nowhere.try_take(7) is None
    nowhere.release(7)


def test_usage_adds_up_over_processes(tmp_path: Path) -> None:
    """No addition of several threads and two descriptors is lost."""
    both = [Usage(str(tmp_path / "usage")) for _ in range(2)]
    for usage in both:
        usage.open(empty=True)
    threads = [
        threading.Thread(target=lambda usage=usage: [usage.add({3: 10}) for _ in range(200)]) for usage in both * 2
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert both[0].total_bytes() == both[1].total_bytes() == 4 * 200 * 10


def test_lost_numbers_are_unknown_until_counted(tmp_path: Path) -> None:
    """A lost file is created again with unknown numbers, which count as 0 until they are set."""
    usage = Usage(str(tmp_path / "usage"))
    usage.open(empty=False)
    assert set(usage.numbers()) == {UNKNOWN}
    usage.add({3: 100})
    assert usage.total_bytes() == 0
    usage.set(3, 500)
    usage.add({3: -600})
    assert usage.total_bytes() == 0
    (tmp_path / "usage").unlink()
    usage.open(empty=False)
    assert set(usage.numbers()) == {UNKNOWN}


def test_a_fork_drops_no_lease_of_the_parent(tmp_path: Path) -> None:
    """A child has its own token and descriptor, and its end releases no lease of the parent."""
    first, second = leases(tmp_path), leases(tmp_path)
    assert first.try_take(7)
    token = first.token
    assert exit_code_of(start_child(lambda: first.token != token and first.try_take(7) is False)) == 0
    assert second.try_take(7) is False
    assert second.is_alive(token)


@pytest.mark.parametrize("number", [0, 1 << 59, (1 << 60) + 5, 1 << 63])
def test_any_number_is_a_lease(tmp_path: Path, number: int) -> None:
    """Numbers beyond the largest offset wrap around."""
    first, second = leases(tmp_path), leases(tmp_path)
    assert first.try_take(number)
    assert second.try_take(number) is False


def test_closing_under_use_is_no_trouble(tmp_path: Path) -> None:
    """Threads that use leases while another thread closes them get no error and touch no other file."""
    for _ in range(20):
        troubles = DiskFailures(str(tmp_path))
        leases = Leases(str(tmp_path / "leases"), troubles)
        assert leases.open()
        begun = threading.Barrier(4)

        def use(leases: Leases = leases, begun: threading.Barrier = begun) -> None:
            begun.wait(10)
            for name in range(500):
                leases.try_take(name)
                leases.release(name)
                leases.is_alive("00")

        users = [threading.Thread(target=use) for _ in range(3)]
        for user in users:
            user.start()
        begun.wait(10)
        leases.close()
        for user in users:
            user.join(30)
        assert not troubles.counts()
        assert not leases.open(anew=True)
