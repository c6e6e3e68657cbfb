"""``shards``, ``objects`` and ``mix``: where every pipeline begins."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from penstock.config import check_names
from penstock.errors import ConfigError
from penstock.pipeline.mixing import Mix, Stop, parts_of
from penstock.pipeline.pipeline import Pipeline, check_part
from penstock.pipeline.source import Connection, Objects, OnCorrupt, Shards
from penstock.tracebacks import boundary

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
    format: str | None = None,  # noqa: A002 - the word that users look for
    on_corrupt: OnCorrupt = "raise",
    manifest: str | None = None,
    **connection: Unpack[ConnectionOptions],
) -> Pipeline:
    """Describe samples that lie in shards: tar, TFRecord, Parquet, ... Looks at nothing until a loader runs.

    Args:
        urls: A prefix (``s3://bucket/train/``: the shards below it, in key order), a pattern
            (``s3://bucket/train-{000000..000099}.tar``, ``s3://bucket/*/train-*.tar``), one shard, or a list of URLs
            taken literally, in which only those that end with ``/`` are prefixes.
        format: Name of their format, e.g. ``"tar"``; None: found from names and first bytes.
        on_corrupt: ``"raise"``, ``"skip_sample"`` or ``"skip_shard"`` (its rest); what is skipped is counted.
        manifest: Instead of `urls`: the URL of a list of shards, so that nothing is listed.
        **connection: ``endpoint_url``, ``region``, ``profile``, ``credentials``, ``anonymous``, ``addressing``,
            ``transport``, ``retry``, ``hedge``, ``requester_pays``, ``sse_customer_key``, ``expected_bucket_owner``:
            as in ``penstock.connect``.

    Returns:
        A pipeline to which stages are added.

    Raises:
        ConfigError: no URL, a pattern that does not unfold, or a bad option.
    """
    paths, is_list = _paths("shards", urls, manifest=manifest)
    return Pipeline(Shards(paths, is_list, _connection("shards", connection), format, on_corrupt, manifest))


@boundary
def objects(
    urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    *,
    group_by: Literal["stem"] | None = None,
    read: Callable[[str], bytes | Mapping[str, bytes]] | None = None,
    manifest: str | None = None,
    **connection: Unpack[ConnectionOptions],
) -> Pipeline:
    """Describe samples that are objects of their own, not packed into shards.

    Args:
        urls: As for ``shards``; with `read`, a list of keys that mean something to it.
        group_by: ``"stem"``: objects whose names are equal up to the first dot are one sample (``7.jpg`` and
            ``7.json``); None: each is a sample. A member's name is what follows the first dot.
        read: A source of your own: ``fn(key)`` gives the object's bytes, or a dict of members' bytes.
        manifest: Instead of `urls`: the URL of a list of objects, so that nothing is listed.
        **connection: As for ``shards``.

    Returns:
        A pipeline to which stages are added.

    Raises:
        ConfigError: no URL, a pattern that does not unfold, or options that exclude each other.
    """
    paths, is_list = _paths("objects", urls, manifest=manifest)
    return Pipeline(Objects(paths, is_list, _connection("objects", connection), group_by, read, manifest))


@boundary
def mix(
    weights: Mapping[Pipeline, float],
    *,
    schedule: Mapping[int, Mapping[Pipeline, float]] | None = None,
    stop: Stop = "all",
) -> Pipeline:
    """Describe several sources read as one, in proportion: ``mix({photos: 0.7, drawings: 0.3}).shuffle()``.

    Args:
        weights: Of each source; any positive scale. A source is a pipeline, mixes included, with the stages that only
            its samples pass (``decode``, ``map``, ...); all must give the same fields.
        schedule: Other weights from a position on, in samples of the whole job:
            ``{1_000_000: {photos: 0.5, drawings: 0.5}}``. Sources that an entry leaves out have weight 0 from there on.
        stop: The epoch ends when ``"all"`` sources are used up (the shares of those that are go to the rest), when the
            ``"first"`` is, or when all are while shorter ones ``"repeat"``.

    Returns:
        A pipeline to which stages are added.

    Raises:
        ConfigError: no source, a bad weight, a schedule for a source that is not in the mix, or a source that shuffles,
            takes or batches, which the mix does after it.
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


def _connection(what: str, options: ConnectionOptions) -> Connection:
    check_names(what, options, Connection.__dataclass_fields__)
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
