"""Objects as samples: one object each, or all objects with one stem. Keys in, groups out; nothing is read here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from penstock.errors import ConfigError, DataError
from penstock.formats.sample import RESERVED_FIELDS, split_name

if TYPE_CHECKING:
    from collections.abc import Iterable

NO_EXTENSION = "data"
"""Field of an object whose name has no dot."""

_BOUNDARIES = ("/", ".", "_", "-")


class ObjectGroup(NamedTuple):
    """One sample: its key, and the key of the object that holds each field, in the order in which they were listed."""

    key: str
    members: dict[str, str]


def group_objects(keys: Iterable[str], *, group_by: Literal["stem"] | None = None) -> list[ObjectGroup]:
    """The samples that some objects are, in the order of their first objects.

    Args:
        keys: Of objects, as listed.
        group_by: None: each object is a sample, its key the object's, its field the extension in lower case (``data``
            where it has none). ``stem``: objects whose path up to the first dot of the basename is the same are one
            sample, that path its key and the rest of each name, in lower case, a field, as WebDataset groups members;
            hidden objects and those without a dot belong to no sample.

    Raises:
        ConfigError: `group_by` is neither.
        DataError: Two objects are the same field of one sample, or a field has a name that penstock adds itself.

    Cost: O(objects) in time and memory.
    """
    if group_by not in {None, "stem"}:
        raise ConfigError(f"group_by={group_by!r} is neither None nor 'stem'")
    groups: dict[str, dict[str, str]] = {}
    for key in keys:
        if group_by is None:
            name, dot, extension = key.rpartition("/")[2].rpartition(".")
            found: tuple[str, str] | None = (key, extension.lower() if name and dot and extension else NO_EXTENSION)
        else:
            found = split_name(key)
        if found is None or key.endswith("/"):
            continue
        sample_key, field = found
        members = groups.setdefault(sample_key, {})
        if field in members or field in RESERVED_FIELDS:
            why = f"is a second field {field!r}" if field in members else f"has the field {field!r}, penstock's own"
            raise DataError(f"object {key!r} {why}", sample_key=sample_key, field=field)
        members[field] = key
    return [ObjectGroup(key, members) for key, members in groups.items()]


def likeness(key: str, names: Iterable[str]) -> str:
    """What a table with these names is told to people to have, where it does not have a sample's key.

    Args:
        key: Of the sample.
        names: Names that the table has.

    Returns:
        One of them, and what it has more or less than the key where they differ by a beginning or an end.
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
