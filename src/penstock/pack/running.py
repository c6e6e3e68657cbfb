"""Carrying out a plan: several shards at a time, each by one thread that reads ahead, and writes in order.

One shard is sequential, so the parallelism is over shards: while one waits for its last parts to be stored, others
read. A thread that fails, or Ctrl-C, stops the others at their next sample; what they had open is dropped. How a shard
is written is a ``Recipe``, which pickles: ``penstock.pack.ray`` has other machines follow it.
"""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from penstock.config import FetchConfig, check_whole, default_budget_bytes
from penstock.errors import ClosedError, ConfigError, DataError, StoreError
from penstock.fetch import set_process_budget
from penstock.fetch.plan import PlanItem
from penstock.pack.progress import BYTES_PER_WORD, SAMPLES_PER_WORD, Packed
from penstock.pack.shard_file import FORMATS_WRITTEN, ShardFile, with_key
from penstock.pack.verifying import check_shard
from penstock.tracebacks import failed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.index import ShardRow
    from penstock.pack.destination import Destination
    from penstock.pack.entries import Entry
    from penstock.pack.plan import Plan, ShardPlan
    from penstock.pack.progress import Listener
    from penstock.pack.shelf import Shelf
    from penstock.pipeline.sources import ConnectionOptions
    from penstock.store import Store
    from penstock.types import Blob

JOBS = 4
"""Shards at a time: enough that one reads while others wait for their last parts; each holds 40 MiB of parts."""

Unit: TypeAlias = "tuple[ShardPlan, ...]"
"""Shards that are written one after the other, by one thread or task."""


class StoppedError(ClosedError):
    """Another shard failed, or the user asked to stop."""


class Desk(NamedTuple):
    """Where one machine writes shards.

    Attributes:
        shelf: They go to it.
        stores: The plan's roots.
        going_on: Asked at every sample; raises to stop.
        progressed: Told of samples that were taken, and of the bytes read for them.
    """

    shelf: Shelf
    stores: Sequence[Store]
    going_on: Callable[[], None]
    progressed: Callable[[int, int], None]


class Recipe(Protocol):
    """How shards are written; pickles."""

    @property
    def format(self) -> str:
        """That is written."""

    def write(self, desk: Desk, unit: Unit) -> Iterator[ShardRow]:
        """Write shards one after the other; the row of each as it is finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How a plan is carried out.

    Attributes:
        executor: ``threads`` of this process, or ``ray``: one task for each shard, on a cluster.
        address: Of the cluster; None: as Ray finds it, else one of its own on this machine.
        jobs: Shards at a time; None: 4, or as many as there are cores where there is a transform; on Ray as many as it
            has CPUs.
        memory_bytes_max: That reading and writing may hold together, in each process; None: the process's budget for
            reading, and 40 MiB for each of the shards at work (136 of Parquet).
        verify: Read each shard back when it is there.

    Raises:
        ConfigError: one is out of bounds.
    """

    executor: Literal["threads", "ray"] = "threads"
    address: str | None = None
    jobs: int | None = None
    memory_bytes_max: int | None = None
    verify: bool = False

    def __post_init__(self) -> None:
        if self.executor not in ("threads", "ray"):
            raise ConfigError(f"executor={self.executor!r} must be 'threads' or 'ray'")
        if self.executor == "ray" and find_spec("ray") is None:
            raise ConfigError("executor='ray' needs Ray", hint="pip install 'penstock[ray]'")
        if self.address is not None and self.executor != "ray":
            raise ConfigError(f"address={self.address!r} is a Ray cluster's", hint="executor='ray'")
        if self.jobs is not None:
            check_whole("jobs", self.jobs, 1)
        if self.memory_bytes_max is not None:
            check_whole("memory_bytes_max", self.memory_bytes_max, 1)
        shares(self.memory_bytes_max, 1, "tar")


class Crew(NamedTuple):
    """What other machines need to follow a recipe: all of it pickles.

    Attributes:
        recipe: That they follow.
        url: Of the destination.
        connection: To it.
        roots: URLs of the stores that are read.
        to_source: Connection to those.
        run: Name of the run that they belong to.
    """

    recipe: Recipe
    url: str
    connection: ConnectionOptions
    roots: tuple[str, ...]
    to_source: ConnectionOptions
    run: str | None


