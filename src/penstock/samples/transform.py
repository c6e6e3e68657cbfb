"""What happens to one sample between its shard and its row of a batch, and whose fault an error is.

``SampleTransform`` walks the stages that see single samples. Where decoding is the last of them, it writes the batch's memory
itself, and no array is made and copied.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.buffers import is_typed
from penstock.errors import ConfigError, DataError, DecodeError, FieldMissingError
from penstock.formats import LOST, RESERVED_FIELDS
from penstock.formats.grouping import likeness
from penstock.pipeline import Decode, Filter, FlatMap, Join, Map, Select
from penstock.samples.context import SampleContext
from penstock.samples.decoding import decoded, written_in_place
from penstock.samples.tolerance import Tolerance, Uncounted
from penstock.tracebacks import failed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.formats import Sample
    from penstock.pipeline import Pipeline, Spec
    from penstock.samples.columns import Layout
    from penstock.samples.context import SampleRandom
    from penstock.samples.joins import Table


class _Step(NamedTuple):
    """A stage and what is asked of it for every sample, looked up once."""

    stage: Decode | Map | Filter | FlatMap | Select | Join
    name: str
    takes_rng: bool
    max_errors: int
    is_raw: bool  # values are members still: views of a part, which no user's function may keep


class SampleTransform:
    """The stages of a pipeline that see single samples, in order. May be called from several threads.

    Attributes:
        is_empty: Whether there are none: samples are their members.
        may_drop: Whether a call may give None: a sample that was filtered out, or dropped under ``max_errors``.
        is_many: Whether a call gives a list, of any length: there is a ``flat_map``.
        tolerance: Counts the samples that it drops for an error, and bounds them.

    Raises:
        ConfigError: a field needs a package that is not installed.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._steps: list[_Step] = []
        is_raw = True
        for stage in pipeline.stages:
            if isinstance(stage, Decode):
                for field in stage.fields:
                    field.require()
            if isinstance(stage, Decode | Map | Filter | FlatMap | Select | Join):
                self._steps.append(_step(stage, self._steps, is_raw=is_raw))
                is_raw = is_raw and isinstance(stage, Filter | Select | Join)
        kinds = [type(step.stage) for step in self._steps]
        joins = [step.stage for step in self._steps if isinstance(step.stage, Join)]
        self.is_empty = not kinds
        self.is_many = FlatMap in kinds
        self.may_drop = (
            Filter in kinds
            or any(step.max_errors for step in self._steps)
            or any(join.missing == "drop" for join in joins)
        )
        self._ends_raw = is_raw
        self._writes_rows = not self.is_many and _has_arrays(self._steps[-1].stage if self._steps else None)
        self.tolerance = Tolerance()
        self._tables = _tables_of(joins, pipeline) if joins else {}

    @property
    def dropped(self) -> dict[str, int]:
        """Samples dropped for an error so far, by stage; those that a filter left out are not among them."""
        return self.tolerance.counts()

    def uncounted(self) -> SampleTransform:
        """The same stages, for samples that were counted already."""
        steps = copy(self)
        steps.tolerance = Uncounted()
        return steps

    def open(self) -> None:
        """Load the tables that are joined, if that has not been done; the first sample does it otherwise.

        Raises:
            StoreError, DataError, ConfigError: a table cannot be read, or is none.
        """
        for table in self._tables.values():
            table.open()

    def specs(self) -> dict[str, Spec] | None:
        """Dtype and shape of every field that comes out, where the pipeline says; None where the first sample must."""
        specs: dict[str, Spec] | None = None
        for step in self._steps:
            stage = step.stage
            if isinstance(stage, Decode):
                found = {
                    name: spec for field in stage.fields for name, spec in zip(field.names, field.specs, strict=True)
                }
                specs = {name: spec for name, spec in found.items() if spec is not None}
                if len(specs) < len(found):
                    specs = None
            elif isinstance(stage, Map):
                specs = None if stage.fields is None else dict(stage.fields)
            elif isinstance(stage, Select) and specs is not None:
                specs = {name: specs[name] for name in stage.names if name in specs}
            elif isinstance(stage, FlatMap | Join):
                specs = None
        return specs

    def __call__(self, sample: Sample, *, shard: str, position: int, random: SampleRandom) -> Any:
        """The values of one sample by name. Without stages, the members as ``bytes``.

        Returns:
            A dict; None where the sample is dropped; a list of dicts where there is a ``flat_map``.

        Raises:
            FieldMissingError: a member that the pipeline decodes is not there.
            DecodeError: a member or a user's function fails; ``__cause__`` is what it raised.
        """
        if sample is LOST:
            return [] if self.is_many else None
        context = SampleContext(sample, shard, position, random)
        result = self._run(sample.fields, context, 0, len(self._steps))
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
        """The same into a row of a batch, decoding straight into its memory where that is the last stage.

        Args:
            sample: As stored.
            layout: Of `batch`.
            batch: As ``layout.allocate`` made it; `row` of it is written, or left undefined where this gives False.
            row: See `batch`.
            shard: URL.
            position: In the epoch.
            random: The thread's.

        Returns:
            False where the sample is dropped. Not for pipelines with a ``flat_map``.

        Raises:
            FieldMissingError, DecodeError: as when called, or the sample is unlike the first one.
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
        last = self._steps[-1]
        values = self._run(sample.fields, context, 0, len(self._steps) - 1)
        if values is None:
            return False
        try:
            assert isinstance(last.stage, Decode)
            values, written = written_in_place(last.stage, values, context, layout, batch, row)
        except DataError as error:
            self.tolerance.drop(error, last.name, last.max_errors, context.epoch)
            return False
        layout.put(batch, row, values, key=sample.key, shard=shard, written=written)
        return True

    def _run(self, values: Any, context: SampleContext, first: int, end: int) -> Any:
        for number in range(first, end):
            step = self._steps[number]
            try:
                values = self._applied(step, values, context)
            except DataError as error:
                self.tolerance.drop(error, step.name, step.max_errors, context.epoch)
                return None
            if values is None:
                return None
            if isinstance(step.stage, FlatMap):
                return self._run_children(values, context, number + 1, end)
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

    def _applied(self, step: _Step, values: Mapping[str, Any], context: SampleContext) -> Any:
        """What `step` makes of `values`; None where it drops the sample."""
        stage = step.stage
        if isinstance(stage, Decode):
            return decoded(stage, values, context)
        if isinstance(stage, Select):
            return _selected(stage, values, context)
        if isinstance(stage, Join):
            table = self._tables[stage]
            if stage.missing == "drop" and table.row(context.sample.key) is None:
                self.tolerance.count(step.name)
                return None
            return _joined(stage, step.name, values, table, context)
        given = _copied(values) if step.is_raw else dict(values)
        given.update(__key__=context.sample.key, __shard__=context.shard, __position__=context.position)
        return _called(step, given, values, context)


def _step(stage: Any, before: Sequence[_Step], *, is_raw: bool) -> _Step:
    number = sum(type(step.stage) is type(stage) for step in before)
    kind = {Decode: "decode", Map: "map", Filter: "filter", FlatMap: "flat_map", Select: "select", Join: "join"}
    name = kind[type(stage)] if isinstance(stage, Decode | Select) else f"{kind[type(stage)]}[{number}]"
    takes_rng = getattr(stage, "takes_rng", False)
    return _Step(stage, name, takes_rng, getattr(stage, "max_errors", 0), is_raw)


def _tables_of(joins: Iterable[Join], pipeline: Pipeline) -> dict[Join, Table]:
    from penstock.samples.joins import table_of

    return {join: table_of(join, pipeline) for join in joins}


def _has_arrays(stage: Any) -> bool:
    """Whether `stage` decodes something that is worth writing in place."""
    return isinstance(stage, Decode) and any(spec and spec.shape for field in stage.fields for spec in field.specs)


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """The members as bytes of their own, or as arrays and numbers where the format says so: none pins a part."""
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
            hint="say which columns to take: join(..., fields=[...])",
            **where,
        )
    context.joined.update(row)
    return {**values, **row}


def _called(step: _Step, given: dict[str, Any], values: Mapping[str, Any], context: SampleContext) -> Any:
    """What a user's function makes of a sample, without the names that are the loader's."""
    stage = step.stage
    assert isinstance(stage, Map | Filter | FlatMap)
    try:
        result = stage.fn(given, context.rng()) if step.takes_rng else stage.fn(given)
        if isinstance(stage, Filter):
            return values if result else None
        if isinstance(stage, FlatMap):
            return [_own(each, stage.name) for each in _listed(result, stage.name)]
        return _own(result, stage.name)
    except Exception as error:
        raise failed(stage.fn, error, stage=step.name, sample_key=context.sample.key, shard=context.shard) from error


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
            hint="return the sample, also where it was changed in place",
        )
    return {field: value for field, value in result.items() if field not in RESERVED_FIELDS}
