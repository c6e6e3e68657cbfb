"""What a ``Loader`` is in the middle of: its plan, its epoch, the batches handed out, and the state that says so.

Refers to no loader, so that a loader can be collected while the session's threads run.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from penstock.errors import ClosedError, ConfigError
from penstock.loader.batches.run import RunPlan
from penstock.loader.epoch.consensus import RankConsensus
from penstock.loader.epoch.opening import EpochRequest, WorkerOptions, open_epoch
from penstock.loader.options import PREFETCH_BYTES
from penstock.loader.plan.loader_plan import LoaderPlan, make_plan
from penstock.loader.plan.ranks import rank_and_world_size
from penstock.loader.plan.sources import SourceFinder
from penstock.loader.position import IndexPosition, OutOfOrderPosition, feed_position
from penstock.loader.reporting import LiveLine
from penstock.loader.state import LoaderState
from penstock.loader.statistics import LoaderStatistics, Meter, cache_sums
from penstock.pipeline import Batch, BatchBySize, Pipeline, Shuffle
from penstock.samples.transform import SampleTransform

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.loader.epoch.sources import BatchSource
    from penstock.loader.options import Options
    from penstock.loader.position import Position
    from penstock.loader.workers.process_pool import ProcessPool

_log = logging.getLogger("penstock.loader")
_DIGEST_MASK = (1 << 62) - 1  # what a signed 64-bit integer of a collective holds


class Session:
    """One loader's run over epochs.

    Args:
        pipeline: Ends with a batch.
        options: The loader's.
    """

    def __init__(self, pipeline: Pipeline, options: Options) -> None:
        self.options = options
        self.meter = Meter()
        self.epoch = 0
        self.generation = 0  # counts epochs and restarts: an iterator of an earlier generation is exhausted
        self.left_s: float | None = None  # when the training loop got its last batch
        self._left_cpu_s = 0.0  # what its thread had run until then
        self._first = pipeline  # as given; `on_epoch` may replace it
        self._batches_count = 0  # handed out in this epoch
        self._position: Position | None = None  # behind the last of them
        self._decided: Mapping[str, Any] | None = None  # the statistics that `on_epoch` was given for this epoch
        self._changed: Mapping[str, Any] | None = None  # the epoch and statistics for which it gave the pipeline of now
        self._opened: int | None = None  # the epoch that all ranks know to be open
        self._loaded: LoaderState | None = None  # a state that iteration has yet to begin from
        self._accepts_changed_data = False
        self._running: BatchSource | None = None
        self._plan: LoaderPlan | None = None
        self._workers: ProcessPool | None = None
        self._closed = self._is_stepping = False
        self._line = LiveLine() if options.progress else None
        self._use(pipeline)

    def _use(self, pipeline: Pipeline) -> None:
        """Read another pipeline from now on."""
        self.pipeline = pipeline
        self.transforms = tuple(SampleTransform(leaf) for leaf in pipeline.flat().leaves)
        self._finder = SourceFinder(
            pipeline,
            fetch=self.options.fetch,
            index_dir=self.options.index_dir,
            cache=self.options.cache,
            share=self.options.share,
        )
        self._plan = None
        self._has_agreed = False  # with the other ranks, on whether an index is used

    # ── one step ───────────────────────────────────────────────────────────────────────────────────────────────────

    def next(self, generation: int) -> Any:
        """The next batch of a generation; None at its end. See ``Loader``."""
        if generation != self.generation:
            return None
        self.check_open()
        if self._is_stepping:  # it would give batches twice
            raise ConfigError("two threads iterate one loader at once", hint="one at a time, or a loader for each")
        self._is_stepping = True
        try:
            return self._next()
        finally:
            self._is_stepping = False

    def _next(self) -> Any:
        asked_s, asked_cpu_s = time.perf_counter(), time.thread_time()
        if self._running is None:
            if self._line is not None:
                self._line.begin(self.statistics(), now_s=time.monotonic())
            self._running = self._started()
            if self._closed:  # by another thread meanwhile, which saw no epoch to close
                self._close_epoch()
                self.check_open()
        found = self._running.next()
        got_s = time.perf_counter()
        left_s, cpu_s = (asked_s, 0.0) if self.left_s is None else (self.left_s, asked_cpu_s - self._left_cpu_s)
        self.meter.stepped(left_s, asked_s, got_s, cpu_s=cpu_s)
        if found is None:
            if self._line is not None:
                self._draw(self._line, is_last=True)
            self.begin_at(self.epoch + 1)
            return None
        self.meter.batches += 1
        self._batches_count = found.number + 1
        self._position = found.position
        if self._line is not None:
            self._draw(self._line)
        self.left_s, self._left_cpu_s = time.perf_counter(), time.thread_time()
        return found.batch

    def begin_at(self, epoch: int) -> None:
        """Be at the beginning of an epoch; iterators made before are exhausted."""
        self._close_epoch()
        self.epoch = epoch
        self.generation += 1
        self._batches_count = 0
        self._position = self._loaded = self._decided = None
        self.left_s = None

    def planned(self) -> LoaderPlan:
        """What was found by looking, now or before."""
        if self._plan is None:
            self._plan = self._planned(self.options)
        return self._plan

    def _planned(self, options: Options) -> LoaderPlan:
        plan = make_plan(self.pipeline, options=options, finder=self._finder, meter=self.meter, state=self._loaded)
        if plan.read_plan.memory is not None:
            plan.read_plan.memory.check()
        return plan

    def check_open(self) -> None:
        """Refuse to go on once closed.

        Raises:
            ClosedError: it is.
        """
        if self._closed:
            raise ClosedError("the loader is closed")

    def close(self) -> None:
        """End the threads and the stores' use; idempotent."""
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
        """See ``Loader``."""
        dropped: dict[str, int] = {}
        for transform in self.transforms:
            for stage, count in transform.dropped.items():
                dropped[stage] = dropped.get(stage, 0) + count
        cached = cache_sums(self._finder.stores)
        return self.meter.read(threads_count=self.options.threads_count, dropped=dropped, cached=cached)

    def _close_finder(self) -> None:
        self.meter.add(cache_sums(self._finder.stores), {})
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
        """See ``Loader``."""
        return (self._loaded or self._state()).to_json()

    def _state(self) -> LoaderState:
        plan = self._plan
        return LoaderState(
            epoch=self.epoch,
            batches_count=self._batches_count,
            mode=plan.read_plan.mode if plan is not None else "",
            facts=plan.facts if plan is not None else {},
            data_digest=plan.digest if plan is not None else "",
            position=self._position,
            epoch_statistics=self._decided,
            pipeline_change=self._changed,
        )

    def load_state_dict(self, state: Mapping[str, Any], *, accept_changed_data: bool) -> None:
        """See ``Loader``."""
        loaded = LoaderState.from_json(state)
        self.begin_at(loaded.epoch)
        self._batches_count = loaded.batches_count
        self._loaded = loaded
        self._accepts_changed_data = accept_changed_data
        if self._plan is not None and loaded.position is not None:
            self._plan = None  # weights, lanes and mode are the state's

    def set_weights(self, weights: Sequence[float] | Mapping[Pipeline, float], *, from_batch: int) -> None:
        """See ``Loader``."""
        if self._loaded is not None:
            self._decide(None)
        plan = self.planned()
        if self._loaded is not None:
            self._position, self._loaded = self._resumed(plan), None
        if not isinstance(from_batch, int):
            raise ConfigError(f"set_weights(from_batch={from_batch!r}) must be a whole number")
        if from_batch < self._batches_count:
            raise ConfigError(
                f"set_weights(from_batch={from_batch}): batch {self._batches_count - 1} was handed out already"
            )
        if isinstance(self._position, OutOfOrderPosition):
            raise ConfigError("set_weights() does not go with batches handed out of order", hint="in_order=True")
        place = feed_position(self._position)
        position = place.position if isinstance(place, IndexPosition) else 0  # nothing else is the place of a mix
        from_position = position + (from_batch - self._batches_count) * plan.batching.global_size
        self._plan = plan.with_weights(weights, epoch=self.epoch, position=from_position)
        self._close_epoch()  # what was prefetched is read again
        if self._batches_count and self._position is None:
            self._position = IndexPosition(0)

    # ── beginning ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _close_epoch(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def _started(self) -> BatchSource:
        """An epoch that all ranks opened."""
        agreement = self._agreement()
        if agreement is None:
            return self._begun(None)
        is_new, self._opened = self._opened != self.epoch, None
        with agreement.reporting_failure() if is_new else nullcontext():
            epoch = self._begun(agreement)
        try:
            if is_new:
                agreement.smallest(0)
        except BaseException:
            epoch.close()
            raise
        self._has_agreed = True
        # who asks before each batch asks also when it opens an epoch again
        self._opened = None if epoch.agrees_each_batch else self.epoch
        return epoch

    def _agreement(self) -> RankConsensus | None:
        """With the other ranks, where there are any."""
        options = self.options
        if options.agree is None:
            return None
        _, world_size = rank_and_world_size(options.rank, options.world_size, mesh=options.mesh)
        return RankConsensus(options.agree) if world_size > 1 else None

    def _begun(self, agreement: RankConsensus | None) -> BatchSource:
        self._decide(agreement)
        self._agree_on_mode(agreement)
        plan = self.planned()
        if self._loaded is not None:
            self._position = self._resumed(plan)
        shuffle = self.pipeline.stage(Shuffle)
        batch = self.pipeline.stage(Batch) or self.pipeline.stage(BatchBySize)
        assert batch is not None
        seed = shuffle.seed if shuffle else 0
        run_plan = RunPlan(
            transforms=self.transforms,
            batch=batch,
            batch_size=plan.rows_count,
            drop_last=plan.batching.drop_last,
            threads_count=self.options.threads_count,
            prefetch_batches=self.options.prefetch_count,
            prefetch_bytes=PREFETCH_BYTES if self.options.prefetch_batches is None else 0,
            seed=seed,
            in_order=self.options.in_order,
        )
        request = EpochRequest(
            plan=plan,
            run_plan=run_plan,
            epoch=self.epoch,
            position=self._position,
            first_number=self._batches_count,
            stride=self.options.stride,
            meter=self.meter,
        )
        epoch = open_epoch(request, consensus=agreement, workers=self._worker_options())
        self._loaded = None
        weights = f", weights {plan.facts['weights']}" if "weights" in plan.facts else ""
        _log.info("epoch %d, seed %d, %s%s", self.epoch, seed, plan.summary, weights)
        return epoch

    def _worker_options(self) -> WorkerOptions | None:
        if not self.options.processes:
            return None
        if self._workers is None:
            from penstock.loader.workers.process_pool import ProcessPool

            self._workers = ProcessPool()
        return WorkerOptions(self._workers, self.options.processes, self.options.restart_workers)

    def _decide(self, agreement: RankConsensus | None) -> None:
        """Ask ``on_epoch`` what to read, as it was asked before where a state says so."""
        on_epoch = self.options.on_epoch
        if on_epoch is None or (self._position is not None and self._loaded is None):
            return
        statistics = self._loaded.epoch_statistics if self._loaded is not None else None
        if statistics is None:
            statistics = asdict(self.statistics())
        current = self.pipeline if self._loaded is None else self._before(self._loaded.pipeline_change)
        changed = self._asked(self.epoch, statistics)
        if agreement is not None:
            agreement.smallest(0)  # before ranks that could not decide are waited for elsewhere
        self._decided = statistics
        if changed is None:
            changed = current
        else:
            self._changed = {"epoch": self.epoch, "statistics": statistics}
        if changed != self.pipeline:
            self._close_finder()
            self._use(changed)
        if agreement is not None:
            self._agree_on_data(agreement)

    def _before(self, changed: Mapping[str, Any] | None) -> Pipeline:
        """What was read before the epoch of the loaded state: as given, or as `on_epoch` changed it last."""
        self._changed = changed
        return self._first if changed is None else self._asked(**changed) or self._first

    def _asked(self, epoch: int, statistics: Mapping[str, Any]) -> Pipeline | None:
        """What ``on_epoch`` gives for an epoch."""
        assert self.options.on_epoch is not None
        given = self.options.on_epoch(epoch, LoaderStatistics.of(statistics))
        if given is None:
            return None
        if not isinstance(given, Pipeline) or (given.stage(Batch) or given.stage(BatchBySize)) is None:
            raise ConfigError(f"on_epoch gave {given!r}, not a pipeline with .batch(), or None to go on with what is")
        return given

    def _agree_on_mode(self, agreement: RankConsensus | None) -> None:
        """Read by an index only where all ranks have one: each host may have its own, left by an earlier job."""
        is_saved = self._loaded is not None and bool(self._loaded.mode)
        if self._has_agreed or agreement is None or is_saved or self.options.index != "auto":
            return
        is_indexed = self.planned().read_plan.mode == "index"
        if not agreement.smallest(int(is_indexed)) and is_indexed:
            self._plan = self._planned(replace(self.options, index="stream"))

    def _agree_on_data(self, agreement: RankConsensus) -> None:
        """All ranks must have decided alike."""
        digest = int(self.planned().digest, 16) & _DIGEST_MASK
        # both on every rank: one that stopped here leaves others waiting
        lowest, highest = agreement.smallest(digest), -agreement.smallest(-digest)
        if lowest != highest:
            raise ConfigError(
                f"epoch {self.epoch}: on_epoch gave another data set here than on another rank",
                hint="decide from what all ranks know",
            )

    def _resumed(self, plan: LoaderPlan) -> Position | None:
        """Where in the epoch the loaded state says to begin."""
        state = self._loaded
        if state is None or not state.facts:
            return None
        if self._accepts_changed_data and state.data_digest != plan.digest:
            _log.warning("the data set changed since the state was saved: epoch %d begins again", self.epoch)
            self._batches_count = 0
            return None
        state.check_same_data(plan.digest)
        if state.position is not None:  # at an epoch's beginning another job may go on
            state.check_same_job(mode=plan.read_plan.mode, facts=plan.facts)
        return state.position
