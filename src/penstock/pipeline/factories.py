"""``shards``, ``objects`` and ``mix``: the functions that make a pipeline."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from penstock.config import check_names
from penstock.errors import ConfigError
from penstock.pipeline.pipeline import Pipeline, check_part
from penstock.pipeline.source import Connection, Mix, Objects, OnCorrupt, Shards, Stop, parts_of
from penstock.system.argument_names import arguments_of
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.config import HedgeConfig, RetryConfig, TransportConfig
    from penstock.store import Credentials


class ConnectionOptions(TypedDict, total=False):
    """The options of ``penstock.connect`` that a source takes."""

    endpoint_url: str | None
    region: str | None
    profile: str | None
    credentials: Credentials | None
    anonymous: bool
    addressing: Literal["auto", "path", "virtual"]
    transport: TransportConfig | None
    retry: RetryConfig | None
    hedge: HedgeConfig | None
    requester_pays: bool
    sse_customer_key: bytes | None
    expected_bucket_owner: str | None


@boundary
def shards(
    urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    *,
    format: str | None = None,  # noqa: A002 - the name that users expect
    on_corrupt: OnCorrupt = "raise",
    manifest: str | None = None,
    **connection: Unpack[ConnectionOptions],
) -> Pipeline:
    """Describe samples that lie in shards, such as tar, TFRecord or Parquet files. Nothing is listed or read yet.

    Args:
        urls: A prefix (``s3://bucket/train/``: all shards below it, in key order), a pattern
            (``s3://bucket/train-{000000..000099}.tar``, ``s3://bucket/*/train-*.tar``), one shard, or a list of URLs. A
            list is taken literally; only its URLs that end with ``/`` are prefixes.
        format: Name of the shards' format, e.g. ``"tar"``; None: their names and first bytes tell.
        on_corrupt: Policy for damaged data: ``"raise"`` an error, ``"skip_sample"``, or ``"skip_shard"`` for the rest
            of the shard; skipped samples are counted.
        manifest: URL of a list of shards, instead of `urls`: then no store is listed.
        **connection: ``endpoint_url``, ``region``, ``profile``, ``credentials``, ``anonymous``, ``addressing``,
            ``transport``, ``retry``, ``hedge``, ``requester_pays``, ``sse_customer_key``, ``expected_bucket_owner``:
            as in ``penstock.connect``.

    Returns:
        A pipeline, to which methods add stages.

    Raises:
        ConfigError: No URL, a pattern that does not expand, or a bad option.
    """
    paths, is_list = _paths("shards", urls, manifest=manifest)
    return Pipeline(Shards(paths, is_list, _connection(shards, connection), format, on_corrupt, manifest))


@boundary
def objects(
    urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    *,
    group_by: Literal["stem"] | None = None,
    read: Callable[[str], bytes | Mapping[str, bytes]] | None = None,
    manifest: str | None = None,
    **connection: Unpack[ConnectionOptions],
) -> Pipeline:
    """Describe samples that are objects of their own, not packed into shards. Nothing is listed or read yet.

    Args:
        urls: As for ``shards``; with `read`, a list of the keys to call it with.
        group_by: ``"stem"``: objects whose names are equal up to the first dot are one sample (``7.jpg`` and
            ``7.json``); None: each object is a sample. The name of a member is the text after the first dot.
        read: A source of your own: ``fn(key)`` returns the bytes of the sample, or a dict of the bytes of its members.
        manifest: URL of a list of objects, instead of `urls`: then no store is listed.
        **connection: As for ``shards``.

    Returns:
        A pipeline, to which methods add stages.

    Raises:
        ConfigError: No URL, a pattern that does not expand, or options that exclude each other.
    """
    paths, is_list = _paths("objects", urls, manifest=manifest)
    return Pipeline(Objects(paths, is_list, _connection(objects, connection), group_by, read, manifest))


@boundary
def mix(
    weights: Mapping[Pipeline, float],
    *,
    schedule: Mapping[int, Mapping[Pipeline, float]] | None = None,
    stop: Stop = "all",
) -> Pipeline:
    """Describe several sources that are read as one, in proportion: ``mix({photos: 0.7, drawings: 0.3}).shuffle()``.

    Args:
        weights: The weight of each source, on any positive scale. A source is a pipeline, which may be a mix, with the
            stages that only its own samples pass (``decode``, ``map``, ...). All sources must produce the same fields.
        schedule: Other weights from a position on, counted in samples of the whole job:
            ``{1_000_000: {photos: 0.5, drawings: 0.5}}``. A source that an entry leaves out has weight 0 from there on.
        stop: When the epoch ends. ``"all"``: when all sources are exhausted; the share of an exhausted source goes to the
            others. ``"first"``: as soon as any source is exhausted. ``"repeat"``: when every source has been read once;
            shorter sources are repeated until then.

    Returns:
        A pipeline, to which methods add stages.

    Raises:
        ConfigError: No source, a bad weight, a schedule for a source that is not in the mix, or a source with
            ``shuffle``, ``take``, ``evaluate`` or ``batch``, which belong after ``mix``.
    """
    if not isinstance(weights, Mapping):
        raise ConfigError(
            f"mix({weights!r}) must be given a dict of pipelines and their weights",
            hint="ps.mix({photos: 0.7, drawings: 0.3}), or {photos: 1, drawings: 1} for equal shares",
        )
    if schedule is not None and not _is_schedule(schedule):
        raise ConfigError(
            f"mix(schedule={schedule!r}) must be a dict of positions and weights",
            hint="schedule={1_000_000: {photos: 0.5, drawings: 0.5}}",
        )
    parts, first, later = parts_of(weights, schedule)
    for part in parts:
        check_part(part, "mix")
    return Pipeline(Mix(parts, first, later, stop))


def _is_schedule(schedule: object) -> bool:
    return isinstance(schedule, Mapping) and all(isinstance(weights, Mapping) for weights in schedule.values())


def _connection(function: Callable[..., Pipeline], options: ConnectionOptions) -> Connection:
    check_names(function.__name__, options, [*Connection.__dataclass_fields__, *arguments_of(function)])
    return Connection(**options)


def _paths(what: str, urls: Any, *, manifest: str | None) -> tuple[tuple[str, ...], bool]:
    if urls is None and manifest is not None:
        return (), True
    if (
        urls is None
        or isinstance(urls, bytes | Pipeline | Mapping)
        or not isinstance(urls, str | os.PathLike | Iterable)
    ):
        given = "" if urls is None else repr(urls)
        raise ConfigError(
            f"{what}({given}) must be given a URL, a pattern, or a list of URLs",
            hint=f"ps.{what}('s3://bucket/train/')",
        )
    is_list = not isinstance(urls, str | os.PathLike)
    listed: tuple[Any, ...] = (urls,) if isinstance(urls, str | os.PathLike) else tuple(urls)
    return tuple(os.fspath(url) if isinstance(url, os.PathLike) else url for url in listed), is_list
