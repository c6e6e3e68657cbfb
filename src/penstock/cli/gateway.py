"""``penstock gateway``: an S3 endpoint in front of a store, which transforms objects while they are read."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import typer

from penstock.cli.options import Given, OptionGroup, argument, expand_groups, flag, option
from penstock.cli.output import print_message, print_result
from penstock.errors import ConfigError
from penstock.gateway.config import (
    AccessPoint,
    GatewayConfig,
    LambdaConfig,
    Setting,
    WebhookConfig,
    declared_settings,
    flags_of,
)

_Config = TypeVar("_Config")

gateway = typer.Typer(
    name="gateway",
    invoke_without_command=True,
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

CONFIG_FILE = option("FILE", "TOML file with access points and everything else.", names=("--config",))


def options_of(kind: type, *paths: str) -> OptionGroup:
    """Return the options for settings of a config, as the config declares them, by the paths of the settings."""
    settings = declared_settings(kind)
    return {path: _option_of(path, *settings[path]) for path in paths}


def _option_of(path: str, hint: Any, declared: Setting) -> tuple[Any, Any]:
    name, _, metavar = declared.flag.partition(" ")
    if hint is bool:
        return bool, flag(declared.help, names=(name,))
    choices = get_args(hint) if get_origin(hint) is Literal else ()
    kind: Any = int if hint is int and "_bytes" not in path else list[str] if get_origin(hint) is Mapping else str
    return kind | None, option(metavar or "|".join(choices), declared.help, names=(name,))


_EXAMPLE = "--argument width=224"
_CONNECTION = "upstream_options."
UPSTREAM: OptionGroup = {
    **options_of(AccessPoint, "upstream", "name"),
    f"{_CONNECTION}endpoint_url": (str | None, option("URL", "URL of the upstream's S3 endpoint; default: as for ls.")),
    f"{_CONNECTION}region": (
        str | None,
        option("NAME", "Region of the upstream's bucket.", names=("--upstream-region",)),
    ),
    f"{_CONNECTION}profile": (str | None, option("NAME", "Profile in ~/.aws/config for the upstream.")),
    f"{_CONNECTION}anonymous": (bool, flag("Do not sign requests to the upstream, for public data.")),
    **options_of(AccessPoint, "read_write"),
}
"""What is served."""

TRANSFORM: OptionGroup = {
    **options_of(AccessPoint, "transform", "arguments", "handler.handler", "handler.python", "handler.code_dir"),
    "sam": (str | None, option("FILE", "A SAM template, whose function is the handler; FILE:NAME names one.")),
    **options_of(AccessPoint, "webhook.url", "memory_bytes_max", "time_s_max", "processes", "version"),
    **options_of(AccessPoint, "length", "list_sizes"),
}
"""What happens to objects while they are read."""

ENDPOINT = options_of(
    GatewayConfig, "host", "port", "domain", "region", "workers", "keys_file", "tls_certificate", "tls_key", "status",
    "log_format", "cpu_affinity", "limits.connections_max", "drain_s_max",
)  # fmt: skip
"""Where and how the gateway listens."""

RESULTS_ENDPOINT = "results_options.endpoint_url"
KEEPING: OptionGroup = {
    **options_of(GatewayConfig, "cache", "metadata_ttl_s", "results"),
    RESULTS_ENDPOINT: (
        str | None,
        option("URL", "URL of its S3 endpoint; default: that of the upstream.", names=("--results-endpoint-url",)),
    ),
}
"""What is kept, and for how long."""


@gateway.callback()
@expand_groups
def serve(
    context: typer.Context,
    *,
    config: str | None = CONFIG_FILE,
    upstream: Given = UPSTREAM,
    transform: Given = TRANSFORM,
    endpoint: Given = ENDPOINT,
    keeping: Given = KEEPING,
) -> None:
    """Serve a store as an S3 endpoint, and transform objects while they are read.

    Without --config there is one access point, which has the name of the upstream's bucket. A directory without a transform
    is served as it is: each folder in it is a bucket. Without access keys, the gateway listens on this machine only.

    For example:

        penstock gateway --upstream s3://bucket/train/ --transform tar2tfrecord
        penstock gateway --upstream s3://bucket --cache /nvme/penstock:200GB --workers 4
        penstock gateway --upstream data/ --read-write --port 0
        penstock gateway --upstream s3://bucket --lambda app:lambda_handler --lambda-python venv/bin/python
        penstock gateway --config gateway.toml --host 0.0.0.0 --keys keys.txt

    SIGHUP reloads the access keys and the certificate; anything else needs a restart. SIGTERM and Ctrl-C
    finish transfers first; a second Ctrl-C ends at once.
    """
    if context.invoked_subcommand is not None:
        return
    from penstock.gateway.serving.startup import serve as start

    raise typer.Exit(start(make_config(config, upstream, transform=transform, endpoint=endpoint, keeping=keeping)))


@gateway.command(name="try")
@expand_groups
def try_(
    transform: str = argument("TRANSFORM", "A built-in transform, module:function or ./file.py:function."),
    source: str = argument("SRC", "Path or URL of an object."),
    *,
    argument: list[str] | None = option("NAME=VALUE", "An argument of the transform; may be repeated."),
    epoch: int | None = option("N", "Epoch of the request."),
    seed: int | None = option("N", "Seed of the request."),
    output: str | None = option("FILE", "File for the result; default: stdout.", names=("--output", "-o")),
) -> None:
    """Run a transform on one object in this process, without a gateway, so that a debugger stops in it.

    The headers of the result and its size are printed to stderr. --epoch and --seed matter only to transforms that declare
    uses_epoch=True or deterministic=False.

    For example:

        penstock gateway try tar2tfrecord shard-000000.tar -o shard.tfrecord
        penstock gateway try ./my.py:upper --argument times=2 words.txt
    """
    from penstock.gateway import try_transform

    arguments = pairs_of(argument, example=_EXAMPLE)
    with try_transform(transform, source, arguments=arguments, epoch=epoch, seed=seed) as trial:
        made_bytes = 0
        with contextlib.nullcontext(sys.stdout.buffer) if output is None else Path(output).open("wb") as file:
            for piece in trial:
                made_bytes += memoryview(piece).nbytes
                file.write(piece)
            file.flush()
    for name, value in trial.headers.items():
        print_message(f"{name}: {value}")
    print_message(f"{made_bytes} bytes")


@gateway.command()
@expand_groups
def check(config: str = option("FILE", "TOML file to check.", required=True)) -> None:
    """Check a configuration and print what it would serve, without starting it.

    For example:

        penstock gateway check --config gateway.toml
    """
    from penstock.gateway.serving.startup import plan_lines

    for line in plan_lines(make_config(config)):
        print_result(line)
    print_message(f"{config} is valid")


def make_config(
    config: str | None,
    upstream: Given | None = None,
    *,
    transform: Given | None = None,
    endpoint: Given | None = None,
    keeping: Given | None = None,
) -> GatewayConfig:
    """Return the configuration that a file and flags describe; flags take precedence.

    Args:
        config: Path of the file; None if there is none.
        upstream: The options of ``UPSTREAM`` that were given, by name.
        transform: The same of ``TRANSFORM``.
        endpoint: The same of ``ENDPOINT``.
        keeping: The same of ``KEEPING``.

    Raises:
        ConfigError: A flag or a key of the file is not valid, or both describe access points.
    """
    from penstock.gateway.serving.toml_file import read_toml

    upstream, transform = upstream or {}, transform or {}
    given = {**(endpoint or {}), **(keeping or {})}
    flags = {**flags_of(GatewayConfig), RESULTS_ENDPOINT: "--results-endpoint-url"}
    if config is None:
        made = _served_by_flags(upstream, transform)
        for point in made.access_points:
            flags |= {f"access_points.{point.name}.{path}": name for path, name in flags_of(AccessPoint).items()}
    else:
        if upstream or transform:
            raise ConfigError(
                "--config cannot be combined with the options of one access point, such as --upstream",
                hint="write [access_points.NAME] in the file",
            )
        made = read_toml(config)
        flags = {path: flags[path] for path in given}
    made = replace(made, names=replace(made.names, flags=flags))
    options = _results_options(given, upstream, made)
    if "://" not in given.get("results", "://"):
        given["results"] = _absolute(given["results"])
    given.pop(RESULTS_ENDPOINT, None)
    made = replace(made, results_options=options)
    return _with(made, _values(GatewayConfig, given))


def _values(kind: type, given: Given) -> dict[str, Any]:
    """Return the values of settings, by their paths, for what their flags were given."""
    from penstock.gateway.serving.toml_file import flag_value

    settings, flags = declared_settings(kind), flags_of(kind)
    return {
        path: pairs_of(value, example=_EXAMPLE)
        if path == "arguments"
        else flag_value(path, settings[path][0], value, flags[path])
        for path, value in given.items()
    }


def _with(config: _Config, values: Mapping[str, Any]) -> _Config:
    """Return a config with other values of the settings at some paths."""
    changes: dict[str, Any] = {}
    for path, value in values.items():
        name, _, inner = path.partition(".")
        changes[name] = _with(changes.get(name, getattr(config, name)), {inner: value}) if inner else value
    return replace(config, **changes)  # type: ignore[type-var]


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _served_by_flags(upstream: Given, transform: Given) -> GatewayConfig:
    url = upstream.get("upstream")
    if url is None:
        raise ConfigError("there is nothing to serve", hint="--upstream s3://bucket, a directory, or --config FILE")
    if "://" not in url and not transform and "name" not in upstream:
        if options := _connection(upstream):
            raise ConfigError(f"{url} is a directory, and {next(iter(options))} is an option of S3")
        return GatewayConfig(directory=_absolute(url), read_write=upstream.get("read_write", False))
    return GatewayConfig(access_points=(_access_point(upstream, transform),))


def _connection(upstream: Given) -> dict[str, Any]:
    """Return the options of ``penstock.connect`` that were given."""
    return {path.removeprefix(_CONNECTION): value for path, value in upstream.items() if path.startswith(_CONNECTION)}


def _access_point(upstream: Given, transform: Given) -> AccessPoint:
    url = upstream["upstream"] if "://" in upstream["upstream"] else _absolute(upstream["upstream"])
    sam = transform.get("sam")
    values = _values(AccessPoint, {path: value for path, value in transform.items() if path != "sam"})
    own = {path: value for path, value in values.items() if "." not in path}
    limits: Given = {name: values[name] for name in ("memory_bytes_max", "time_s_max") if name in values}
    handler = _handler(values, limits) if sam is None else _sam_handler(sam, values, limits)
    webhook = None
    if "webhook.url" in values:
        webhook = WebhookConfig(url=values["webhook.url"])
        webhook = replace(webhook, time_s_max=limits.get("time_s_max", webhook.time_s_max))
    if handler is not None or webhook is not None:
        own.pop("time_s_max", None)  # it is the limit of one call; waiting comes on top
    elif "transform" not in own:
        _refuse_limits(own)
    return AccessPoint(
        name=upstream.get("name") or _name_of(url),
        upstream=url,
        upstream_options=_connection(upstream),
        handler=handler,
        webhook=webhook,
        read_write=upstream.get("read_write", False),
        **own,
    )


def _refuse_limits(values: Given) -> None:
    """Refuse flags that have no effect without a transform."""
    for path in values:
        if path != "arguments":
            name = flags_of(AccessPoint)[path]
            raise ConfigError(f"{name} is for a transform, but there is none", hint="--transform tar2tfrecord")


def _name_of(url: str) -> str:
    """Return the name of an upstream's bucket, or of its directory."""
    from penstock.gateway.serving.checks import NAME

    scheme, _, rest = url.rpartition("://")
    found = rest.split("/")[0] if scheme == "s3" else ""
    if not scheme or scheme == "file":
        found = re.sub(r"[^a-z0-9-]+", "-", Path(rest).name.lower()).strip("-")
    if not NAME.fullmatch(found):
        reason = f"{found!r} of the upstream {url} is no name of a bucket" if found else f"the upstream {url} has none"
        raise ConfigError(f"the access point needs a name, and {reason}", hint="--name train")
    return found


