"""``advise``: measures a store, this machine, a data set and a training step, and says what to change."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Unpack, cast

from penstock import pipeline as pipelines
from penstock.advise.probes import StoreProbe, measure_machine
from penstock.advise.profiles import CpuRate, DataProfile, Profile, Report
from penstock.advise.recommendations import recommend
from penstock.cache import CacheConfig
from penstock.config import MIB, FetchConfig, check_number, check_whole, cores_count
from penstock.errors import ConfigError, PenstockError, StoreError
from penstock.formats import FORMATS
from penstock.loader.inspection import list_url, look_into
from penstock.loader.loader import Loader
from penstock.loader.plan.source_finder import SourceFinder
from penstock.order import LANES_DEFAULT
from penstock.pipeline import Pipeline, Shards
from penstock.redaction import public_url
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.loader.inspection import Inspection, Listing
    from penstock.loader.statistics import LoaderStatistics
    from penstock.pipeline import ConnectionOptions

SHARES = 20  # single measurements among which the seconds are divided
LISTED_MAX = 10_000  # objects that are looked at; the number of more is estimated
LISTED_S_MAX = 3.0
PROBED_COUNT = 1000
STEPS_MAX = 50
ROUNDS = 2
DECODED_BYTES_MAX = 64 * MIB  # of the samples on which decoding is timed: they lie in a cache meanwhile
DECODED_SAMPLES_MAX = 20_000
WINDOW_BATCHES = 16  # batches in which a rate of decoding is measured: of two or three, one more is half of the rate
DEFAULT_BATCH_BYTES = 4 * MIB
TRY_NAMES = ("threads", "processes", "lanes", "prefetch_batches", "requests_max", "cache")  # options of a loader
_LEFT_OUT = (pipelines.Shuffle, pipelines.Evaluate, pipelines.Take, pipelines.Batch, pipelines.BatchBySize)


@boundary
def advise(
    url: str,
    *,
    pipeline: Pipeline | None = None,
    step: Callable[[Any], object] | None = None,
    step_s: float | None = None,
    batch: int | None = None,
    epochs: int = 10,
    seconds: float = 30.0,
    bytes_max: int = 2 * 10**9,
    progress: Callable[[str], None] = lambda _: None,
    **connection: Unpack[ConnectionOptions],
) -> Report:
    """Measure a store, this machine and a data set, and say what limits training and what to change.

    Ctrl-C ends the measurement: the report says what was found until then, and ``report.profile.is_interrupted`` is true.

    Args:
        url: One object, a prefix that ends with ``/``, or a pattern.
        pipeline: The pipeline of the training job, whose stages are applied to the data at `url`. None makes one up, which
            decodes pictures to 224 x 224 pixels. Its shuffle is left out, because filling its window would take long.
        step: The training step, ``fn(batch)``, which is called on a real batch.
        step_s: Seconds that a training step takes, instead of `step`.
        batch: Number of samples in a batch; None takes the pipeline's, or as many as make 4 MiB.
        epochs: Number of times that training reads the data, at least 1.
        seconds: Seconds that the measurement takes, about.
        bytes_max: Bytes that it reads from the store, about.
        progress: Called with the name of each part before it is measured.
        **connection: The options of a connection, as for ``penstock.shards``.

    Raises:
        ObjectMissingError: There is no object at the URL.
        StoreError: The store cannot be listed or read.
        ConfigError: An argument is out of bounds, or the pipeline mixes sources.

    Cost: a listing of 10 000 keys at most, and some hundred requests to estimate the number of more; up to `bytes_max` bytes of
        the store; and a file of 64 MiB on the disk with the most free space, which is removed.
    """
    check_number("seconds", seconds, 0.1)
    check_whole("epochs", epochs, 1)
    check_whole("bytes_max", bytes_max, 1)
    if step is not None and step_s is not None:
        raise ConfigError("step= and step_s= both say how long a training step takes: give only one")
    start_s, each_s = time.monotonic(), seconds / SHARES
    progress("this machine and the objects")
    options = {name: value for name, value in connection.items() if value and isinstance(value, str | bool)}
    profile = Profile(url=public_url(url), machine=measure_machine(), options=options, epochs=epochs)
    listing = list_url(url, objects_max=LISTED_MAX, seconds_max=LISTED_S_MAX, **connection)
    notes = [listing.sampled_text] if listing.is_estimated else []
    if len(listing.infos) == 1:
        notes.append("there is one object only: it is read again and again, so a store that caches it looks faster")
    spread = listing.infos[:: max(1, len(listing.infos) // PROBED_COUNT)]
    store = StoreProbe(listing.store, spread, seconds=each_s, bytes_max=bytes_max // 12)
    data, is_interrupted = None, False
    try:
        with _noting(notes):
            data = DataProbe(listing, pipeline, batch, notes)
        store.run(progress)
        with _noting(notes):
            if data is not None:
                data.run(progress, each_s, bytes_max // 4)
                step_s = step_s if step is None else data.time_step(step, 2 * each_s)
    except KeyboardInterrupt:
        is_interrupted = True
    finally:
        listing.store.close()
    received_bytes = store.received_bytes
    if data is not None:
        received_bytes += data.received_bytes
        rate = data.profile.batch_size / step_s if step_s else math.inf
        profile = replace(profile, data=data.profile, step_samples_per_s=rate)
    profile = replace(profile, store=store.profile, listed_per_s=listing.listed_per_s, received_bytes=received_bytes)
    profile = replace(profile, notes=tuple(dict.fromkeys(notes)), is_interrupted=is_interrupted)
    return recommend(replace(profile, seconds=time.monotonic() - start_s))


@contextmanager
def _noting(notes: list[str]) -> Iterator[None]:
    """Note what the user's own code raises in the block: the rest is measured nevertheless."""
    try:
        yield
    except (ConfigError, StoreError):
        raise
    except Exception as error:  # a pipeline and a step may raise anything
        what = error.what if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
        notes.append(f"the pipeline or the step failed, so what depends on it was not measured: {what}")


