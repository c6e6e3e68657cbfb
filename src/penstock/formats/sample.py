"""What every parser gives and every writer takes: the sample, and how member names make one.

The naming rules are WebDataset's, because the shards that exist follow them: a member's path up to the *first* dot of
its basename is the sample's key, the rest, in lower case, is the field; neighbours with one key are one sample.
Members that belong to no sample are passed over: names without a dot, hidden files, and everything under a first path
component like ``__meta__``. One deviation, on purpose: WebDataset reads ``dir/._x.jpg`` (what macOS leaves) as field
``_x.jpg`` of a sample called ``dir/``; here hidden is hidden in every directory.

A writer refuses more than a reader: what it would not read back equal, and what other tar tools would rewrite.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.errors import CorruptShardError
    from penstock.types import Buffer

RESERVED_FIELDS = frozenset({"__key__", "__shard__", "__position__", "__valid__"})
"""Names that the loader adds to a sample or a batch; no stored field may have them."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Sample:
    """One sample as stored: named slices of the shard.

    Attributes:
        key: As stored: in tar and zip, the path of its members up to the first dot of the basename; else from its offset.
        fields: By name, in stored order; slices of the chunk that was fed, where they lay in one. uint8[length], or, for
            what the format itself says are numbers, a typed view with their shape (``np.asarray(value)``): so count
            bytes by ``value.nbytes``.
        offset_bytes: Of its first byte in the shard; a parser can start there, where the format's unit is the sample.
            In a compressed shard, of the decompressed bytes.
        size_bytes: Of what is stored of it from there on: parsed alone, this gives the sample. None where its unit is
            larger.
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
"""Stands for a sample that an index counts, and that is corrupt and passed over: it keeps its place, and nobody gets it."""


class Parser(Protocol):
    """Bytes of one shard in, samples out; pure. Chunks may be cut at any byte.

    A format that has no such entry (gzip) refuses a ``start_offset_bytes`` other than 0 when the parser is made.

    Attributes:
        skipped_samples: Left out, where the policy is to skip what is corrupt.
        skipped_bytes: Passed over for that.
        skipped_error: Why, the first time.
        decided_format: The format that the shard's first record decided on, where the format's name leaves open what
            records hold; None before that, and where nothing is open.
    """

    skipped_samples: int
    skipped_bytes: int
    skipped_error: CorruptShardError | None
    decided_format: str | None

    @property
    def pending(self) -> bool:
        """Whether bytes of the last chunk wait for ``feed(b"")``: compressed shards grow a bounded piece at a time."""

    @property
    def held_bytes(self) -> int:
        """Bytes of a sample that is not complete, which are held until it is."""

    @property
    def offset_bytes(self) -> int:
        """Bytes of the shard that were fed, those before the start included."""

    def feed(self, data: Buffer) -> list[Sample]:
        """Take the next bytes; give the samples that are complete now.

        Raises:
            CorruptShardError: The bytes are not of this format; the parser is of no further use.
        """

    def finish(self) -> list[Sample]:
        """The shard ended: give what is left.

        Raises:
            CorruptShardError: It ended inside a sample.
        """


def is_metadata(name: bytes) -> bool:
    """Whether a member's `name` lies under ``__meta__`` or the like, or is called so."""
    first, _, _ = name.partition(b"/")
    return len(first) >= 4 and first.startswith(b"__") and first.endswith(b"__")


def split_name(name: str) -> tuple[str, str] | None:
    """(key, field) of a member or object called `name`; None: it belongs to no sample."""
    slash = name.rfind("/") + 1
    dot = name.find(".", slash)
    if dot <= slash:
        return None
    first, _, _ = name.partition("/")
    if len(first) >= 4 and first.startswith("__") and first.endswith("__"):
        return None
    return name[:dot], name[dot + 1 :].lower()


def decode_name(raw: bytes) -> str:
    """A stored name as text; bytes that are no UTF-8 survive as lone surrogates, as in ``tarfile``."""
    return raw.decode("utf-8", "surrogateescape")


def check_key(key: object) -> str:
    """`key`, where it reads back equal.

    Raises:
        ConfigError: It would not, or not everywhere.
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
    """`field`, where it reads back equal.

    Raises:
        ConfigError: It would not, or not everywhere.
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
