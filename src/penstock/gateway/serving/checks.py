"""Checks of a whole configuration before anything starts: names, bounds, files, and settings that contradict each other."""

from __future__ import annotations

import ipaddress
import math
import os
import re
import socket
import stat
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import check_number, check_whole
from penstock.errors import ConfigError
from penstock.gateway.aws_lambda.events import CALLER, HIDDEN_HEADERS
from penstock.gateway.config import Setting
from penstock.gateway.serving.toml_file import suggestion
from penstock.system.private import others_can_read

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.gateway.config import AccessPoint, GatewayConfig, LambdaConfig

NAME = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
UPSTREAM_OPTIONS: dict[str, type] = {
    "endpoint_url": str,
    "region": str,
    "profile": str,
    "anonymous": bool,
    "addressing": str,
    "requester_pays": bool,
    "expected_bucket_owner": str,
    "requests_max": int,
}
"""Options of ``penstock.connect`` that an access point may have."""

ACTIONS = ("GetObject", "HeadObject", "ListObjects", "ListObjectsV2")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def check_config(config: GatewayConfig) -> None:
    """Check a configuration, including that the files and folders that it names exist.

    Raises:
        ConfigError: Something in it is not valid; the message names it as the user does, by its flag or its key in the file.
    """
    if not config.access_points and not config.directory:
        raise ConfigError(
            "the gateway has nothing to serve",
            hint="--upstream s3://bucket, --upstream DIRECTORY, or [access_points.NAME] in --config FILE",
        )
    names = config.names
    if bool(config.tls_certificate) != bool(config.tls_key):
        missing = "tls_key" if config.tls_certificate else "tls_certificate"
        raise ConfigError(f"TLS needs a certificate and a key, and {names.of(missing)} is not given")
    _check_declared(config, names.of)
    _check_host(config)
    if config.tls_key:
        check_secret_file(config.tls_key, "the key of the TLS certificate")
    if config.read_write and not config.directory:
        raise ConfigError(
            f"{names.of('read_write')}=true needs a directory, and none is configured",
            hint="set it in an access point",
        )
    _check_cache(config)
    _check_results(config)
    seen: set[str] = set()
    for point in config.access_points:
        if point.name in seen:
            raise ConfigError(f"two access points are named {point.name!r}")
        seen.add(point.name)
        named = _named_in(names.of, f"access_points.{point.name}")
        _check_access_point(point, named)
        if point.read_write and config.workers > 1 and not point.is_s3:
            raise ConfigError(
                f"{named('read_write')}=true needs {names.of('workers')}=1, not {config.workers}: only the process in which a "
                f"multipart upload to {point.upstream} was begun has its parts",
                hint="one process, or --upstream DIRECTORY --read-write, which keeps parts of uploads in the directory",
            )


def _named_in(named: Callable[[str], str], table: str) -> Callable[[str], str]:
    """Return what names the settings of a table."""
    return lambda setting: named(f"{table}.{setting}")


def _check_declared(config: Any, named: Callable[[str], str]) -> None:
    """Check each setting of a config, and of the configs in it, against its declaration."""
    for each in fields(config):
        value, declared, name = getattr(config, each.name), each.metadata.get("setting", Setting()), named(each.name)
        if is_dataclass(value):
            _check_declared(value, _named_in(named, each.name))
        if declared.low is not None and each.type == "float":
            high = math.inf if declared.high is None else declared.high
            check_number(name, value, declared.low, high, opened=declared.opened)
        elif declared.low is not None:
            check_whole(name, value, declared.low, declared.high)
        elif declared.pattern and value != each.default:
            for text in value if isinstance(value, tuple) else (value,):
                if not re.fullmatch(declared.pattern, text):
                    shown = "" if declared.is_secret else f": {text!r}" if isinstance(value, tuple) else f"={text!r}"
                    raise ConfigError(f"{name}{shown} {declared.what}", hint=declared.hint or None)
        elif value:
            _check_path(value, declared, name)


def _check_path(path: str, declared: Setting, name: str) -> None:
    if declared.path == "file" and not Path(path).is_file():
        raise ConfigError(f"{name}: {path} is not a file", hint=declared.hint or None)
    if (declared.path == "folder" or (declared.path == "url" and "://" not in path)) and not Path(path).is_dir():
        raise ConfigError(f"{name}: {path} is not a directory", hint="it is not created")


def _check_cache(config: GatewayConfig) -> None:
    from penstock.cache import CacheConfig

    place = f"{config.names.of('cache')}={config.cache!r}"
    path, colon, _ = config.cache.rpartition(":")
    if config.cache and not (colon and path):
        raise ConfigError(f"{place} must be PATH:SIZE", hint="e.g. /nvme/penstock:200GB, or none to keep nothing")
    if config.cache:
        try:
            CacheConfig.of(config.cache)
        except ConfigError as error:
            what = error.what.removeprefix(f"cache={config.cache!r}: ")
            raise ConfigError(f"{place}: {what}", hint=error.hint) from None


