"""What a member of a sample is, and how its bytes become a value. Content decides, never the extension."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from penstock.buffers import is_typed
from penstock.errors import ConfigError
from penstock.tracebacks import function_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

_RESERVED = "__"  # __key__, __shard__, __position__, __valid__ are the loader's own
_INTEGER = re.compile(rb"\s*(?:([+-]?\d+)|\[\s*([+-]?\d+)\s*\])\s*")
_NUMBER = rb"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|(?i:nan|inf|infinity))"
_FLOAT = re.compile(rb"\s*(?:(" + _NUMBER + rb")|\[\s*(" + _NUMBER + rb")\s*\])\s*")
_INT64_MAX = 2**63 - 1


class Spec(NamedTuple):
    """What all values of a field are alike in: an array ``dtype[*shape]``; a number where the shape is ().

    The dtype ``"object"`` is anything else; a batch has a list of them.
    """

    dtype: str
    shape: tuple[int, ...]


OBJECT = Spec("object", ())


@dataclass(frozen=True, slots=True)
class Field(ABC):
    """A member of every sample, by name: ``"jpg"`` is what follows the first dot in ``0001.jpg``.

    Write your own as a frozen dataclass with ``decode``. One whose values all have one dtype and shape says so by
    `specs` and overrides ``decode_into``, which then writes the batch's memory without a copy.

    Raises:
        ConfigError: the name is empty or begins with ``__``.
    """

    MODULES: ClassVar[tuple[str, ...]] = ()
    TAKES_NUMBERS: ClassVar[bool] = False
    """Whether ``decode`` takes a typed view as well: what the format itself says are numbers."""
    EXTRA: ClassVar[str] = ""
    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or self.name.startswith(_RESERVED):
            raise ConfigError(
                f"a field is named by a non-empty string that does not begin with '__', not {self.name!r}",
                hint="the name is the member's extension, e.g. Image('jpg')",
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The members that it reads, which are also the values that it gives."""
        return (self.name,)

    @property
    def specs(self) -> tuple[Spec | None, ...]:
        """For each of `names` what its values are alike in; None where that is not known."""
        return (None,) * len(self.names)

    @property
    def takes_rng(self) -> bool:
        """Whether decoding draws random numbers."""
        return False

    def require(self) -> None:
        """Look whether what this field decodes with is installed.

        Raises:
            ConfigError: it is not; the hint says how to get it.
        """
        for module in self.MODULES:
            if find_spec(module) is None:
                raise ConfigError(
                    f"{self!r} decodes with the module {module!r}, which is not installed",
                    hint=f"pip install 'penstock[{self.EXTRA}]'",
                )

    @abstractmethod
    def decode(self, data: memoryview) -> Any:
        """The value of a member with bytes `data`, which it does not keep. ``ValueError`` for what it cannot be."""

    def decode_into(self, data: memoryview, out: Any, rng: np.random.Generator | None = None) -> None:
        """Write the value of `data` to `out`, an array of its spec's dtype and shape; called where there is a spec."""
        out[...] = self.decode(data)

    def decode_members(self, members: Sequence[memoryview], rng: np.random.Generator | None) -> Sequence[Any]:
        """The values of `names`, from the bytes of `names`."""
        return [self.decode(members[0])]

    def write_members(
        self, members: Sequence[memoryview], outs: Sequence[Any], rng: np.random.Generator | None
    ) -> None:
        """The same into arrays that are there already; called where every spec has a shape."""
        self.decode_into(members[0], outs[0], rng)

    def __repr__(self) -> str:
        parts = [repr(self.name)]
        for name, entry in type(self).__dataclass_fields__.items():
            value = getattr(self, name)
            if name != "name" and entry.repr and value != entry.default:
                parts.append(function_name(value) if name == "fn" else f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"


@dataclass(frozen=True, slots=True, repr=False)
class Integer(Field):
    r"""A whole number as WebDataset writers leave it: ``7``, ``7\n`` or ``[7]``; or one that is stored so. Gives int64."""

    TAKES_NUMBERS: ClassVar[bool] = True

    @property
    def specs(self) -> tuple[Spec | None, ...]:
        """An int64."""
        return (Spec("int64", ()),)

    def decode(self, data: memoryview) -> int:
        """A Python int that fits into int64."""
        if is_typed(data):
            number = _the_number(data)
            if not isinstance(number, int):
                raise ValueError(f"not a whole number: {number!r}")
        else:
            text = bytes(data)
            match = _INTEGER.fullmatch(text)
            if match is None:
                raise ValueError(f"not a whole number: {text[:40]!r}")
            number = int(match[1] or match[2])
        if not -_INT64_MAX - 1 <= number <= _INT64_MAX:
            raise ValueError(f"{number} does not fit into int64")
        return number


@dataclass(frozen=True, slots=True, repr=False)
class Float(Field):
    r"""A number in decimal: ``0.5``, ``1e-3\n``, ``[7]``, ``nan``; or one that is stored so. Gives float64."""

    TAKES_NUMBERS: ClassVar[bool] = True

    @property
    def specs(self) -> tuple[Spec | None, ...]:
        """A float64."""
        return (Spec("float64", ()),)

    def decode(self, data: memoryview) -> float:
        """The nearest float64."""
        if is_typed(data):
            return float(_the_number(data))
        text = bytes(data)
        match = _FLOAT.fullmatch(text)
        if match is None:
            raise ValueError(f"not a number: {text[:40]!r}")
        return float(match[1] or match[2])


@dataclass(frozen=True, slots=True, repr=False)
class Text(Field):
    """UTF-8 text. Gives a list of ``str`` per batch."""

    @property
    def specs(self) -> tuple[Spec | None, ...]:
        """A list per batch."""
        return (OBJECT,)

    def decode(self, data: memoryview) -> str:
        """The text, unchanged: a trailing newline stays."""
        return str(data, "utf-8")


@dataclass(frozen=True, slots=True, repr=False)
class Json(Field):
    """A JSON document. Gives a list of objects per batch."""

    def decode(self, data: memoryview) -> Any:
        """dict, list, str, int, float, bool or None."""
        return json.loads(bytes(data))


@dataclass(frozen=True, slots=True, repr=False)
class Bytes(Field):
    """The member as it is. Gives a list of ``bytes`` per batch."""

    @property
    def specs(self) -> tuple[Spec | None, ...]:
        """A list per batch."""
        return (OBJECT,)

    def decode(self, data: memoryview) -> bytes:
        """A copy of `data`."""
        return bytes(data)


@dataclass(frozen=True, slots=True, repr=False)
class Function(Field):
    """A member decoded by a function of your own: ``ps.Function("pkl.gz", fn)``.

    Attributes:
        fn: ``fn(data: memoryview)`` gives the value, and keeps no view of `data`.
        dtype: With `shape`: what every value is an array of. Where it is not said, the first sample tells.
        shape: The value's shape.
    """

    TAKES_NUMBERS: ClassVar[bool] = True
    fn: Callable[[memoryview], Any]
    dtype: str | None = field(default=None, kw_only=True)
    shape: tuple[int, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        Field.__post_init__(self)
        if not callable(self.fn):
            raise ConfigError(f"Function({self.name!r}, {self.fn!r}) must be given a function of a memoryview")
        if (self.dtype is None) != (self.shape is None):
            raise ConfigError(f"dtype={self.dtype!r} and shape={self.shape!r}: give both, or none")

    @property
    def specs(self) -> tuple[Spec | None, ...]:
        """As it was said."""
        if self.dtype is None or self.shape is None:
            return (None,)
        return (Spec(self.dtype, tuple(self.shape)),)

    def decode(self, data: memoryview) -> Any:
        """What the function gives."""
        return self.fn(data)

    def decode_into(self, data: memoryview, out: Any, rng: np.random.Generator | None = None) -> None:
        """What the function gives, where it has the dtype and shape that were said."""
        import numpy as np

        value = np.asarray(self.fn(data))
        if value.shape != out.shape or value.dtype != out.dtype:
            raise ValueError(f"{value.dtype}{list(value.shape)}, not the {out.dtype}{list(out.shape)} that was said")
        out[...] = value


def _the_number(data: memoryview) -> int | float:
    import numpy as np

    array = np.asarray(data)
    if array.size != 1:
        raise ValueError(f"{array.dtype}{list(array.shape)} is not one number")
    number: int | float = array.item()
    return number
