"""The stages of a pipeline that see single samples: from a sample's stored members to its values.

``SampleTransform`` runs these stages and names the stage, the field and the sample in every error. If decoding is the last
stage, it writes straight into the memory of the batch, so that no array is allocated and copied per sample.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.errors import ConfigError, DataError, DecodeError, FieldMissingError
from penstock.formats import LOST, RESERVED_FIELDS
from penstock.formats.sample import likeness
from penstock.memory.buffers import is_typed
from penstock.pipeline import (
    Batch,
    BatchBySize,
    Decode,
    Evaluate,
    Filter,
    FlatMap,
    Join,
    Map,
    Select,
    Shards,
    Shuffle,
    Take,
    TokenBlocks,
)
from penstock.samples.decoding import SampleContext, decoded, decoded_columns
from penstock.system.tracebacks import failed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.formats import Sample, Samples
    from penstock.pipeline import Pipeline, Spec
    from penstock.samples.columns import Layout
    from penstock.samples.decoding import SampleRandom
    from penstock.samples.joins import Table


class Tolerance:
    """Counts dropped samples by stage, in total for the statistics and per epoch for the bound. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._in_epoch: dict[str, tuple[int, int]] = {}  # by stage: an epoch, and the count in it

    def drop(self, error: DataError, stage: str, max_errors: int, epoch: int) -> None:
        """Count a sample as dropped, unless the stage has reached its bound.

        Args:
            error: Error of the sample.
            stage: Name of the stage that failed.
            max_errors: Number of samples that the stage may drop per epoch; 0: none.
            epoch: Epoch number, from 0.

        Raises:
            DataError: `error` itself, if the stage may not drop another sample in this epoch.
        """
        if not max_errors:
            raise error
        with self._lock:
            counted_epoch, count = self._in_epoch.get(stage, (epoch, 0))
            if counted_epoch != epoch:
                count = 0
            if count < max_errors:
                self._in_epoch[stage] = (epoch, count + 1)
                self._counts[stage] = self._counts.get(stage, 0) + 1
                return
        error.add_note(f"max_errors={max_errors}: {stage} has already dropped this many samples in epoch {epoch}")
        raise error

    def count(self, stage: str) -> None:
        """Count a sample as dropped by a stage whose drops have no bound."""
        with self._lock:
            self._counts[stage] = self._counts.get(stage, 0) + 1

    def counts(self) -> dict[str, int]:
        """Return a copy of the numbers of samples dropped so far, by stage."""
        with self._lock:
            return dict(self._counts)


class Uncounted(Tolerance):
    """Counts nothing: for samples that pass the stages a second time, whose errors were counted the first time."""

    def drop(self, error: DataError, stage: str, max_errors: int, epoch: int) -> None:
        """Raise `error` if the stage drops no samples at all; otherwise do nothing."""
        if not max_errors:
            raise error

    def count(self, stage: str) -> None:
        """Do nothing."""


class _PreparedStage(NamedTuple):
    """A stage with what every sample needs of it, looked up once."""

    stage: Decode | Map | Filter | FlatMap | Select | Join
    name: str  # for errors and counts: "map[0]" is the first ``map`` of the pipeline
    takes_rng: bool
    max_errors: int
    is_raw: bool  # its input is still members: views of a part, which no user's function may keep


