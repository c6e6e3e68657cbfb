"""What a configuration would serve, as lines of text; ``penstock gateway check`` prints them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.gateway.serving.checks import check_config
from penstock.gateway.serving.startup import plan_text, read_keys, with_defaults
from penstock.gateway.serving.tls import TlsCertificate
from penstock.gateway.transforms.builtin import BUILTINS
from penstock.gateway.transforms.program import load_program, spelled_program

if TYPE_CHECKING:
    from penstock.gateway.authentication.keys import AccessKeys
    from penstock.gateway.config import AccessPoint, GatewayConfig


def plan_lines(config: GatewayConfig) -> list[str]:
    """Check a configuration, and return what it would serve.

    Raises:
        ConfigError: It is not valid.
    """
    config = with_defaults(config)
    check_config(config)
    for point in config.access_points:
        if point.transform:
            _check_builtins(point, config.names.of(f"access_points.{point.name}.transform"))
    keys = read_keys(config)
    scheme = "https" if config.tls_certificate else "http"
    lines = [
        f"listens on {scheme}://{config.host}:{config.port} with {_counted(config.workers, 'process', 'processes')}",
        _keys_line(keys),
        f"cache: {config.cache or 'none'}",
    ]
    if config.results:
        lines.append(f"results: {config.results}")
    if config.tls_certificate:
        lines.append(TlsCertificate(config).warning() or f"certificate: {config.tls_certificate}")
    if config.directory:
        access = "read and write" if config.read_write else "read only"
        lines.append(f"buckets: the folders of {config.directory}, {access}")
    lines += [_access_point_line(point) for point in config.access_points]
    return lines


def _check_builtins(point: AccessPoint, name: str) -> None:
    """Check the arguments of built-in transforms; code of others is run only by worker processes.

    Raises:
        ConfigError: An argument is unknown, missing or has a wrong value.
    """
    program = spelled_program(point.transform, arguments=point.arguments, folder=point.folder)
    steps = tuple(step for step in program.steps if step.target in BUILTINS.values())
    try:
        load_program(program._replace(steps=steps))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.what}", hint=error.hint) from None


def _keys_line(keys: AccessKeys | None) -> str:
    if keys is None:
        return "access keys: none; everyone on this machine may read"
    text = f"access keys: {len(keys)}"
    return f"{text}, and unsigned requests" if keys.anonymous is not None else text


def _access_point_line(point: AccessPoint) -> str:
    access = "read and write" if point.read_write else "read only"
    keys = f", for the keys {', '.join(point.keys)}" if point.keys else ""
    return f"access point {point.name}: {plan_text(point)}, {access}{keys}"


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