def carry_out(
    plan: Plan,
    units: Callable[[list[ShardPlan]], list[Unit]],
    *,
    destination: Destination,
    stores: Sequence[Store],
    crew: Crew,
    how: How,
    listener: Listener,
) -> Packed:
    """Write the shards of a plan that are not finished; then the index and the manifest.

    Args:
        plan: Written down already.
        units: Which shards are written one after the other.
        destination: Where they go.
        stores: The plan's roots.
        crew: The recipe, and how to follow it elsewhere.
        how: At a time, where.
        listener: Told how it goes.

    Raises:
        PenstockError: the first error of any shard; what is finished stays.
    """
    known = {row.key: row for row in destination.rows([shard.name for shard in plan.shards])}
    for row in known.values():
        listener.finished(row, known=True)
        if how.verify:
            check_shard(destination.store, destination.place, row)
            listener.verified(row)
    todo = [shard for shard in plan.shards if shard.name not in known]
    samples_count = sum(len(shard.entries) for shard in todo) if plan.kind == "entries" else 0
    listener.planned(len(todo), samples_count, plan.bytes_of(todo))
    if not todo:
        written: dict[str, ShardRow] = {}
    elif how.executor == "ray":
        from penstock.pack.ray import run_on_ray

        written = run_on_ray(units(todo), crew, how=how, listener=listener)
    else:
        written = _run_here(units(todo), destination, stores, crew.recipe, how, listener)
    rows = [known.get(shard.name) or written[shard.name] for shard in plan.shards]
    if plan.kind == "entries":
        _check_counts(plan.shards, rows)
    destination.finish(plan, rows)
    return Packed(destination.url, tuple(rows), len(written), plan.passed_over)


