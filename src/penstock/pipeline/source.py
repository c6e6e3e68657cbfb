"""The sources of a pipeline as frozen records: URLs and the options to connect to them, or a reader. Nothing is read here."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from penstock.config import check_configs
from penstock.errors import ConfigError
from penstock.redaction import HIDDEN, public_url
from penstock.system.tracebacks import function_name
from penstock.text.patterns import expand_braces

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.config import HedgeConfig, RetryConfig, TransportConfig
    from penstock.formats import Sample
    from penstock.pipeline.pipeline import Pipeline
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
            of the shard; skipped samples are counted.
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
        """Everything on which the samples and their order depend; a state that was saved with another identity is refused."""

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


Stop: TypeAlias = Literal["all", "first", "repeat"]
Weights: TypeAlias = tuple[float, ...]

PARTS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Mix:
    """Several sources and their weights.

    Attributes:
        parts: Pipelines without shuffle, take, evaluate or batch; a part may be a mix.
        weights: Weight of each part from the start of the epoch, on any positive scale.
        schedule: Pairs of a position, in samples of the whole job, and the weights from there on, in ascending order.
        stop: When the epoch ends. ``"all"``: when all parts are exhausted; the share of an exhausted part goes to the
            others. ``"first"``: as soon as any part is exhausted. ``"repeat"``: when every part has been read once; shorter
            parts are repeated until then.
    """

    parts: tuple[Pipeline, ...]
    weights: Weights
    schedule: tuple[tuple[int, Weights], ...] = ()
    stop: Stop = "all"

    def __post_init__(self) -> None:
        if not 1 <= len(self.parts) <= PARTS_MAX:
            raise ConfigError(f"mix() has {len(self.parts)} sources, but must have between 1 and {PARTS_MAX}")
        for weights in (self.weights, *(weights for _, weights in self.schedule)):
            _check_weights(weights, len(self.parts))
        positions = [position for position, _ in self.schedule]
        if any(not isinstance(position, int) or position < 1 for position in positions):
            raise ConfigError(f"mix(schedule=) at {positions}: positions must be whole numbers of samples, at least 1")
        if positions != sorted(set(positions)):
            raise ConfigError(f"mix(schedule=) at {positions}: positions must ascend")
        if self.stop not in ("all", "first", "repeat"):
            raise ConfigError(f"mix(stop={self.stop!r}) must be 'all', 'first' or 'repeat'")

    def weights_at(self, position: int) -> Weights:
        """Return the share of each part at a position; the shares sum to 1."""
        weights = self.weights
        for start, later in self.schedule:
            if position >= start:
                weights = later
        total = sum(weights)
        return tuple(weight / total for weight in weights)

    def __repr__(self) -> str:
        options = ""
        if self.schedule:
            entries = (f"{position}: {self._shown(weights)}" for position, weights in self.schedule)
            options = f", schedule={{{', '.join(entries)}}}"
        options += "" if self.stop == "all" else f", stop={self.stop!r}"
        return f"mix({self._shown(self.weights)}{options})"

    def _shown(self, weights: Weights) -> str:
        entries = (f"{part!r}: {weight:g}" for part, weight in zip(self.parts, weights, strict=True))
        return f"{{{', '.join(entries)}}}"


class Flat(NamedTuple):
    """A pipeline as single sources and their shares, without nested mixes.

    Attributes:
        leaves: Pipelines over ``Shards``, ``Objects`` or ``Sequential``, each with all stages that its samples pass.
        schedule: Pairs of a position and the share of each leaf from there on, in ascending order; the first position
            is 0, and shares sum to 1.
        stop: As in ``Mix``.
    """

    leaves: tuple[Pipeline, ...]
    schedule: tuple[tuple[int, Weights], ...]
    stop: Stop

    def shares_at(self, position: int) -> Weights:
        """Return the share of each leaf at a position."""
        return next(shares for start, shares in reversed(self.schedule) if start <= position)


def parts_of(weights: Mapping[Pipeline, float], schedule: Mapping[int, Mapping[Pipeline, float]] | None) -> tuple[
    tuple[Pipeline, ...], Weights, tuple[tuple[int, Weights], ...]
]:  # fmt: skip
    """Return the arguments of ``mix`` as the fields of ``Mix``: weights in the order of the parts, 0 for parts left out."""
    parts = tuple(weights)
    later = []
    for position, changed in sorted((schedule or {}).items()):
        if unknown := [part for part in changed if part not in weights]:
            raise ConfigError(f"mix(schedule={{{position}: ...}}) has {unknown[0]!r}, which is not in the mix")
        later.append((position, tuple(changed.get(part, 0) for part in parts)))
    return parts, tuple(weights.values()), tuple(later)


def flattened(source: Shards | Objects | Sequential | Mix, pipeline: Pipeline) -> Flat:
    """Return the single sources of `pipeline`; the share of each is the product of the shares of the mixes that contain it.

    Args:
        source: The source of `pipeline`.
        pipeline: The pipeline.

    Raises:
        ConfigError: A mix inside a mix has another `stop`.
    """
    if not isinstance(source, Mix):
        return Flat((pipeline,), ((0, (1.0,)),), "all")
    flats = [flattened(part.source, part) for part in source.parts]
    for part, flat in zip(source.parts, flats, strict=True):
        if isinstance(part.source, Mix) and flat.stop != source.stop:
            raise ConfigError(
                f"mix(stop={source.stop!r}) contains mix(stop={flat.stop!r}): both must have the same stop="
            )
    leaves = tuple(
        type(pipeline)(leaf.source, (*leaf.stages, *pipeline.stages)) for flat in flats for leaf in flat.leaves
    )
    starts = {0, *(position for position, _ in source.schedule)}
    starts |= {position for flat in flats for position, _ in flat.schedule}
    schedule = []
    for start in sorted(starts):
        outer = source.weights_at(start)
        inner = [flat.shares_at(start) for flat in flats]
        shares = tuple(share * each for share, each_of in zip(outer, inner, strict=True) for each in each_of)
        schedule.append((start, shares))
    return Flat(leaves, tuple(schedule), source.stop)


def _check_weights(weights: Weights, parts_count: int) -> None:
    if len(weights) != parts_count:
        raise ConfigError(f"mix() has {parts_count} sources and {len(weights)} weights")
    for weight in weights:
        if not isinstance(weight, int | float) or not math.isfinite(weight) or weight < 0:
            raise ConfigError(f"mix() weight {weight!r} must be a number of at least 0")
    if not sum(weights):
        raise ConfigError(f"mix() weights {list(weights)} are all 0")
