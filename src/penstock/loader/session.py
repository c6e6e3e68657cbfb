"""The session of a ``Loader``: its plan, its epoch, and the state that describes which batches were handed out.

A session does not refer to its loader, so that the loader can be collected while the threads of the session run.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from penstock.errors import ClosedError, ClusterLostError, ConfigError
from penstock.loader.epoch import Epoch, RankConsensus
from penstock.loader.plan.loader_plan import Planner, filtered_shares
from penstock.loader.plan.ranks import rank_and_world_size
from penstock.loader.plan.source_finder import SourceFinder
from penstock.loader.position import (
    REBATCHED_SAMPLES_MAX,
    IndexPosition,
    OutOfOrderPosition,
    RebatchedPosition,
    feed_position,
)
from penstock.loader.state import LoaderState
from penstock.loader.statistics import LiveLine, LoaderStatistics, Meter, store_sums
from penstock.pipeline import Batch, BatchBySize, Pipeline
from penstock.samples.transform import SampleTransform

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.loader.epoch import BatchSource, NumberedBatch
    from penstock.loader.options import LoaderOptions
    from penstock.loader.plan.loader_plan import LoaderPlan
    from penstock.loader.position import Position
    from penstock.loader.workers.process_pool import WorkerPool

_log = logging.getLogger("penstock.loader")
_DIGEST_MASK = (1 << 62) - 1  # a digest that fits into a collective's signed 64-bit integer


class Session:
    """The progress of one loader over epochs.

    Args:
        pipeline: A pipeline that ends with a batch.
        options: Options of the loader.
    """

    def __init__(self, pipeline: Pipeline, options: LoaderOptions) -> None:
        self.options = options
        self.meter = Meter()
        self.epoch = 0
        self._generation = 0  # counts epochs and restarts: an iterator of an earlier generation is exhausted
        # when the training loop got its last batch, and CPU time of its thread until then; None after a pause
        self._previous_s: tuple[float, float] | None = None
        self._first = pipeline  # as given; `on_epoch` may replace it
        self._batches_count = 0  # handed out in this epoch
        self._position: Position | None = None  # position after the last of these batches
        self._epoch_statistics: Mapping[str, Any] | None = None  # what `on_epoch` was called with; None before the call
        self._pipeline_change: Mapping[str, Any] | None = None  # the call of `on_epoch` that returned this pipeline
        self._agreed_epoch: int | None = None  # the epoch that all ranks know to be open
        self._loaded: LoaderState | None = None  # the state from which iteration will start
        self._running: BatchSource | None = None
        self._plan: LoaderPlan | None = None
        self._workers: WorkerPool | None = None
        self._closed = self._is_stepping = False
        self._is_local = False  # whether this epoch goes on without the workers of the cluster
        self._line = LiveLine() if options.progress else None
        self._use(pipeline)

    def _use(self, pipeline: Pipeline) -> None:
        """Read this pipeline from now on."""
        self.pipeline = pipeline
        self.transforms = tuple(SampleTransform(leaf) for leaf in pipeline.flat().leaves)
        self._finder = SourceFinder(
            pipeline,
            fetch=self.options.fetch,
            index_dir=self.options.index_dir,
            cache=self.options.cache,
            share=self.options.share,
        )
        self._checks_shares = len(self.transforms) > 1 and any(each.has_filter for each in self.transforms)
        self._plan = None
        self._has_agreed = False  # whether the ranks have agreed on the use of an index

    # ── one step ───────────────────────────────────────────────────────────────────────────────────────────────────

    def begin_iteration(self) -> int:
        """Return the number of the current generation, for a new iterator. The time until its first step is not counted.

        Raises:
            ClosedError: The session is closed.
        """
        self.check_open()
        self._previous_s = None
        return self._generation

    def next(self, generation: int) -> Any:
        """The next batch of a generation; None at its end."""
        if generation != self._generation:
            return None
        self.check_open()
        if self._is_stepping:  # batches would be handed out twice
            raise ConfigError(
                "two threads are iterating one loader",
                hint="iterate it in one thread at a time, or make a loader for each thread",
            )
        self._is_stepping = True
        try:
            asked_s, asked_cpu_s = time.perf_counter(), time.thread_time()
            numbered = self._next_batch()
            got_s = time.perf_counter()
            previous_s, previous_cpu_s = self._previous_s or (asked_s, asked_cpu_s)
            self.meter.stepped(previous_s, asked_s, got_s, cpu_s=asked_cpu_s - previous_cpu_s)
            if numbered is None:
                if self._line is not None:
                    self._draw(self._line, is_last=True)
                self.begin_at(self.epoch + 1)
                return None
            self.meter.batches += 1
            self._batches_count = numbered.number + 1
            self._position = numbered.position
            if self._line is not None:
                self._draw(self._line)
            if self._checks_shares:
                self._check_shares()
            self._previous_s = time.perf_counter(), time.thread_time()
            return numbered.batch
        finally:
            self._is_stepping = False

    def _next_batch(self) -> NumberedBatch | None:
        """The next batch of the epoch, if need be without the workers of the cluster."""
        running = self._running or self._begin_epoch()
        try:
            return running.next()
        except ClusterLostError as error:
            if running.agrees_each_batch:  # the other ranks know that this one has failed
                raise
            self._leave_cluster(error)
        self._close_epoch()
        return self._begin_epoch().next()

    def _leave_cluster(self, error: ClusterLostError) -> None:
        """Go on without workers until the next epoch, if that is wanted; otherwise raise the error."""
        if self.options.workers is None or not self.options.workers.fallback:
            raise error
        _log.warning("%s; epoch %d goes on in this process", error.what, self.epoch)
        self._is_local = True

    def _begin_epoch(self) -> BatchSource:
        if self._line is not None:
            self._line.begin(self.statistics(), now_s=time.monotonic())
        opened = self._running = self._open_epoch()
        if self._closed:  # another thread closed the session in the meantime, and saw no epoch to close
            self._close_epoch()
            self.check_open()
        return opened

    def _check_shares(self) -> None:
        """Warn once if filters change the shares of a mix."""
        found = filtered_shares(self.planned().read_plan.order, self.transforms)
        self._checks_shares = found is None
        if found:
            _log.warning(found)

    def begin_at(self, epoch: int) -> None:
        """Go to the beginning of an epoch. Iterators that were made before are exhausted."""
        self._close_epoch()
        self.epoch = epoch
        self._is_local = False
        self._generation += 1
        self._batches_count = 0
        self._position = self._loaded = self._epoch_statistics = None
        self._previous_s = None

    def planned(self) -> LoaderPlan:
        """The plan; made at the first call. Cost: see ``Planner.plan``."""
        if self._plan is None:
            self._plan = self._planned(self.options)
        return self._plan

    def _planned(self, options: LoaderOptions) -> LoaderPlan:
        planner = Planner(
            pipeline=self.pipeline, options=options, transforms=self.transforms, meter=self.meter, state=self._loaded
        )
        plan = planner.plan(self._finder)
        if plan.read_plan.memory is not None:
            plan.read_plan.memory.check()
        return plan

    def check_open(self) -> None:
        """Refuse a closed session.

        Raises:
            ClosedError: The session is closed.
        """
        if self._closed:
            raise ClosedError("the loader is closed")

    def close(self) -> None:
        """End the threads and close the stores; idempotent."""
        self._closed = True
        self._close_epoch()
        recording = self._plan.read_plan.reading.recording if self._plan is not None else None
        if recording is not None:
            recording.close()
        if self._workers is not None:
            self._workers.close()
        self._close_finder()
        if self._line is not None:
            self._line.end()

    def statistics(self) -> LoaderStatistics:
        """Statistics of the loader so far."""
        dropped: dict[str, int] = {}
        for transform in self.transforms:
            for stage, count in transform.tolerance.counts().items():
                dropped[stage] = dropped.get(stage, 0) + count
        of_stores = store_sums(self._finder.stores)
        return self.meter.read(threads_count=self.options.threads_count, dropped=dropped, of_stores=of_stores)

    def _close_finder(self) -> None:
        self.meter.add(store_sums(self._finder.stores), {})
        self._finder.close()

    def _draw(self, line: LiveLine, *, is_last: bool = False) -> None:
        now_s = time.monotonic()
        if is_last:
            line.summarise(self.statistics(), epoch=self.epoch, batches=self._batches_count, now_s=now_s)
        elif line.is_due(now_s):
            plan = self.planned()
            batches = plan.batches(self.epoch)
            count = None if batches is None else len(batches)
            line.draw(self.statistics(), epoch=self.epoch, batch=self._batches_count, batches=count, now_s=now_s)

    # ── state ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """The place of the training loop, as JSON."""
        if self._loaded is not None:
            return self._loaded.to_json()
        plan = self._plan
        return LoaderState(
            epoch=self.epoch,
            batches_count=self._batches_count,
            mode=plan.read_plan.mode if plan is not None else "",
            facts=plan.facts if plan is not None else {},
            data_digest=plan.digest if plan is not None else "",
            position=self._position,
            epoch_statistics=self._epoch_statistics,
            pipeline_change=self._pipeline_change,
        ).to_json()

    def load_state_dict(self, state: Mapping[str, Any], *, accept_changed_data: bool) -> None:
        """Continue where `state` was saved; see ``Loader.load_state_dict``."""
        loaded = LoaderState.from_json(state, accepts_changed_data=accept_changed_data)
        self.begin_at(loaded.epoch)
        self._batches_count = loaded.batches_count
        self._loaded = loaded
        if self._plan is not None and (loaded.kept_facts or self._plan.facts.get("has_set_weights")):
            self._plan = None  # the state decides on weights, lanes and mode

    def set_weights(self, weights: Sequence[float] | Mapping[Pipeline, float], *, from_batch: int) -> None:
        """Mix in other proportions from a batch of this epoch on; see ``Loader.set_weights``."""
        consensus = self._consensus()
        with consensus.reporting_failure() if consensus is not None else nullcontext():
            self._choose_pipeline(consensus)
        plan = self.planned()
        if self._loaded is not None:
            self._position, self._loaded = self._resume_position(plan), None
        if not isinstance(from_batch, int):
            raise ConfigError(f"set_weights(from_batch={from_batch!r}) must be a whole number")
        if from_batch < self._batches_count:
            raise ConfigError(
                f"set_weights(from_batch={from_batch}): batch {self._batches_count - 1} was handed out already"
            )
        if isinstance(self._position, OutOfOrderPosition):
            raise ConfigError("set_weights() needs batches in order, not in_order=False", hint="in_order=True")
        place = feed_position(self._position)
        position = place.position if isinstance(place, IndexPosition) else 0  # a mix has no other positions
        from_position = position + (from_batch - self._batches_count) * plan.batching.global_size
        if isinstance(
            self._position, RebatchedPosition
        ):  # samples whose outputs were handed out go through the stages again
            from_position = max(from_position, position + REBATCHED_SAMPLES_MAX * plan.read_plan.order.world_size)
        self._plan = plan.with_weights(weights, epoch=self.epoch, position=from_position)
        self._close_epoch()  # prefetched batches are read again

    # ── opening an epoch ───────────────────────────────────────────────────────────────────────────────────────────

    def _close_epoch(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def _open_epoch(self) -> BatchSource:
        """Open the epoch, and return when all ranks have opened it."""
        consensus = self._consensus()
        if consensus is None:
            return self._open_own_epoch(None)
        is_new, self._agreed_epoch = self._agreed_epoch != self.epoch, None
        with consensus.reporting_failure() if is_new else nullcontext():
            epoch = self._open_own_epoch(consensus)
        try:
            if is_new:
                consensus.smallest(0)
        except BaseException:
            epoch.close()
            raise
        self._has_agreed = True
        # ranks that agree before each batch also agree when they open an epoch again
        self._agreed_epoch = None if epoch.agrees_each_batch else self.epoch
        return epoch

    def _consensus(self) -> RankConsensus | None:
        """Consensus with the other ranks, if there are any."""
        options = self.options
        if options.agree is None:
            return None
        _, world_size = rank_and_world_size(options.rank, options.world_size, mesh=options.mesh)
        return RankConsensus(options.agree) if world_size > 1 else None

    def _open_own_epoch(self, consensus: RankConsensus | None) -> BatchSource:
        """Open the epoch on this rank."""
        pool = self._pool()
        self._choose_pipeline(consensus)
        self._agree_on_mode(consensus)
        plan = self.planned()
        if self._loaded is not None:
            self._position = self._resume_position(plan)
        epoch = Epoch(
            plan=plan, number=self.epoch, position=self._position, first_batch=self._batches_count, meter=self.meter
        )
        try:
            opened = epoch.open(consensus=consensus, pool=pool)
        except ClusterLostError as error:
            self._leave_cluster(error)
            opened = epoch.open(consensus=consensus)
        self._loaded = None
        weights = f", weights {plan.facts['weights']}" if "weights" in plan.facts else ""
        _log.info("epoch %d, seed %d, %s%s", self.epoch, plan.batch_plan.seed, plan.summary, weights)
        return opened

    def _pool(self) -> WorkerPool | None:
        """The workers of this epoch, which may start while it is planned; None if it is read in threads."""
        if self._workers is None and self.options.workers is not None:
            self._workers = self.options.workers.open(self.meter)
            if self._closed:  # by another thread in the meantime, which saw no workers to end
                self._workers.close()
        elif self._workers is None and self.options.processes:
            from penstock.loader.workers.process_pool import ProcessPool

            self._workers = ProcessPool(self.options.processes)
        return None if self._is_local else self._workers

    def _resume_position(self, plan: LoaderPlan) -> Position | None:
        """The position of the loaded state, if the state fits the plan."""
        state = self._loaded
        if state is None or not state.facts:
            return None
        if state.accepts_changed_data and state.data_digest != plan.digest:
            _log.warning("the data set changed since the state was saved: epoch %d begins again", self.epoch)
            self._batches_count = 0
            return None
        state.check_same_data(plan.digest)
        if state.position is not None:  # at the beginning of an epoch, another job may continue
            state.check_same_job(mode=plan.read_plan.mode, facts=plan.facts)
        return state.position

    # ── on_epoch, and consensus among ranks ──────────────────────────────────────────────────────────────────────────

    def _choose_pipeline(self, consensus: RankConsensus | None) -> None:
        """Call ``on_epoch`` for the epoch's pipeline; a resumed epoch passes the statistics of the first call again."""
        on_epoch = self.options.on_epoch
        if on_epoch is None or self._epoch_statistics is not None:
            return
        loaded = self._loaded
        statistics = loaded.epoch_statistics if loaded is not None else None
        is_first_call = statistics is None
        if statistics is None:
            statistics = asdict(self.statistics())
        current = self.pipeline if loaded is None else self._earlier_pipeline(loaded.pipeline_change)
        chosen = self._call_on_epoch(self.epoch, statistics)
        if consensus is not None:
            consensus.smallest(0)  # so that no rank waits elsewhere for a rank whose function failed
        if chosen is None:
            chosen = current
        else:
            self._pipeline_change = {"epoch": self.epoch, "statistics": statistics}
        if loaded is not None and is_first_call and chosen != current:
            self._loaded = replace(
                loaded, facts={**loaded.facts, "has_set_weights": False}
            )  # they were of the pipeline before
        if chosen != self.pipeline:
            self._close_finder()
            self._use(chosen)
        if consensus is not None:
            self._agree_on_data(consensus)
        self._epoch_statistics = statistics

    def _earlier_pipeline(self, change: Mapping[str, Any] | None) -> Pipeline:
        """The pipeline before the epoch of the loaded state: the first one, or the last that `on_epoch` returned."""
        self._pipeline_change = change
        return self._first if change is None else self._call_on_epoch(**change) or self._first

    def _call_on_epoch(self, epoch: int, statistics: Mapping[str, Any]) -> Pipeline | None:
        """The result of ``on_epoch`` for an epoch."""
        assert self.options.on_epoch is not None
        given = self.options.on_epoch(epoch, LoaderStatistics.of(statistics))
        if given is None:
            return None
        if not isinstance(given, Pipeline) or (given.stage(Batch) or given.stage(BatchBySize)) is None:
            raise ConfigError(
                f"on_epoch returned {given!r}, but must return a pipeline with .batch(), or None to keep the current one"
            )
        return given

    def _agree_on_mode(self, consensus: RankConsensus | None) -> None:
        """Use an index only if all ranks have one: an earlier job may have left an index on some hosts only."""
        is_saved = self._loaded is not None and bool(self._loaded.mode)
        if self._has_agreed or consensus is None or is_saved or self.options.index != "auto":
            return
        is_indexed = self.planned().read_plan.mode == "index"
        if not consensus.smallest(int(is_indexed)) and is_indexed:
            self._plan = self._planned(replace(self.options, index="stream"))

    def _agree_on_data(self, consensus: RankConsensus) -> None:
        """Refuse an epoch for which ``on_epoch`` chose different data on another rank."""
        digest = int(self.planned().digest, 16) & _DIGEST_MASK
        # every rank calls both: a rank that stopped after the first would leave the others waiting
        lowest, highest = consensus.smallest(digest), -consensus.smallest(-digest)
        if lowest != highest:
            raise ConfigError(
                f"epoch {self.epoch}: on_epoch chose a different data set here than on another rank",
                hint="decide only from what all ranks know",
            )
