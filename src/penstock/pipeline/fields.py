"""Fields: how the bytes of a sample's members become values. The content decides, never the extension."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from penstock.config import check_names
from penstock.errors import ConfigError
from penstock.memory.buffers import is_typed
from penstock.system.tracebacks import function_name
from penstock.text.json_text import parse_json
from penstock.version import install_hint

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

_RESERVED = "__"  # the loader itself adds __key__, __shard__, __position__ and __valid__
_INTEGER = re.compile(rb"\s*(?:([+-]?\d+)|\[\s*([+-]?\d+)\s*\])\s*")
_NUMBER = rb"[+-]?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|(?i:nan|inf|infinity))"
_FLOAT = re.compile(rb"\s*(?:(" + _NUMBER + rb")|\[\s*(" + _NUMBER + rb")\s*\])\s*")
_INT64_MAX = 2**63 - 1


class Spec(NamedTuple):
    """Dtype and shape that all values of a field have in common. A batch holds an array ``dtype[B, *shape]`` of them.

    Attributes:
        dtype: Name of a numpy dtype, or ``"object"`` for anything else, of which a batch holds a list.
        shape: Shape of each value; () for a number.
    """

    dtype: str
    shape: tuple[int, ...]


OBJECT = Spec("object", ())


@dataclass(frozen=True, slots=True)
class Field(ABC):
    """A member of every sample, by name: ``"jpg"`` is the text after the first dot in ``0001.jpg``.

    A field of your own is a frozen dataclass that derives from this class and has ``decode``. If all its values have one
    dtype and shape, override `specs`, and ``decode_into`` to write into the memory of the batch without a copy.

    Attributes:
        name: Name of the member, and of the value. Of ``"jpg;jpeg;png"``, the first member that a sample has is taken, and the
            value has the first name. Case does not matter: members of shards and files have names in lower case.
        default: Value for samples that lack the member, or in which it is null; if it is left out, they are an error.
        valid: Name of a second value, a bool: whether the sample has the member. It needs `default`.

    Raises:
        ConfigError: A name is empty or begins with ``__``, or `default` does not fit the dtype of the field.
    """

    MODULES: ClassVar[tuple[str, ...]] = ()
    """Modules that decoding imports."""
    TAKES_NUMBERS: ClassVar[bool] = False
    """Whether ``decode`` also takes a typed view: numbers or arrays that the format itself stores as such."""
    EXTRA: ClassVar[str] = ""
    """Extra of the package that installs `MODULES`."""
    SEVERAL_NAMES: ClassVar[bool] = False
    """Whether alternative names can be arguments of their own."""
    SPEC: ClassVar[Spec | None] = None
    """Dtype and shape of every value, if they are the same for all fields of the class."""
    name: str
    default: Any = field(default=..., kw_only=True)
    valid: str | None = field(default=None, kw_only=True)

    def __new__(cls, *_: Any, **options: Any) -> Self:
        """Check the names of the arguments, which ``__init__`` takes."""
        check_names(cls.__name__, options, cls.__dataclass_fields__)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        names = self.name.split(";") if isinstance(self.name, str) else [self.name]
        for name in names if self.valid is None else [*names, self.valid]:
            if not isinstance(name, str) or not name or name.startswith(_RESERVED):
                raise ConfigError(
                    f"the name of a field must be a non-empty string that does not begin with '__', not {name!r}",
                    hint="the name is the member's extension, e.g. Image('jpg')",
                )
        if self.default is not ...:
            self.missing_values()
        elif self.valid is not None:
            raise ConfigError(f"{self!r} needs a value for samples that lack the member", hint="default=0")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the values, which are those of the members that the field reads."""
        return (self.name.partition(";")[0],)

    @property
    def alternatives(self) -> tuple[str, ...]:
        """Names of the members that take the place of the first of `names` in samples that lack it."""
        return tuple(self.name.split(";")[1:])

    @property
    def specs(self) -> tuple[Spec | None, ...]:
        """Dtype and shape of the values of each of `names`; None if they are not known."""
        return (self.SPEC,) * len(self.names)

    @property
    def takes_rng(self) -> bool:
        """Whether decoding draws random numbers."""
        return False

    def missing_values(self) -> list[Any]:
        """Return the values of `names` for a sample without the member: `default`, as an array if `specs` say so.

        Raises:
            ConfigError: The dtype of the field cannot hold `default`.
        """
        return [self.default if spec is None or spec == OBJECT else _filled(spec, self.default) for spec in self.specs]

    def require(self) -> None:
        """Check that the modules which this field decodes with are installed.

        Raises:
            ConfigError: A module is missing; the hint says how to install it.
        """
        for module in self.MODULES:
            if find_spec(module) is None:
                raise ConfigError(
                    f"{self!r} decodes with the module {module!r}, which is not installed",
                    hint=install_hint(self.EXTRA),
                )

    @abstractmethod
    def decode(self, data: memoryview) -> Any:
        """Return the value of a member.

        Args:
            data: The bytes of the member, valid during the call: keep no view of them.

        Raises:
            ValueError: `data` cannot be decoded.
        """

    def decode_into(self, data: memoryview, out: Any, rng: np.random.Generator | None = None) -> None:
        """Write the value of a member into an array. Called only if `specs` has a shape.

        Args:
            data: The bytes of the member, valid during the call.
            out: Array of the dtype and shape in `specs`.
            rng: The sample's random numbers, if ``takes_rng``.
        """
        out[...] = self.decode(data)

    def decode_members(self, members: Sequence[memoryview], rng: np.random.Generator | None) -> Sequence[Any]:
        """Return the values of `names`, given the bytes of each."""
        return [self.decode(members[0])]

    def write_members(
        self, members: Sequence[memoryview], outs: Sequence[Any], rng: np.random.Generator | None
    ) -> None:
        """Write the values of `names` into the arrays `outs`. Called only if every one of `specs` has a shape."""
        self.decode_into(members[0], outs[0], rng)

    def decode_column(self, values: list[bytes] | NDArray[Any]) -> list[Any] | NDArray[Any] | None:
        """Return the results of ``decode`` for many members of tables; None if they have to be decoded one by one.

        It is called only if the class itself defines it, not if it inherits it.

        Args:
            values: The members of consecutive samples: their bytes, or numbers as type[n, count].
        """
        del values
        return None

    def __repr__(self) -> str:
        parts = list(map(repr, self.name.split(";"))) if self.SEVERAL_NAMES else [repr(self.name)]
        for name, entry in type(self).__dataclass_fields__.items():
            value = getattr(self, name)
            if name != "name" and entry.repr and value != entry.default:
                parts.append(function_name(value) if name == "fn" else f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"


@dataclass(frozen=True, slots=True, repr=False)
class Integer(Field):
    r"""A whole number as text (``7``, ``7\n`` or ``[7]``) or as the format stores it. A batch holds int64[B]."""

    SPEC: ClassVar[Spec | None] = Spec("int64", ())
    TAKES_NUMBERS: ClassVar[bool] = True

    def decode(self, data: memoryview) -> int:
        """Return a Python int that fits into int64."""
        if is_typed(data):
            number = _single_number(data)
            if not isinstance(number, int):
                raise ValueError(f"not a whole number: {number!r}")
            number = int(number)  # of a bool
        else:
            text = bytes(data)
            match = _INTEGER.fullmatch(text)
            if match is None:
                raise ValueError(f"not a whole number: {text[:40]!r}")
            number = int(match[1] or match[2])
        if not -_INT64_MAX - 1 <= number <= _INT64_MAX:
            raise ValueError(f"{number} does not fit into int64")
        return number

    def decode_column(self, values: list[bytes] | NDArray[Any]) -> NDArray[Any] | None:
        """Return int64[n]."""
        if isinstance(values, list) or values.shape[1] != 1 or values.dtype.kind not in "iub":
            return None
        return None if values.dtype == "uint64" else values[:, 0].astype("int64")


@dataclass(frozen=True, slots=True, repr=False)
class Float(Field):
    r"""A number as text (``0.5``, ``1e-3\n``, ``[7]``, ``nan``) or as the format stores it. A batch holds float64[B]."""

    SPEC: ClassVar[Spec | None] = Spec("float64", ())
    TAKES_NUMBERS: ClassVar[bool] = True

    def decode(self, data: memoryview) -> float:
        """Return the nearest float64."""
        if is_typed(data):
            return float(_single_number(data))
        text = bytes(data)
        match = _FLOAT.fullmatch(text)
        if match is None:
            raise ValueError(f"not a number: {text[:40]!r}")
        return float(match[1] or match[2])

    def decode_column(self, values: list[bytes] | NDArray[Any]) -> NDArray[Any] | None:
        """Return float64[n]."""
        return None if isinstance(values, list) or values.shape[1] != 1 else values[:, 0].astype("float64")


@dataclass(frozen=True, slots=True, repr=False)
class Text(Field):
    """UTF-8 text. A batch holds a list of ``str``."""

    SPEC: ClassVar[Spec | None] = OBJECT

    def decode(self, data: memoryview) -> str:
        """Return the text unchanged, including a trailing newline."""
        return str(data, "utf-8")

    def decode_column(self, values: list[bytes] | NDArray[Any]) -> list[str] | None:
        """Return a list of texts."""
        return [str(value, "utf-8") for value in values] if isinstance(values, list) else None


@dataclass(frozen=True, slots=True, repr=False)
class Stored(Field):
    """Text, or a number as the format stores it. A batch holds a list. ``Category`` and ``read_column`` use it."""

    SPEC: ClassVar[Spec | None] = OBJECT
    TAKES_NUMBERS: ClassVar[bool] = True

    def decode(self, data: memoryview) -> str | int | float:
        """Return a str, int, float or bool."""
        return _text_or_number(data)

    def decode_column(self, values: list[bytes] | NDArray[Any]) -> list[Any] | None:
        """Return a list of texts or numbers."""
        return _texts_or_numbers(values)


@dataclass(frozen=True, slots=True, repr=False)
class Category(Field):
    """One of a list of categories: text, or a number as the format stores it. A batch holds its code, int64[B].

    Attributes:
        values: All categories; the code of each is its place in the list, from 0. If they are not known:
            ``sorted(set(penstock.read_column(pipeline, name)))``.
        default: Also the code of a category that is not in the list; if it is left out, that is an error.
    """

    SPEC: ClassVar[Spec | None] = Spec("int64", ())
    TAKES_NUMBERS: ClassVar[bool] = True
    values: Sequence[str | int] = field(repr=False)
    _codes: dict[Any, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Field.__post_init__(self)
        values = () if isinstance(self.values, str) else tuple(self.values)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "_codes", {value: code for code, value in enumerate(values)})
        if not values or len(self._codes) < len(values):
            raise ConfigError(f"{self!r} must be given a list of categories, each once")

    def decode(self, data: memoryview) -> int:
        """Return the code of a category."""
        return self._code(_text_or_number(data))

    def decode_column(self, values: list[bytes] | NDArray[Any]) -> NDArray[Any] | None:
        """Return int64[n]."""
        import numpy as np

        column = _texts_or_numbers(values)
        return None if column is None else np.array(list(map(self._code, column)), np.int64)

    def _code(self, value: Any) -> int:
        code = self._codes.get(value, self.default)
        if code is ...:
            raise ValueError(f"{value!r:.60} is not one of its {len(self._codes)} categories")
        return int(code)


@dataclass(frozen=True, slots=True, repr=False)
class Json(Field):
    """A JSON document. A batch holds a list of the documents' values."""

    def decode(self, data: memoryview) -> Any:
        """Return a dict, list, str, int, float, bool or None."""
        return parse_json(data)


@dataclass(frozen=True, slots=True, repr=False)
class Bytes(Field):
    """The member as it is stored. A batch holds a list of ``bytes``."""

    SPEC: ClassVar[Spec | None] = OBJECT

    def decode(self, data: memoryview) -> bytes:
        """Return a copy of `data`."""
        return bytes(data)

    def decode_column(self, values: list[bytes] | NDArray[Any]) -> list[bytes] | None:
        """Return the list."""
        return values if isinstance(values, list) else None


@dataclass(frozen=True, slots=True, repr=False)
class DeclaredField(Field):
    """Base of the fields whose dtype and shape a user may declare.

    Attributes:
        dtype: Name of the numpy dtype of every value, given together with `shape`; None: the first sample determines both.
        shape: Shape of every value.
    """

    TAKES_NUMBERS: ClassVar[bool] = True
    dtype: str | None = field(default=None, kw_only=True)
    shape: tuple[int, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        Field.__post_init__(self)
        if (self.dtype is None) != (self.shape is None):
            raise ConfigError(f"dtype={self.dtype!r} and shape={self.shape!r}: give both or neither")

    @property
    def specs(self) -> tuple[Spec | None, ...]:
        """The declared dtype and shape, if any."""
        return (None,) if self.dtype is None or self.shape is None else (Spec(self.dtype, tuple(self.shape)),)

    @abstractmethod
    def array(self, data: memoryview) -> NDArray[Any]:
        """Return the value as an array, which may share the memory of `data`."""

    def decode_into(self, data: memoryview, out: Any, rng: np.random.Generator | None = None) -> None:
        """Copy the value into `out`.

        Raises:
            ValueError: The value does not have the declared dtype and shape.
        """
        array = self.array(data)
        if array.shape != out.shape or array.dtype != out.dtype:
            raise ValueError(f"{array.dtype}{list(array.shape)}, not the declared {out.dtype}{list(out.shape)}")
        out[...] = array


@dataclass(frozen=True, slots=True, repr=False)
class Function(DeclaredField):
    """A member that a function of your own decodes: ``ps.Function("pkl.gz", fn)``.

    Attributes:
        fn: ``fn(data: memoryview)`` that returns the value and keeps no view of `data`.
        dtype: Name of the numpy dtype of every value, given together with `shape`; None: the first sample determines both.
        shape: Shape of every value.
    """

    fn: Callable[[memoryview], Any]

    def __post_init__(self) -> None:
        DeclaredField.__post_init__(self)
        if not callable(self.fn):
            raise ConfigError(f"Function({self.name!r}, {self.fn!r}) must be given a function of a memoryview")

    def decode(self, data: memoryview) -> Any:
        """Return the result of the function."""
        return self.fn(data)

    def array(self, data: memoryview) -> NDArray[Any]:
        """Return the result of the function as an array."""
        import numpy as np

        return np.asarray(self.fn(data))


def _text_or_number(data: memoryview) -> str | int | float:
    return _single_number(data) if is_typed(data) else str(data, "utf-8")


def _texts_or_numbers(values: list[bytes] | NDArray[Any]) -> list[Any] | None:
    if isinstance(values, list):
        return [str(value, "utf-8") for value in values]
    return values[:, 0].tolist() if values.shape[1] == 1 else None


def _filled(spec: Spec, value: Any) -> Any:
    """Return an array, or a number, of the dtype and shape of `spec` with `value` everywhere."""
    import numpy as np

    try:
        array = np.full(spec.shape, value, spec.dtype)
        if np.array_equal(array, np.full(spec.shape, value), equal_nan=True):
            return array[()]
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(f"default={value!r} is not {spec.dtype}")


def _single_number(data: memoryview) -> int | float:
    import numpy as np

    array = np.asarray(data)
    if array.size != 1:
        raise ValueError(f"{array.dtype}{list(array.shape)} is not one number")
    number: int | float = array.item()
    return number
