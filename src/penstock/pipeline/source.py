"""The sources of a pipeline as frozen records: URLs and the options to connect to them, or a reader. Nothing is read here."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from penstock.config import check_configs
from penstock.errors import ConfigError
from penstock.redaction import HIDDEN, public_url
from penstock.system.tracebacks import function_name
from penstock.text.patterns import expand_braces

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.config import HedgeConfig, RetryConfig, TransportConfig
    from penstock.formats import Sample
    from penstock.store import Credentials

OnCorrupt: TypeAlias = Literal["raise", "skip_sample", "skip_shard"]
ON_CORRUPT = ("raise", "skip_sample", "skip_shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The options of ``penstock.connect`` that a user gave to a source."""

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
        """Return the options that differ from their defaults."""
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
    """Shards by URL. Their order is fixed: listings by key, patterns as they expand, lists as given.

    Attributes:
        urls: One pattern or prefix, or a list of URLs.
        is_list: Whether the URLs were given as a list, which is taken literally.
        connection: Options to connect to the stores.
        format: Name of the shards' format; None: their names and first bytes tell.
        on_corrupt: Policy for damaged data: ``"raise"`` an error, ``"skip_sample"``, or ``"skip_shard"`` for the rest
            of the shard; what is skipped is counted.
        manifest: URL of a list of shards that is read instead of listing a store; `urls` is then empty.
        picked: Numbers of the samples to read, counted over all shards; None: all samples.
    """

    urls: tuple[str, ...]
    is_list: bool
    connection: Connection
    format: str | None = None
    on_corrupt: OnCorrupt = "raise"
    manifest: str | None = None
    picked: tuple[int, ...] | None = None

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
        picked = "" if self.picked is None else f".pick({len(self.picked)} samples)"
        return _shown("shards", self, options) + picked


@dataclass(frozen=True, slots=True)
class Objects:
    """Objects that are samples: each object is a sample, or adjacent objects with the same stem are one.

    Attributes:
        urls: As in ``Shards``; with `read`, the keys to call it with.
        is_list: Whether the URLs were given as a list, which is taken literally.
        connection: Options to connect to the stores.
        group_by: ``"stem"``: objects whose names are equal up to the first dot are one sample (``7.jpg``, ``7.json``);
            None: each object is a sample.
        read: ``fn(key)`` that returns the bytes of a sample, or the bytes of its members by name; None: stores are read.
        manifest: URL of a list of objects that is read instead of listing a store; `urls` is then empty.
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
                    "objects(keys, read=fn) takes neither group_by= nor connection options, since the function reads",
                    hint="to group members, let the function return a dict of them",
                )
        elif not self.is_list and self.urls:
            expand_braces(self.urls[0])

    def __repr__(self) -> str:
        options = [] if self.group_by is None else [f"group_by={self.group_by!r}"]
        options += [] if self.read is None else [f"read={function_name(self.read)}"]
        return _shown("objects", self, options)


class SequentialEpoch(Protocol):
    """The samples of one epoch of a ``SequentialReader``. One thread reads; any thread may close."""

    def read(self) -> Sequence[Sample] | None:
        """The samples that arrive next, perhaps none; None at the end. Blocks for them."""

    def close(self) -> None:
        """Leave the epoch, and have a ``read`` that blocks in another thread return; idempotent."""


class SequentialReader(Protocol):
    """Gives the samples of each epoch once, from the first to the last, in an order that is the same in every run."""

    @property
    def name(self) -> str:
        """Name of the data, for messages and for ``__shard__``."""

    @property
    def identity(self) -> str:
        """What the samples and their order depend on; a state that was saved with another identity is refused."""

    def open_epoch(self, epoch: int) -> SequentialEpoch:
        """Begin an epoch. Epochs before it that were not read are left out.

        Raises:
            ConfigError: The epoch was begun before.
        """


@dataclass(frozen=True, slots=True)
class Sequential:
    """Samples that a reader gives, which cannot be listed, counted or read again.

    Attributes:
        reader: The reader. It belongs to the caller.
    """

    reader: SequentialReader

    def __repr__(self) -> str:
        return f"{self.reader!r}.pipeline()"


def _check_urls(what: str, urls: tuple[str, ...], *, manifest: str | None) -> None:
    if manifest is not None:
        if urls or not isinstance(manifest, str) or not manifest:
            raise ConfigError(f"{what}(manifest={manifest!r}) must be the URL of a list, without other URLs")
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
