"""``ReadRun``: which reads are a sequence, and how far ahead of it to read."""

from __future__ import annotations

from penstock.config import KIB, MIB
from penstock.fetch.runs import REORDERED_BYTES_MAX, RUNS_MAX, ReadRuns


def test_the_next_bytes_belong_to_the_run() -> None:
    """A read that begins where the last one ended continues the run; one elsewhere does not."""
    runs = ReadRuns()
    run, old = runs.begin(0, MIB)
    assert old is None
    assert runs.of(MIB, 2 * MIB, has_gap=True) is run
    assert runs.of(5 * MIB, 6 * MIB, has_gap=True) is None
    assert run.frontier == 2 * MIB


def test_nothing_is_read_ahead_before_the_program_has_returned() -> None:
    """Reads that came together give no distance; the first return after bytes were taken does."""
    runs = ReadRuns()
    run, _ = runs.begin(0, MIB)
    runs.of(MIB, 2 * MIB, has_gap=True)
    run.adapt(waits=True, share_bytes=100 * MIB)
    assert run.goal_bytes == 0
    run.taken_bytes = 2 * MIB
    runs.of(2 * MIB, 3 * MIB, has_gap=True)
    run.adapt(waits=True, share_bytes=100 * MIB)
    assert run.goal_bytes == 16 * MIB


def test_the_distance_grows_only_while_the_program_waits() -> None:
    """A program that finds its bytes keeps the distance; one that waits gets more, up to its share."""
    runs = ReadRuns()
    run, _ = runs.begin(0, MIB)
    run.taken_bytes = MIB
    distances = []
    for step, waits in enumerate((True, False, False, True, True, True), start=1):
        runs.of(step * MIB, (step + 1) * MIB, has_gap=True)
        run.adapt(waits=waits, share_bytes=40 * MIB)
        run.taken_bytes += MIB
        distances.append(run.goal_bytes // MIB)
    assert distances == [8, 8, 8, 32, 40, 40]


def test_elsewhere_the_distance_grows_slowly_at_first() -> None:
    """In the midst of an object, two reads that touch may be chance: as much is read ahead as was taken."""
    runs = ReadRuns()
    run, _ = runs.begin(50 * MIB, 51 * MIB)
    distances = []
    for step in range(51, 55):
        run.taken_bytes += MIB
        runs.of(step * MIB, (step + 1) * MIB, has_gap=True)
        run.adapt(waits=True, share_bytes=100 * MIB)
        distances.append(run.goal_bytes // MIB)
    assert distances == [1, 2, 24, 32]


def test_a_skip_is_no_return() -> None:
    """A read that skips some bytes of what is held moves the frontier, but is no evidence of a sequence."""
    runs = ReadRuns()
    run, _ = runs.begin(5 * MIB, 5 * MIB + 8)
    run.taken_bytes, run.ahead_end = 8, 5 * MIB + 64 * KIB
    assert runs.of(5 * MIB + 9000, 5 * MIB + 9100, has_gap=False) is run
    run.adapt(waits=True, share_bytes=100 * MIB)
    assert run.goal_bytes == 0


def test_reading_backwards_is_no_run() -> None:
    """A program that goes backwards, one piece after the other, is not read ahead."""
    runs = ReadRuns()
    for start in range(20 * MIB, 0, -MIB):
        assert runs.of(start, start + MIB, has_gap=True) is None
        run, _ = runs.begin(start, start + MIB)
        run.taken_bytes = MIB


def test_a_jump_back_of_some_bytes_is_a_new_run() -> None:
    """Bytes before the frontier that nobody holds were read long ago; those that are held may just be late."""
    runs = ReadRuns()
    run, _ = runs.begin(0, 20 * MIB)
    assert runs.of(19 * MIB, 20 * MIB, has_gap=True) is None
    assert runs.of(19 * MIB, 20 * MIB, has_gap=False) is run
    assert runs.of(20 * MIB - REORDERED_BYTES_MAX - 1, 20 * MIB, has_gap=False) is None


def test_the_run_that_was_read_least_recently_is_given_up() -> None:
    """A bounded number of runs is followed, and the one that is used stays."""
    runs = ReadRuns()
    first, _ = runs.begin(0, MIB)
    gone = []
    for index in range(1, RUNS_MAX + 3):
        assert runs.of(first.frontier, first.frontier + 10, has_gap=True) is first
        _, old = runs.begin(index * 100 * MIB, index * 100 * MIB + MIB)
        if old is not None:
            gone.append(old.start // (100 * MIB))
    assert gone == [1, 2, 3]
    assert first in list(runs)


def test_random_chunks_are_requested_whole_and_no_further() -> None:
    """After runs of 8 and 4 MiB, the first read of another one has the rest of 4 MiB ahead, and its last read has nothing."""
    runs = ReadRuns()
    for number, length_bytes in enumerate((8 * MIB, 4 * MIB) + (MIB,) * (RUNS_MAX - 1)):
        start = number * 100 * MIB
        run, _ = runs.begin(start, start + MIB)
        for end in range(start + 2 * MIB, start + length_bytes + 1, MIB):
            assert runs.of(end - MIB, end, has_gap=True) is run
    runs.begin(5000 * MIB, 5001 * MIB)
    start = 6000 * MIB
    run, _ = runs.begin(start, start + MIB)
    distances = []
    for step in range(1, 7):
        run.adapt(waits=True, share_bytes=100 * MIB)
        distances.append(run.goal_bytes // MIB)
        run.taken_bytes += MIB
        runs.of(start + step * MIB, start + (step + 1) * MIB, has_gap=True)
    assert distances == [3, 2, 1, 0, 4, 5]


def test_a_length_that_does_not_come_again_is_forgotten() -> None:
    """One long run among short ones makes nobody read ahead."""
    runs = ReadRuns()
    for number, length_bytes in enumerate((MIB, 64 * MIB) + (MIB,) * RUNS_MAX):
        runs.begin(number * 100 * MIB, number * 100 * MIB + length_bytes)
    run, _ = runs.begin(9000 * MIB, 9001 * MIB)
    run.adapt(waits=True, share_bytes=100 * MIB)
    assert run.goal_bytes == 0
