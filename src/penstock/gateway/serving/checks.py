"""Checks of a whole configuration before anything starts: names, bounds, files, and settings that contradict each other."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import stat
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import KIB, MIB, check_number, check_whole
from penstock.errors import ConfigError
from penstock.gateway.serving.values import suggestion

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.gateway.config import AccessPoint, GatewayConfig, LambdaConfig, WebhookConfig

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
_HEADER_TEXT = re.compile(r"[\x21-\x7e]+(?: [\x21-\x7e]+)?")


def check_config(config: GatewayConfig) -> None:
    """Check a configuration, including that the files and folders that it names exist.

    Raises:
        ConfigError: Something in it is not valid; the message names it.
    """
    if not config.access_points and not config.directory:
        raise ConfigError(
            "the gateway has nothing to serve",
            hint="--upstream s3://bucket, --upstream DIRECTORY, or [access_points.NAME] in --config FILE",
        )
    _check_addresses(config)
    _check_limits(config)
    _check_tls(config)
    if config.directory:
        _check_folder(config.directory, "directory")
    elif config.read_write:
        raise ConfigError(
            "read_write = true needs a directory, and none is configured", hint="set it in an access point"
        )
    if config.keys_file and not Path(config.keys_file).is_file():
        raise ConfigError(f"keys_file: {config.keys_file} is not a file", hint="--keys FILE: ACCESS:SECRET:ro, ...")
    _check_results(config)
    if config.cache:
        from penstock.cache import CacheConfig

        CacheConfig.of(config.cache)
    seen: set[str] = set()
    for point in config.access_points:
        if point.name in seen:
            raise ConfigError(f"two access points are named {point.name!r}")
        seen.add(point.name)
        _check_access_point(point)


def _check_results(config: GatewayConfig) -> None:
    _check_options(config.results_options, "results_options")
    if not config.results:
        if config.results_options:
            raise ConfigError("results_options is set, but results is empty", hint="results = 's3://bucket/derived/'")
        return
    if config.results.startswith(("http://", "https://")):
        raise ConfigError(f"results = {config.results!r} can only be read", hint="results = 's3://bucket/derived/'")
    if "://" not in config.results:
        _check_folder(config.results, "results")
    if not config.cache:
        raise ConfigError("results needs a cache, and the cache is switched off", hint="--cache PATH:SIZE")
    for point in config.access_points:
        is_served = point.transform or point.handler or point.webhook
        if is_served and f"{config.results.rstrip('/')}/".startswith(f"{point.upstream.rstrip('/')}/"):
            raise ConfigError(
                f"results = {config.results!r} lies in what access point {point.name!r} transforms",
                hint="a bucket or prefix beside it, e.g. s3://bucket/derived/ beside s3://bucket/train/",
            )


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def _check_addresses(config: GatewayConfig) -> None:
    check_whole("port", config.port, 0, 65535)
    check_whole("workers", config.workers, 1, WORKERS_MAX)
    try:
        socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host = {config.host!r} is not an address of this machine: {error}") from None
    if config.domain and not _DOMAIN.fullmatch(config.domain):
        raise ConfigError(f"domain = {config.domain!r} is not a host name", hint="e.g. s3.example.com, in lower case")
    if config.region and not _REGION.fullmatch(config.region):
        raise ConfigError(f"region = {config.region!r} is not a region", hint="e.g. us-east-1; empty accepts all")
    for origin in config.cors_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"cors_origins: {origin!r} is not an origin", hint="https://example.org, without a path, or *"
            )


def _check_limits(config: GatewayConfig) -> None:
    limits = config.limits
    for field in fields(limits):
        value = getattr(limits, field.name)
        if field.name.endswith("_s_max"):
            check_number(f"limits.{field.name}", value, 0, 86400, opened=True)
        else:
            low, high = _LIMITS.get(field.name, (1, 1024 * MIB))
            check_whole(f"limits.{field.name}", value, low, high)
    check_number("drain_s_max", config.drain_s_max, 0, 86400)
    check_number("metadata_ttl_s", config.metadata_ttl_s, 0)


_LIMITS = {
    "connections_max": (1, 1_000_000),
    "header_bytes_max": (1 * KIB, 1 * MIB),
    "body_bytes_max": (64 * KIB, 1024 * MIB),
    "bytes_per_s_min": (0, 1024 * MIB),
}


def _check_tls(config: GatewayConfig) -> None:
    if bool(config.tls_certificate) != bool(config.tls_key):
        missing = "tls_key" if config.tls_certificate else "tls_certificate"
        raise ConfigError(f"TLS needs a certificate and a key, and {missing} is not given")
    for name in ("tls_certificate", "tls_key"):
        path = getattr(config, name)
        if path and not Path(path).is_file():
            raise ConfigError(f"{name}: {path} is not a file")
    if config.tls_key:
        check_secret_file(config.tls_key, "the key of the TLS certificate")


def check_secret_file(path: str, what: str) -> None:
    """Refuse a file with a secret that other users can read or change.

    Raises:
        ConfigError: Group or others may read or write the file, or it belongs to another user.
    """
    status = Path(path).stat()
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077 and not (mode & 0o077 == 0o040 and status.st_uid == 0):  # root:gateway 0640, as packages install it
        raise ConfigError(f"{what} {path} has mode {mode:04o}: others can read or change it", hint=f"chmod 600 {path}")


def _check_folder(path: str, what: str) -> None:
    if not Path(path).is_dir():
        raise ConfigError(f"{what}: {path} is not a directory", hint="it is not created")


def _check_access_point(point: AccessPoint) -> None:
    place = f"access point {point.name!r}"
    if not NAME.fullmatch(point.name):
        raise ConfigError(
            f"{place}: the name is not a bucket name",
            hint="3 to 63 lower-case letters, digits and hyphens, with a letter or digit at both ends (--name NAME)",
        )
    if not point.upstream:
        raise ConfigError(f"{place}: upstream is empty", hint="upstream = 's3://bucket/prefix/', or a directory")
    _check_upstream_options(point, place)
    kinds = [name for name in ("transform", "handler", "webhook") if getattr(point, name)]
    if len(kinds) > 1:
        raise ConfigError(f"{place} has both {kinds[0]} and {kinds[1]}", hint="an access point has one of them")
    if point.read_write and kinds:
        raise ConfigError(
            f"{place}: read_write = true cannot be combined with {kinds[0]}", hint="write through another access point"
        )
    if point.arguments and not point.transform:
        raise ConfigError(f"{place} has arguments, but no transform")
    if not _ACCOUNT.fullmatch(point.account):
        raise ConfigError(f"{place}: account = {point.account!r} must have 12 digits")
    if not _REGION.fullmatch(point.region):
        raise ConfigError(f"{place}: region = {point.region!r} is not a region", hint="e.g. us-east-1")
    check_number(f"{place}: time_s_max", point.time_s_max, 0, 86400, opened=True)
    check_whole(f"{place}: memory_bytes_max", point.memory_bytes_max, 64 * MIB)
    check_whole(f"{place}: output_bytes_max", point.output_bytes_max, 1)
    check_whole(f"{place}: processes", point.processes, 0, 1024)
    for old, new in point.renamed_suffixes.items():
        if not old or "/" in old or "/" in new:
            raise ConfigError(f"{place}: renamed_suffixes {old!r} to {new!r}", hint='e.g. { ".tar" = ".tfrecord" }')
    if point.handler:
        _check_handler(point.handler, f"{place}: handler")
    if point.webhook:
        _check_webhook(point.webhook, f"{place}: webhook")


def _check_upstream_options(point: AccessPoint, place: str) -> None:
    _check_options(point.upstream_options, f"{place}: upstream_options")
    if "://" not in point.upstream:
        _check_folder(point.upstream, f"{place}: upstream")


def _check_options(options: Mapping[str, object], place: str) -> None:
    for name, value in options.items():
        kind: Any = UPSTREAM_OPTIONS.get(name)
        if kind is None:
            hint = suggestion(name, UPSTREAM_OPTIONS)
            raise ConfigError(f"{place} has no key {name!r}", hint=hint)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ConfigError(f"{place}.{name} = {value!r} must be of type {kind.__name__}")


def _check_handler(handler: LambdaConfig, place: str) -> None:
    if not re.fullmatch(r"[\w./-]+[.:]\w+", handler.handler):
        raise ConfigError(f"{place} = {handler.handler!r} is not module.function or module:function")
    _check_folder(handler.code_dir, f"{place}: code_dir")
    if handler.python and not os.access(handler.python, os.X_OK):
        raise ConfigError(f"{place}: python: {handler.python} is not a program that can be run")
    check_whole(f"{place}: memory_bytes_max", handler.memory_bytes_max, 64 * MIB)
    check_number(f"{place}: time_s_max", handler.time_s_max, 0, 900, opened=True)
    for action in handler.actions:
        if action not in ACTIONS:
            raise ConfigError(f"{place}: there is no action {action!r}", hint=suggestion(action, ACTIONS))


def _check_webhook(webhook: WebhookConfig, place: str) -> None:
    if not webhook.url.startswith(("http://", "https://")):
        raise ConfigError(f"{place}: url = {webhook.url!r} is not an http:// or https:// URL")
    if webhook.token and not _HEADER_TEXT.fullmatch(webhook.token):
        raise ConfigError(f"{place}: token is not one or two words of ASCII")
    check_number(f"{place}: time_s_max", webhook.time_s_max, 0, 86400, opened=True)
