"""Reads ``gateway.toml``. Its keys are the fields of ``GatewayConfig``; access points are tables ``[access_points.NAME]``."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.gateway.config import AccessPoint, GatewayConfig, SettingNames
from penstock.gateway.serving.values import decode

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE_BYTES_MAX = 1024 * 1024
_DECLARED_TWICE = re.compile(r"Cannot declare \('access_points', '([^']*)'\) twice")
_PATHS = ("tls_certificate", "tls_key", "keys_file", "directory")
_HANDLER_PATHS = ("code_dir", "python")


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
    _absolute(tables, _PATHS, folder)
    if "://" not in str(tables.get("results", "://")):
        _absolute(tables, ("results",), folder)
    decoded = tuple(_access_point(name, point, where, folder) for name, point in points.items())
    config = decode(GatewayConfig, tables, where=f"{where}: ")
    return replace(config, access_points=decoded, names=SettingNames(file=where))


def _access_point(name: str, table: Mapping[str, object], where: str, folder: Path) -> AccessPoint:
    place = f"{where}: access_points.{name}"
    values = dict(table)
    if "name" in values:
        raise ConfigError(f"{place}: the table's header already names it", hint=f"[access_points.{name}]")
    if "cache" in values:
        values["deterministic"] = _deterministic(values, place)
    values.setdefault("folder", ".")
    _absolute(values, ("folder",), folder)
    if "://" not in str(values.get("upstream", "://")):
        _absolute(values, ("upstream",), folder)
    handler = values.get("handler")
    if isinstance(handler, dict):
        values["handler"] = handler = dict(handler)
        _absolute(handler, _HANDLER_PATHS, folder)
    return decode(AccessPoint, {"name": name, **values}, where=f"{place}.")


def _deterministic(values: dict[str, object], place: str) -> bool:
    cache = values.pop("cache")
    if cache != "never":
        raise ConfigError(
            f'{place}.cache = {cache!r} must be "never", or be left out', hint="results are kept by default"
        )
    if values.get("deterministic"):
        raise ConfigError(f'{place}: cache = "never" contradicts deterministic = true')
    return False


def _absolute(table: dict[str, object], names: tuple[str, ...], folder: Path) -> None:
    for name in names:
        value = table.get(name)
        if isinstance(value, str) and value:
            table[name] = str(folder.absolute() / Path(value).expanduser())


def _syntax_error(path: str, error: Exception) -> ConfigError:
    if isinstance(error, UnicodeDecodeError):
        return ConfigError(f"{path} is not TOML: it is not UTF-8")
    twice = _DECLARED_TWICE.search(str(error))
    if twice:
        return ConfigError(f"{path}: two access points are named {twice[1]!r}: {error}")
    return ConfigError(f"{path} is not TOML: {error}")
