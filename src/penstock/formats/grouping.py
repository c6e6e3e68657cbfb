"""Groups objects into samples: one sample per object, or one for all objects with the same stem. It reads nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from penstock.errors import ConfigError, DataError
from penstock.formats.sample import RESERVED_FIELDS, split_name

if TYPE_CHECKING:
    from collections.abc import Iterable

NO_EXTENSION = "data"
"""Field name of an object whose name has no extension."""

_BOUNDARIES = ("/", ".", "_", "-")


class ObjectGroup(NamedTuple):
    """One sample: its key, and for each field the key of the object that holds it, in listed order."""

    key: str
    members: dict[str, str]


def group_objects(keys: Iterable[str], *, group_by: Literal["stem"] | None = None) -> list[ObjectGroup]:
    """Group objects into samples, in the order of their first objects.

    Args:
        keys: Object keys, as listed.
        group_by: With None, each object is a sample with the object's key, and its only field is named after the extension
            in lower case (``data`` if it has none). With ``stem``, objects whose paths are equal up to the first dot of
            the basename form one sample. That path is its key, and the rest of each name, in lower case, is a field, as
            in WebDataset; hidden objects and objects without a dot belong to no sample.

    Raises:
        ConfigError: `group_by` has another value.
        DataError: Two objects give the same field of one sample, or a field has a name that penstock reserves.

    Cost: O(objects) in time and memory.
    """
    if group_by not in {None, "stem"}:
        raise ConfigError(f"group_by={group_by!r} is neither None nor 'stem'")
    groups: dict[str, dict[str, str]] = {}
    for key in keys:
        member = member_of(key, group_by)
        if member is None:
            continue
        sample_key, field = member
        members = groups.setdefault(sample_key, {})
        if field in members or field in RESERVED_FIELDS:
            why = f"is a second field {field!r}" if field in members else f"has the field {field!r}, penstock's own"
            raise DataError(f"object {key!r} {why}", sample_key=sample_key, field=field)
        members[field] = key
    return [ObjectGroup(key, members) for key, members in groups.items()]


def member_of(key: str, group_by: Literal["stem"] | None) -> tuple[str, str] | None:
    """Key of the sample that an object belongs to, and the field that it is there; None if it belongs to no sample.

    Args:
        key: Object key, as listed.
        group_by: How keys become samples, as for ``group_objects``.
    """
    if key.endswith("/"):
        return None
    if group_by is not None:
        return split_name(key)
    name, _, extension = key.rpartition("/")[2].rpartition(".")
    return key, extension.lower() if name and extension else NO_EXTENSION


def likeness(key: str, names: Iterable[str]) -> str:
    """Describe, for an error message, what keys a table contains that lacks a sample's key.

    Args:
        key: The sample's key.
        names: The keys in the table.

    Returns:
        A phrase with one of the names and, if it differs from the key only by a prefix or suffix, that difference.
    """
    first = None
    for name in names:
        first = first or name
        for longer, shorter, whose in ((name, key, "its names"), (key, name, "samples' keys")):
            more = longer.removesuffix(shorter)
            if shorter and more.endswith(_BOUNDARIES) and more != longer:
                return f"it has {name!r}: {whose} begin with {more!r}"
            more = longer.removeprefix(shorter)
            if shorter and more.startswith(_BOUNDARIES) and more != longer:
                return f"it has {name!r}: {whose} end with {more!r}"
    return "it is empty" if first is None else f"its names are like {first!r}"
