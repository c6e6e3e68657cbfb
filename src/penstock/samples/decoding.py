"""Decodes the members of a sample to values: to new objects, or straight into a row of a batch."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import DataError, DecodeError, FieldMissingError, PenstockError
from penstock.memory.buffers import is_typed
from penstock.pipeline import Function
from penstock.system.tracebacks import failed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.formats import Sample, Samples
    from penstock.pipeline import Decode, Field
    from penstock.samples.columns import Layout


_STREAM = 0x70656E73746F636B  # "penstock": separates these streams from other Philox streams with the same seed


class SampleRandom:
    """The random numbers of one thread: a Philox generator that is set to the start of each sample's own stream.

    The key is (seed, epoch). The counter of a sample's stream starts at (0, index, position, _STREAM); drawing numbers
    advances its low word, so the streams of different samples never overlap. The index is 0 before a ``flat_map`` and
    counts the samples that it returned, from 1, after it.

    Args:
        seed: Seed of the pipeline, in [0, 2**64).
        epoch: Epoch number, from 0.
    """

    def __init__(self, *, seed: int, epoch: int) -> None:
        self.epoch = epoch
        self._bits = np.random.Philox()
        self._generator = np.random.Generator(self._bits)
        self._key = np.array([seed, epoch], dtype=np.uint64)

    def at(self, position: int, index: int = 0) -> np.random.Generator:
        """Return the generator, set to the start of the stream of `position` and `index`; valid until the next call."""
        self._bits.state = {
            "bit_generator": "Philox",
            "state": {"counter": np.array([0, index, position, _STREAM], dtype=np.uint64), "key": self._key},
            "buffer": np.zeros(4, dtype=np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        return self._generator


class ThreadRandom(threading.local):
    """The random numbers of each thread, as the attribute ``random``.

    Args:
        seed: Seed of the pipeline, in [0, 2**64).
        epoch: Epoch number, from 0.
    """

    def __init__(self, *, seed: int, epoch: int) -> None:
        self.random = SampleRandom(seed=seed, epoch=epoch)


class SampleContext:
    """A sample on its way through the stages.

    Attributes:
        sample: The sample as stored.
        shard: URL of its shard or object.
        position: Position of the sample in the epoch, from 0.
        children_count: Number of samples that a ``flat_map`` has made of it so far.
        joined: Names of joined fields, which ``decode`` keeps although it does not name them.
    """

    __slots__ = ("_index", "_random", "_rng", "children_count", "joined", "position", "sample", "shard")

    def __init__(self, sample: Sample, shard: str, position: int, random: SampleRandom) -> None:
        self.sample = sample
        self.shard = shard
        self.position = position
        self.children_count = 0
        self.joined: set[str] = set()
        self._random = random
        self._index = 0
        self._rng: np.random.Generator | None = None

    @property
    def epoch(self) -> int:
        """Number of the epoch in which the sample is read, from 0."""
        return self._random.epoch

    def rng(self) -> np.random.Generator:
        """Return the sample's random stream; the first call sets it to its start, later calls continue it."""
        if self._rng is None:
            self._rng = self._random.at(self.position, self._index)
        return self._rng

    def begin_child(self) -> None:
        """Give the next sample that a ``flat_map`` returned a random stream of its own."""
        self.children_count += 1
        self._index = self.children_count
        self._rng = None


def decoded(
    stage: Decode,
    members: Mapping[str, Any],
    context: SampleContext,
    layout: Layout | None = None,
    batch: Mapping[str, Any] | None = None,
    row: int = 0,
) -> tuple[dict[str, Any], list[str]]:
    """Decode a sample's fields: to values, or with a layout, arrays of known shape straight into their row of a batch.

    Args:
        stage: The fields.
        members: The stored members, and the fields that were joined before.
        context: The sample.
        layout: The columns of `batch`; None writes nothing.
        batch: Arrays that ``layout.allocate`` returned.
        row: Index of the row to write, from 0.

    Returns:
        The values, those of joined fields included, and the names of the fields that were written instead.

    Raises:
        FieldMissingError: The sample lacks a member.
        DecodeError: A field cannot decode its member.
    """
    values = _joined_fields(stage, members, context) if context.joined else {}
    written: list[str] = []
    for field in stage.fields:
        data = _members_of(field, members, context)
        if data is None:
            values.update(zip(field.names, field.missing_values(), strict=True))
        else:
            rng = context.rng() if field.takes_rng else None
            try:
                if layout is not None and batch is not None and all(map(layout.holds, field.names, field.specs)):
                    field.write_members(data, [batch[name][row] for name in field.names], rng)
                    written += field.names
                else:
                    values.update(zip(field.names, field.decode_members(data, rng), strict=True))
            except PenstockError:
                raise
            except Exception as error:
                raise _decode_error(field, data, context, error) from error
        if field.valid is not None:
            values[field.valid] = data is not None
    return values, written


