"""``penstock gateway``: an S3 endpoint in front of a store, which transforms objects while they are read."""

from __future__ import annotations

import contextlib
import re
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli.options import argument, expand_groups, flag, option
from penstock.cli.output import print_message, print_result
from penstock.errors import ConfigError
from penstock.text.sizes import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from penstock.gateway.config import AccessPoint, GatewayConfig, LambdaConfig, WebhookConfig

gateway = typer.Typer(
    name="gateway",
    invoke_without_command=True,
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

FLAGS = {
    "directory": "--upstream",
    "read_write": "--read-write",
    "host": "--host",
    "port": "--port",
    "domain": "--domain",
    "region": "--region",
    "workers": "--workers",
    "cpu_affinity": "--cpu-affinity",
    "keys_file": "--keys",
    "tls_certificate": "--tls-certificate",
    "tls_key": "--tls-key",
    "limits.connections_max": "--connections-max",
    "drain_s_max": "--drain-timeout",
    "cache": "--cache",
    "metadata_ttl_s": "--metadata-ttl",
    "results": "--results",
    "results_options.endpoint_url": "--results-endpoint-url",
}
"""Flags by the setting that they are: their names in messages about it."""

POINT_FLAGS = {
    "upstream": "--upstream",
    "read_write": "--read-write",
    "transform": "--transform",
    "arguments": "--argument",
    "time_s_max": "--timeout",
    "memory_bytes_max": "--memory",
    "processes": "--processes",
    "handler": "--lambda",
    "handler.handler": "--lambda",
    "handler.code_dir": "--lambda-dir",
    "handler.python": "--lambda-python",
    "handler.memory_bytes_max": "--memory",
    "handler.time_s_max": "--timeout",
    "webhook": "--webhook",
    "webhook.url": "--webhook",
    "webhook.time_s_max": "--timeout",
}
"""The same of settings of the access point that flags describe."""

CONFIG_FILE = option("FILE", "TOML file with access points and everything else.", names=("--config",))


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamGroup:
    """The options that say what is served."""

    upstream: str | None = option("URL", "What is served: s3://bucket/prefix/, a directory, https://...")
    name: str | None = option("NAME", "Name of the bucket that clients see; default: the upstream's.")
    endpoint_url: str | None = option("URL", "URL of the upstream's S3 endpoint; default: as for ls.")
    upstream_region: str | None = option("NAME", "Region of the upstream's bucket.")
    profile: str | None = option("NAME", "Profile in ~/.aws/config for the upstream.")
    anonymous: bool = flag("Do not sign requests to the upstream, for public data.")
    read_write: bool = flag("Let clients change objects; only without a transform.")

    def options(self) -> dict[str, object]:
        """Return the options of ``penstock.connect`` that were given."""
        given = {
            "endpoint_url": self.endpoint_url,
            "region": self.upstream_region,
            "profile": self.profile,
            "anonymous": self.anonymous or None,
        }
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformGroup:
    """The options that say what happens to objects while they are read."""

    transform: str | None = option("NAME", "A built-in transform (tar2tfrecord, ...) or module:function.")
    argument: list[str] | None = option("NAME=VALUE", "An argument of the transform; may be repeated.")
    handler: str | None = option(
        "MODULE:HANDLER", "An AWS Lambda handler of S3 Object Lambda, unchanged.", names=("--lambda",)
    )
    lambda_python: str | None = option("PATH", "Interpreter that has the handler's dependencies.")
    lambda_dir: str | None = option("DIR", "Folder with the handler's module; default: this one.")
    sam: str | None = option("FILE", "A SAM template, whose function is the handler; FILE:NAME names one.")
    webhook: str | None = option("URL", "A webhook in MinIO's dialect that transforms objects.")
    memory: str | None = option("SIZE", "Memory of one transform process, e.g. 2GiB.")
    timeout: str | None = option("TIME", "Longest time for one result, e.g. 90s, 5min.")
    processes: int | None = option("N", "Transform processes; default: one per processor.")
    version_tag: str | None = option("TEXT", "Part of the results' ETags: changing it makes all results again.")
    length: str | None = option("auto|stream|spool", "Send the first byte at once, or the length first.")
    list_sizes: str | None = option(
        "transform|known-only|source", "What listings do about sizes that are not known yet."
    )

    def is_given(self) -> bool:
        """Return whether any of the options was given."""
        return any(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointGroup:
    """The options that say where and how the gateway listens."""

    host: str | None = option("ADDRESS", "Address to listen on; default 127.0.0.1.")
    port: int | None = option("PORT", "Port to listen on; default 9000, 0 takes a free one.")
    domain: str | None = option("NAME", "Domain whose subdomains are buckets, e.g. s3.example.com.")
    region: str | None = option("NAME", "Region that signatures must name; default: any.")
    workers: int | None = option("N", "Processes that share the port; default 1.")
    keys: str | None = option("FILE", "File of access keys; default: the variable PENSTOCK_GATEWAY_KEYS.")
    tls_certificate: str | None = option("FILE", "Certificate chain in PEM; SIGHUP reloads it.")
    tls_key: str | None = option("FILE", "Key of the certificate.")
    status: str | None = option("loopback|metrics|everyone", "Who may see /-/metrics and the page /-/.")
    log_format: str | None = option("lines|json", "Form of the log on stderr.")
    cpu_affinity: str | None = option(
        "auto|one|all", "Whether a process stays on one processor; auto: unless an upstream is read by TLS."
    )
    connections_max: int | None = option("N", "Open connections of one process.")
    drain_timeout: str | None = option("TIME", "Time for transfers under way at the end; default 30s.")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepingGroup:
    """The options that say what is kept, and for how long."""

    cache: str | None = option("PATH:SIZE", "The node's cache, or none; default 10GB below ~/.cache.")
    metadata_ttl: str | None = option("TIME", "Time for which versions are not checked again; default 0.")
    results: str | None = option("URL", "Prefix that keeps finished results for all gateways.")
    results_endpoint_url: str | None = option("URL", "URL of its S3 endpoint; default: that of the upstream.")


@gateway.callback()
@expand_groups
def serve(
    context: typer.Context,
    *,
    config: str | None = CONFIG_FILE,
    upstream: UpstreamGroup,
    transform: TransformGroup,
    endpoint: EndpointGroup,
    keeping: KeepingGroup,
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

    arguments = dict(_argument(text) for text in argument or ())
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
    from penstock.gateway.serving.plan import plan_lines

    for line in plan_lines(make_config(config)):
        print_result(line)
    print_message(f"{config} is valid")


def make_config(
    config: str | None,
    upstream: UpstreamGroup | None = None,
    *,
    transform: TransformGroup | None = None,
    endpoint: EndpointGroup | None = None,
    keeping: KeepingGroup | None = None,
) -> GatewayConfig:
    """Return the configuration that a file and flags describe; flags take precedence.

    Raises:
        ConfigError: A flag or a key of the file is not valid, or both describe access points.
    """
    from penstock.gateway.config import GatewayConfig
    from penstock.gateway.serving.toml_file import read_toml

    upstream, transform = upstream or UpstreamGroup(), transform or TransformGroup()
    endpoint, keeping = endpoint or EndpointGroup(), keeping or KeepingGroup()
    if config is None:
        made = _served_by_flags(upstream, transform, GatewayConfig())
        flags = FLAGS | {
            f"access_points.{point.name}.{name}": flag
            for point in made.access_points
            for name, flag in POINT_FLAGS.items()
        }
    else:
        if upstream != UpstreamGroup() or transform.is_given():
            raise ConfigError(
                "--config cannot be combined with the options of one access point, such as --upstream",
                hint="write [access_points.NAME] in the file",
            )
        made = read_toml(config)
        flags = {name: flag for name, flag in FLAGS.items() if _is_given(flag, endpoint) or _is_given(flag, keeping)}
    made = replace(made, names=replace(made.names, flags=flags))
    made = replace(made, **_endpoint_values(endpoint, made))
    return replace(made, **_keeping_values(keeping, upstream, made))


def _is_given(flag: str, group: EndpointGroup | KeepingGroup) -> bool:
    return getattr(group, flag.removeprefix("--").replace("-", "_"), None) is not None


def _served_by_flags(upstream: UpstreamGroup, transform: TransformGroup, config: GatewayConfig) -> GatewayConfig:
    if upstream.upstream is None:
        raise ConfigError("there is nothing to serve", hint="--upstream s3://bucket, a directory, or --config FILE")
    is_path = "://" not in upstream.upstream
    if is_path and not transform.is_given() and upstream.name is None:
        if upstream.options():
            raise ConfigError(
                f"{upstream.upstream} is a directory, and {next(iter(upstream.options()))} is an option of S3"
            )
        folder = str(Path(upstream.upstream).expanduser().absolute())
        return replace(config, directory=folder, read_write=upstream.read_write)
    return replace(config, access_points=(_access_point(upstream, transform),))


def _access_point(upstream: UpstreamGroup, transform: TransformGroup) -> AccessPoint:
    from penstock.gateway.config import AccessPoint

    assert upstream.upstream is not None
    url = upstream.upstream if "://" in upstream.upstream else str(Path(upstream.upstream).expanduser().absolute())
    handler, webhook = _handler(transform), _webhook(transform)
    is_called = handler is not None or webhook is not None  # then a limit is that of one call; waiting comes on top
    if not is_called and not transform.transform:
        _refuse_limits(transform)
    seconds = None if transform.timeout is None else parse_seconds(transform.timeout, option="--timeout")
    values: dict[str, Any] = {
        "transform": transform.transform,
        "version": transform.version_tag,
        "length": _choice("--length", transform.length, ("auto", "stream", "spool")),
        "list_sizes": _choice("--list-sizes", transform.list_sizes, ("transform", "known-only", "source")),
        "processes": transform.processes,
        "time_s_max": None if is_called else seconds,
        "memory_bytes_max": None if transform.memory is None else parse_bytes(transform.memory, option="--memory"),
        "handler": handler,
        "webhook": webhook,
    }
    return AccessPoint(
        name=upstream.name or _name_of(url),
        upstream=url,
        upstream_options=upstream.options(),
        arguments=dict(_argument(text) for text in transform.argument or ()),
        read_write=upstream.read_write,
        **{name: value for name, value in values.items() if value is not None},
    )


def _refuse_limits(transform: TransformGroup) -> None:
    """Refuse flags that have no effect without a transform."""
    for name in ("timeout", "processes", "memory", "version_tag", "length", "list_sizes"):
        if getattr(transform, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is for a transform, but there is none", hint="--transform tar2tfrecord")


def _name_of(url: str) -> str:
    """Return the name of an upstream's bucket, or of its directory."""
    scheme, _, rest = url.rpartition("://")
    found = rest.split("/")[0] if scheme == "s3" else ""
    if not scheme or scheme == "file":
        found = re.sub(r"[^a-z0-9-]+", "-", Path(rest).name.lower()).strip("-")
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]", found):
        reason = f"{found!r} of the upstream {url} is no name of a bucket" if found else f"the upstream {url} has none"
        raise ConfigError(f"the access point needs a name, and {reason}", hint="--name train")
    return found


def _argument(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--argument {text!r} must be NAME=VALUE", hint="--argument width=224")
    return name, value


def _handler(transform: TransformGroup) -> LambdaConfig | None:
    from penstock.gateway.config import LambdaConfig

    if transform.sam is not None:
        return _sam_handler(transform)
    if transform.handler is None:
        for option, value in (("--lambda-python", transform.lambda_python), ("--lambda-dir", transform.lambda_dir)):
            if value is not None:
                raise ConfigError(f"{option} needs a handler", hint="--lambda module:handler")
        return None
    values: dict[str, Any] = {"handler": transform.handler}
    values["code_dir"] = str(Path(transform.lambda_dir or ".").expanduser().absolute())
    if transform.lambda_python is not None:
        values["python"] = str(Path(transform.lambda_python).expanduser().absolute())
    if transform.memory is not None:
        values["memory_bytes_max"] = parse_bytes(transform.memory, option="--memory")
    if transform.timeout is not None:
        values["time_s_max"] = parse_seconds(transform.timeout, option="--timeout")
    return LambdaConfig(**values)


def _sam_handler(transform: TransformGroup) -> LambdaConfig:
    from penstock.gateway.aws_lambda import lambda_config_of

    if transform.handler is not None:
        raise ConfigError(
            "--sam and --lambda cannot be combined: the template names the handler", hint="--sam template.yaml:Function"
        )
    made = lambda_config_of(transform.sam or "", python=transform.lambda_python)
    if transform.memory is not None:
        made = replace(made, memory_bytes_max=parse_bytes(transform.memory, option="--memory"))
    if transform.timeout is not None:
        made = replace(made, time_s_max=parse_seconds(transform.timeout, option="--timeout"))
    return made


def _webhook(transform: TransformGroup) -> WebhookConfig | None:
    from penstock.gateway.config import WebhookConfig

    if transform.webhook is None:
        return None
    if transform.timeout is None:
        return WebhookConfig(url=transform.webhook)
    return WebhookConfig(url=transform.webhook, time_s_max=parse_seconds(transform.timeout, option="--timeout"))


def _endpoint_values(endpoint: EndpointGroup, config: GatewayConfig) -> dict[str, Any]:
    limits = None
    if endpoint.connections_max is not None:
        limits = replace(config.limits, connections_max=endpoint.connections_max)
    drain = endpoint.drain_timeout
    values = {
        "host": endpoint.host,
        "port": endpoint.port,
        "domain": endpoint.domain,
        "region": endpoint.region,
        "workers": endpoint.workers,
        "keys_file": endpoint.keys,
        "tls_certificate": endpoint.tls_certificate,
        "tls_key": endpoint.tls_key,
        "status": _choice("--status", endpoint.status, ("loopback", "metrics", "everyone")),
        "log_format": _choice("--log-format", endpoint.log_format, ("lines", "json")),
        "cpu_affinity": _choice("--cpu-affinity", endpoint.cpu_affinity, ("auto", "one", "all")),
        "drain_s_max": None if drain is None else parse_seconds(drain, option="--drain-timeout"),
        "limits": limits,
    }
    return {name: value for name, value in values.items() if value is not None}


def _keeping_values(keeping: KeepingGroup, upstream: UpstreamGroup, config: GatewayConfig) -> dict[str, Any]:
    ttl, results = keeping.metadata_ttl, keeping.results
    options = dict(config.results_options)
    if results is not None:
        if "://" not in results:
            results = str(Path(results).expanduser().absolute())
        elif results.startswith("s3://") and upstream.endpoint_url is not None:
            options["endpoint_url"] = upstream.endpoint_url
        if results.startswith("s3://") and upstream.profile is not None:
            options["profile"] = upstream.profile
    if keeping.results_endpoint_url is not None:
        options["endpoint_url"] = keeping.results_endpoint_url
    values = {
        "cache": keeping.cache,
        "metadata_ttl_s": None if ttl is None else parse_seconds(ttl, option="--metadata-ttl"),
        "results": results,
        "results_options": options,
    }
    return {name: value for name, value in values.items() if value is not None}


def _choice(option: str, value: str | None, choices: tuple[str, ...]) -> str | None:
    if value is not None and value not in choices:
        raise ConfigError(f"{option} {value!r} must be one of {', '.join(choices)}")
    return value