class SampleTransform:
    """The stages of a pipeline that see single samples, in order. Several threads may call it at once.

    Args:
        pipeline: A pipeline over one source: a leaf of ``Pipeline.flat()``.

    Attributes:
        is_empty: Whether there are no such stages: a sample's values are then its members.
        may_drop: Whether a call may return None, because a stage filters, tolerates errors or drops samples without a
            row in a joined table.
        is_many: Whether a call returns a list of any length, because there is a ``flat_map``.
        takes_columns: Whether ``columns`` may return columns: the only stage, if any, decodes fields that allow it.
        has_filter: Whether there is a ``filter``.
        tolerance: Counts the samples that are dropped for an error, and bounds their number.
        seen_count, filtered_count: Number of samples that reached the first filter, and that any filter left out. Threads
            count without a lock, so that they are nearly exact.

    Raises:
        ConfigError: A field needs a package that is not installed.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._stages: list[_PreparedStage] = []
        is_raw = True
        for stage in pipeline.stages:
            if isinstance(stage, Decode):
                for field in stage.fields:
                    field.require()
            if isinstance(stage, Decode | Map | Filter | FlatMap | Select | Join):
                self._stages.append(_prepared(stage, self._stages, is_raw=is_raw))
                is_raw = is_raw and isinstance(stage, Filter | Select | Join)
        kinds = [type(prepared.stage) for prepared in self._stages]
        joins = [prepared.stage for prepared in self._stages if isinstance(prepared.stage, Join)]
        self.is_empty = not kinds
        self.is_many = FlatMap in kinds
        self.has_filter = Filter in kinds
        self.seen_count = self.filtered_count = 0
        self.may_drop = (
            Filter in kinds
            or any(prepared.max_errors for prepared in self._stages)
            or any(join.missing == "drop" for join in joins)
        )
        self._ends_raw = is_raw
        last = self._stages[-1].stage if self._stages else None
        # arrays of known shape are worth writing in place
        has_arrays = isinstance(last, Decode) and any(spec and spec.shape for spec in last.specs.values())
        self._writes_rows = not self.is_many and has_arrays
        only = self._stages[0].stage if len(kinds) == 1 else None
        self._fields = only.fields if isinstance(only, Decode) else ()
        self.takes_columns = not kinds or (
            bool(self._fields) and all("decode_column" in vars(type(field)) for field in self._fields)
        )
        self.tolerance = Tolerance()
        self._tables: dict[Join, Table] = {}
        if joins:
            from penstock.samples.joins import table_of

            self._tables = {join: table_of(join, pipeline) for join in joins}

    def uncounted(self) -> SampleTransform:
        """Return the same transform for samples that it has seen before: dropped samples are then not counted again."""
        transform = copy(self)
        transform.tolerance = Uncounted()
        return transform

    def open(self) -> None:
        """Load the joined tables now; otherwise the first sample loads them.

        Raises:
            StoreError, DataError, ConfigError: A table cannot be read, or the object is not a table.
        """
        for table in self._tables.values():
            table.open()

    def specs(self) -> dict[str, Spec] | None:
        """Return dtype and shape of every output field, or None if only the first sample can show them."""
        specs: dict[str, Spec] | None = None
        for prepared in self._stages:
            stage = prepared.stage
            if isinstance(stage, Decode):
                specs = {name: spec for name, spec in stage.specs.items() if spec is not None}
                if len(specs) < len(stage.specs):
                    specs = None
            elif isinstance(stage, Map):
                specs = None if stage.fields is None else dict(stage.fields)
            elif isinstance(stage, Select) and specs is not None:
                specs = {name: specs[name] for name in stage.names if name in specs}
            elif isinstance(stage, FlatMap | Join):
                specs = None
        return specs

    def __call__(self, sample: Sample, *, shard: str, position: int, random: SampleRandom) -> Any:
        """Run the stages on one sample. Without stages, the values are the members as ``bytes``.

        Args:
            sample: The sample as stored.
            shard: URL of its shard or object.
            position: Position of the sample in the epoch, from 0.
            random: The random numbers of the calling thread.

        Returns:
            A dict of values by field name, or None if the sample is dropped; with a ``flat_map``, a list of dicts.

        Raises:
            FieldMissingError: The sample lacks a member that the pipeline decodes.
            DecodeError: A member does not decode or a user's function fails; ``__cause__`` is the original error.
        """
        if sample is LOST:
            return [] if self.is_many else None
        context = SampleContext(sample, shard, position, random)
        result = self._run(sample.fields, context, 0, len(self._stages))
        if self.is_many:
            return [] if result is None else result
        return _copied(result) if self._ends_raw and result is not None else result

    def write(
        self,
        sample: Sample,
        layout: Layout,
        batch: dict[str, Any],
        row: int,
        *,
        shard: str,
        position: int,
        random: SampleRandom,
    ) -> bool:
        """Run the stages on one sample and write the values into a row of a batch.

        If decoding is the last stage, it writes into the memory of the batch. Not for pipelines with a ``flat_map``.

        Args:
            sample: The sample as stored.
            layout: The columns of `batch`.
            batch: Arrays that ``layout.allocate`` returned.
            row: Index of the row to write, from 0; undefined after a call that returns False.
            shard: URL of the sample's shard or object.
            position: Position of the sample in the epoch, from 0.
            random: The random numbers of the calling thread.

        Returns:
            Whether the row was written; False if the sample is dropped.

        Raises:
            FieldMissingError, DecodeError: As a call, or the values do not fit the columns of the batch.
        """
        if not self._writes_rows:
            values = self(sample, shard=shard, position=position, random=random)
            if values is None:
                return False
            layout.put(batch, row, values, key=sample.key, shard=shard)
            return True
        if sample is LOST:
            return False
        context = SampleContext(sample, shard, position, random)
        last = self._stages[-1]
        values = self._run(sample.fields, context, 0, len(self._stages) - 1)
        if values is None:
            return False
        try:
            assert isinstance(last.stage, Decode)
            values, written = decoded(last.stage, values, context, layout, batch, row)
        except DataError as error:
            self.tolerance.drop(error, last.name, last.max_errors, context.epoch)
            return False
        layout.put(batch, row, values, key=sample.key, shard=shard, written=written)
        return True

    def columns(self, samples: Samples) -> dict[str, Any] | None:
        """Run the stages on many samples at once. Returns None if some have to be handled by themselves, also for an error."""
        if self._fields:
            return decoded_columns(self._fields, samples)
        if any(samples.valid(name) is not None for name in samples.names):
            return None
        return {name: samples.array(name) for name in samples.names}

    def _run(self, values: Any, context: SampleContext, first: int, end: int) -> Any:
        for index in range(first, end):
            prepared = self._stages[index]
            try:
                values = self._applied(prepared, values, context)
            except DataError as error:
                self.tolerance.drop(error, prepared.name, prepared.max_errors, context.epoch)
                return None
            if values is None:
                return None
            if isinstance(prepared.stage, FlatMap):
                return self._run_children(values, context, index + 1, end)
        return values

    def _run_children(self, children: list[Any], context: SampleContext, first: int, end: int) -> list[Any]:
        results: list[Any] = []
        for child in children:
            context.begin_child()
            result = self._run(child, context, first, end)
            if isinstance(result, list):
                results += result
            elif result is not None:
                results.append(result)
        return results

    def _applied(self, prepared: _PreparedStage, values: Mapping[str, Any], context: SampleContext) -> Any:
        """Return the output of a stage for `values`, or None if the stage drops the sample."""
        stage = prepared.stage
        if isinstance(stage, Decode):
            return decoded(stage, values, context)[0]
        if isinstance(stage, Select):
            return _selected(stage, values, context)
        if isinstance(stage, Join):
            table = self._tables[stage]
            if stage.missing == "drop" and table.row(context.sample.key) is None:
                self.tolerance.count(prepared.name)
                return None
            return _joined(stage, prepared.name, values, table, context)
        given = _copied(values) if prepared.is_raw else dict(values)
        given.update(__key__=context.sample.key, __shard__=context.shard, __position__=context.position)
        result = _called(prepared, given, values, context)
        if isinstance(stage, Filter):
            self.seen_count += prepared.name == "filter[0]"
            self.filtered_count += result is None
        return result


def _prepared(stage: Any, before: Sequence[_PreparedStage], *, is_raw: bool) -> _PreparedStage:
    number = sum(type(prepared.stage) is type(stage) for prepared in before)
    kind = {Decode: "decode", Map: "map", Filter: "filter", FlatMap: "flat_map", Select: "select", Join: "join"}
    name = kind[type(stage)] if isinstance(stage, Decode | Select) else f"{kind[type(stage)]}[{number}]"
    takes_rng = getattr(stage, "takes_rng", False)
    return _PreparedStage(stage, name, takes_rng, getattr(stage, "max_errors", 0), is_raw)


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy views of members to bytes, or to arrays and numbers if the format has typed values, so that no view pins a part."""
    return {name: _own_value(value) if type(value) is memoryview else value for name, value in values.items()}


