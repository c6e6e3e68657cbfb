"""``Cached``: a store whose bytes, once read, are on this node's disk, for every process that names the directory.

Outermost in the stack: a block that is here costs no permit, no hedge and no trace of a request. See docs/concepts/cache.md
for what lies where, and for what is promised.
"""

from __future__ import annotations

import threading
import weakref
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from penstock import forks
from penstock.cache.asking import WRITES, Question, Writing
from penstock.cache.claims import Claim, Claims, Wanted
from penstock.cache.config import CacheConfig
from penstock.cache.entry import digest_of, identity_of
from penstock.cache.eviction import Evictor
from penstock.cache.files import Files
from penstock.cache.metadata import Metadata
from penstock.cache.reading import DIRECT_INDEX, Read
from penstock.cache.recording import Recorder
from penstock.cache.scope import core_of, has_queries, scope_of
from penstock.cache.statistics import CacheStatistics, Counts
from penstock.errors import ClosedError
from penstock.redaction import public_url
from penstock.store.base import Store, Wrapper
from penstock.store.keys import check_key, has_dot_segment
from penstock.store.threaded import Pool
from penstock.types import Get, Head, ListPage

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence

    from penstock.types import Key, Operation, Sink, Transfer


class Cached(Wrapper):
    """Keeps what is read of the store inside on disk; see the module.

    Args:
        inner: The store.
        config: A ``CacheConfig``, or ``"PATH:SIZE"``, e.g. ``"/nvme/penstock:200GB"``.

    Raises:
        ConfigError: `config` is neither. A directory that cannot be used is no error: it is said once, and every read goes to
            the store.

    Cost: at most ``threads_max`` threads while there is work; about 200 bytes for each block seen. Reads of whole blocks land
        where they were asked for, without a copy; one that begins or ends inside a block that it must fetch, or verify, holds
        that block beside it meanwhile, outside the budget.
    """

    def __init__(self, inner: Store, config: CacheConfig | str | os.PathLike[str]) -> None:
        super().__init__(inner)
        self.config = CacheConfig.of(config)
        self.counts = Counts()
        self.files = Files(self.config, self.counts)
        self.evictor = Evictor(self.files, self.config, self.counts)
        self.files.reserve = self.evictor.reserve
        self._check_key: Callable[[Key], None] = getattr(core_of(inner), "check_key", check_key)
        self._scope, self._named = scope_of(inner, self.config.namespace)
        self.metadata = Metadata(self.files, self.config.metadata_ttl_s, self._scope, self._named)
        self.claims = Claims(self.files.leases, self.config.wait_s_max, self.counts)
        self._pool = Pool(threads_max=self.config.threads_max, name="cache")
        self._recorder: Recorder | None = None
        if self.config.record_path is not None:
            self._recorder = Recorder(self.config.record_path, self.files.troubles)
            weakref.finalize(self, self._recorder.flush)  # also at exit
        self._closed = False
        self._tended = False
        self._lock = threading.Lock()
        self.files.prepare()
        forks.register(self)
        weakref.finalize(self, self._pool.end).atexit = False  # at exit the threads are daemons

    def __reduce__(self) -> tuple[Any, ...]:
        return Cached, (self.inner, self.config)

    def after_fork_in_child(self) -> None:
        """See ``forks``: what is under way is the parent's."""
        self._lock = threading.Lock()

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """See ``Store``."""
        if not self._tended:
            self._tend()
        if isinstance(operation, (Get, Head)) and has_dot_segment(operation.key):
            return self.inner.submit(operation, sink)  # refused by many stores, who say so best themselves
        if isinstance(operation, Get):
            self._check_key(operation.key)
            if operation.span is not None:
                operation.span.checked()
            if self._recorder is not None:
                key = public_url(operation.key) if has_queries(core_of(self)) else operation.key
                self._recorder.note(key, operation.span)
            read = Read(self, operation, sink)
            self._pool.put(read)
            return read
        if isinstance(operation, (Head, ListPage)):
            if isinstance(operation, Head):
                self._check_key(operation.key)
            question = Question(self, operation, sink)
            if question.may_be_answered():
                self._pool.put(question)
            else:
                question.send()
            return question
        if isinstance(operation, WRITES):
            writing = Writing(self, operation, sink)
            writing.start()
            return writing
        return self.inner.submit(operation, sink)

    def statistics(self) -> CacheStatistics:
        """See ``CacheStatistics``. Cost: one read of 2 KiB."""
        return CacheStatistics(
            **self.counts.values(),
            used_bytes=self.files.usage.total_bytes(),
            bytes_max=self.config.bytes_max,
            troubles=self.files.troubles.counts(),
            inner=self.inner.statistics(),
        )

    def close(self) -> None:
        """Finish what was submitted, end the threads, close the store inside; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._recorder is not None:
            self._recorder.flush()
        self.claims.close()
        self.inner.close()
        self._pool.close()
        self.files.close()

    def _tend(self) -> None:
        """Once per process, in the background: what killed processes left is put right."""
        with self._lock:
            if self._tended:
                return
            self._tended = True
        self.step(self._put_right, lambda _: None)

    def _put_right(self) -> None:
        self.files.remove_stale_temporaries()
        self.files.count_unknown()

    # ── for the parts of this package ──────────────────────────────────────────────────────────────────────────────

    def step(self, run: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Have `run` called on a thread of the pool; `failed` if it raises, or at once where the store was closed."""
        try:
            self._pool.put(_Step(run, failed))
        except ClosedError as error:
            failed(error)

    def identity(self, key: Key, etag: str) -> tuple[bytes, str]:
        """Identity of an object's blocks, and its digest."""
        return _identity(self._scope, self._named(key), etag, self.config.block_bytes)

    def lease_number(self, read: Read, index: int) -> int:
        """Of the lease of a block, or of a ``Get`` of unknown version."""
        digest = self._direct_digest(read) if index == DIRECT_INDEX else read.digest
        return int(digest[:15], 16) + max(0, index)

    def _direct_digest(self, read: Read) -> str:
        operation = read.operation
        return digest_of(identity_of(*self._scope, self._named(operation.key), str(operation.span), "direct"))

    def claim_blocks(self, read: Read, indices: Sequence[int], *, patient: bool) -> list[Claim | bool]:
        """See ``Claims.take``."""
        wanted = [Wanted(f"{read.digest}.{index:x}", self.lease_number(read, index), index) for index in indices]
        return self.claims.take(wanted, read, patient=patient)

    def claim_direct(self, read: Read, *, patient: bool) -> Claim | bool:
        """The claim of a ``Get`` of unknown version."""
        number = self.lease_number(read, DIRECT_INDEX)
        wanted = Wanted(self._direct_digest(read), number, DIRECT_INDEX)
        return self.claims.take([wanted], read, patient=patient)[0]

    def free(self, claim: Claim) -> None:
        """Release a claim, and have those who waited for it look again."""
        for waiter, index in self.claims.release([claim])[0]:
            waiter.resume((index,), expired=False)


@lru_cache(maxsize=1024)
def _identity(scope: tuple[str, ...], key: Key, etag: str, block_bytes: int) -> tuple[bytes, str]:
    identity = identity_of(*scope, key, etag, str(block_bytes))
    return identity, digest_of(identity)


class _Step:
    """A function as a job of the pool; a thread of the pool must not end by an exception, nor a reader wait for ever."""

    __slots__ = ("_failed", "_run")

    def __init__(self, run: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        self._run = run
        self._failed = failed

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            self._failed(error)
