"""``Cached``: a store that keeps objects on this node's disk once they are read, for every process that names the directory.

It is the outermost wrapper of the stack, so a block on the disk takes no permit, no hedge and no entry in a trace.
docs/concepts/cache.md describes what the cache guarantees, docs/development/cache-design.md the directory and the reasons.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

from penstock.cache.cached_read import CachedRead
from penstock.cache.config import CacheConfig
from penstock.cache.context import CacheContext
from penstock.cache.directory import BlockRead, block_read
from penstock.cache.entry import block_name, has_queries
from penstock.cache.metadata_ops import WRITES, MetadataQuery, WriteThrough
from penstock.cache.statistics import CacheStatistics
from penstock.cache.warm import Recorder
from penstock.memory.buffers import small_buffer
from penstock.redaction import public_url
from penstock.store.base import Store, Wrapper, check_key, has_dot_segment, innermost
from penstock.system import forks
from penstock.types import Get, Head, ListPage

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable

    from penstock.cache.statistics import Counts
    from penstock.types import ByteRange, Key, ObjectInfo, Operation, Sink, Transfer


class Cached(Wrapper):
    """A store that keeps objects of another store on disk.

    Args:
        inner: The other store.
        config: A ``CacheConfig``, or ``"PATH:SIZE"``, e.g. ``"/nvme/penstock:200GB"``.

    Raises:
        ConfigError: `config` is neither. A directory that cannot be used raises nothing: one warning is logged, and every
            read goes to the store.

    Cost: at most ``threads_max`` threads while there is work, and about 200 bytes for each block seen. Whole blocks are read
        into the caller's buffer without a copy. A read that begins or ends inside a block that must be fetched or verified
        also holds that block meanwhile, outside the budget.
    """

    def __init__(self, inner: Store, config: CacheConfig | str | os.PathLike[str]) -> None:
        super().__init__(inner)
        self.config = CacheConfig.of(config)
        self.context = CacheContext(inner, self.config)
        self._check_key: Callable[[Key], None] = getattr(innermost(inner), "check_key", check_key)
        self._recorder: Recorder | None = None
        if self.config.record_path is not None:
            self._recorder = Recorder(self.config.record_path, self.context.directory.failures)
            weakref.finalize(self, self._recorder.flush)  # also at exit
        self._closed = False
        self.lands_in_files = False  # bodies are put into the cache, too
        self._is_tidy = False
        self._lock = threading.Lock()
        forks.register(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Cached, (self.inner, self.config)

    def after_fork_in_child(self) -> None:
        """Replace the lock, which another thread of the parent may have held."""
        self._lock = threading.Lock()

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        """Start an operation; see ``penstock.types.Core``."""
        if not self._is_tidy:
            self._tidy_up()
        if isinstance(operation, (Get, Head)) and has_dot_segment(operation.key):
            return self.inner.submit(operation, sink)  # many stores refuse such keys, with the best message
        if isinstance(operation, Get):
            self._check_key(operation.key)
            if operation.span is not None:
                operation.span.checked()
            if self._recorder is not None:
                key = public_url(operation.key) if has_queries(innermost(self)) else operation.key
                self._recorder.note(key, operation.span)
            read = CachedRead(self.context, operation, sink)
            self.context.pool.put(read)
            return read
        if isinstance(operation, (Head, ListPage)):
            if isinstance(operation, Head):
                self._check_key(operation.key)
            query = MetadataQuery(self.context, operation, sink)
            if query.may_be_known():
                self.context.pool.put(query)
            else:
                query.send()
            return query
        if isinstance(operation, WRITES):
            write = WriteThrough(self.context, operation, sink)
            write.start()
            return write
        return self.inner.submit(operation, sink)

    def stat_nowait(self, key: Key) -> ObjectInfo | None:
        """Return an object that this process holds and trusts by ``metadata_ttl_s``; None for any other. It never waits."""
        if self._closed or self._recorder is not None:
            return None
        info = self.context.metadata.fresh_in_memory(key)
        if info is None:
            return None
        self.context.counts.metadata_hit_count += 1
        return info._replace(key=key) if info.key != key else info

    def read_nowait(self, info: ObjectInfo, span: ByteRange) -> memoryview | None:
        """Return bytes of one version of an object, if that needs neither the store nor the disk nor another thread.

        That is the case if the page cache has the blocks. An event loop may call this; ``submit`` reads all other blocks.

        Args:
            info: The version: key, size and ETag.
            span: Bytes to read, inside the object.

        Returns:
            uint8[span]; None if the page cache lacks a block.

        Cost: four system calls for each block and one copy; 25 µs for 100 KB, and 0.1 ms for 1 MiB.
        """
        if self._closed or self._recorder is not None or info.etag is None:
            return None
        identity, digest = self.context.identities.of_version(info.key, info.etag)
        view = small_buffer(span.length_bytes)[: span.length_bytes]
        block_bytes, size_bytes = self.config.block_bytes, info.size_bytes
        index, begin = divmod(span.start, block_bytes)
        start = span.start - begin
        if span.end <= start + block_bytes:  # most objects lie in one block
            block = BlockRead(block_name(digest, index), index, min(block_bytes, size_bytes - start), begin, view)
            blocks = [block]
        else:
            blocks = [
                block_read(digest, number, span, view, size_bytes=size_bytes, block_bytes=block_bytes)
                for number in range(index, (span.end - 1) // block_bytes + 1)
            ]
        return view if self.context.directory.read_blocks_nowait(identity, blocks) else None

    def note_written(self, keys: Iterable[Key]) -> None:
        """Forget the metadata of objects that were written without this store, before and after such a write.

        Cost: two removals of small files and 8 bytes written to another for each key.
        """
        for key in keys:
            self.context.metadata.written(key)

    @property
    def counts(self) -> Counts:
        """The counters of this process; a loader reads them at every step."""
        return self.context.counts

    def statistics(self) -> CacheStatistics:
        """Return the statistics of the cache so far. Cost: one read of 2 KiB."""
        return CacheStatistics(
            **self.context.counts.values(),
            used_bytes=self.context.directory.usage.total_bytes(),
            bytes_max=self.config.bytes_max,
            troubles=self.context.directory.failures.counts(),
            inner=self.inner.statistics(),
        )

    def close(self) -> None:
        """Finish submitted operations, end the threads, and close the store inside; idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._recorder is not None:
            self._recorder.flush()
        self.context.close()

    def _tidy_up(self) -> None:
        """Clean up after killed processes, once per process and in the background."""
        with self._lock:
            if self._is_tidy:
                return
            self._is_tidy = True
        directory = self.context.directory

        def clean() -> None:
            directory.remove_stale_temporaries()
            directory.count_unknown()

        self.context.run_on_pool(clean, lambda _: None)
