"""The parts of one cached store that its operations work with."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from penstock.cache.claims import Claims
from penstock.cache.directory import CacheDirectory
from penstock.cache.entry import Identities
from penstock.cache.eviction import Evictor
from penstock.cache.metadata import Metadata
from penstock.cache.statistics import Counts
from penstock.cache.storing import StoreQueue
from penstock.errors import ClosedError
from penstock.store.threaded import Pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.cache.config import CacheConfig
    from penstock.store.base import Store


class CacheContext:
    """The parts of one cached store. Operations that are under way keep it alive, and with it the threads.

    Attributes:
        inner: The store inside the cache.
        config: The limits.
        counts: Counters of this process.
        directory: The entries on the disk.
        identities: The identities of the store's objects.
        metadata: Known versions, sizes and listings of objects.
        claims: Blocks that this process is fetching.
        pool: The threads that read and write the disk.
        storing: Bodies that wait to be stored, after their readers were notified.
    """

    def __init__(self, inner: Store, config: CacheConfig) -> None:
        self.inner = inner
        self.config = config
        self.counts = Counts()
        self.directory = CacheDirectory(config, self.counts)
        self.directory.reserve = Evictor(self.directory, config, self.counts).reserve
        self.identities = Identities(inner, config.namespace, config.block_bytes)
        self.metadata = Metadata(self.directory, config.metadata_ttl_s, self.identities)
        self.claims = Claims(self.directory.leases, config.wait_s_max, self.counts)
        self.pool = Pool(threads_max=config.threads_max, name="cache")
        weakref.finalize(self, self.pool.end).atexit = False  # at exit the threads are daemons
        self.storing = StoreQueue(self.directory, self.run_on_pool)
        self.directory.prepare()

    def run_on_pool(self, run: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Call `run` on a thread of the pool.

        Args:
            run: The function to call.
            failed: Called with the exception if `run` raises one, or at once if the store was closed.
        """
        try:
            self.pool.put(_FunctionJob(run, failed))
        except ClosedError as error:
            failed(error)

    def close(self) -> None:
        """Finish the operations under way, end the threads and close the store inside."""
        self.claims.close()
        self.inner.close()
        self.pool.close()
        self.directory.close()


class _FunctionJob:
    """A function as a job of the pool. An exception must neither end the thread nor leave a reader waiting for ever."""

    __slots__ = ("_failed", "_run")

    def __init__(self, run: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        self._run = run
        self._failed = failed

    def run(self) -> None:
        try:
            self._run()
        except Exception as error:
            self._failed(error)
