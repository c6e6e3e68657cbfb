"""Decodes the members of a sample to values: to new objects, or straight into a row of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import DataError, DecodeError, FieldMissingError, PenstockError
from penstock.memory.buffers import is_typed
from penstock.pipeline import Function
from penstock.system.tracebacks import failed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.formats import Samples
    from penstock.pipeline import Decode, Field
    from penstock.samples.columns import Layout
    from penstock.samples.context import SampleContext


def decoded(stage: Decode, members: Mapping[str, Any], context: SampleContext) -> dict[str, Any]:
    """Return the values of a sample's fields, and the fields that were joined before.

    Raises:
        FieldMissingError: The sample lacks a member.
        DecodeError: A field cannot decode its member.
    """
    values = _joined_fields(stage, members, context)
    for field in stage.fields:
        data = _members_of(field, members, context)
        if data is None:
            _put_default(field, values)
            continue
        try:
            decoded_members = field.decode_members(data, context.rng() if field.takes_rng else None)
        except PenstockError:
            raise
        except Exception as error:
            raise _decode_error(field, data, context, error) from error
        values.update(zip(field.names, decoded_members, strict=True))
        if field.valid is not None:
            values[field.valid] = True
    return values


def written_in_place(
    stage: Decode,
    members: Mapping[str, Any],
    context: SampleContext,
    layout: Layout,
    batch: dict[str, Any],
    row: int,
) -> tuple[dict[str, Any], list[str]]:
    """Decode as ``decoded`` does, but write arrays of known shape straight into their row of `batch`.

    Returns:
        The values of the other fields, and the names of the fields that were written.

    Raises:
        FieldMissingError, DecodeError: As ``decoded``.
    """
    values = _joined_fields(stage, members, context)
    written: list[str] = []
    for field in stage.fields:
        data = _members_of(field, members, context)
        if data is None:
            _put_default(field, values)
            continue
        rng = context.rng() if field.takes_rng else None
        try:
            if all(map(layout.holds, field.names, field.specs)):
                field.write_members(data, [batch[name][row] for name in field.names], rng)
                written += field.names
            else:
                values.update(zip(field.names, field.decode_members(data, rng), strict=True))
        except PenstockError:
            raise
        except Exception as error:
            raise _decode_error(field, data, context, error) from error
        if field.valid is not None:
            values[field.valid] = True
    return values, written


def decoded_columns(fields: Sequence[Field], samples: Samples) -> dict[str, Any] | None:
    """Decode as ``decoded`` does, many samples at once, without joined fields.

    Returns:
        Columns, as arrays or lists; None if a value has to be decoded by itself, or cannot be decoded.
    """
    columns: dict[str, Any] = {}
    for field in fields:
        if field.name not in samples.names:
            return None
        values, valid = samples.array(field.name), samples.valid(field.name)
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
        columns[field.name] = column
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
    if not context.joined:
        return {}
    names = context.joined.difference(stage.names)
    return {name: value for name, value in members.items() if name in names}


def _put_default(field: Field, values: dict[str, Any]) -> None:
    values.update(zip(field.names, field.missing_values(), strict=True))
    if field.valid is not None:
        values[field.valid] = False


def _members_of(field: Field, members: Mapping[str, Any], context: SampleContext) -> list[memoryview] | None:
    """Return the members of a field; None if the sample lacks one, and the field has a default."""
    views = []
    for name in field.names:
        data = members.get(name)
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
        "field": field.name,
        "sample_key": context.sample.key,
        "offset_bytes": context.sample.offset_bytes,
        "shard": context.shard,
    }
    if isinstance(field, Function):
        return failed(field.fn, error, **where)
    size_bytes = sum(each.nbytes for each in data)
    return DecodeError(f"{field!r} cannot read these {size_bytes} bytes: {error or type(error).__name__}", **where)