def _check_results(config: GatewayConfig) -> None:
    names = config.names
    place = f"{names.of('results')}={config.results!r}"
    _check_options(config.results_options, names.of, "results_options")
    if not config.results:
        if config.results_options:
            raise ConfigError(
                f"{names.of(f'results_options.{next(iter(config.results_options))}')} is set, but results is empty",
                hint="results = 's3://bucket/derived/', or --results s3://bucket/derived/",
            )
        return
    if config.results.startswith(("http://", "https://")):
        raise ConfigError(f"{place} can only be read", hint="e.g. s3://bucket/derived/")
    if not config.cache:
        raise ConfigError(
            f"{names.of('results')} needs a cache, and the cache is switched off", hint="--cache PATH:SIZE"
        )
    for point in config.access_points:
        is_served = point.transform or point.handler or point.webhook
        if is_served and f"{config.results.rstrip('/')}/".startswith(f"{point.upstream.rstrip('/')}/"):
            raise ConfigError(
                f"{place} lies in what access point {point.name!r} transforms",
                hint="a bucket or prefix beside it, e.g. s3://bucket/derived/ beside s3://bucket/train/",
            )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _check_host(config: GatewayConfig) -> None:
    try:
        socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{config.names.of('host')}={config.host!r} is not an address of this machine: {reason}",
            hint="e.g. 127.0.0.1",
        ) from None


def check_secret_file(path: str, what: str) -> None:
    """Refuse a file with a secret that other users can read or change.

    Raises:
        ConfigError: Others may read or write the file.
    """
    status = Path(path).stat()
    mode = stat.S_IMODE(status.st_mode)
    if others_can_read(status) or mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{what} {path} has mode {mode:04o}: others can read or change it", hint=f"chmod 600 {path}")


def _check_access_point(point: AccessPoint, named: Callable[[str], str]) -> None:
    if not NAME.fullmatch(point.name):
        raise ConfigError(
            f"access point {point.name!r}: the name is not a bucket name",
            hint="3 to 63 lower-case letters, digits and hyphens, with a letter or digit at both ends (--name NAME)",
        )
    if not point.upstream:
        raise ConfigError(f"{named('upstream')} is empty", hint="upstream = 's3://bucket/prefix/', or a directory")
    _check_options(point.upstream_options, named, "upstream_options")
    _check_declared(point, named)
    _check_kind(point, named)
    for old, new in point.renamed_suffixes.items():
        if not old or "/" in old or "/" in new:
            raise ConfigError(
                f"{named('renamed_suffixes')}: {old!r} to {new!r} does not rename a suffix",
                hint='e.g. { ".tar" = ".tfrecord" }',
            )


def _check_kind(point: AccessPoint, named: Callable[[str], str]) -> None:
    """Check what an access point does with its objects: a transform, a handler, a webhook, writing, or nothing."""
    kinds = [name for name in ("transform", "handler", "webhook") if getattr(point, name)]
    if len(kinds) > 1:
        raise ConfigError(
            f"{named(kinds[0])} and {named(kinds[1])} cannot be combined", hint="an access point has one of them"
        )
    if point.read_write and kinds:
        raise ConfigError(
            f"{named('read_write')} cannot be combined with {kinds[0]}", hint="write through another access point"
        )
    if point.arguments and not point.transform:
        raise ConfigError(f"{named('arguments')} is for a transform, but there is none")
    if point.transform:
        _check_transform(point, named)
    if point.handler:
        _check_handler(point.handler, named)
    for name in ("handler", "webhook"):
        if (called := getattr(point, name)) is not None:
            _check_varies_by(called.varies_by, named(f"{name}.varies_by"))


def _check_transform(point: AccessPoint, named: Callable[[str], str]) -> None:
    """Check how a transform is spelled; its own code is imported only when the gateway starts."""
    from penstock.gateway.transforms.program import checked_number, spelled_program

    if not Path(point.folder).is_dir():
        raise ConfigError(f"{named('folder')}: {point.folder} is not a directory", hint="it is not created")
    try:
        spelled_program(point.transform, arguments=point.arguments, folder=point.folder)
    except ConfigError as error:
        raise ConfigError(f"{named('transform')}: {error.what}", hint=error.hint) from None
    if point.epoch:
        checked_number(named("epoch"), point.epoch)


def _check_options(options: Mapping[str, object], named: Callable[[str], str], place: str) -> None:
    for name, value in options.items():
        kind: Any = UPSTREAM_OPTIONS.get(name)
        if kind is None:
            raise ConfigError(f"{named(place)} has no key {name!r}", hint=suggestion(name, UPSTREAM_OPTIONS))
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{named(f'{place}.{name}')}={value!r} must be of type {kind.__name__}")


def _check_handler(handler: LambdaConfig, named: Callable[[str], str]) -> None:
    if handler.python and not os.access(handler.python, os.X_OK):
        raise ConfigError(f"{named('handler.python')}: {handler.python} is not a program that can be run")
    for action in handler.actions:
        if action not in ACTIONS:
            hint = suggestion(action, ACTIONS)
            raise ConfigError(f"{named('handler.actions')}: there is no action {action!r}", hint=hint)


def _check_varies_by(names: tuple[str, ...] | None, what: str) -> None:
    for name in names or ():
        if name.lower() in HIDDEN_HEADERS or not _HEADER_NAME.fullmatch(name):
            hint = f"names of headers that are not about signatures, ranges or conditions, and {CALLER!r}"
            raise ConfigError(f"{what}: {name!r} is nothing that is passed on", hint=hint)