def pairs_of(texts: Iterable[str] | None, *, example: str) -> dict[str, str]:
    """Return the values by name of an option that is repeated.

    Args:
        texts: Values of the option, each ``NAME=VALUE``; None if it was not given.
        example: The option with a value, for messages.

    Raises:
        ConfigError: A text has another form.
    """
    pairs = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"{example.split(maxsplit=1)[0]} {text!r} must be NAME=VALUE", hint=example)
        pairs[name] = value
    return pairs


def _handler(values: Given, limits: Given) -> LambdaConfig | None:
    own = {path.removeprefix("handler."): value for path, value in values.items() if path.startswith("handler.")}
    if "handler" not in own:
        for path in own:
            raise ConfigError(f"{flags_of(LambdaConfig)[path]} needs a handler", hint="--lambda module:handler")
        return None
    for name, path in {"code_dir": ".", **own}.items():
        own[name] = path if name == "handler" else _absolute(path)
    return LambdaConfig(**own, **limits)


def _sam_handler(template: str, values: Given, limits: Given) -> LambdaConfig:
    from penstock.gateway.aws_lambda import lambda_config_of

    if "handler.handler" in values:
        raise ConfigError(
            "--sam and --lambda cannot be combined: the template names the handler", hint="--sam template.yaml:Function"
        )
    return replace(lambda_config_of(template, python=values.get("handler.python")), **limits)


def _results_options(given: Given, upstream: Given, config: GatewayConfig) -> dict[str, Any]:
    """Return how the bucket of results is reached: as the upstream, unless the flags say otherwise."""
    options = dict(config.results_options)
    if given.get("results", "").startswith("s3://"):
        given_too = _connection(upstream)
        options |= {name: given_too[name] for name in ("endpoint_url", "profile") if name in given_too}
    if RESULTS_ENDPOINT in given:
        options["endpoint_url"] = given[RESULTS_ENDPOINT]
    return options
