"""Every request is answered, whatever becomes of those around it."""

from __future__ import annotations

import threading

from penstock.config import KIB, FetchConfig
from penstock.errors import CancelledOperationError, ClosedError, StoreError, ThrottledError
from penstock.fetch import Budget, PlanItem, ReadAhead
from penstock.store.base import Wrapper
from penstock.store.memory import MemoryStore
from penstock.types import Attempt, Blob, Completion, Get, Operation, Sink, Transfer


class Throttled(Wrapper):
    """Refuses the first part of ``bad``, asking to slow down, and takes its time to end the second, which is cancelled."""

    parts: list[tuple[Operation, Sink]]

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        if not isinstance(operation, Get) or operation.key != "bad":
            return self.inner.submit(operation, sink)
        self.parts = [*getattr(self, "parts", []), (operation, sink)]
        if len(self.parts) == 2:
            threading.Thread(target=self._refuse).start()
        return self

    def _refuse(self) -> None:
        operation, sink = self.parts[0]
        completion = Completion(operation, error=ThrottledError("slow down", retryable=False))
        completion.attempts = (Attempt(0.0, 503, 0, 0, 0.0, 0.0, 0.0, 0.0, True, None),)
        sink.done(completion)

    def cancel(self) -> None:
        operation, sink = self.parts[1]
        completion = Completion(operation, error=CancelledOperationError("cancelled"))
        threading.Timer(0.1, sink.done, [completion]).start()

    def unanswered_s(self) -> float:
        return 0.0


def test_what_follows_a_failed_object_is_read_when_its_other_requests_have_ended() -> None:
    """A failed object's cancelled requests may fill the window, so that nothing behind it is under way: it still comes."""
    store = Throttled(MemoryStore({"a": b"x", "bad": bytes(128 * KIB)}))
    store.fetch_config = FetchConfig(part_bytes=64 * KIB, requests_min=2, requests_max=2)
    answers = list(store.try_read_many(["a"] * 4 + [PlanItem("bad", size_bytes=128 * KIB)] + ["a"] * 3))
    assert [type(answer) for answer in answers] == [Blob] * 4 + [ThrottledError] + [Blob] * 3
    assert isinstance(answers[4], StoreError)


def test_closing_while_memory_is_asked_for_sends_nothing() -> None:
    """A finaliser that runs where memory is made may drop the very iterator that it is made for."""

    class Closing(Budget):
        ahead: ReadAhead | None = None

        def reserve(self, size_bytes: int, *, force: bool = False) -> bool:
            taken = super().reserve(size_bytes, force=force)
            if self.ahead is not None:
                self.ahead.close()
            return taken

    budget = Closing(1 << 30)
    store = MemoryStore({"a": b"x"})
    ahead = ReadAhead(store, ["a"] * 3, config=FetchConfig(), budget=budget, whole=True)
    budget.ahead = ahead
    try:
        found = ahead.wait_read()
    except ClosedError:
        found = None
    assert found is None
    assert budget.statistics().used_bytes == 0
