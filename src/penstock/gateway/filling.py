"""``penstock gateway fill``: makes results in advance, in this process and its transform processes, or by tasks on Ray.

A task on a cluster makes a batch of results, with a transform process of its own, and stores them in the bucket of results or
in the cache of its machine. Tasks do not depend on each other. A task that is repeated, because its machine was lost, finds
the results that are stored already, and so does the next run after Ctrl-C.

Not split because every part serves the one function ``fill``: the job, its sources, making their results, and the tasks.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import uvloop

from penstock.compose import connect, split
from penstock.config import MIB, check_whole, cores_count
from penstock.errors import ConfigError, ObjectMissingError, PenstockError
from penstock.gateway.buckets.indexed import for_each
from penstock.gateway.buckets.transformed import is_beside_shards
from penstock.gateway.objects import Caller, GatewayRequest, S3Error
from penstock.gateway.results.derived import was_copied
from penstock.gateway.serving.assembly import assembly_of, is_transformed
from penstock.gateway.serving.checks import check_config
from penstock.gateway.serving.startup import with_defaults
from penstock.index import read_manifest
from penstock.index.place import DATASET_KEY, FOLDER
from penstock.pack.workers import ExecutionOptions
from penstock.store.s3_requests import encoded_key
from penstock.text.patterns import is_pattern, matcher, split_glob

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence

    from penstock.gateway.config import AccessPoint, GatewayConfig
    from penstock.gateway.results.derived import DerivedResults
    from penstock.gateway.results.record import ResultRecord
    from penstock.gateway.results.results import Results
    from penstock.gateway.results.shared_result import SharedResult
    from penstock.store.base import Store
    from penstock.types import ObjectInfo

Place = Literal["results", "cache"]

CHECKS_PER_RESULT = 8
"""Lookups in flight for each result that is being made. A lookup waits for two round trips and uses almost no CPU."""

_ATTEMPTS_COUNT = 2
"""A result that was found in the cache, but not all of its blocks, is made once more."""
BATCH_RESULTS_MAX = 64
BATCH_BYTES_MAX = 256 * MIB
"""A task on a cluster takes a second to start its transform; it should work for longer, but not so long that much is lost with
its machine."""


class FillKey(NamedTuple):
    """A source whose result is to be made.

    Attributes:
        point: Name of the access point.
        key: Key of the source.
        size_bytes: Size of the source; 0 if it is not known.
    """

    point: str
    key: str
    size_bytes: int


class Filled(NamedTuple):
    """The outcome of one result.

    Attributes:
        source: Source of the result.
        outcome: ``made`` by the transform; ``copied`` from one place to another; ``present`` in all places already;
            ``left-out`` because the access point does not serve its key; ``failed``.
        etag: ETag of the result; empty if it failed before that was known.
        size_bytes: Size of the result; 0 unless it was made or copied.
        error: Why it failed.
    """

    source: FillKey
    outcome: Literal["made", "copied", "present", "left-out", "failed"]
    etag: str = ""
    size_bytes: int = 0
    error: str = ""


class FillListener(Protocol):
    """Receives the progress of ``fill``, in the thread that calls it."""

    def planned(self, results_count: int, source_bytes: int) -> None:
        """Report how many results will be made or found, and the size of their sources in bytes."""

    def filled(self, result: Filled) -> None:
        """Report the outcome of one result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FillJob:
    """The work of every process that makes results.

    Attributes:
        config: The gateway, with only the access points that are filled.
        places: Places that must have a result in the end: the bucket of results, the cache of the node that makes it, or both.
        query: Parameters of the query of the requests whose results are made, e.g. ``{"x-penstock-epoch": "3"}``.
        caller: ID of the access key that sends them, for Lambda handlers whose answers depend on it.
    """

    config: GatewayConfig
    places: frozenset[Place]
    query: Mapping[str, str] = field(default_factory=dict)
    caller: str = ""


