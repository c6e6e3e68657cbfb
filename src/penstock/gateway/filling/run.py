"""``fill``: makes results ahead, in this process and its transform processes, or by tasks on a Ray cluster.

A task on a cluster makes a batch of results, with a transform process of its own, and stores them in the bucket of results or
in the cache of its machine. Tasks do not depend on each other. One that is repeated, because its machine was lost, finds what
was stored already; so does the next run after Ctrl-C.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple

import uvloop

from penstock.config import MIB, check_whole, cores_count
from penstock.errors import ConfigError
from penstock.gateway.filling.filler import ResultFiller
from penstock.gateway.filling.keys import listed_keys, manifest_keys
from penstock.pack.ray import RayTasks
from penstock.pack.workers import ExecutionOptions

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence

    from penstock.gateway.filling.job import Filled, FillJob, FillListener
    from penstock.gateway.filling.keys import FillKey

BATCH_RESULTS_MAX = 64
BATCH_BYTES_MAX = 256 * MIB
"""A task on a cluster takes a second to start its transform; it should work for longer, but not so long that much is lost with
its machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FillOptions:
    """Which results are made, and where.

    Attributes:
        patterns: Keys of sources, prefixes that end with a slash, or patterns; empty for all.
        manifest: URL or path of a manifest of sources; empty for none.
        executor: ``processes`` makes them on this machine; ``ray`` makes them on a cluster.
        address: Address of the Ray cluster; None uses the one that Ray finds, or starts one on this machine.
        jobs: Number of transform processes, or of tasks on the cluster at a time; None means one for each processor.
        has_index: Whether the index of all results is made as well, for random access.

    Raises:
        ConfigError: An option is out of bounds, or cannot be combined with another one.
    """

    patterns: Sequence[str] = ()
    manifest: str = ""
    executor: Literal["processes", "ray"] = "processes"
    address: str | None = None
    jobs: int | None = None
    has_index: bool = False

    def __post_init__(self) -> None:
        if self.executor not in ("processes", "ray"):
            raise ConfigError(f"--executor {self.executor!r} must be processes or ray")
        if self.manifest and self.patterns:
            raise ConfigError("--manifest and --source cannot be combined")
        if self.has_index and (self.manifest or self.patterns):
            raise ConfigError("--index describes all results, and --source and --manifest make some of them")
        if self.has_index and self.executor == "ray":
            raise ConfigError(
                "--index is made on one machine, and cannot be combined with --executor ray",
                hint="fill on the cluster first, and then with --index on this machine, which finds the results",
            )
        if self.jobs is not None:
            check_whole("jobs", self.jobs, 1)
        executor: Literal["threads", "ray"] = "ray" if self.executor == "ray" else "threads"
        ExecutionOptions(executor=executor, address=self.address)


def fill(job: FillJob, options: FillOptions, listener: FillListener) -> None:
    """Make results ahead. What is in its place already is skipped, so an interrupted run can be repeated.

    Args:
        job: The results to fill; see ``fill_job``.
        options: Say which results are made, and where.
        listener: Receives the outcome of each result, failures included.

    Raises:
        ConfigError: The configuration cannot be served, or the machines of the cluster would make other results.
        StoreError: The sources cannot be listed, or the bucket of results does not answer.
        WorkerDiedError: A machine of the cluster was lost too often.
        KeyboardInterrupt: The user interrupted; what was being made is dropped, and what is complete is stored.

    Cost: one request for each source and one for each result that exists; 200 bytes of memory for each source.
    """
    if options.executor == "ray":
        _fill_on_ray(job, options, listener)
    else:
        _run(_fill_here(job, options, listener))