def try_options(
    url: str,
    options: Sequence[Mapping[str, Any]],
    *,
    pipeline: Pipeline | None,
    batch: int | None,
    seconds: float,
    bytes_max: int,
    **connection: Unpack[ConnectionOptions],
) -> list[float]:
    """Return the samples per second that a ``Loader`` delivers with each of several sets of options, which take turns.

    Args:
        url: URL of the data.
        options: Options of a loader, of those in ``TRY_NAMES``.
        pipeline: The pipeline, as for ``advise``.
        batch: Number of samples in a batch, as for ``advise``.
        seconds: Seconds that are divided among the options' turns, each a sixth of them.
        bytes_max: Bytes of which each turn reads an eighth, epoch after epoch.
        **connection: The options of a connection.
    """
    listing = list_url(url, objects_max=LISTED_MAX, seconds_max=LISTED_S_MAX, **connection)
    with closing(listing.store):
        data = DataProbe(listing, pipeline, batch, [])
        made = data.pipeline(math.ceil(bytes_max / 8 / max(1.0, data.profile.sample_bytes)))
        rates: list[list[float]] = [[] for _ in options]
        for _ in range(ROUNDS):
            for each, measured in zip(options, rates, strict=True):
                given = dict(each)
                if "requests_max" in given:
                    given["fetch"] = FetchConfig(requests_min=1, requests_max=given.pop("requests_max"))
                if "cache" in given:  # the first epoch fills it
                    loader_statistics(made, seconds=0, **given)
                measured.append(loader_statistics(made, seconds=seconds / 6, **given).samples_per_s)
        return [statistics.median(measured) for measured in rates]


# ── the data ────────────────────────────────────────────────────────────────────────────────────────────────────────


