"""Checks of a whole configuration before anything starts: names, bounds, files, and settings that contradict each other."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import KIB, MIB, check_number, check_whole
from penstock.errors import ConfigError
from penstock.gateway.aws_lambda.events import CALLER, HIDDEN_HEADERS
from penstock.gateway.serving.values import suggestion
from penstock.system.private import others_can_read

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.gateway.config import AccessPoint, GatewayConfig, LambdaConfig, SettingNames, WebhookConfig

NAME = re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]")
WORKERS_MAX = 256
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
_ACCOUNT = re.compile(r"[0-9]{12}")
_REGION = re.compile(r"[a-z0-9-]{1,64}")
_DOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9](?:[a-z0-9-]{0,62})(?:\.[a-z0-9-]{1,63})*(?::[0-9]{1,5})?")
_ORIGIN = re.compile(r"https?://[a-z0-9.\[\]:-]+")
_HOST = re.compile(r"[A-Za-z0-9._-]+(?::[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](?::[0-9]{1,5})?")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_TEXT = re.compile(r"[\x21-\x7e]+(?: [\x21-\x7e]+)?")


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
    _check_addresses(config)
    _check_limits(config)
    _check_tls(config)
    if config.directory:
        _check_folder(config.directory, names.of("directory"))
    elif config.read_write:
        raise ConfigError(
            f"{names.of('read_write')}=true needs a directory, and none is configured",
            hint="set it in an access point",
        )
    if config.keys_file and not Path(config.keys_file).is_file():
        raise ConfigError(
            f"{names.of('keys_file')}: {config.keys_file} is not a file", hint="lines such as ACCESS:SECRET:ro"
        )
    _check_cache(config)
    _check_results(config)
    _check_webhook_service(config)
    seen: set[str] = set()
    for point in config.access_points:
        if point.name in seen:
            raise ConfigError(f"two access points are named {point.name!r}")
        seen.add(point.name)
        _check_access_point(point, partial(_name_in, names, point.name))


def _name_in(names: SettingNames, point: str, setting: str = "") -> str:
    """Return the name of a setting of an access point, or that of the access point itself."""
    return names.of(f"access_points.{point}.{setting}".rstrip("."))


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
    if "://" not in config.results:
        _check_folder(config.results, names.of("results"))
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


def _check_webhook_service(config: GatewayConfig) -> None:
    service, names = config.webhook_service, config.names
    _check_token(service.token, names.of("webhook_service.token"))
    check_whole(names.of("webhook_service.source_bytes_max"), service.source_bytes_max, 1)
    for host in service.source_hosts:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"{names.of('webhook_service.source_hosts')}: {host!r} is not HOST or HOST:PORT",
                hint="e.g. minio.example.com:9000, without http://",
            )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _check_addresses(config: GatewayConfig) -> None:
    names = config.names
    check_whole(names.of("port"), config.port, 0, 65535)
    check_whole(names.of("workers"), config.workers, 1, WORKERS_MAX)
    try:
        socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{names.of('host')}={config.host!r} is not an address of this machine: {reason}", hint="e.g. 127.0.0.1"
        ) from None
    if config.domain and not _DOMAIN.fullmatch(config.domain):
        raise ConfigError(
            f"{names.of('domain')}={config.domain!r} is not a host name", hint="e.g. s3.example.com, in lower case"
        )
    if config.region and not _REGION.fullmatch(config.region):
        raise ConfigError(
            f"{names.of('region')}={config.region!r} is not a region", hint="e.g. us-east-1; empty accepts all"
        )
    for origin in config.cors_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"{names.of('cors_origins')}: {origin!r} is not an origin",
                hint="https://example.org, without a path, or *",
            )


def _check_limits(config: GatewayConfig) -> None:
    limits, names = config.limits, config.names
    for field in fields(limits):
        value, name = getattr(limits, field.name), names.of(f"limits.{field.name}")
        if field.name.endswith("_s_max"):
            check_number(name, value, 0, 86400, opened=True)
        else:
            low, high = _LIMITS.get(field.name, (1, 1024 * MIB))
            check_whole(name, value, low, high)
    check_number(names.of("drain_s_max"), config.drain_s_max, 0, 86400)
    check_number(names.of("metadata_ttl_s"), config.metadata_ttl_s, 0)


_LIMITS = {
    "connections_max": (1, 1_000_000),
    "header_bytes_max": (1 * KIB, 1 * MIB),
    "body_bytes_max": (64 * KIB, 1024 * MIB),
    "bytes_per_s_min": (0, 1024 * MIB),
}


def _check_tls(config: GatewayConfig) -> None:
    if bool(config.tls_certificate) != bool(config.tls_key):
        missing = "tls_key" if config.tls_certificate else "tls_certificate"
        raise ConfigError(f"TLS needs a certificate and a key, and {config.names.of(missing)} is not given")
    for name in ("tls_certificate", "tls_key"):
        path = getattr(config, name)
        if path and not Path(path).is_file():
            raise ConfigError(f"{config.names.of(name)}: {path} is not a file")
    if config.tls_key:
        check_secret_file(config.tls_key, "the key of the TLS certificate")


def check_secret_file(path: str, what: str) -> None:
    """Refuse a file with a secret that other users can read or change.

    Raises:
        ConfigError: Others may read or write the file.
    """
    status = Path(path).stat()
    mode = stat.S_IMODE(status.st_mode)
    if others_can_read(status) or mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{what} {path} has mode {mode:04o}: others can read or change it", hint=f"chmod 600 {path}")


def _check_folder(path: str, what: str) -> None:
    if not Path(path).is_dir():
        raise ConfigError(f"{what}: {path} is not a directory", hint="it is not created")


def _check_access_point(point: AccessPoint, named: Callable[..., str]) -> None:
    if not NAME.fullmatch(point.name):
        raise ConfigError(
            f"access point {point.name!r}: the name is not a bucket name",
            hint="3 to 63 lower-case letters, digits and hyphens, with a letter or digit at both ends (--name NAME)",
        )
    if not point.upstream:
        raise ConfigError(f"{named('upstream')} is empty", hint="upstream = 's3://bucket/prefix/', or a directory")
    _check_options(point.upstream_options, named, "upstream_options")
    if "://" not in point.upstream:
        _check_folder(point.upstream, named("upstream"))
    _check_kind(point, named)
    if not _ACCOUNT.fullmatch(point.account):
        raise ConfigError(f"{named('account')}={point.account!r} must have 12 digits", hint="e.g. 000000000000")
    if not _REGION.fullmatch(point.region):
        raise ConfigError(f"{named('region')}={point.region!r} is not a region", hint="e.g. us-east-1")
    check_number(named("time_s_max"), point.time_s_max, 0, 86400, opened=True)
    check_whole(named("memory_bytes_max"), point.memory_bytes_max, 64 * MIB)
    check_whole(named("output_bytes_max"), point.output_bytes_max, 1)
    check_whole(named("processes"), point.processes, 0, 1024)
    check_whole(named("calls_max"), point.calls_max, 0)
    for old, new in point.renamed_suffixes.items():
        if not old or "/" in old or "/" in new:
            raise ConfigError(
                f"{named('renamed_suffixes')}: {old!r} to {new!r} does not rename a suffix",
                hint='e.g. { ".tar" = ".tfrecord" }',
            )


def _check_kind(point: AccessPoint, named: Callable[..., str]) -> None:
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
    if point.webhook:
        _check_webhook(point.webhook, named)


def _check_transform(point: AccessPoint, named: Callable[..., str]) -> None:
    """Check how a transform is spelled; its own code is imported only when the gateway starts."""
    from penstock.gateway.transforms.program import checked_number, spelled_program

    _check_folder(point.folder, named("folder"))
    try:
        spelled_program(point.transform, arguments=point.arguments, folder=point.folder)
    except ConfigError as error:
        raise ConfigError(f"{named('transform')}: {error.what}", hint=error.hint) from None
    if point.epoch:
        checked_number(named("epoch"), point.epoch)


def _check_options(options: Mapping[str, object], named: Callable[..., str], place: str) -> None:
    for name, value in options.items():
        kind: Any = UPSTREAM_OPTIONS.get(name)
        if kind is None:
            raise ConfigError(f"{named(place)} has no key {name!r}", hint=suggestion(name, UPSTREAM_OPTIONS))
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{named(f'{place}.{name}')}={value!r} must be of type {kind.__name__}")


def _check_handler(handler: LambdaConfig, named: Callable[..., str]) -> None:
    if not re.fullmatch(r"[\w./-]+[.:]\w+", handler.handler):
        raise ConfigError(f"{named('handler.handler')}={handler.handler!r} is not module.function or module:function")
    _check_folder(handler.code_dir, named("handler.code_dir"))
    if handler.python and not os.access(handler.python, os.X_OK):
        raise ConfigError(f"{named('handler.python')}: {handler.python} is not a program that can be run")
    check_whole(named("handler.memory_bytes_max"), handler.memory_bytes_max, 64 * MIB)
    check_number(named("handler.time_s_max"), handler.time_s_max, 0, 900, opened=True)
    for action in handler.actions:
        if action not in ACTIONS:
            hint = suggestion(action, ACTIONS)
            raise ConfigError(f"{named('handler.actions')}: there is no action {action!r}", hint=hint)
    _check_varies_by(handler.varies_by, named("handler.varies_by"))


def _check_webhook(webhook: WebhookConfig, named: Callable[..., str]) -> None:
    if not webhook.url.startswith(("http://", "https://")):
        raise ConfigError(f"{named('webhook.url')}={webhook.url!r} is not an http:// or https:// URL")
    _check_token(webhook.token, named("webhook.token"))
    check_number(named("webhook.time_s_max"), webhook.time_s_max, 0, 86400, opened=True)
    _check_varies_by(webhook.varies_by, named("webhook.varies_by"))


def _check_varies_by(names: tuple[str, ...] | None, what: str) -> None:
    for name in names or ():
        if name.lower() in HIDDEN_HEADERS or not _HEADER_NAME.fullmatch(name):
            hint = f"names of headers that are not about signatures, ranges or conditions, and {CALLER!r}"
            raise ConfigError(f"{what}: {name!r} is nothing that is passed on", hint=hint)


def _check_token(token: str, name: str) -> None:
    if token and not _HEADER_TEXT.fullmatch(token):
        raise ConfigError(f"{name} is not one or two words of ASCII")