def fill_job(
    config: GatewayConfig,
    points: Iterable[str] = (),
    *,
    into: str | None = None,
    query: Mapping[str, str] | None = None,
    caller: str = "",
) -> FillJob:
    """Return the job that fills access points of a gateway.

    Args:
        config: The gateway.
        points: Names of access points; empty for all that have a transform.
        into: ``"results"``, ``"cache"`` or ``"both"``; None takes the bucket of results if there is one, else the cache.
        query: Parameters of the query of the requests whose results are made; None for none.
        caller: ID of the access key that sends them; empty for none.

    Raises:
        ConfigError: The configuration is not valid, or there is nothing to fill or no place for it.
    """
    config = with_defaults(config)
    check_config(config)
    names = list(points)
    known = {point.name: point for point in config.access_points}
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no access point {name!r}", hint=f"there are {', '.join(sorted(known))}")
        if not is_transformed(known[name]):
            raise ConfigError(f"access point {name!r} has no transform, so it has no results")
    chosen = tuple(point for point in config.access_points if (point.name in names if names else is_transformed(point)))
    if not chosen:
        raise ConfigError("no access point has a transform, so there are no results", hint="--transform NAME")
    for point in chosen:
        if point.handler is not None and "GetObject" not in point.handler.actions:
            raise ConfigError(f"the handler of access point {point.name!r} does not answer GetObject")
    if not config.cache:
        raise ConfigError("results are made in the cache, and the cache is switched off", hint="--cache PATH:SIZE")
    return FillJob(
        config=replace(config, access_points=chosen), places=_places(config, into), query=query or {}, caller=caller
    )


def _places(config: GatewayConfig, into: str | None) -> frozenset[Place]:
    chosen = into or ("results" if config.results else "cache")
    places: dict[str, frozenset[Place]] = {
        "results": frozenset({"results"}),
        "cache": frozenset({"cache"}),
        "both": frozenset({"results", "cache"}),
    }
    if chosen not in places:
        raise ConfigError(f"--into {chosen!r} must be one of {', '.join(places)}")
    if "results" in places[chosen] and not config.results:
        raise ConfigError(f"--into {chosen} needs a bucket of results", hint="--results s3://bucket/derived/")
    return places[chosen]


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


# ── the sources ──────────────────────────────────────────────────────────────────────────────────────────────────────


def listed_keys(point: AccessPoint, store: Store, patterns: Iterable[str]) -> Iterator[FillKey]:
    """Iterate over the sources of an access point, each once.

    Args:
        point: The access point.
        store: Store of the upstream.
        patterns: Keys of sources, prefixes that end with a slash, or patterns such as ``train/**/*.tar``; empty for all.

    Raises:
        ConfigError: A pattern is not valid.
        StoreError: The store cannot be listed.

    Cost: one listing for each pattern.
    """
    seen: set[str] = set()
    for pattern in list(patterns) or [""]:
        for info in _matching(store, pattern):
            if info.key not in seen and not _is_left_out(info.key):
                seen.add(info.key)
                yield FillKey(point.name, info.key, info.size_bytes)


def _matching(store: Store, pattern: str) -> Iterator[ObjectInfo]:
    if not is_pattern(pattern):
        if pattern and not pattern.endswith("/"):
            yield store.stat(pattern)
        else:
            yield from store.list(pattern)
        return
    head, below = split_glob(pattern)
    head = "" if head == "./" else head
    matches = matcher(below)
    for info in store.list(head):
        if matches(info.key[len(head) :]):
            yield info


def manifest_keys(point: AccessPoint, url: str) -> Iterator[FillKey]:
    """Iterate over the sources that a manifest names, each once.

    Raises:
        ConfigError: The manifest names an object that does not lie in the upstream of the access point.
        DataError: It is not a manifest.
        StoreError: It cannot be read.
    """
    folder, name = split(url)
    options = point.upstream_options if url.startswith("s3://") else {}
    with connect(folder, **options) as store:  # type: ignore[arg-type]
        entries = read_manifest(store.read(name).data, url=url)
    root = f"{point.upstream.rstrip('/')}/"
    seen: set[str] = set()
    for entry in entries:
        key = entry.url.removeprefix("file://").removeprefix(root)
        if key == entry.url or key.startswith("/"):
            raise ConfigError(f"the manifest {url} names {entry.url}, which does not lie in {point.upstream}")
        if key not in seen and not _is_left_out(key):
            seen.add(key)
            yield FillKey(point.name, key, entry.size_bytes or 0)