def _own_value(value: memoryview) -> Any:
    if not is_typed(value):
        return bytes(value)
    array = np.array(value)
    return array if array.ndim else array[()]


def _selected(stage: Select, values: Mapping[str, Any], context: SampleContext) -> dict[str, Any]:
    try:
        return {name: values[name] for name in stage.names}
    except KeyError as error:
        raise FieldMissingError(
            f"{stage!r}: the sample has {', '.join(map(repr, values)) or 'no fields'}",
            stage="select",
            field=error.args[0],
            sample_key=context.sample.key,
            shard=context.shard,
        ) from None


def _joined(stage: Join, name: str, values: Mapping[str, Any], table: Table, context: SampleContext) -> dict[str, Any]:
    where = {"stage": name, "sample_key": context.sample.key, "shard": context.shard}
    row = table.row(context.sample.key)
    if row is None:
        raise FieldMissingError(
            f"{stage!r} has no row for this key; {likeness(context.sample.key, table.open())}",
            hint="missing='drop' leaves such samples out",
            **where,
        )
    if twice := row.keys() & values.keys():
        raise DecodeError(
            f"{stage!r}: the sample has {', '.join(sorted(twice))} already",
            hint="name the columns to take: join(..., fields=[...])",
            **where,
        )
    context.joined.update(row)
    return {**values, **row}


