"""The configuration of a gateway: access points, limits, and where results are kept. It is made from flags or a TOML file."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - settings are read by their types
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from penstock.config import GIB, KIB, MIB, RetryConfig, is_variable
from penstock.errors import ConfigError

DAY_S = 86400
REGION = r"[a-z0-9-]{1,64}"
TOKEN = r"[\x21-\x7e]+(?: [\x21-\x7e]+)?"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is declared of a setting beside its name, type and default: its flag, and what values it may have.

    The end of a setting's name is its unit: a text for one that ends with ``_bytes_max`` or ``_bytes_per_s_min`` is a size
    such as ``"4GiB"``, and for one that ends with ``_s`` or ``_s_max`` a duration such as ``"90s"``.

    Attributes:
        flag: Flag of the setting, with what stands for its value in the help text, e.g. ``--keys FILE``; empty if it has none.
        help: Help text of the flag; empty if another setting or the command has it.
        low: Smallest number; None if it is no number, or has no bounds.
        high: Largest number; None for no bound.
        opened: Whether `low` itself is excluded.
        pattern: Regular expression that the text, or each of a list of texts, matches unless it is empty.
        what: End of the error for a value that the pattern does not match, such as "is not a name".
        hint: The hint about it, or about a path that is not there.
        path: Kind of path that the text is; a relative one in a file is relative to its folder. A ``url`` may also be a URL.
        is_secret: Whether the value is never shown.
    """

    flag: str = ""
    help: str = ""
    low: float | None = None
    high: float | None = None
    opened: bool = False
    pattern: str = ""
    what: str = ""
    hint: str = ""
    path: Literal["", "file", "folder", "url", "any"] = ""
    is_secret: bool = False


def setting(default: Any = MISSING, *, factory: Any = MISSING, **declared: Any) -> Any:
    """Declare a setting as a field of a config.

    Args:
        default: The default; without it and without a `factory`, the setting must be given.
        factory: Makes the default.
        declared: Attributes of ``Setting``.
    """
    kept = {"setting": Setting(**declared)}
    return field(default=default, default_factory=factory, repr=not declared.get("is_secret"), metadata=kept)


@cache
def types_of(kind: type) -> dict[str, Any]:
    """Return the types of a config's settings by name."""
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind) if each.metadata.get("is_setting", True)}


@cache
def declared_settings(kind: type) -> dict[str, tuple[Any, Setting]]:
    """Return type and declaration of each setting by its path, e.g. ``limits.idle_s_max``; those in tables included."""
    found: dict[str, tuple[Any, Setting]] = {}
    declared = {each.name: each.metadata.get("setting", Setting()) for each in fields(kind)}
    for name, hint in types_of(kind).items():
        found[name] = hint, declared[name]
        for each in (hint, *get_args(hint)):
            if hasattr(each, "__dataclass_fields__") and get_origin(hint) is not tuple:
                found |= {f"{name}.{inner}": one for inner, one in declared_settings(each).items()}
    return found


def flags_of(kind: type) -> dict[str, str]:
    """Return the names of the flags of a config's settings by their paths."""
    return {path: each.flag.split()[0] for path, (_, each) in declared_settings(kind).items() if each.flag}


