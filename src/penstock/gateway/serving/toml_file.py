"""Reads ``gateway.toml``. Its keys are the fields of ``GatewayConfig``; access points are tables ``[access_points.NAME]``."""

from __future__ import annotations

import re
import tomllib
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin

from penstock.errors import ConfigError
from penstock.gateway.config import AccessPoint, GatewayConfig, SettingNames, declared_settings, types_of
from penstock.text.sizes import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable


FILE_BYTES_MAX = 1024 * 1024
_DECLARED_TWICE = re.compile(r"Cannot declare \('access_points', '([^']*)'\) twice")


def read_toml(path: str) -> GatewayConfig:
    """Return the gateway that a TOML file describes. Relative paths of files in it are relative to its folder.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or a key or value in it is not valid.
    """
    file = Path(path)
    try:
        with file.open("rb") as stream:
            data = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}", hint="--config FILE") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path} is larger than {FILE_BYTES_MAX} bytes: it is not a configuration")
    try:
        document = tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _syntax_error(path, error) from None
    return config_of(document, where=file.name, folder=file.parent)


def config_of(document: Mapping[str, object], *, where: str, folder: Path) -> GatewayConfig:
    """Return the gateway that a parsed document describes.

    Args:
        document: The document's tables.
        where: Name of the document for messages.
        folder: Folder that relative paths are relative to.

    Raises:
        ConfigError: A key or value is not valid.
    """
    tables = dict(document)
    points = tables.pop("access_points", {})
    if not isinstance(points, dict) or not all(isinstance(point, dict) for point in points.values()):
        raise ConfigError(f"{where}: access_points must be tables by name", hint="[access_points.train]")
    decoded = tuple(_access_point(name, point, where, folder) for name, point in points.items())
    config = decode(GatewayConfig, tables, where=f"{where}: ", folder=folder)
    return replace(config, access_points=decoded, names=SettingNames(file=where))


def _access_point(name: str, table: Mapping[str, object], where: str, folder: Path) -> AccessPoint:
    place = f"{where}: access_points.{name}"
    values = dict(table)
    if "name" in values:
        raise ConfigError(f"{place}: the table's header already names it", hint=f"[access_points.{name}]")
    if "cache" in values:
        values["deterministic"] = _deterministic(values, place)
    values.setdefault("folder", ".")
    return decode(AccessPoint, {"name": name, **values}, where=f"{place}.", folder=folder)


def _deterministic(values: dict[str, object], place: str) -> bool:
    cache = values.pop("cache")
    if cache != "never":
        raise ConfigError(
            f'{place}.cache = {cache!r} must be "never", or be left out', hint="results are kept by default"
        )
    if values.get("deterministic"):
        raise ConfigError(f'{place}: cache = "never" contradicts deterministic = true')
    return False


def _syntax_error(path: str, error: Exception) -> ConfigError:
    if isinstance(error, UnicodeDecodeError):
        return ConfigError(f"{path} is not TOML: it is not UTF-8")
    twice = _DECLARED_TWICE.search(str(error))
    if twice:
        return ConfigError(f"{path}: two access points are named {twice[1]!r}: {error}")
    return ConfigError(f"{path} is not TOML: {error}")


_Config = TypeVar("_Config")
_SIZE_SUFFIXES = ("_bytes", "_bytes_max", "_bytes_per_s_min")
_TIME_SUFFIXES = ("_s", "_s_max")
_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return a hint for a name that does not exist: the closest one that does, or all of them."""
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"


def decode(kind: type[_Config], table: Mapping[str, object], *, where: str, folder: Path) -> _Config:
    """Make a config of a table.

    Args:
        kind: A frozen dataclass. Its fields are the keys of the table.
        table: The table, as ``tomllib`` returns it.
        where: The words before a key in messages, e.g. ``"gateway.toml: limits."``.
        folder: Folder that relative paths are relative to.

    Raises:
        ConfigError: A key does not exist or is missing, or a value has the wrong type.
    """
    known, declared = types_of(kind), declared_settings(kind)  # type: ignore[arg-type]
    values = {}
    for name, value in table.items():
        if name not in known:
            raise ConfigError(f"{where}{name} is not a key that exists", hint=suggestion(name, known))
        values[name] = decoded = _value(known[name], value, f"{where}{name}", folder)
        kind_of_path = declared[name][1].path
        if kind_of_path and decoded and not (kind_of_path == "url" and "://" in str(decoded)):
            values[name] = str(folder.absolute() / Path(str(decoded)).expanduser())
    for each in fields(kind):  # type: ignore[arg-type]
        if each.default is MISSING and each.default_factory is MISSING and each.name not in values:
            raise ConfigError(f"{where}{each.name} is missing")
    return kind(**values)


def flag_value(path: str, hint: Any, given: Any, flag: str) -> Any:
    """Return the value of a setting for what its flag was given.

    Args:
        path: Path of the setting, whose end is its unit.
        hint: Type of the setting.
        given: A text, a number or a truth value.
        flag: Name of the flag, for messages.

    Raises:
        ConfigError: It is not a value of the setting.
    """
    if get_origin(hint) is Literal and given not in get_args(hint):
        raise ConfigError(f"{flag} {given!r} must be one of {', '.join(get_args(hint))}")
    return _in_unit(hint, given, path, flag)


def _in_unit(hint: Any, value: Any, name: str, where: str) -> Any:
    """Return a text such as ``"4GiB"`` or ``"90s"`` as a number, if it is for a number of bytes or seconds."""
    if isinstance(value, str) and hint in (int, float):
        if name.endswith(_SIZE_SUFFIXES):
            return parse_bytes(value, option=where)
        if name.endswith(_TIME_SUFFIXES):
            return parse_seconds(value, option=where)
    return value


def _value(hint: Any, value: object, where: str, folder: Path) -> object:
    name = where.rpartition(".")[2].rpartition(" ")[2]
    value = _in_unit(hint, value, name, where)
    origin = get_origin(hint)
    if origin is Literal:
        if value not in get_args(hint):
            choices = ", ".join(repr(choice) for choice in get_args(hint))
            raise ConfigError(f"{where} = {value!r} must be one of {choices}")
        return value
    if origin in (Union, types.UnionType):
        inner = next(each for each in get_args(hint) if each is not type(None))
        return _value(inner, value, where, folder)
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{where} = {value!r} must be a list", hint=f"{name} = [...]")
        return tuple(_value(get_args(hint)[0], each, where, folder) for each in value)
    if origin is Mapping:
        return _mapping(get_args(hint)[1], value, where)
    if is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{where} = {value!r} must be a table", hint=f"[{name}]")
        return decode(hint, value, where=f"{where}.", folder=folder)  # type: ignore[arg-type]
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
