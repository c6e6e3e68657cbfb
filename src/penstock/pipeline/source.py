"""Where samples come from: URLs and how to connect to them, recorded; nothing is looked at."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from penstock.config import check_configs
from penstock.errors import ConfigError
from penstock.patterns import expand_braces
from penstock.redaction import HIDDEN, public_url
from penstock.tracebacks import function_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.config import HedgeConfig, RetryConfig, TransportConfig
    from penstock.store import Credentials

OnCorrupt: TypeAlias = Literal["raise", "skip_sample", "skip_shard"]
ON_CORRUPT = ("raise", "skip_sample", "skip_shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The options of ``penstock.connect``, as they were given."""

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    credentials: Credentials | None = None
    anonymous: bool = False
    addressing: Literal["auto", "path", "virtual"] = "auto"
    transport: TransportConfig | None = None
    retry: RetryConfig | None = None
    hedge: HedgeConfig | None = None
    requester_pays: bool = False
    sse_customer_key: bytes | None = None
    expected_bucket_owner: str | None = None

    def __post_init__(self) -> None:
        check_configs(transport=self.transport, retry=self.retry, hedge=self.hedge)

    def given(self) -> dict[str, Any]:
        """Options that differ from their default."""
        return {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if getattr(self, entry.name) != entry.default
        }

    def __repr__(self) -> str:
        return ", ".join(f"{name}={_option(name, value)}" for name, value in self.given().items())


def _option(name: str, value: object) -> str:
    if name in ("credentials", "sse_customer_key"):
        return HIDDEN
    return repr(public_url(value) if isinstance(value, str) else value)


@dataclass(frozen=True, slots=True)
class Shards:
    """Shards by URL, in an order that the URLs fix: listings in key order, patterns as they unfold, lists as given.

    Attributes:
        urls: One pattern or prefix, or a list of URLs.
        is_list: Whether they were given as a list, and are taken literally.
        connection: How to reach them.
        format: Name of their format; None: found from names and first bytes.
        on_corrupt: What to do with damage: raise, skip the sample or skip the rest of the shard, both counted.
        manifest: URL of a list of shards to read instead of listing a store; then there are no `urls`.
    """

    urls: tuple[str, ...]
    is_list: bool
    connection: Connection
    format: str | None = None
    on_corrupt: OnCorrupt = "raise"
    manifest: str | None = None

    def __post_init__(self) -> None:
        _check_urls("shards", self.urls, manifest=self.manifest)
        if not self.is_list and self.urls:
            expand_braces(self.urls[0])
        if self.format is not None and (not isinstance(self.format, str) or not self.format):
            raise ConfigError(f"format={self.format!r} must be the name of a format", hint="e.g. format='tar'")
        if self.on_corrupt not in ON_CORRUPT:
            raise ConfigError(f"on_corrupt={self.on_corrupt!r} must be one of {', '.join(map(repr, ON_CORRUPT))}")

    def __repr__(self) -> str:
        options = [] if self.format is None else [f"format={self.format!r}"]
        options += [] if self.on_corrupt == "raise" else [f"on_corrupt={self.on_corrupt!r}"]
        return _shown("shards", self, options)


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects that are samples themselves: one each, or neighbours with one stem together.

    Attributes:
        urls: As for ``Shards``; with `read`, keys that mean something to it.
        is_list: Whether they were given as a list, and are taken literally.
        connection: How to reach them.
        group_by: ``"stem"``: objects whose names are equal up to the first dot make one sample (``7.jpg``, ``7.json``);
            None: each is a sample.
        read: ``fn(key)`` gives a sample's bytes, or its members' bytes by name; None: the store does.
        manifest: URL of a list of objects to read instead of listing a store; then there are no `urls`.
    """

    urls: tuple[str, ...]
    is_list: bool
    connection: Connection
    group_by: Literal["stem"] | None = None
    read: Callable[[str], bytes | Mapping[str, bytes]] | None = None
    manifest: str | None = None

    def __post_init__(self) -> None:
        _check_urls("objects", self.urls, manifest=self.manifest)
        if self.group_by not in (None, "stem"):
            raise ConfigError(f"group_by={self.group_by!r} must be None or 'stem'")
        if self.read is not None:
            if not callable(self.read) or not self.is_list:
                raise ConfigError("objects(keys, read=fn) must be given a list of keys and a function of a key")
            if self.group_by is not None or self.connection != Connection():
                raise ConfigError(
                    "objects(keys, read=fn) takes no group_by= and no connection: the function reads",
                    hint="let it return a dict of members",
                )
        elif not self.is_list and self.urls:
            expand_braces(self.urls[0])

    def __repr__(self) -> str:
        options = [] if self.group_by is None else [f"group_by={self.group_by!r}"]
        options += [] if self.read is None else [f"read={function_name(self.read)}"]
        return _shown("objects", self, options)


def _check_urls(what: str, urls: tuple[str, ...], *, manifest: str | None) -> None:
    if manifest is not None:
        if urls or not isinstance(manifest, str) or not manifest:
            raise ConfigError(f"{what}(manifest={manifest!r}) is the URL of a list, and takes no other URL")
        return
    if not urls:
        raise ConfigError(f"{what}([]) needs at least one URL")
    for url in urls:
        if not isinstance(url, str) or not url:
            raise ConfigError(f"{what}({url!r}) must be given a URL, a pattern, or a list of URLs")


def _shown(what: str, source: Shards | Objects, options: list[str]) -> str:
    urls = [repr(public_url(url)) for url in source.urls]
    if len(urls) > 4:
        urls[2:] = [f"... {len(urls) - 2} more"]
    shown = [f"[{', '.join(urls)}]"] if source.is_list else urls
    if source.manifest is not None:
        shown = [f"manifest={public_url(source.manifest)!r}"]
    return f"{what}({', '.join([*shown, *options, *filter(None, [repr(source.connection)])])})"