@dataclass(frozen=True, slots=True, kw_only=True)
class LambdaConfig:
    """An AWS Lambda handler.

    Attributes:
        handler: ``module.function``, or ``module:function``.
        code_dir: Folder that contains the module.
        python: Interpreter that has the handler's dependencies; None uses the gateway's own.
        memory_bytes_max: Largest address space of one worker process, in bytes.
        time_s_max: Longest time for one call, in seconds.
        environment: Environment variables of the handler.
        payload: ``configuration.payload`` of its events.
        actions: Operations that call the handler, of ``GetObject``, ``HeadObject``, ``ListObjects`` and ``ListObjectsV2``. The
            others are answered by the gateway.
        varies_by: Parts of a request that the handler is told beside its query: headers, and ``"caller"`` for the access
            key. All of it is part of a result's identity, so requests that differ in nothing else share one result. None
            means the caller and all headers except those that clients and proxies send of their own accord, e.g.
            ``User-Agent`` and ``Cookie``.

    Raises:
        ConfigError: No environment can hold one of the variables.
    """

    handler: str = setting(
        flag="--lambda MODULE:HANDLER",
        help="An AWS Lambda handler of S3 Object Lambda, unchanged.",
        pattern=r"[\w./-]+[.:]\w+",
        what="is not module.function or module:function",
    )
    code_dir: str = setting(
        ".", flag="--lambda-dir DIR", help="Folder with the handler's module; default: this one.", path="folder"
    )
    python: str | None = setting(
        None, flag="--lambda-python PATH", help="Interpreter that has the handler's dependencies.", path="any"
    )
    memory_bytes_max: int = setting(1 * GIB, flag="--memory", low=64 * MIB)
    time_s_max: float = setting(60.0, flag="--timeout", low=0, high=900, opened=True)
    environment: Mapping[str, str] = field(default_factory=dict)
    payload: str = ""
    actions: tuple[str, ...] = ("GetObject",)
    varies_by: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name, value in self.environment.items():
            if not is_variable(name, value):
                raise ConfigError(f"the handler's environment has {name!r:.60}, which cannot be a variable of text")


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookConfig:
    """A webhook in MinIO's dialect.

    Attributes:
        url: URL of the webhook.
        token: Token of the header ``Authorization``, sent as ``Bearer TOKEN``, or as it is if it has two words;
            empty for none.
        time_s_max: Longest time for one call, in seconds.
        varies_by: Parts of a request that the webhook is told beside its query, as in ``LambdaConfig``.
    """

    url: str = setting(
        flag="--webhook URL",
        help="A webhook in MinIO's dialect that transforms objects.",
        pattern=r"https?://.*",
        what="is not an http:// or https:// URL",
    )
    token: str = setting("", pattern=TOKEN, what="is not one or two words of ASCII", is_secret=True)
    time_s_max: float = setting(60.0, flag="--timeout", low=0, high=DAY_S, opened=True)
    varies_by: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookServiceConfig:
    """How the gateway serves its own transforms as webhooks, for other servers that speak MinIO's dialect.

    Attributes:
        token: Token that callers must send in ``Authorization``, as in ``WebhookConfig``. If it is empty, no webhook is served.
        source_hosts: Hosts, each as ``HOST`` or ``HOST:PORT``, from which sources may be read.
        source_bytes_max: Size of the largest source, in bytes.
    """

    token: str = setting("", pattern=TOKEN, what="is not one or two words of ASCII", is_secret=True)
    source_hosts: tuple[str, ...] = setting(
        (),
        pattern=r"[A-Za-z0-9._-]+(?::[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](?::[0-9]{1,5})?",
        what="is not HOST or HOST:PORT",
        hint="e.g. minio.example.com:9000, without http://",
    )
    source_bytes_max: int = setting(1024 * GIB, low=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessPoint:
    """A name under which the gateway serves a bucket or a prefix, transformed or as it is.

    Attributes:
        name: Name by which clients address it, as a bucket and in ARNs.
        upstream: URL of the bucket or prefix, in any scheme of ``penstock.connect``.
        upstream_options: Options of ``penstock.connect``: ``endpoint_url``, ``region``, ``profile``, ``anonymous``, ...
        transform: Name of a built-in transform, or ``module:function``; empty for none.
        folder: Folder from which `transform` imports modules. A relative path in a TOML file starts at the
            file's folder.
        handler: A Lambda handler, instead of `transform`.
        webhook: A webhook, instead of `transform`.
        arguments: Arguments of the transform.
        version: Text that is part of the results' ETags. Changing it makes every result again.
        deterministic: Whether equal requests give equal bytes; None uses what the transform declares.
        epoch: Epoch for requests that do not name one (``x-penstock-epoch``), as text; empty for none.
        length: ``"stream"`` sends the first byte at once, without a length. ``"spool"`` sends nothing before the length is
            known. ``"auto"`` streams to plain GETs, and waits for the length if the client needs it.
        list_sizes: Policy of listings for results whose sizes are not known: ``"transform"`` produces them, ``"known-only"``
            leaves them out, and ``"source"`` shows the sizes of the sources, which are wrong for most transforms.
        renamed_suffixes: New suffix of keys by old suffix, e.g. ``{".tar": ".tfrecord"}``.
        keys: IDs of the access keys that may use it; empty for all.
        region: Region in its ARN.
        account: Account in its ARN.
        time_s_max: Longest time for producing one result, in seconds.
        memory_bytes_max: Largest address space of a worker process of this access point, in bytes.
        output_bytes_max: Size of the largest result, in bytes.
        processes: Number of worker processes for its transform; 0 means one per processor.
        calls_max: Number of calls after which a worker process is replaced, for code that leaks memory; 0 for no limit.
        read_write: Whether clients may change objects; allowed only without a transform.
    """

    name: str = setting(flag="--name NAME", help="Name of the bucket that clients see; default: the upstream's.")
    upstream: str = setting(
        flag="--upstream URL", help="What is served: s3://bucket/prefix/, a directory, https://...", path="url"
    )
    upstream_options: Mapping[str, object] = field(default_factory=dict)
    transform: str = setting(
        "", flag="--transform NAME", help="A built-in transform (tar2tfrecord, ...) or module:function."
    )
    folder: str = setting(".", path="any")
    handler: LambdaConfig | None = setting(None, flag="--lambda")
    webhook: WebhookConfig | None = setting(None, flag="--webhook")
    arguments: Mapping[str, str] = setting(
        factory=dict, flag="--argument NAME=VALUE", help="An argument of the transform; may be repeated."
    )
    version: str = setting(
        "", flag="--version-tag TEXT", help="Part of the results' ETags: changing it makes all results again."
    )
    deterministic: bool | None = None
    epoch: str = ""
    length: Literal["auto", "stream", "spool"] = setting(
        "auto", flag="--length", help="Send the first byte at once, or the length first."
    )
    list_sizes: Literal["transform", "known-only", "source"] = setting(
        "transform", flag="--list-sizes", help="What listings do about sizes that are not known yet."
    )
    renamed_suffixes: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    region: str = setting("us-east-1", pattern=REGION, what="is not a region", hint="e.g. us-east-1")
    account: str = setting("000000000000", pattern=r"[0-9]{12}", what="must have 12 digits", hint="e.g. 000000000000")
    time_s_max: float = setting(
        300.0,
        flag="--timeout TIME",
        help="Longest time for one result, e.g. 90s, 5min.",
        low=0,
        high=DAY_S,
        opened=True,
    )
    memory_bytes_max: int = setting(
        4 * GIB, flag="--memory SIZE", help="Memory of one transform process, e.g. 2GiB.", low=64 * MIB
    )
    output_bytes_max: int = setting(1024 * GIB, low=1)
    processes: int = setting(
        0, flag="--processes N", help="Transform processes; default: one per processor.", low=0, high=1024
    )
    calls_max: int = setting(0, low=0)
    read_write: bool = setting(False, flag="--read-write", help="Let clients change objects; only without a transform.")

    @property
    def is_s3(self) -> bool:
        """Whether the upstream is on S3."""
        return self.upstream.startswith("s3://")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingNames:
    """What the settings of a configuration are called where the user wrote them, for messages.

    Attributes:
        file: Name of the TOML file; empty if there is none.
        flags: Flags by setting, e.g. ``{"tls_key": "--tls-key"}``: those that replace keys of the file, or all without a file.
    """

    file: str = ""
    flags: Mapping[str, str] = field(default_factory=dict)

    def of(self, setting: str) -> str:
        """Return the name of a setting, e.g. ``--tls-key``, or ``gateway.toml: limits.idle_s_max``.

        Args:
            setting: Path of the setting, such as ``tls_key``, ``limits.idle_s_max`` or ``access_points.NAME.region``.
        """
        return self.flags.get(setting) or (f"{self.file}: {setting}" if self.file else setting)


UPSTREAM_RETRY = RetryConfig(total_s_max=15.0)
"""For how long the gateway waits for an upstream that stops answering. Its client then hears 503 and asks again, before its own
deadline for the first byte, which may be 20 s, is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayLimits:
    """Bounds on what clients may use.

    Attributes:
        connections_max: Largest number of open connections of one worker process.
        header_bytes_max: Largest request line, and largest sum of all header lines, in bytes each.
        header_s_max: Longest time from the connection, or the last answer, to the end of the next request's headers while
            a request is arriving, in seconds.
        idle_s_max: Longest time between two requests on one connection, in seconds.
        bytes_per_s_min: Rate in bytes per second below which a client that sends or receives a body is disconnected.
        stall_s_max: Longest time without any progress in either direction, in seconds.
        body_bytes_max: Largest body, in bytes, of a request that is not streamed to a store, e.g. a list of keys.
    """

    connections_max: int = setting(
        4096, flag="--connections-max N", help="Open connections of one process.", low=1, high=1_000_000
    )
    header_bytes_max: int = setting(16 * KIB, low=1 * KIB, high=1 * MIB)
    header_s_max: float = setting(20.0, low=0, high=DAY_S, opened=True)
    idle_s_max: float = setting(75.0, low=0, high=DAY_S, opened=True)
    bytes_per_s_min: int = setting(1 * KIB, low=0, high=1 * GIB)
    stall_s_max: float = setting(30.0, low=0, high=DAY_S, opened=True)
    body_bytes_max: int = setting(4 * MIB, low=64 * KIB, high=1 * GIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """The configuration of one gateway.

    Attributes:
        access_points: The access points that it serves.
        directory: Directory whose folders are buckets, beside the access points; empty for none.
        read_write: Whether clients may change objects in `directory`, and create and delete buckets there.
        host: Address to listen on.
        port: Port to listen on; 0 uses a free one.
        domain: Host name whose subdomains are bucket names; empty allows only names under ``localhost``.
        region: Region that signatures must name; empty accepts every region.
        workers: Number of processes that share the port.
        cache: ``PATH:SIZE`` of the node's cache, in which blocks and results are kept; empty uses 10 GB in
            ``$XDG_CACHE_HOME/penstock/gateway``, and ``"none"`` keeps nothing.
        metadata_ttl_s: Time for which the gateway relies on sizes and versions of source objects without asking the upstream,
            in seconds; 0 asks for each read.
        results: URL of a prefix in which finished results are kept as well; empty for none.
        results_options: Options of ``penstock.connect`` for `results`, as in ``AccessPoint.upstream_options``.
        tls_certificate: Path of a certificate chain in PEM; empty for plain HTTP.
        tls_key: Path of its private key.
        presigned_version_2: Whether presigned URLs of Signature Version 2 are accepted, which boto3 makes unless it is
            configured with ``signature_version="s3v4"``. Requests with signed headers need version 4.
        keys_file: Path of a file with access keys; empty reads ``PENSTOCK_GATEWAY_KEYS``.
        log_format: ``"lines"`` or ``"json"``.
        cpu_affinity: Whether each process stays on ``"one"`` processor or uses ``"all"``. ``"auto"`` is one, unless an
            upstream is read by TLS, because decryption gains from several. Source: bench/gateway.py.
        status: Clients that may see the status page and the metrics. ``"loopback"`` shows both to this machine only,
            ``"metrics"`` shows the metrics to everyone, and ``"everyone"`` shows both to everyone.
        cors_origins: Origins whose web pages may use the gateway in a browser, e.g. ``https://example.org``; ``"*"`` for all.
        drain_s_max: Longest time that transfers may go on after SIGTERM, in seconds.
        limits: Bounds on what clients may use.
        webhook_service: Settings of the gateway's own webhooks.
        names: The names of the settings in messages; a file cannot set it.
    """

    access_points: tuple[AccessPoint, ...] = ()
    directory: str = setting("", flag="--upstream", path="folder")
    read_write: bool = setting(False, flag="--read-write")
    host: str = setting("127.0.0.1", flag="--host ADDRESS", help="Address to listen on; default 127.0.0.1.")
    port: int = setting(
        9000, flag="--port PORT", help="Port to listen on; default 9000, 0 takes a free one.", low=0, high=65535
    )
    domain: str = setting(
        "",
        flag="--domain NAME",
        help="Domain whose subdomains are buckets, e.g. s3.example.com.",
        pattern=r"(?=.{1,253}\Z)[a-z0-9](?:[a-z0-9-]{0,62})(?:\.[a-z0-9-]{1,63})*(?::[0-9]{1,5})?",
        what="is not a host name",
        hint="e.g. s3.example.com, in lower case",
    )
    region: str = setting(
        "",
        flag="--region NAME",
        help="Region that signatures must name; default: any.",
        pattern=REGION,
        what="is not a region",
        hint="e.g. us-east-1; empty accepts all",
    )
    workers: int = setting(1, flag="--workers N", help="Processes that share the port; default 1.", low=1, high=256)
    cache: str = setting("", flag="--cache PATH:SIZE", help="The node's cache, or none; default 10GB below ~/.cache.")
    metadata_ttl_s: float = setting(
        0.0, flag="--metadata-ttl TIME", help="Time for which versions are not checked again; default 0.", low=0
    )
    results: str = setting(
        "", flag="--results URL", help="Prefix that keeps finished results for all gateways.", path="url"
    )
    results_options: Mapping[str, Any] = field(default_factory=dict)
    tls_certificate: str = setting(
        "", flag="--tls-certificate FILE", help="Certificate chain in PEM; SIGHUP reloads it.", path="file"
    )
    tls_key: str = setting("", flag="--tls-key FILE", help="Key of the certificate.", path="file")
    presigned_version_2: bool = True
    keys_file: str = setting(
        "",
        flag="--keys FILE",
        help="File of access keys; default: the variable PENSTOCK_GATEWAY_KEYS.",
        path="file",
        hint="lines such as ACCESS:SECRET:ro",
    )
    log_format: Literal["lines", "json"] = setting("lines", flag="--log-format", help="Form of the log on stderr.")
    cpu_affinity: Literal["auto", "one", "all"] = setting(
        "auto",
        flag="--cpu-affinity",
        help="Whether a process stays on one processor; auto: unless an upstream is read by TLS.",
    )
    status: Literal["loopback", "metrics", "everyone"] = setting(
        "loopback", flag="--status", help="Who may see /-/metrics and the page /-/."
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        pattern=r"https?://[a-z0-9.\[\]:-]+|\*",
        what="is not an origin",
        hint="https://example.org, without a path, or *",
    )
    drain_s_max: float = setting(
        30.0,
        flag="--drain-timeout TIME",
        help="Time for transfers under way at the end; default 30s.",
        low=0,
        high=DAY_S,
    )
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    webhook_service: WebhookServiceConfig = field(default_factory=WebhookServiceConfig)
    names: SettingNames = field(default_factory=SettingNames, compare=False, repr=False, metadata={"is_setting": False})
