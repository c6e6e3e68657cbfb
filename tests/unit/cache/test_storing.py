"""Bodies that are stored after their readers were notified."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, cast

from penstock.cache import storing
from penstock.cache.storing import BODY_BYTES_MAX, LateEntries, StoreQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from penstock.cache.directory import CacheDirectory, NewEntry


class RecordingDirectory:
    """Notes what is written together, and holds the first write until it is told to go on."""

    def __init__(self) -> None:
        self.writes: list[list[object]] = []
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    def write(self, entries: list[object]) -> int:
        self.has_begun.set()
        assert self.may_go_on.wait(10)
        self.writes.append(entries)
        return len(entries)


def on_thread(run: Callable[[], None], _: Callable[[Exception], None]) -> None:
    threading.Thread(target=run).start()


def queue_of(directory: RecordingDirectory) -> StoreQueue:
    return StoreQueue(cast("CacheDirectory", directory), on_thread)


def entry(text: str) -> list[NewEntry]:
    return cast("list[NewEntry]", [text])


def test_what_waits_is_stored_together() -> None:
    """While one write goes on, further bodies wait, and the next write takes all of them; each is told its end once."""
    ended: list[str] = []
    directory = RecordingDirectory()
    queue, last = queue_of(directory), threading.Event()

    def late(name: str) -> LateEntries:
        def end() -> None:
            ended.append(name)
            if name == "d":
                last.set()

        return LateEntries(1, lambda: entry(name), end)

    assert queue.put(late("a"))
    assert directory.has_begun.wait(10)
    for name in "bcd":
        assert queue.put(late(name))
    directory.may_go_on.set()
    assert last.wait(10)
    assert directory.writes == [["a"], ["b", "c", "d"]]
    assert ended == ["a", "b", "c", "d"]


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that is too large, or for which there is no room, is refused; the room is free again after the write."""
    monkeypatch.setattr(storing, "_WAITING_BYTES_MAX", 100)
    directory, last = RecordingDirectory(), threading.Event()
    queue = queue_of(directory)
    assert not queue.put(LateEntries(BODY_BYTES_MAX + 1, list, lambda: None))
    assert queue.put(LateEntries(60, lambda: entry("a"), last.set))
    assert not queue.put(LateEntries(60, list, lambda: None))
    directory.may_go_on.set()
    assert last.wait(10)
    last.clear()
    assert queue.put(LateEntries(60, lambda: entry("b"), last.set))
    assert last.wait(10)


def test_a_failure_ends_only_its_batch(caplog: pytest.LogCaptureFixture) -> None:
    """If making the entries fails, that is logged, the claims are freed, and the next body is stored."""
    directory, first, second = RecordingDirectory(), threading.Event(), threading.Event()
    directory.may_go_on.set()
    queue = queue_of(directory)

    def fail() -> list[NewEntry]:
        raise ValueError("a defect")

    assert queue.put(LateEntries(1, fail, first.set))
    assert first.wait(10)
    assert queue.put(LateEntries(1, lambda: entry("b"), second.set))
    assert second.wait(10)
    assert directory.writes == [["b"]]
    assert "Storing blocks failed" in caplog.text


def test_a_closed_store_ends_what_waits() -> None:
    """If no thread can be had any more, nothing is stored, and the claims are freed at once."""
    ended: list[str] = []
    directory = RecordingDirectory()
    queue = StoreQueue(cast("CacheDirectory", directory), lambda _, failed: failed(RuntimeError("closed")))
    assert queue.put(LateEntries(1, lambda: entry("a"), lambda: ended.append("a")))
    assert ended == ["a"]
    assert directory.writes == []
