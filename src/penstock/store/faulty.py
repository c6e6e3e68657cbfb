"""``Faulty``: a store that fails on purpose, the same way every time, to test code that uses a store."""

from __future__ import annotations

import hashlib
import itertools
from functools import partial
from typing import Any

from penstock.errors import ConfigError, ShortReadError, StoreError
from penstock.store.base import Relay, Store, Wrapper
from penstock.types import ByteRange, Completion, Get, Landing, ObjectInfo, Operation, Sink, Transfer


class Faulty(Wrapper):
    """Fails chosen operations of the store inside.

    Args:
        inner: The store.
        fail_at_call: Number of the one operation to fail, from 1; None chooses only by `ratio`.
        ratio: Share of operations to fail, from 0 to 1; a hash of `seed` and the operation's number chooses them.
        seed: Any whole number; with the same one, the same operations fail.
        error: Error of the failed operations; None means a ``ShortReadError`` after half of the body for a ``Get``.
    """

    def __init__(
        self,
        inner: Store,
        *,
        fail_at_call: int | None = None,
        ratio: float = 0.0,
        seed: int = 0,
        error: StoreError | None = None,
    ) -> None:
        super().__init__(inner)
        if not 0 <= ratio <= 1:
            raise ConfigError(f"ratio={ratio!r} must lie in [0, 1]")
        self.fail_at_call = fail_at_call
        self.ratio = ratio
        self.seed = seed
        self.error = error
        self.lands_in_files = False  # half a body is received in memory
        self._calls = itertools.count(1)

    def __reduce__(self) -> tuple[Any, ...]:
        again = partial(Faulty, fail_at_call=self.fail_at_call, ratio=self.ratio, seed=self.seed, error=self.error)
        return again, (self.inner,)

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Start `operation`, and let it fail if it was chosen; see ``Store.submit``."""
        call = next(self._calls)
        if call != self.fail_at_call and not self._chosen(call):
            return self.inner.submit(operation, sink)
        if self.error is None and isinstance(operation, Get):
            return self.inner.submit(operation, _Half(sink))
        return self.inner.submit(
            operation, _Refused(sink, self.error or StoreError("failed on purpose", retryable=True))
        )

    def _chosen(self, call: int) -> bool:
        digest = hashlib.blake2b(f"{self.seed}:{call}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.ratio * 2**64


class _Refused(Relay):
    """Performs the operation but loses its answer, which is the worst case for a retrying caller."""

    __slots__ = ("error",)

    def __init__(self, sink: Sink, error: StoreError) -> None:
        self.sink = sink
        self.error = error
        self.landing = None

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        return None

    def done(self, completion: Completion) -> None:
        failed = Completion(
            completion.operation, error=type(self.error)(self.error.what, retryable=self.error.retryable)
        )
        failed.attempts = completion.attempts
        self.sink.done(failed)


class _Half(Relay):
    """Delivers half of the body, then breaks the connection."""

    __slots__ = ("whole",)

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.landing = None
        self.whole: Landing | None = None

    def head(self, info: ObjectInfo, span: ByteRange) -> Landing | None:
        self.whole = self.sink.head(info, span)
        if self.whole is None:
            self.whole = Landing(bytearray(span.length_bytes), 0, span.length_bytes)
        half = Landing(self.whole.buffer, self.whole.offset, (self.whole.offset + self.whole.end + 1) // 2)
        return half if half.length_bytes else self.whole

    def done(self, completion: Completion) -> None:
        if completion.error is None and self.whole is not None:
            if completion.landing is not None:
                self.whole.offset = completion.landing.offset
            completion.landing = self.whole
            received = self.whole.offset - self.whole.start
            completion.error = ShortReadError(f"the connection ended after {received} bytes of body, on purpose")
        self.sink.done(completion)