def _called(prepared: _PreparedStage, given: dict[str, Any], values: Mapping[str, Any], context: SampleContext) -> Any:
    """Return the result of the user's function for a sample, without the reserved field names."""
    stage = prepared.stage
    assert isinstance(stage, Map | Filter | FlatMap)
    try:
        result = stage.fn(given, context.rng()) if prepared.takes_rng else stage.fn(given)
        if isinstance(stage, Filter):
            return values if result else None
        if isinstance(stage, FlatMap):
            return [_own(each, stage.name) for each in _listed(result, stage.name)]
        return _own(result, stage.name)
    except Exception as error:
        raise failed(
            stage.fn, error, stage=prepared.name, sample_key=context.sample.key, shard=context.shard
        ) from error


def _listed(result: Any, name: str) -> Iterable[Any]:
    if isinstance(result, Mapping) or not hasattr(result, "__iter__"):
        raise ConfigError(
            f"{name} returned {type(result).__name__}, not an iterable of samples", hint="return a list, or yield"
        )
    samples: Iterable[Any] = result
    return samples


def _own(result: Any, name: str) -> dict[str, Any]:
    if not isinstance(result, Mapping):
        raise ConfigError(
            f"{name} returned {type(result).__name__}, not a dict of values",
            hint="return the sample even if the function changes it in place",
        )
    return {field: value for field, value in result.items() if field not in RESERVED_FIELDS}


def is_plain(pipeline: Pipeline) -> bool:
    """Whether samples are not changed: batches are lists of members as they are stored."""
    stages = [stage for leaf in pipeline.flat().leaves for stage in leaf.stages]
    batch = pipeline.stage(Batch)
    shapes = batch is None or batch.collate is not None or batch.pad or batch.ragged
    return not shapes and all(isinstance(stage, Shuffle | Take | Evaluate | Batch) for stage in stages)


def may_drop(pipeline: Pipeline) -> bool:
    """Whether samples may be left out of their batch: filtered, failed within ``max_errors``, or corrupt."""
    leaves = pipeline.flat().leaves
    skips = any(isinstance(leaf.source, Shards) and leaf.source.on_corrupt != "raise" for leaf in leaves)
    return skips or any(SampleTransform(leaf).may_drop for leaf in leaves)


def rebatches(pipeline: Pipeline) -> bool:
    """Whether stages change the number of samples, so that what comes out of them fills the batches."""
    stages = [stage for leaf in pipeline.flat().leaves for stage in leaf.stages]
    return any(
        isinstance(stage, FlatMap | TokenBlocks | BatchBySize) or (isinstance(stage, Filter) and stage.refill)
        for stage in stages
    )


def row_bytes(pipeline: Pipeline) -> int | None:
    """Size of a sample in a batch, in bytes; None if the stages do not tell."""
    if (blocks := pipeline.stage(TokenBlocks)) is not None:
        return blocks.length * (np.dtype(blocks.dtype).itemsize + 8 * blocks.position_ids)
    specs = SampleTransform(pipeline.flat().leaves[0]).specs()
    if specs is None or any(spec.dtype == "object" for spec in specs.values()):
        return None
    return sum(np.dtype(spec.dtype).itemsize * math.prod(spec.shape) for spec in specs.values())
