"""Carrying out a plan: several shards at a time, each by one thread that reads ahead, and writes in order.

One shard is sequential, so the parallelism is over shards: while one waits for its last parts to be stored, others
read. A thread that fails, or Ctrl-C, stops the others at their next sample; what they had open is dropped.
"""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from penstock.errors import ClosedError, DataError, StoreError
from penstock.fetch.plan import PlanItem
from penstock.pack.progress import BYTES_PER_WORD, SAMPLES_PER_WORD
from penstock.pack.shard_file import ShardFile
from penstock.pack.verifying import check_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.index import ShardRow
    from penstock.pack.destination import Destination
    from penstock.pack.entries import Entry
    from penstock.pack.plan import ShardPlan
    from penstock.pack.progress import Listener
    from penstock.store import Store
    from penstock.types import Blob


class StoppedError(ClosedError):
    """Another shard failed, or the user asked to stop."""


class Runner:
    """Does the shards of a plan.

    Args:
        destination: Where they go.
        jobs: How many at a time.
        listener: Told how it goes.
        verify: Read each back when it is there.
    """

    def __init__(self, destination: Destination, *, jobs: int, listener: Listener, verify: bool) -> None:
        self.destination = destination
        self._jobs = jobs
        self._listener = listener
        self._verify = verify
        self._stop = threading.Event()

    def run(self, shards: Sequence[ShardPlan], write: Callable[[ShardPlan], ShardRow]) -> dict[str, ShardRow]:
        """Write all `shards` by `write`; their rows by name.

        Raises:
            PenstockError: the first error of any shard; the others are given up.
            KeyboardInterrupt: the same.
        """
        pool = ThreadPoolExecutor(self._jobs, thread_name_prefix="penstock-pack")
        try:
            futures = {pool.submit(self._one, shard, write): shard for shard in shards}
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for error in [future.exception() for future in done]:
                if error is not None and not isinstance(error, StoppedError):
                    raise error
            return {futures[future].name: future.result() for future in futures}
        finally:
            self._stop.set()
            pool.shutdown(cancel_futures=True)

    def check(self) -> None:
        """Whether to go on.

        Raises:
            StoppedError: no.
        """
        if self._stop.is_set():
            raise StoppedError("the packing was stopped")

    def _one(self, shard: ShardPlan, write: Callable[[ShardPlan], ShardRow]) -> ShardRow:
        try:
            self.check()
            row = write(shard)
            self._listener.finished(row, known=False)
            if self._verify:
                check_shard(self.destination.store, self.destination.place, row, going_on=self.check)
                self._listener.verified(row)
        except BaseException:
            self._stop.set()
            raise
        return row


class EntriesWriter:
    """Writes shards whose samples are made of objects.

    Args:
        runner: Whose shards they are.
        stores: The plan's roots.
        format_name: That is written.
        transform: Of each sample.
        listener: Told how it goes.
    """

    def __init__(
        self,
        runner: Runner,
        stores: Sequence[Store],
        *,
        format_name: str,
        transform: Callable[[dict[str, Any]], Mapping[str, Any]] | None,
        listener: Listener,
    ) -> None:
        self._runner = runner
        self._stores = stores
        self._format = format_name
        self._transform = transform
        self._listener = listener

    def __call__(self, shard: ShardPlan) -> ShardRow:
        """Read the shard's samples, ahead and in order, and write them."""
        destination = self._runner.destination
        with ExitStack() as stack:
            readers = self._readers(shard, stack)
            file = stack.enter_context(
                ShardFile(destination.store, destination.place, shard.name, format_name=self._format)
            )
            said, said_bytes = 0, 0
            for count, entry in enumerate(shard.entries, 1):
                self._runner.check()
                file.add(self._sample(entry, readers))
                said_bytes += entry.size_bytes
                if count - said == SAMPLES_PER_WORD or said_bytes >= BYTES_PER_WORD:
                    self._listener.progressed(count - said, said_bytes)
                    said, said_bytes = count, 0
            self._listener.progressed(len(shard.entries) - said, said_bytes)
            return file.close()

    def _readers(self, shard: ShardPlan, stack: ExitStack) -> dict[int, Iterator[Blob]]:
        """For each store, its objects of this shard, in the order in which they are needed."""
        requests: dict[int, list[PlanItem]] = {}
        for entry in shard.entries:
            for member in entry.members:
                item = PlanItem(member.key, etag=member.etag, size_bytes=member.size_bytes)
                requests.setdefault(member.root, []).append(item)
        readers = {}
        for root, items in requests.items():
            reader = self._stores[root].read_many(items)
            stack.callback(reader.close)  # type: ignore[attr-defined]
            readers[root] = reader
        return readers

    def _sample(self, entry: Entry, readers: dict[int, Iterator[Blob]]) -> Mapping[str, Any]:
        sample: dict[str, Any] = {"__key__": entry.key}
        for member in entry.members:
            blob = next(readers[member.root])
            if len(blob.data) != member.size_bytes:
                url = self._stores[member.root].describe(member.key)
                raise StoreError(
                    f"it has {len(blob.data)} bytes, the plan says {member.size_bytes}",
                    hint="the source changed since it was listed; --overwrite plans anew",
                    url=url,
                )
            sample[member.field] = blob.data
        sample.update(entry.values)
        return sample if self._transform is None else transformed(self._transform, sample)


def transformed(transform: Callable[[dict[str, Any]], Mapping[str, Any]], sample: dict[str, Any]) -> Mapping[str, Any]:
    """What `transform` makes of `sample`, its key kept where it is not given another.

    Raises:
        DataError: it failed, or gave no sample: counts must agree, so none can be dropped here.
    """
    key = sample["__key__"]
    try:
        taken = {name: bytes(value) if isinstance(value, memoryview) else value for name, value in sample.items()}
        result = transform(taken)
    except Exception as error:
        raise DataError(
            f"the transform failed: {type(error).__name__}: {error}", sample_key=key, stage="transform"
        ) from error
    if not hasattr(result, "items"):
        raise DataError(
            f"the transform gave {type(result).__name__}, not a sample",
            hint="leave samples out of the source instead: the shards are planned",
            sample_key=key,
            stage="transform",
        )
    return {"__key__": key, **result}