def decoded_columns(fields: Sequence[Field], samples: Samples) -> dict[str, Any] | None:
    """Decode as ``decoded`` does, many samples at once, without joined fields.

    Returns:
        Columns, as arrays or lists; None if a value has to be decoded by itself, or cannot be decoded.
    """
    columns: dict[str, Any] = {}
    for field in fields:
        name = field.names[0]
        if name not in samples.names or field.alternatives:
            return None
        values, valid = samples.array(name), samples.valid(name)
        if valid is not None:
            if field.default is ... or field.specs[0] is None:
                return None
            values = [value for value in values if value is not None] if isinstance(values, list) else values[valid]
        try:
            column = field.decode_column(values)
        except ValueError:
            return None
        if column is not None and valid is not None:
            column = _spread(column, valid, field.missing_values()[0])
        if column is None:
            return None
        columns[name] = column
        if field.valid is not None:
            columns[field.valid] = np.ones(len(samples), np.bool_) if valid is None else valid
    return columns


def _spread(column: list[Any] | NDArray[Any], valid: NDArray[np.bool_], default: Any) -> list[Any] | NDArray[Any]:
    """Put the values of `column` where `valid` is true, and `default` everywhere else."""
    if isinstance(column, list):
        rest = iter(column)
        return [next(rest) if there else default for there in valid.tolist()]
    spread = np.empty((len(valid), *column.shape[1:]), column.dtype)
    spread[valid], spread[~valid] = column, default
    return spread


def _joined_fields(stage: Decode, members: Mapping[str, Any], context: SampleContext) -> dict[str, Any]:
    """Return the fields that were joined before ``decode``."""
    names = context.joined.difference(stage.names)
    return {name: value for name, value in members.items() if name in names}


def _members_of(field: Field, members: Mapping[str, Any], context: SampleContext) -> list[memoryview] | None:
    """Return the members of a field; None if the sample lacks one, and the field has a default."""
    views = []
    for name in field.names:
        data = members.get(name)
        if data is None and name == field.names[0]:
            there = (members[other] for other in field.alternatives if members.get(other) is not None)
            data = next(there, None)
        if data is None:
            if field.default is not ...:
                return None
            raise FieldMissingError(
                f"{field!r}: it is null or missing; the sample has {', '.join(map(repr, members)) or 'no members'}",
                hint="the field's default= is the value of such samples",
                stage="decode",
                field=name,
                sample_key=context.sample.key,
                shard=context.shard,
            )
        if isinstance(data, str):  # from a table
            data = data.encode()
        try:
            view = memoryview(data)
            if is_typed(view) and not field.TAKES_NUMBERS:
                raise ValueError(f"the member is {np.asarray(view).dtype}{list(view.shape or ())}, not bytes")
            views.append(view)
        except (TypeError, ValueError) as error:
            raise _decode_error(field, [], context, error) from error
    return views


def _decode_error(field: Field, data: Sequence[memoryview], context: SampleContext, error: Exception) -> DataError:
    where: dict[str, Any] = {
        "stage": "decode",
        "field": field.names[0],
        "sample_key": context.sample.key,
        "offset_bytes": context.sample.offset_bytes,
        "shard": context.shard,
    }
    if isinstance(field, Function):
        return failed(field.fn, error, **where)
    size_bytes = sum(each.nbytes for each in data)
    return DecodeError(
        f"{field!r} cannot read these {size_bytes} bytes: {error or type(error).__name__}",
        hint="decode(max_errors=n) leaves out up to n such samples; on_corrupt= is about damaged shards",
        **where,
    )
