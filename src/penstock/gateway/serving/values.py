"""Makes frozen configs of TOML tables: each key is a field, and each value is checked against the field's type.

The name of a field says which units its value may have: a field that ends with ``_bytes``, ``_bytes_max`` or ``_bytes_per_s``
may be a size such as ``"4GiB"``, and one that ends with ``_s`` or ``_s_max`` a duration such as ``"90s"``.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from penstock.errors import ConfigError
from penstock.text.sizes import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

_Config = TypeVar("_Config")
_SIZE_SUFFIXES = ("_bytes", "_bytes_max", "_bytes_per_s_min")
_TIME_SUFFIXES = ("_s", "_s_max")
_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a hint for a name that does not exist: the closest one that does, or all of them."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"


def decode(kind: type[_Config], table: Mapping[str, object], *, where: str) -> _Config:
    """Make a config of a table.

    Args:
        kind: A frozen dataclass. Its fields are the keys of the table.
        table: The table, as ``tomllib`` returns it.
        where: The words before a key in messages, e.g. ``"gateway.toml: limits."``.

    Raises:
        ConfigError: A key does not exist or is missing, or a value has the wrong type.
    """
    hints = hints_of(kind)  # type: ignore[arg-type]
    values = {}
    for name, value in table.items():
        if name not in hints:
            raise ConfigError(f"{where}{name} is not a key that exists", hint=suggestion(name, hints))
        values[name] = _value(hints[name], value, f"{where}{name}")
    required = [field.name for field in fields(kind) if _is_required(field)]  # type: ignore[arg-type]
    missing = [name for name in required if name not in values]
    if missing:
        raise ConfigError(f"{where}{missing[0]} is missing")
    return kind(**values)


@cache
def hints_of(kind: type) -> dict[str, Any]:
    """Return the types of a config's settings by name."""
    from penstock.gateway import config

    hints = get_type_hints(kind, localns={**vars(config), "Mapping": Mapping})
    settings = [field.name for field in fields(kind) if field.metadata.get("is_setting", True)]
    return {name: hints[name] for name in settings}


def _is_required(field: Any) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _value(hint: Any, value: object, where: str) -> object:
    name = where.rpartition(".")[2].rpartition(" ")[2]
    if isinstance(value, str) and hint in (int, float):
        if name.endswith(_SIZE_SUFFIXES):
            return parse_bytes(value, option=where)
        if name.endswith(_TIME_SUFFIXES):
            return parse_seconds(value, option=where)
    origin = get_origin(hint)
    if origin is Literal:
        if value not in get_args(hint):
            choices = ", ".join(repr(choice) for choice in get_args(hint))
            raise ConfigError(f"{where} = {value!r} must be one of {choices}")
        return value
    if origin in (Union, types.UnionType):
        inner = next(each for each in get_args(hint) if each is not type(None))
        return _value(inner, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} = {value!r} must be a list", hint=f"{name} = [...]")
        return tuple(_value(get_args(hint)[0], each, where) for each in value)
    if origin is Mapping:
        return _mapping(get_args(hint)[1], value, where)
    if is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} = {value!r} must be a table", hint=f"[{name}]")
        return decode(hint, value, where=f"{where}.")  # type: ignore[arg-type]
    return _plain(hint, value, where)


def _mapping(hint: Any, value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} = {value!r} must be a table", hint="{ name = value }")
    if hint is str:
        return {name: _text(each, f"{where}.{name}") for name, each in value.items()}
    return dict(value)


def _text(value: object, where: str) -> str:
    """Return a value of a table of texts, where numbers and truth values may stand without quotes."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return value
    raise ConfigError(f"{where} = {value!r} must be text, a number, true or false")


def _plain(hint: type, value: object, where: str) -> object:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (hint is not bool and isinstance(value, bool)):
        raise ConfigError(f"{where} = {value!r} must be {_NAMES.get(hint, hint.__name__)}")
    if hint is str and "\0" in value:  # type: ignore[operator]
        raise ConfigError(f"{where} = {value!r} contains NUL")
    return value
