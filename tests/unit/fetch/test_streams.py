"""``ReadStream``: which reads are a sequence, and how far ahead of it to read."""

from __future__ import annotations

from penstock.config import KIB, MIB
from penstock.fetch.positioned_reads import REORDERED_BYTES_MAX, STREAMS_MAX, ReadStreams


def test_the_next_bytes_belong_to_the_run() -> None:
    """A read that begins where the last one ended continues the stream; one elsewhere does not."""
    streams = ReadStreams()
    stream, old = streams.begin(0, MIB)
    assert old is None
    assert streams.of(MIB, 2 * MIB, has_gap=True) is stream
    assert streams.of(5 * MIB, 6 * MIB, has_gap=True) is None
    assert stream.frontier == 2 * MIB


def test_nothing_is_read_ahead_before_the_program_has_returned() -> None:
    """Reads that came together give no distance; the first return after bytes were taken does."""
    streams = ReadStreams()
    stream, _ = streams.begin(0, MIB)
    streams.of(MIB, 2 * MIB, has_gap=True)
    stream.adapt(waits=True, share_bytes=100 * MIB)
    assert stream.goal_bytes == 0
    stream.taken_bytes = 2 * MIB
    streams.of(2 * MIB, 3 * MIB, has_gap=True)
    stream.adapt(waits=True, share_bytes=100 * MIB)
    assert stream.goal_bytes == 16 * MIB


def test_the_distance_grows_only_while_the_program_waits() -> None:
    """A program that finds its bytes keeps the distance; one that waits gets more, up to its share."""
    streams = ReadStreams()
    stream, _ = streams.begin(0, MIB)
    stream.taken_bytes = MIB
    distances = []
    for step, waits in enumerate((True, False, False, True, True, True), start=1):
        streams.of(step * MIB, (step + 1) * MIB, has_gap=True)
        stream.adapt(waits=waits, share_bytes=40 * MIB)
        stream.taken_bytes += MIB
        distances.append(stream.goal_bytes // MIB)
    assert distances == [8, 8, 8, 32, 40, 40]


def test_elsewhere_the_distance_grows_slowly_at_first() -> None:
    """In the midst of an object, two reads that touch may be chance: as much is read ahead as was taken."""
    streams = ReadStreams()
    stream, _ = streams.begin(50 * MIB, 51 * MIB)
    distances = []
    for step in range(51, 55):
        stream.taken_bytes += MIB
        streams.of(step * MIB, (step + 1) * MIB, has_gap=True)
        stream.adapt(waits=True, share_bytes=100 * MIB)
        distances.append(stream.goal_bytes // MIB)
    assert distances == [1, 2, 24, 32]


def test_a_skip_is_no_return() -> None:
    """A read that skips some bytes of what is held moves the frontier, but is no evidence of a sequence."""
    streams = ReadStreams()
    stream, _ = streams.begin(5 * MIB, 5 * MIB + 8)
    stream.taken_bytes, stream.ahead_end = 8, 5 * MIB + 64 * KIB
    assert streams.of(5 * MIB + 9000, 5 * MIB + 9100, has_gap=False) is stream
    stream.adapt(waits=True, share_bytes=100 * MIB)
    assert stream.goal_bytes == 0


def test_reading_backwards_is_no_run() -> None:
    """A program that goes backwards, one piece after the other, is not read ahead."""
    streams = ReadStreams()
    for start in range(20 * MIB, 0, -MIB):
        assert streams.of(start, start + MIB, has_gap=True) is None
        stream, _ = streams.begin(start, start + MIB)
        stream.taken_bytes = MIB


def test_a_jump_back_of_some_bytes_is_a_new_run() -> None:
    """Bytes before the frontier that nobody holds were read long ago; those that are held may just be late."""
    streams = ReadStreams()
    stream, _ = streams.begin(0, 20 * MIB)
    assert streams.of(19 * MIB, 20 * MIB, has_gap=True) is None
    assert streams.of(19 * MIB, 20 * MIB, has_gap=False) is stream
    assert streams.of(20 * MIB - REORDERED_BYTES_MAX - 1, 20 * MIB, has_gap=False) is None


def test_the_run_that_was_read_least_recently_is_given_up() -> None:
    """A bounded number of streams is followed, and the one that is used stays."""
    streams = ReadStreams()
    first, _ = streams.begin(0, MIB)
    gone = []
    for index in range(1, STREAMS_MAX + 3):
        assert streams.of(first.frontier, first.frontier + 10, has_gap=True) is first
        _, old = streams.begin(index * 100 * MIB, index * 100 * MIB + MIB)
        if old is not None:
            gone.append(old.start // (100 * MIB))
    assert gone == [1, 2, 3]
    assert first in list(streams)


def test_random_chunks_are_requested_whole_and_no_further() -> None:
    """After streams of 8 and 4 MiB, the first read of another one has the rest of 4 MiB ahead, and its last one nothing."""
    streams = ReadStreams()
    for number, length_bytes in enumerate((8 * MIB, 4 * MIB) + (MIB,) * (STREAMS_MAX - 1)):
        start = number * 100 * MIB
        stream, _ = streams.begin(start, start + MIB)
        for end in range(start + 2 * MIB, start + length_bytes + 1, MIB):
            assert streams.of(end - MIB, end, has_gap=True) is stream
    streams.begin(5000 * MIB, 5001 * MIB)
    start = 6000 * MIB
    stream, _ = streams.begin(start, start + MIB)
    distances = []
    for step in range(1, 7):
        stream.adapt(waits=True, share_bytes=100 * MIB)
        distances.append(stream.goal_bytes // MIB)
        stream.taken_bytes += MIB
        streams.of(start + step * MIB, start + (step + 1) * MIB, has_gap=True)
    assert distances == [3, 2, 1, 0, 4, 5]


def test_a_length_that_does_not_come_again_is_forgotten() -> None:
    """One long stream among short ones makes nobody read ahead."""
    streams = ReadStreams()
    for number, length_bytes in enumerate((MIB, 64 * MIB) + (MIB,) * STREAMS_MAX):
        streams.begin(number * 100 * MIB, number * 100 * MIB + length_bytes)
    stream, _ = streams.begin(9000 * MIB, 9001 * MIB)
    stream.adapt(waits=True, share_bytes=100 * MIB)
    assert stream.goal_bytes == 0