def _run(work: Coroutine[None, None, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


def _with_processes(job: FillJob, count: int | None) -> FillJob:
    """Return a job whose transforms have `count` worker processes each; None leaves the configured number."""
    if count is None:
        return job
    points = tuple(replace(point, processes=count) for point in job.config.access_points)
    return replace(job, config=replace(job.config, access_points=points))


def _selected(job: FillJob, options: FillOptions, filler: ResultFiller) -> list[FillKey]:
    points = job.config.access_points
    if not options.manifest:
        return list(
            chain.from_iterable(listed_keys(each, filler.store(each.name), options.patterns) for each in points)
        )
    if len(points) > 1:
        raise ConfigError(
            "--manifest names sources of one access point, and several would be filled",
            hint=f"name one of {', '.join(p.name for p in points)}",
        )
    return list(manifest_keys(points[0], options.manifest))


def _plan(keys: Sequence[FillKey], listener: FillListener, *, indexes_count: int = 0) -> None:
    listener.planned(len(keys) + indexes_count, sum(each.size_bytes for each in keys))


async def _fill_here(job: FillJob, options: FillOptions, listener: FillListener) -> None:
    job = _with_processes(job, options.jobs)
    processes = max(point.processes or cores_count() for point in job.config.access_points)
    filler = ResultFiller(job, together_max=2 * processes)  # one is stored while the next one is made
    try:
        await filler.start()
        if options.has_index:
            filler.check_indexes()
        keys = await asyncio.to_thread(_selected, job, options, filler)
        indexed = job.config.access_points if options.has_index else ()
        _plan(keys, listener, indexes_count=len(indexed))
        await filler.fill(keys, listener.filled)
        for point in indexed:
            listener.filled(await filler.fill_index(point.name))
    finally:
        await filler.close()


# ── on a cluster ────────────────────────────────────────────────────────────────────────────────────────────────────


class _BatchSetup(NamedTuple):
    job: FillJob
    identities: Mapping[str, str]


def _fill_on_ray(job: FillJob, options: FillOptions, listener: FillListener) -> None:
    job = _with_processes(job, 1)
    identities: dict[str, str] = {}
    keys: list[FillKey] = []

    async def look() -> None:
        filler = ResultFiller(job, together_max=1)
        try:
            await filler.start()
            identities.update(filler.identities())
            keys.extend(await asyncio.to_thread(_selected, job, options, filler))
        finally:
            await filler.close()

    _run(look())
    _plan(keys, listener)

    def take(_: tuple[FillKey, ...], results: list[Filled]) -> None:
        for result in results:
            listener.filled(result)

    RayTasks(address=options.address, tasks_max=options.jobs).run(
        _fill_batch,
        batches_of(keys),
        setup=_BatchSetup(job, identities),
        taken=take,
        describe=lambda batch: f"the result of {batch[0].key!r}",
    )


def batches_of(keys: Iterable[FillKey]) -> Iterator[tuple[FillKey, ...]]:
    """Yield the sources in batches, each of which is a task on a cluster."""
    batch: list[FillKey] = []
    batch_bytes = 0
    for each in keys:
        if batch and (len(batch) == BATCH_RESULTS_MAX or batch_bytes + each.size_bytes > BATCH_BYTES_MAX):
            yield tuple(batch)
            batch, batch_bytes = [], 0
        batch.append(each)
        batch_bytes += each.size_bytes
    if batch:
        yield tuple(batch)


def _fill_batch(setup: _BatchSetup, batch: tuple[FillKey, ...]) -> list[Filled]:
    """Make the results of a batch; this runs as a Ray task, on any machine of the cluster."""
    results: list[Filled] = []

    async def work() -> None:
        filler = ResultFiller(setup.job, together_max=2)
        try:
            await filler.start()
            for name, identity in filler.identities().items():
                if identity != setup.identities[name]:
                    raise ConfigError(
                        f"a machine of the cluster has another version of the transform of access point {name!r}, "
                        "and its results would not be found",
                        hint="install the same packages and code on all machines",
                    )
            await filler.fill(batch, results.append)
        finally:
            await filler.close()

    _run(work())
    return results
