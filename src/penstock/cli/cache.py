"""``penstock cache``: shows, fills, verifies, trims and clears a node's cache."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal

import typer

from penstock.cli.options import AS_JSON, ConnectionGroup, argument, expand_groups, option, pipeline_of
from penstock.cli.output import ProgressReport, counted, print_message, print_record, print_result
from penstock.redaction import public_url
from penstock.text.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache import CacheConfig
    from penstock.cache.warm import Warmed
    from penstock.fetch import PlanItem
    from penstock.pipeline import Pipeline
    from penstock.pipeline.factories import ConnectionOptions
    from penstock.store.base import Store

_HTTP = ("http://", "https://")
_ATTRIBUTE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

cache = typer.Typer(
    name="cache",
    help="Manage a node's cache of what was read: the directory of `cache=PATH:SIZE`.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

DIRECTORY = argument("PATH", "Directory of the cache.")


@cache.command()
@expand_groups
def stats(path: str = DIRECTORY, *, as_json: bool = AS_JSON) -> None:
    """Show what is in the cache at PATH, by bucket.

    For example:

        penstock cache stats /nvme/penstock
    """
    from penstock.cache.maintenance import survey

    with CacheProgress("entries", as_json=as_json) as progress:
        found = survey(path, progress=progress.advance)
    if as_json:
        print(json.dumps({"path": path, **asdict(found)}))
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.counts.items()))
    print_result(f"{path}: {format_bytes(found.size_bytes)} in {found.entries_count} entries ({kinds or 'empty'})")
    print_result(f"least recently used {_age(found.oldest_s)} ago; {format_bytes(found.free_bytes)} free on the disk")
    for origin in found.origins:
        where = " ".join(part for part in (origin.namespace, origin.endpoint, origin.name) if part)
        counts = f"{counted(origin.objects_count, 'object')}, {counted(origin.blocks_count, 'block')}"
        text = f"{format_bytes(origin.size_bytes):>10}  {counts}"
        print_result(f"{text}  {where}")


@cache.command()
@expand_groups
def warm(
    url: str = argument(
        "URL", "s3://bucket/prefix/, one object, a pattern of shards, or a pipeline as module:attribute."
    ),
    *,
    at: str = option(
        "PATH:SIZE", "Directory and size of the cache, e.g. /nvme/penstock:200GB.", names=("--cache",), required=True
    ),
    accesses: str | None = option(
        "FILE", 'Read only the ranges in this file: lines of JSON, {"key": ..., "start": ..., "end": ...}.'
    ),
    namespace: str = option("TEXT", "Namespace that the job uses: CacheConfig(namespace=...).", default=""),
    block_bytes: int | None = option("N", "Block size that the job uses: CacheConfig(block_bytes=...)."),
    as_json: bool = AS_JSON,
    connection: ConnectionGroup,
) -> None:
    """Read URL into the cache, so that a job finds it there. What the cache has already is verified, not fetched.

    After an interruption, run it again: what it has read is kept.

    For example:

        penstock cache warm s3://bucket/train/ --cache /nvme/penstock:200GB
        penstock cache warm s3://bucket --cache /nvme/penstock:200GB --accesses epoch.jsonl
        penstock cache warm train:pipeline --cache /nvme/penstock:200GB
    """
    import dataclasses

    from penstock.cache import CacheConfig

    config = dataclasses.replace(CacheConfig.of(at), namespace=namespace)
    if block_bytes is not None:
        config = dataclasses.replace(config, block_bytes=block_bytes)
    with CacheProgress("bytes", as_json=as_json) as progress:
        done = _fill(url, config, connection.options(), accesses, progress)
    seconds = progress.seconds
    values = {"url": public_url(url), "cache": str(config.path), **done._asdict(), "seconds": round(seconds, 3)}
    fetched = f", {format_bytes(done.fetched_bytes)} of it fetched, {seconds:.1f} s"
    text = f"{counted(done.requests_count, 'object')}, {format_bytes(done.size_bytes)}{fetched}: {config.path}"
    print_record(values, text, as_json=as_json)
    if done.refused_count:
        print_message(f"penstock: {done.refused_count} blocks were not kept, because the limit or the disk is full")
    if done.evicted_bytes:
        gone = f"{format_bytes(done.evicted_bytes)} of it was evicted again: the cache or its disk is too small for all of it"
        print_message(f"penstock: {gone}")
    if done.refused_count or done.evicted_bytes:
        raise typer.Exit(1)


@cache.command()
@expand_groups
def verify(path: str = DIRECTORY, *, as_json: bool = AS_JSON) -> None:
    """Read all entries at PATH and remove the corrupt ones; the exit code is 1 if there were any.

    For example:

        penstock cache verify /nvme/penstock
    """
    from penstock.cache.maintenance import verify as check

    with CacheProgress("bytes", as_json=as_json) as progress:
        entries_count, corrupt_count = check(path, progress=progress.advance)
    values = {"path": path, "entries_count": entries_count, "corrupt_count": corrupt_count}
    removed = " and removed" if corrupt_count else ""
    print_record(values, f"{path}: {entries_count} entries, {corrupt_count} corrupt{removed}", as_json=as_json)
    if corrupt_count:
        raise typer.Exit(1)


@cache.command()
@expand_groups
def clear(path: str = DIRECTORY, *, as_json: bool = AS_JSON) -> None:
    """Remove everything in the cache at PATH. Running jobs fetch again what they need.

    For example:

        penstock cache clear /nvme/penstock
    """
    from penstock.cache.maintenance import clear as empty

    removed_bytes = empty(path)
    values = {"path": path, "removed_bytes": removed_bytes}
    print_record(values, f"{format_bytes(removed_bytes)} removed", as_json=as_json)


@cache.command()
@expand_groups
def trim(
    path: str = DIRECTORY,
    size: str = argument("SIZE", "Size of what may stay: 100GB, 1.5TiB."),
    *,
    as_json: bool = AS_JSON,
) -> None:
    """Remove the least recently used entries at PATH until the rest takes at most SIZE.

    For example:

        penstock cache trim /nvme/penstock 100GB
    """
    from penstock.cache.maintenance import trim as shrink

    removed_count, removed_bytes = shrink(path, parse_bytes(size, option="SIZE"))
    values = {"path": path, "removed_count": removed_count, "removed_bytes": removed_bytes}
    print_record(values, f"{removed_count} entries, {format_bytes(removed_bytes)} removed", as_json=as_json)


def _fill(
    url: str, config: CacheConfig, options: ConnectionOptions, accesses: str | None, progress: CacheProgress
) -> Warmed:
    """Fill the cache from an object, a prefix, a pattern, a pipeline, or a file of accesses."""
    from penstock.cache.warm import warm as fill
    from penstock.compose import connect, split

    if accesses is None and (pipeline := _pipeline(url, options)) is not None:
        from penstock.loader.explain import warm_cache

        return warm_cache(pipeline, config, expect=progress.expect, progress=progress.advance)
    root_url, key = split(url)
    with connect(root_url, cache=config, **options) as store:
        plan = list(_listed(store, key, url) if accesses is None else _accessed(store, accesses))
        progress.expect(sum(item.span.length_bytes if item.span else item.size_bytes or 0 for item in plan) or None)
        return fill(store, plan, progress=progress.advance)


def _pipeline(text: str, options: ConnectionOptions) -> Pipeline | None:
    """Return the pipeline that ``module:attribute`` or a pattern of shards names; None for an object or a prefix.

    Raises:
        ConfigError: The module or the attribute does not exist, or the attribute is not a pipeline.
    """
    from penstock.pipeline import shards

    signs = "{" if text.startswith(_HTTP) else "*?[{"  # over HTTP, a question mark begins a query
    if any(sign in text for sign in signs):
        return shards(text, **options)
    if _ATTRIBUTE.fullmatch(text) is None:
        return None
    return pipeline_of(text, "URL")


class CacheProgress(ProgressReport):
    """Progress on a terminal; nothing is shown elsewhere, and with --json.

    Args:
        unit: Unit of the counts: ``bytes`` or ``entries``.
        as_json: Whether the command prints JSON.
    """

    def __init__(self, unit: Literal["bytes", "entries"], *, as_json: bool) -> None:
        super().__init__(as_json=as_json)
        self._unit = unit
        counted = ("Download", "TransferSpeed") if unit == "bytes" else ("MofNComplete",)
        self.shown = ("Bar", *counted, "TimeElapsed")

    def expect(self, total: int | None) -> None:
        """Set the total; None if it is unknown."""
        self.update(description=self._unit, total=total)

    def advance(self, count: int, size_bytes: int) -> None:
        """Count entries and their bytes."""
        self.update(description=self._unit, advance=size_bytes if self._unit == "bytes" else count)


def _listed(store: Store, key: str, url: str) -> Iterator[PlanItem]:
    """Yield the object at `key`, or all objects below it."""
    from penstock.errors import ObjectMissingError
    from penstock.fetch import PlanItem

    if url.startswith(_HTTP):  # HTTP has no listing, so this is one object
        info = store.stat(key)
        yield PlanItem(info.key, etag=info.etag, size_bytes=info.size_bytes)
        return
    found = False
    for info in store.list(key):
        if key.endswith("/") or not key or info.key == key or info.key.startswith(key + "/"):
            found = True
            yield PlanItem(info.key, etag=info.etag, size_bytes=info.size_bytes)
    if not found:
        raise ObjectMissingError("there is nothing to read into the cache", url=url)


def _accessed(store: Store, file: str) -> Iterator[PlanItem]:
    """Yield the objects and ranges that a file of JSON lines names, each once.

    Ranges are read in the object's present version, because the cache keeps only ranges of a known version.
    """
    from pathlib import Path

    from penstock.errors import ConfigError
    from penstock.fetch import PlanItem
    from penstock.text.json_text import parse_json
    from penstock.types import ByteRange, ObjectInfo

    versions: dict[str, ObjectInfo] = {}
    seen: set[str] = set()
    for number, line in enumerate(Path(file).read_text().splitlines(), 1):
        if line in seen:
            continue
        seen.add(line)
        try:
            row = parse_json(line)
            key = str(row["key"])
            span = ByteRange(int(row["start"]), int(row["end"])).checked() if "start" in row else None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{file}:{number}: this is not an access: {error}", hint='{"key": "a.tar", "start": 0, "end": 4096}'
            ) from error
        if span is None:
            yield PlanItem(key)
            continue
        if key not in versions:
            versions[key] = store.stat(key)
        yield PlanItem(key, span, versions[key].etag, versions[key].size_bytes)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