def _run_here(
    units: list[Unit], destination: Destination, stores: Sequence[Store], recipe: Recipe, how: How, listener: Listener
) -> dict[str, ShardRow]:
    budget, jobs = shares(how.memory_bytes_max, how.jobs or JOBS, recipe.format)
    if how.memory_bytes_max is not None:
        set_process_budget(budget)
    jobs = min(jobs, len(units))
    for store in stores:  # together as many requests as one reader alone would have in flight
        config = store.fetch_config or FetchConfig()
        requests_max = max(config.requests_min, config.requests_max // jobs)
        store.fetch_config = dataclasses.replace(config, requests_max=requests_max)
    runner = Runner(destination, jobs=jobs, listener=listener, verify=how.verify)
    desk = Desk(destination, stores, runner.check, listener.progressed)
    return runner.run(units, partial(recipe.write, desk))


def _check_counts(shards: list[ShardPlan], rows: list[ShardRow]) -> None:
    for shard, row in zip(shards, rows, strict=True):
        if row.samples_count != len(shard.entries):
            raise DataError(
                f"it has {row.samples_count} samples, the plan says {len(shard.entries)}",
                hint="somebody replaced it; --overwrite begins anew",
                shard=row.key,
            )


class Shares(NamedTuple):
    """What reading may hold, and how many shards may be written at a time."""

    reading_bytes: int
    jobs: int


def shares(memory_bytes_max: int | None, jobs: int, format_name: str) -> Shares:
    """How memory is divided between reading and `jobs` shards being written in a format.

    Raises:
        ConfigError: it is too little for one shard.
    """
    if memory_bytes_max is None:
        return Shares(default_budget_bytes(), jobs)
    held_bytes = FORMATS_WRITTEN[format_name].held_bytes
    if memory_bytes_max < 2 * held_bytes:
        raise ConfigError(
            f"memory_bytes_max={memory_bytes_max!r} must be at least {2 * held_bytes} to write {format_name}",
            hint="raise --memory-bytes-max (memory_bytes_max=)",
        )
    jobs = max(1, min(jobs, memory_bytes_max // 2 // held_bytes))
    return Shares(memory_bytes_max - jobs * held_bytes, jobs)


class Runner:
    """Does the shards of a plan on threads.

    Args:
        shelf: Where they go.
        jobs: How many at a time.
        listener: Told how it goes.
        verify: Read each back when it is there.
    """

    def __init__(self, shelf: Shelf, *, jobs: int, listener: Listener, verify: bool) -> None:
        self._shelf = shelf
        self._jobs = jobs
        self._listener = listener
        self._verify = verify
        self._stop = threading.Event()

    def run(self, units: Sequence[Unit], write: Callable[[Unit], Iterator[ShardRow]]) -> dict[str, ShardRow]:
        """Write all shards by `write`; their rows by name.

        Raises:
            PenstockError: the first error of any shard; the others are given up.
            KeyboardInterrupt: the same.
        """
        pool = ThreadPoolExecutor(self._jobs, thread_name_prefix="penstock-pack")
        try:
            futures = [pool.submit(self._one, unit, write) for unit in units]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for error in [future.exception() for future in done]:
                if error is not None and not isinstance(error, StoppedError):
                    raise error
            return {row.key: row for future in futures for row in future.result()}
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

    def _one(self, unit: Unit, write: Callable[[Unit], Iterator[ShardRow]]) -> list[ShardRow]:
        rows = []
        try:
            self.check()
            for row in write(unit):
                self._listener.finished(row, known=False)
                if self._verify:
                    check_shard(self._shelf.store, self._shelf.place, row, going_on=self.check)
                    self._listener.verified(row)
                rows.append(row)
        except BaseException:
            self._stop.set()
            raise
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class EntriesRecipe:
    """Writes shards whose samples are made of objects.

    Attributes:
        format: That is written.
        transform: Of each sample.
        key_field: Name of the field that takes the keys.
    """

    format: str
    transform: Callable[[dict[str, Any]], Mapping[str, Any]] | None
    key_field: str | None = None

    def write(self, desk: Desk, unit: Unit) -> Iterator[ShardRow]:
        """See ``Recipe``."""
        for shard in unit:
            yield self._shard(desk, shard)

    def _shard(self, desk: Desk, shard: ShardPlan) -> ShardRow:
        """Read the shard's samples, ahead and in order, and write them."""
        with ExitStack() as stack:
            readers = _readers(desk, shard, stack)
            file = stack.enter_context(
                ShardFile(desk.shelf, shard.name, format_name=self.format, key_field=self.key_field)
            )
            said, said_bytes = 0, 0
            for count, entry in enumerate(shard.entries, 1):
                desk.going_on()
                file.add(self._sample(desk, entry, readers))
                said_bytes += entry.size_bytes
                if count - said == SAMPLES_PER_WORD or said_bytes >= BYTES_PER_WORD:
                    desk.progressed(count - said, said_bytes)
                    said, said_bytes = count, 0
            desk.progressed(len(shard.entries) - said, said_bytes)
            return file.close()

    def _sample(self, desk: Desk, entry: Entry, readers: dict[int, Iterator[Blob]]) -> Mapping[str, Any]:
        sample: dict[str, Any] = {"__key__": entry.key}
        for member in entry.members:
            blob = next(readers[member.root])
            if len(blob.data) != member.size_bytes:
                url = desk.stores[member.root].describe(member.key)
                raise StoreError(
                    f"it has {len(blob.data)} bytes, the plan says {member.size_bytes}",
                    hint="the source changed since it was listed; --overwrite plans anew",
                    url=url,
                )
            sample[member.field] = blob.data
        sample.update(entry.values)
        made = sample if self.transform is None else transformed(self.transform, sample)
        return with_key(made, self.key_field)


def _readers(desk: Desk, shard: ShardPlan, stack: ExitStack) -> dict[int, Iterator[Blob]]:
    """For each store, its objects of this shard, in the order in which they are needed."""
    requests: dict[int, list[PlanItem]] = {}
    for entry in shard.entries:
        for member in entry.members:
            item = PlanItem(member.key, etag=member.etag, size_bytes=member.size_bytes)
            requests.setdefault(member.root, []).append(item)
    readers = {}
    for root, items in requests.items():
        reader = desk.stores[root].read_many(items)
        stack.callback(reader.close)  # type: ignore[attr-defined]
        readers[root] = reader
    return readers


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
        raise failed(transform, error, kind=DataError, sample_key=key, stage="transform") from error
    if not hasattr(result, "items"):
        raise DataError(
            f"the transform gave {type(result).__name__}, not a sample",
            hint="leave samples out of the source instead: the shards are planned",
            sample_key=key,
            stage="transform",
        )
    return {"__key__": key, **result}