def _is_left_out(key: str) -> bool:
    """Whether an object is not a source, such as a folder marker or a file that penstock keeps beside shards."""
    return key.endswith("/") or is_beside_shards(key)


# ── making results ───────────────────────────────────────────────────────────────────────────────────────────────────


class _FailureLog(logging.Handler):
    """Keeps log records about requests, because the errors that clients get name neither code nor paths."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: dict[str, str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        request_id = getattr(record, "request_id", None)
        if request_id in self.texts:
            self.texts[request_id] = record.getMessage()


class ResultFiller:
    """Makes results. All methods run on one event loop.

    Args:
        job: The access points to fill, and where results are kept.
        together_max: Number of results that are made at the same time.
    """

    def __init__(self, job: FillJob, *, together_max: int) -> None:
        self._job = job
        self._assembly = assembly_of(job.config, job.config.access_points)
        self._together_max = together_max
        self._turns = asyncio.Semaphore(together_max)
        self._failures = _FailureLog()
        logging.getLogger("penstock").addHandler(self._failures)

    async def start(self) -> None:
        """Open the stores, and start the transforms.

        Raises:
            ConfigError: The configuration cannot be served, or an access point keeps no results.
            StoreError: The bucket of results does not answer.
        """
        await self._assembly.start()
        for name, bucket in self._assembly.transformed.items():
            if not bucket.keeps_results(self._request(name, "")):
                raise ConfigError(
                    f"access point {name!r} keeps no results that other requests find",
                    hint="a transform with random numbers needs --query x-penstock-epoch=N; one that maps ranges keeps none",
                )
        if "results" in self._job.places:
            await self._derived.check()

    @property
    def _results(self) -> Results:
        assert self._assembly.results is not None
        return self._assembly.results

    @property
    def _derived(self) -> DerivedResults:
        assert self._results.derived is not None
        return self._results.derived

    def identities(self) -> dict[str, str]:
        """Return the identity of each transform by access point. Machines with equal identities make the same results."""
        return {name: transform.identity for name, transform in self._assembly.transforms.items()}

    def store(self, name: str) -> Store:
        """Return the store of an access point."""
        return self._assembly.sources[name].store

    async def fill(self, keys: Iterable[FillKey], filled: Callable[[Filled], None]) -> None:
        """Make the results of sources.

        Args:
            keys: The sources; they are taken as results are finished.
            filled: Called with the outcome of each result, failures included.
        """

        async def work(source: FillKey) -> None:
            filled(await self._fill(source))

        await for_each(keys, work, together_max=self._together_max * CHECKS_PER_RESULT)

    def check_indexes(self) -> None:
        """Make sure that every access point serves indexes.

        Raises:
            ConfigError: One does not; the message says why.
        """
        for name, bucket in self._assembly.indexed.items():
            if not bucket.serves_indexes(self._request(name, "")):
                raise ConfigError(
                    f"access point {name!r} serves no index, because its listings show the sizes of the sources",
                    hint="list_sizes = 'transform'",
                )

    async def fill_index(self, name: str) -> Filled:
        """Make the index of all results of an access point, and those of the results themselves.

        Args:
            name: Name of the access point, whose results exist.

        Returns:
            The outcome of the index of all results; left out if none of them is a shard.

        Cost: a listing, and one pass over the bytes of the results that have no index yet.
        """
        source = FillKey(name, f"{FOLDER}{DATASET_KEY}", 0)
        try:
            *shards, dataset = await self._assembly.indexed[name].shared_indexes(self._request(name, ""))
        except ObjectMissingError:
            return Filled(source, "left-out")
        try:
            await for_each(shards, partial(self._ensure, source), together_max=self._together_max)
            return await self._ensure(source, dataset)
        except (S3Error, PenstockError, OSError) as error:
            return Filled(source, "failed", dataset.plan.name.etag, error=f"{type(error).__name__}: {error}")

    async def _fill(self, source: FillKey) -> Filled:
        bucket = self._assembly.transformed[source.point]
        key = bucket.result_key(source.key)
        if key is None:
            return Filled(source, "left-out")
        request = self._request(source.point, key)
        texts, etag = self._failures.texts, ""
        texts[request.request_id] = ""
        try:
            shared = await bucket.share(request)
            etag = shared.plan.name.etag
            return await self._ensure(source, shared)
        except S3Error as error:
            reasons = [f"{error.code}: {error.message}", texts[request.request_id]]
            return Filled(source, "failed", etag, error="\n".join(filter(None, reasons)))
        except (PenstockError, OSError) as error:
            return Filled(source, "failed", etag, error=f"{type(error).__name__}: {error}")
        finally:
            del texts[request.request_id]

    async def _ensure(self, source: FillKey, shared: SharedResult) -> Filled:
        """Make sure that a result is kept in every place of the job."""
        name, places = shared.plan.name, self._job.places
        is_derived = "results" in places and await self._derived.find(name) is not None
        is_cached = shared.record is not None and shared.record.is_complete
        if is_derived >= ("results" in places) and is_cached >= ("cache" in places):
            return Filled(source, "present", name.etag)
        async with self._turns:
            record = await self._kept(shared)
            if "results" in places and not is_derived:
                record = await self._ensure_derived(shared, record)
        is_copied = is_cached or was_copied(shared.plan)
        return Filled(source, "copied" if is_copied else "made", name.etag, record.size_bytes or 0)

    async def _kept(self, shared: SharedResult) -> ResultRecord:
        record = await shared.wait_complete()
        if record is None:
            raise ConfigError(
                "the result does not fit into the cache", hint="--cache PATH:SIZE, more than twice as large"
            )
        return record

    async def _ensure_derived(self, shared: SharedResult, record: ResultRecord) -> ResultRecord:
        for _ in range(_ATTEMPTS_COUNT):
            kept = await self._results.ensure_derived(record)
            if kept.outcome in ("stored", "present"):
                return record
            if kept.outcome == "failed":
                raise PenstockError(f"the bucket of results did not take it: {kept.error}")
            shared.lost(record)
            record = await self._kept(shared)
        raise ConfigError("its blocks were evicted from the cache before they were stored", hint="--cache PATH:SIZE")

    def _request(self, point: str, key: str) -> GatewayRequest:
        config = self._job.config
        return GatewayRequest(
            method="GET",
            bucket=point,
            key=key,
            query=self._job.query,
            headers={},
            caller=Caller(self._job.caller, False),
            url=f"http://127.0.0.1:{config.port}/{encoded_key(f'{point}/{key}')}",
            remote="127.0.0.1",
            request_id=secrets.token_hex(8),
        )

    async def close(self) -> None:
        """End the transforms, finish the writes in progress, and close everything; idempotent."""
        logging.getLogger("penstock").removeHandler(self._failures)
        await self._assembly.close()


def fill(job: FillJob, options: FillOptions, listener: FillListener) -> None:
    """Make results ahead. Existing results are skipped, so an interrupted run can be repeated.

    Args:
        job: The results to fill; see ``fill_job``.
        options: Say which results are made, and where.
        listener: Receives the outcome of each result, failures included.

    Raises:
        ConfigError: The configuration cannot be served, or the machines of the cluster would make other results.
        StoreError: The sources cannot be listed, or the bucket of results does not answer.
        WorkerDiedError: A machine of the cluster was lost too often.
        KeyboardInterrupt: The user interrupted; unfinished results are dropped, and complete ones are stored.

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
        listener.planned(len(keys) + len(indexed), sum(each.size_bytes for each in keys))
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
    listener.planned(len(keys), sum(each.size_bytes for each in keys))

    def take(_: tuple[FillKey, ...], results: list[Filled]) -> None:
        for result in results:
            listener.filled(result)

    from penstock.ray.tasks import RayTasks  # here, because Ray may not be installed

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