class DataProbe:
    """Measures one data set, a part at a time, so that an interrupted measurement keeps what it has.

    Args:
        listing: The objects at a URL.
        pipeline: The user's pipeline; None makes one up, which decodes pictures to 224 x 224 pixels.
        batch_size: Number of samples in a batch; None takes the pipeline's, or as many as make 4 MiB.
        notes: Takes oddities of the data.

    Attributes:
        profile: The measurement up to now.
        received_bytes: Bytes that were read up to now.

    Raises:
        ConfigError: The pipeline mixes sources, or cannot be read again.
        DataError, StoreError: The data cannot be read.
    """

    def __init__(self, listing: Listing, pipeline: Pipeline | None, batch_size: int | None, notes: list[str]) -> None:
        self._notes = notes
        self.received_bytes = 0
        given = None
        if pipeline is not None:
            pipelines.check_rereadable(pipeline, "advise")
            given = pipeline.source
            if isinstance(given, pipelines.Mix):
                raise ConfigError(f"advise() of {pipeline!r} looks at one source", hint="give a part of the mix")
        found = look_into(listing, given)
        if found.left_out:
            notes.append(found.left_out)
        self._urls, self._source = found.urls, cast("Any", found.source)
        if pipeline is None:
            pipeline = Pipeline(self._source, _default_stages(found))
        self._stages = tuple(stage for stage in pipeline.stages if not isinstance(stage, _LEFT_OUT))
        is_sharded = isinstance(self._source, Shards)
        is_columnar = is_sharded and FORMATS[found.format].unit == "block"
        needed = pipeline.members() if is_sharded and not is_columnar else None
        members = found.member_bytes
        self.profile = DataProfile(
            kind="shards" if is_sharded else "objects",
            objects_count=found.objects_count,
            is_sampled=listing.is_estimated,
            objects_bytes=found.size_bytes,
            formats=listing.formats,
            samples_per_object=found.samples_per_object,  # `run` and an index know better
            member_bytes=members,
            group_by=None if is_sharded else self._source.group_by,
            unused_members=() if needed is None else tuple(set(members) - set(";".join(needed).split(";"))),
            stages="".join(map(repr, self._stages)),
            lanes=LANES_DEFAULT if pipeline.stage(pipelines.Shuffle) else 1,
        )
        if is_sharded and not listing.is_estimated:
            with closing(SourceFinder(Pipeline(self._source), fetch=None, index_dir=None)) as finder:
                (source,) = finder.find(index="auto").sources
            if source.is_indexed:
                self._replace(is_indexed=True, samples_per_object=source.samples_count / len(source.shards))
        batch = pipeline.stage(pipelines.Batch)
        usual = max(16, min(1024, round(DEFAULT_BATCH_BYTES / max(1.0, self.profile.sample_bytes))))
        self._replace(batch_size=batch_size or (batch and (batch.size or batch.global_size)) or usual)

    def pipeline(self, take: int | None, urls: Sequence[str] | None = None, batch_size: int | None = None) -> Pipeline:
        """Return the pipeline that is measured, on the first samples of these URLs; None stands for all."""
        source = self._source if urls is None else replace(self._source, urls=tuple(urls))
        made = Pipeline(source, self._stages)
        return (made if take is None else made.take(take)).batch(batch_size or self.profile.batch_size)

    def run(self, progress: Callable[[str], None], seconds: float, bytes_max: int) -> None:
        """Time parsing and decoding, of samples that lie in a cache on this machine, and a ``Loader`` on the store.

        Args:
            progress: Called with the name of each part before it runs.
            seconds: Seconds that each measurement takes, about.
            bytes_max: Bytes that the loader may read.

        Raises:
            Exception: Whatever the pipeline raises.
        """
        progress("reading samples")
        sample_bytes, per_object = max(1.0, self.profile.sample_bytes), self.profile.samples_per_object
        count = min(DECODED_SAMPLES_MAX, math.ceil(DECODED_BYTES_MAX / sample_bytes))
        urls = self._urls[: math.ceil(count / per_object)]
        take = count if len(urls) * per_object > 1.2 * count else None  # whole shards tell how many samples they hold
        with tempfile.TemporaryDirectory(prefix="penstock-advise-") as folder:
            cache = CacheConfig(folder, 8 * DECODED_BYTES_MAX, free_ratio_min=0, metadata_ttl_s=math.inf)
            pipeline = self.pipeline(take, urls)
            filled = loader_statistics(pipeline, seconds=0.0, cache=cache)
            self.received_bytes += filled.cache_fetched_bytes
            if not filled.samples:
                self._notes.append("the pipeline gives no sample of those that were read")
                return
            if take is None and not self.profile.is_indexed and self.profile.kind == "shards":
                self._replace(samples_per_object=filled.samples / len(urls))
            batch_size = min(self.profile.batch_size, math.ceil(filled.samples_per_s * seconds / WINDOW_BATCHES))
            self._time_decoding(self.pipeline(take, urls, batch_size), cache, progress, seconds)
        progress("a Loader with its defaults")
        pipeline = self.pipeline(max(self.profile.batch_size, round(bytes_max / sample_bytes)))
        done = loader_statistics(pipeline, seconds=2 * seconds)
        self.received_bytes += done.bytes
        self._replace(samples_per_s=done.samples_per_s or None)

    def time_step(self, step: Callable[[Any], object], seconds: float) -> float:
        """Return the median seconds of a training step on a real batch, after a first one that compiles and allocates."""
        with Loader(self.pipeline(self.profile.batch_size), rank=0, world_size=1, index="stream") as loader:
            batch = next(iter(loader))
        times: list[float] = []
        end_s = time.monotonic() + seconds
        while len(times) < STEPS_MAX and (len(times) < 4 or time.monotonic() < end_s):
            start_s = time.perf_counter()
            step(batch)
            times.append(time.perf_counter() - start_s)
        return statistics.median(times[1:])

    def _time_decoding(
        self, pipeline: Pipeline, cache: CacheConfig, progress: Callable[[str], None], seconds: float
    ) -> None:
        cores, rates = cores_count(), dict[tuple[int, int], float]()
        settings = list(dict.fromkeys([(1, 0), (cores, 0), (cores, cores)]))
        for threads, processes in settings * ROUNDS:  # in turns, and the best counts: other programs only slow one down
            progress(f"decoding in {threads} {'processes' if processes else 'threads'}")
            options: dict[str, Any] = {"threads": threads, "processes": processes, "lanes": max(1, processes)}
            try:
                done = loader_statistics(pipeline, seconds=seconds, cache=cache, **options)
            except PenstockError as error:
                if not processes:
                    raise
                self._notes.append(f"worker processes cannot run this pipeline: {error.what}")
                continue
            rates[threads, processes] = max(done.samples_per_s, rates.get((threads, processes), 0.0))
            self._replace(cpu_rates=tuple(CpuRate(*setting, rate) for setting, rate in rates.items()))

    def _replace(self, **values: Any) -> None:
        self.profile = replace(self.profile, **values)


