"""The sample, which every parser returns and every writer takes, and how the names of members and objects form samples.

The naming rules are those of WebDataset, because existing shards follow them. A member's path up to the *first* dot of its
basename is the sample's key, and the rest, in lower case, is the field. Adjacent members with the same key form one sample.
Members that belong to no sample are ignored: names without a dot, hidden files, and everything below a first path component
like ``__meta__``. There is one deliberate deviation. WebDataset reads ``dir/._x.jpg``, which macOS creates, as the field
``_x.jpg`` of a sample called ``dir/``; here a hidden file is ignored in every directory.

Writers are stricter than readers: they refuse names that would not read back equal, or that other tar tools would rewrite.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from penstock.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

RESERVED_FIELDS = frozenset({"__key__", "__shard__", "__position__", "__valid__"})
"""Names that the loader adds to a sample or a batch. No stored field may have one of them."""

NO_EXTENSION = "data"
"""Field name of an object whose name has no extension."""

ITEM_BYTES = {"B": 1, "b": 1, "H": 2, "h": 2, "e": 2, "I": 4, "i": 4, "f": 4, "Q": 8, "q": 8, "d": 8}
"""Size of each type that occurs, by its letter in ``struct``. Native order is little endian, as in all formats."""

_BOUNDARIES = ("/", ".", "_", "-")
_IS_METADATA = re.compile(r"__[^/]*__(?:/|\Z)").match
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Sample:
    """One sample as stored: named slices of the shard.

    Attributes:
        key: Key of the sample. In tar and zip it is the path of the members up to the first dot of the basename; most other
            formats derive it from the offset.
        fields: Values by field name, in stored order. A value is a slice of the chunk that was fed, if it lay in one: it is
            uint8[length] or, if the format states that it holds numbers, a typed view with their shape, which
            ``np.asarray(value)`` takes. Its size in bytes is therefore ``value.nbytes``, not ``len(value)``.
        offset_bytes: Offset of the first byte in the shard, or in the decompressed bytes of a compressed shard. If the
            format's unit is the sample, a parser can start there.
        size_bytes: Number of stored bytes from that offset which, parsed alone, give the sample. None if the format's unit
            is larger than a sample.
    """

    __slots__ = ("fields", "key", "offset_bytes", "size_bytes")

    def __init__(
        self, key: str, fields: dict[str, memoryview], offset_bytes: int, size_bytes: int | None = None
    ) -> None:
        self.key = key
        self.fields = fields
        self.offset_bytes = offset_bytes
        self.size_bytes = size_bytes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        return (self.key, self.fields, self.offset_bytes) == (other.key, other.fields, other.offset_bytes)

    __hash__ = None  # type: ignore[assignment]  # its values are mutable views

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {value.nbytes}" for name, value in self.fields.items())
        return f"<Sample {self.key!r} at {self.offset_bytes}: {sizes} bytes>"


LOST = Sample("", {}, 0)
"""Placeholder for a corrupt sample that was skipped but that an index counts.

It keeps the position in the order, and is never delivered.
"""


def is_metadata(name: bytes) -> bool:
    """Whether the first path component of a member's `name` has the form ``__meta__``."""
    return _IS_METADATA(decode_name(name)) is not None


def split_name(name: str) -> tuple[str, str] | None:
    """Return (key, field) for a member or object called `name`, or None if it belongs to no sample."""
    slash = name.rfind("/") + 1
    dot = name.find(".", slash)
    if dot <= slash or _IS_METADATA(name):
        return None
    return name[:dot], name[dot + 1 :].lower()


def decode_name(raw: bytes) -> str:
    """Decode a stored name. Bytes that are not valid UTF-8 become lone surrogates, as in ``tarfile``."""
    return raw.decode("utf-8", "surrogateescape")


def check_key(key: object) -> str:
    """Return `key` if it reads back equal.

    Raises:
        ConfigError: The key would not read back equal with every tool.
    """
    if not isinstance(key, str):
        raise ConfigError(f"__key__ must be str, not {type(key).__name__}")
    parts = key.split("/")
    if "" in parts:
        raise ConfigError(f"__key__ {key!r} has an empty path component", hint="no leading, trailing or double slash")
    if bad := [part for part in parts if part in {".", ".."}]:
        raise ConfigError(f"__key__ {key!r} has a component {bad[0]!r}", hint="use a plain relative path")
    if "." in parts[-1]:
        raise ConfigError(
            f"__key__ {key!r} has a dot in its last component, where the field's name would begin",
            hint="replace the dots there, e.g. by underscores",
        )
    if _IS_METADATA(key):
        raise ConfigError(f"__key__ {key!r} begins with {parts[0]!r}, which readers pass over as metadata")
    return _check_text("__key__", key)


def check_field(field: object) -> str:
    """Return `field` if it reads back equal.

    Raises:
        ConfigError: The name would not read back equal with every tool.
    """
    if not isinstance(field, str):
        raise ConfigError(f"a field's name must be str, not {type(field).__name__} ({field!r})")
    if not field or "/" in field:
        raise ConfigError(f"field {field!r} must be a name without a slash")
    if field != field.lower():
        raise ConfigError(f"field {field!r} is not in lower case, in which it would be read", hint=f"{field.lower()!r}")
    if field.startswith("__"):
        raise ConfigError(f"field {field!r}: names with two leading underscores are penstock's and WebDataset's own")
    return _check_text("field", field)


def _check_text(what: str, text: str) -> str:
    if _CONTROL.search(text):
        raise ConfigError(f"{what} {text!r} has a control character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError(f"{what} {text!r} cannot be written as UTF-8") from None
    return text


# ── objects as samples ──────────────────────────────────────────────────────────────────────────────────────────────


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
        group_by: Rule by which keys become samples, as for ``group_objects``.
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


# ── numbers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def typed(value: memoryview, form: str, shape: Sequence[int] | None = None) -> memoryview:
    """Return `value`, uint8[length], as a view of items of type `form` with `shape`; None is one dimension of any length.

    Raises:
        ValueError: The length does not match.
    """
    item_bytes = ITEM_BYTES[form]
    if shape is None:
        shape = (len(value) // item_bytes,)
    size_bytes = item_bytes
    for extent in shape:
        size_bytes *= extent
    if size_bytes != len(value):
        raise ValueError(f"{len(value)} bytes are not items of {item_bytes} bytes in shape {tuple(shape)}")
    if form == "e" or not size_bytes or not shape:  # ``cast`` cannot create this shape
        import numpy as np

        return view_of_array(np.frombuffer(value, np.dtype(form)).reshape(shape))
    view: Any = value
    return cast("memoryview", view.cast(form, list(shape)) if form != "B" or len(shape) > 1 else view)


def is_bytes(value: object) -> bool:
    """Whether a value is bytes, as it is or in a view, and not numbers."""
    return isinstance(value, bytes | bytearray) or (isinstance(value, memoryview) and value.format in {"B", "b", "c"})


def view_of_array(array: Any) -> memoryview:
    """Return a view of a NumPy array with its type and shape."""
    return memoryview(array)
