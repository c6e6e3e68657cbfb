"""Guessing where pages begin: numbers in any alphabet go on as they began."""

import pytest

from penstock.store import pages
from penstock.store.pages import GuessBudget


@pytest.mark.parametrize(
    ("keys", "guesses"),
    [
        ([f"train/{number:08}.jpg" for number in range(1000)], ["train/00001997", "train/00002995"]),
        ([f"{number // 2:04}.{kind}" for number in range(1000) for kind in ("cls",)], ["0998", "1497"]),
        ([f"{number:04x}" for number in range(0x50, 0x60)], ["006d", "007b"]),
        ([f"{number:03X}" for number in range(0xA0, 0xF0)], ["13D", "18B"]),
        (["q", "r", "s", "t"], []),
        (["same"], []),
        (["x/", "x/1", "x/2"], ["x/3", "x/4"]),
        ([f"{number:03}" for number in range(900, 1000)], []),
    ],
)
def test_the_next_pages_of_numbers_are_known(keys, guesses):
    """Counters go on as they began, in their own alphabet, carrying, up to their largest number."""
    assert pages.next_pages(keys, start=0, high="", count=2) == guesses


def test_trust_doubles_while_guesses_are_right_and_ends_where_they_are_wrong():
    """Each right guess allows two; at half of them right the number stays, below that none is left for good."""
    guesses = GuessBudget(4)
    allowed = []
    for right in (1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.0, 1.0):
        count = guesses.allowed()
        allowed.append(count)
        guesses.spend(count)
        for index in range(count):
            guesses.judge(500 if index < right * count else 499, 1000)
    assert allowed[:5] == [4, 8, 16, 32, 64]
    assert max(allowed) == 64
    while guesses.allowed():
        guesses.spend(guesses.allowed())
    guesses.judge(10, 1000)
    assert guesses.allowed() == 0
