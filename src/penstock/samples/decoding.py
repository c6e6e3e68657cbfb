"""Decodes the members of a sample to values: to new objects, or straight into a row of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.buffers import is_typed
from penstock.errors import DataError, DecodeError, FieldMissingError, PenstockError
from penstock.pipeline import Function
from penstock.tracebacks import failed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
        try:
            decoded_members = field.decode_members(data, context.rng() if field.takes_rng else None)
        except PenstockError:
            raise
        except Exception as error:
            raise _decode_error(field, data, context, error) from error
        values.update(zip(field.names, decoded_members, strict=True))
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
    return values, written


def _joined_fields(stage: Decode, members: Mapping[str, Any], context: SampleContext) -> dict[str, Any]:
    """Return the fields that were joined before ``decode``."""
    if not context.joined:
        return {}
    names = context.joined.difference(stage.names)
    return {name: value for name, value in members.items() if name in names}


def _members_of(field: Field, members: Mapping[str, Any], context: SampleContext) -> list[memoryview]:
    views = []
    for name in field.names:
        data = members.get(name)
        if data is None:
            raise FieldMissingError(
                f"{field!r}: the sample has {', '.join(map(repr, members)) or 'no members'}",
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