def loader_statistics(pipeline: Pipeline, *, seconds: float, **options: Any) -> LoaderStatistics:
    """Return the statistics of a ``Loader`` that was read for some seconds, epoch after epoch, without its first batch.

    Args:
        pipeline: A pipeline that ends with ``.batch()``.
        seconds: Seconds after which reading ends; 0 reads one epoch, with its first batch.
        **options: Options of the loader.
    """
    with Loader(pipeline, rank=0, world_size=1, index="stream", **options) as loader:
        start_s, before = time.monotonic(), None
        while True:
            for _ in loader:
                if before is None and seconds:
                    before, start_s = loader.statistics(), time.monotonic()
                elif seconds and time.monotonic() > start_s + seconds:
                    break
            done = loader.statistics()
            if not done.samples or time.monotonic() >= start_s + seconds:
                break
    if before is None or done.samples == before.samples:
        return done
    return replace(done, **{name: getattr(done, name) - getattr(before, name) for name in ("samples", "elapsed_s")})


def _default_stages(found: Inspection) -> tuple[Any, ...]:
    """A stage that decodes pictures to 224 x 224 pixels; none if there are no pictures, or they cannot be decoded."""
    pictures, picture, other = found.pictures, pipelines.Image, pipelines.Bytes
    if not pictures or find_spec("PIL") is None:
        return ()
    names = found.member_bytes
    fields = [picture(name, height=224, width=224) if name in pictures else other(name, default=b"") for name in names]
    return pipelines.shards("any").decode(*fields).stages
