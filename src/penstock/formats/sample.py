"""The sample, which every parser returns and every writer takes, and how the names of members form samples.

The naming rules are those of WebDataset, because existing shards follow them. A member's path up to the *first* dot of its
basename is the sample's key, and the rest, in lower case, is the field. Adjacent members with the same key form one sample.
Members that belong to no sample are ignored: names without a dot, hidden files, and everything below a first path component
like ``__meta__``. There is one deliberate deviation. WebDataset reads ``dir/._x.jpg``, which macOS creates, as the field
``_x.jpg`` of a sample called ``dir/``; here a hidden file is ignored in every directory.

Writers are stricter than readers: they refuse what would not read back equal, and what other tar tools would rewrite.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.errors import CorruptShardError
    from penstock.types import Buffer

RESERVED_FIELDS = frozenset({"__key__", "__shard__", "__position__", "__valid__"})
"""Names that the loader adds to a sample or a batch. No stored field may have one of them."""

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


class Parser(Protocol):
    """Turns the bytes of one shard into samples. Chunks may end at any byte, and a parser does no I/O.

    A format that can only be read from its start, such as gzip, refuses any other ``start_offset_bytes`` at construction.

    Attributes:
        skipped_samples: Number of corrupt samples that were skipped under the policy.
        skipped_bytes: Number of bytes that were skipped.
        skipped_error: The first error that led to skipping.
        decided_format: The more specific format that the shard's first record determined. None before that, and for formats
            whose name already states the content of records.
    """

    skipped_samples: int
    skipped_bytes: int
    skipped_error: CorruptShardError | None
    decided_format: str | None

    @property
    def pending(self) -> bool:
        """Whether bytes of the last chunk are waiting for ``feed(b"")``.

        Compressed shards are decompressed in pieces of bounded size.
        """

    @property
    def held_bytes(self) -> int:
        """Bytes that are held because their sample is not complete yet."""

    @property
    def offset_bytes(self) -> int:
        """Offset in the shard up to which it was fed; bytes before the start count."""

    def feed(self, data: Buffer) -> list[Sample]:
        """Parse the next bytes. Returns the samples that are now complete.

        Raises:
            CorruptShardError: The data is corrupt. The parser cannot be used any further.
        """

    def finish(self) -> list[Sample]:
        """Note the end of the shard. Returns the last samples.

        Raises:
            CorruptShardError: The shard ended inside a sample.
        """


def is_metadata(name: bytes) -> bool:
    """Whether the first path component of a member's `name` has the form ``__meta__``."""
    first, _, _ = name.partition(b"/")
    return len(first) >= 4 and first.startswith(b"__") and first.endswith(b"__")


def split_name(name: str) -> tuple[str, str] | None:
    """Return (key, field) for a member or object called `name`, or None if it belongs to no sample."""
    slash = name.rfind("/") + 1
    dot = name.find(".", slash)
    if dot <= slash:
        return None
    first, _, _ = name.partition("/")
    if len(first) >= 4 and first.startswith("__") and first.endswith("__"):
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
    if len(parts[0]) >= 4 and parts[0].startswith("__") and parts[0].endswith("__"):
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
