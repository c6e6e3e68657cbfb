"""What a gateway serves: access points, limits, and where results are kept. It is made from flags or a TOML file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from penstock.config import GIB, MIB, is_variable
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


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

    handler: str
    code_dir: str = "."
    python: str | None = None
    memory_bytes_max: int = 1 * GIB
    time_s_max: float = 60.0
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

    url: str
    token: str = field(default="", repr=False)
    time_s_max: float = 60.0
    varies_by: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookServiceConfig:
    """How the gateway serves its own transforms as webhooks, for other servers that speak MinIO's dialect.

    Attributes:
        token: Token that callers must send in ``Authorization``, as in ``WebhookConfig``. If it is empty, no webhook is served.
        source_hosts: Hosts, each as ``HOST`` or ``HOST:PORT``, from which sources may be read.
        source_bytes_max: Size of the largest source, in bytes.
    """

    token: str = field(default="", repr=False)
    source_hosts: tuple[str, ...] = ()
    source_bytes_max: int = 1024 * GIB


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

    name: str
    upstream: str
    upstream_options: Mapping[str, object] = field(default_factory=dict)
    transform: str = ""
    folder: str = "."
    handler: LambdaConfig | None = None
    webhook: WebhookConfig | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    deterministic: bool | None = None
    epoch: str = ""
    length: Literal["stream", "spool", "auto"] = "auto"
    list_sizes: Literal["transform", "known-only", "source"] = "transform"
    renamed_suffixes: Mapping[str, str] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    region: str = "us-east-1"
    account: str = "000000000000"
    time_s_max: float = 300.0
    memory_bytes_max: int = 4 * GIB
    output_bytes_max: int = 1024 * GIB
    processes: int = 0
    calls_max: int = 0
    read_write: bool = False


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

    connections_max: int = 4096
    header_bytes_max: int = 16 * 1024
    header_s_max: float = 20.0
    idle_s_max: float = 75.0
    bytes_per_s_min: int = 1024
    stall_s_max: float = 30.0
    body_bytes_max: int = 4 * MIB


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
        metadata_ttl_s: How long the gateway relies on sizes and versions of source objects without asking the upstream, in
            seconds; 0 asks for each read.
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
        status: Who may see the status page and the metrics. ``"loopback"`` shows both to this machine only, ``"metrics"`` shows
            the metrics to everyone, and ``"everyone"`` shows both to everyone.
        cors_origins: Origins whose web pages may use the gateway in a browser, e.g. ``https://example.org``; ``"*"`` for all.
        drain_s_max: Longest time that transfers may go on after SIGTERM, in seconds.
        limits: Bounds on what clients may use.
        webhook_service: How the gateway serves its transforms as webhooks.
        names: The names of the settings in messages; a file cannot set it.
    """

    access_points: tuple[AccessPoint, ...] = ()
    directory: str = ""
    read_write: bool = False
    host: str = "127.0.0.1"
    port: int = 9000
    domain: str = ""
    region: str = ""
    workers: int = 1
    cache: str = ""
    metadata_ttl_s: float = 0.0
    results: str = ""
    results_options: Mapping[str, Any] = field(default_factory=dict)
    tls_certificate: str = ""
    tls_key: str = ""
    presigned_version_2: bool = True
    keys_file: str = ""
    log_format: Literal["lines", "json"] = "lines"
    cpu_affinity: Literal["auto", "one", "all"] = "auto"
    status: Literal["loopback", "metrics", "everyone"] = "loopback"
    cors_origins: tuple[str, ...] = ()
    drain_s_max: float = 30.0
    limits: GatewayLimits = field(default_factory=GatewayLimits)
    webhook_service: WebhookServiceConfig = field(default_factory=WebhookServiceConfig)
    names: SettingNames = field(default_factory=SettingNames, compare=False, repr=False, metadata={"is_setting": False})
