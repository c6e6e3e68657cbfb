"""``penstock cache``: look at a node's cache, fill it, check it, make it smaller, empty it."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from penstock.cli.options import Anonymous, AsJson, EndpointUrl, Profile, Region  # noqa: TC001 - typer reads them
from penstock.cli.saying import show, tell
from penstock.redaction import public_url
from penstock.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.cache import CacheConfig
    from penstock.cache.warm import Warmed
    from penstock.fetch import PlanItem
    from penstock.pipeline import Pipeline
    from penstock.store.base import Store

_HTTP = ("http://", "https://")
_ATTRIBUTE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

cache = typer.Typer(
    name="cache",
    help="Look after a node's cache of what was read: the directory of `cache=PATH:SIZE`.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Directory = Annotated[str, typer.Argument(metavar="PATH", help="The cache's directory.")]


@cache.command()
def stats(path: Directory, *, as_json: AsJson = False) -> None:
    """Say what is in the cache at PATH, by bucket.

    For example:

        penstock cache stats /nvme/penstock
    """
    from penstock.cache.maintenance import survey

    with Bar("entries", as_json=as_json) as bar:
        found = survey(path, progress=bar.advance)
    if as_json:
        print(json.dumps({"path": path, **asdict(found)}))
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.counts.items()))
    show(f"{path}: {format_bytes(found.size_bytes)} in {found.entries_count} entries ({kinds or 'empty'})")
    show(f"least recently used {_age(found.oldest_s)} ago; {format_bytes(found.free_bytes)} free on the disk")
    for origin in found.origins:
        where = " ".join(part for part in (origin.namespace, origin.endpoint, origin.name) if part)
        text = f"{format_bytes(origin.size_bytes):>10}  {origin.objects_count} objects, {origin.blocks_count} blocks"
        show(f"{text}  {where}")


@cache.command()
def warm(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="s3://bucket/prefix/, one object, a pattern of shards, or module:attribute of a pipeline.",
        ),
    ],
    *,
    at: Annotated[str, typer.Option("--cache", metavar="PATH:SIZE", help="The cache, e.g. /nvme/penstock:200GB.")],
    accesses: Annotated[
        str | None,
        typer.Option(
            "--accesses", metavar="FILE", help='Only these: lines of JSON, {"key": ..., "start": ..., "end": ...}.'
        ),
    ] = None,
    namespace: Annotated[
        str, typer.Option("--namespace", metavar="TEXT", help="As the job has it: CacheConfig(namespace=...).")
    ] = "",
    block_bytes: Annotated[
        int | None, typer.Option("--block-bytes", metavar="N", help="As the job has it: CacheConfig(block_bytes=...).")
    ] = None,
    as_json: AsJson = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    anonymous: Anonymous = False,
) -> None:
    """Read URL into the cache, so that the job finds it there. What is there already is verified, not fetched.

    Run it again after it was interrupted: what it has read is kept.

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
    begun_s = time.monotonic()
    options: dict[str, Any] = {
        "region": region,
        "profile": profile,
        "anonymous": anonymous,
        "endpoint_url": endpoint_url,
    }
    with Bar("bytes", as_json=as_json) as bar:
        done = _warmed(url, config, options, accesses, bar)
    seconds = time.monotonic() - begun_s
    if as_json:
        print(
            json.dumps(
                {"url": public_url(url), "cache": str(config.path), **done._asdict(), "seconds": round(seconds, 3)}
            )
        )
    else:
        there = f", {format_bytes(done.fetched_bytes)} of it fetched, {seconds:.1f} s"
        show(f"{done.requests_count} objects, {format_bytes(done.size_bytes)}{there}: {config.path}")
    if done.refused_count:
        tell(f"penstock: {done.refused_count} blocks were not kept: the limit or the disk is full")
    if done.evicted_bytes:
        gone = (
            f"{format_bytes(done.evicted_bytes)} of it is gone again: the cache or its disk is too small for all of it"
        )
        tell(f"penstock: {gone}")
    if done.refused_count or done.evicted_bytes:
        raise typer.Exit(1)


@cache.command()
def verify(path: Directory, *, as_json: AsJson = False) -> None:
    """Read all entries at PATH and remove what is corrupt; the exit code is 1 where something was.

    For example:

        penstock cache verify /nvme/penstock
    """
    from penstock.cache.maintenance import verify as check

    with Bar("bytes", as_json=as_json) as bar:
        entries_count, corrupt_count = check(path, progress=bar.advance)
    if as_json:
        print(json.dumps({"path": path, "entries_count": entries_count, "corrupt_count": corrupt_count}))
    else:
        show(f"{path}: {entries_count} entries, {corrupt_count} corrupt" + (" and removed" if corrupt_count else ""))
    if corrupt_count:
        raise typer.Exit(1)


@cache.command()
def clear(path: Directory, *, as_json: AsJson = False) -> None:
    """Remove everything cached at PATH, also beside running jobs, which fetch again what they need.

    For example:

        penstock cache clear /nvme/penstock
    """
    from penstock.cache.maintenance import clear as empty

    removed_bytes = empty(path)
    print(
        json.dumps({"path": path, "removed_bytes": removed_bytes})
        if as_json
        else f"{format_bytes(removed_bytes)} removed"
    )


@cache.command()
def trim(
    path: Directory,
    size: Annotated[str, typer.Argument(metavar="SIZE", help="What may stay: 100GB, 1.5TiB.")],
    *,
    as_json: AsJson = False,
) -> None:
    """Remove the least recently used at PATH until the rest takes at most SIZE.

    For example:

        penstock cache trim /nvme/penstock 100GB
    """
    from penstock.cache.maintenance import trim as shrink

    removed_count, removed_bytes = shrink(path, parse_bytes(size, option="SIZE"))
    if as_json:
        print(json.dumps({"path": path, "removed_count": removed_count, "removed_bytes": removed_bytes}))
    else:
        show(f"{removed_count} entries, {format_bytes(removed_bytes)} removed")


def _warmed(url: str, config: CacheConfig, options: dict[str, Any], accesses: str | None, bar: Bar) -> Warmed:
    """Fill the cache from an object, a prefix, a pattern, a pipeline, or a profile of accesses."""
    from penstock.cache.warm import warm as fill
    from penstock.compose import connect, split

    if accesses is None and (pipeline := _pipeline(url, options)) is not None:
        from penstock.loader.warming import warm_cache

        return warm_cache(pipeline, config, expect=bar.expect, progress=bar.advance)
    root_url, key = split(url)
    with connect(root_url, cache=config, **options) as store:
        plan = list(_listed(store, key, url) if accesses is None else _accessed(store, accesses))
        bar.expect(sum(item.span.length_bytes if item.span else item.size_bytes or 0 for item in plan) or None)
        return fill(store, plan, progress=bar.advance)


def _pipeline(text: str, options: dict[str, Any]) -> Pipeline | None:
    """The pipeline of ``module:attribute``, or of a pattern of shards; None where `text` is one object or a prefix.

    Raises:
        ConfigError: there is no such module or attribute, or it is no pipeline.
    """
    from penstock.errors import ConfigError
    from penstock.pipeline import Pipeline, shards

    signs = "{" if text.startswith(_HTTP) else "*?[{"  # over HTTP, a question mark begins a query
    if any(sign in text for sign in signs):
        return shards(text, **options)
    if _ATTRIBUTE.fullmatch(text) is None:
        return None
    name, _, attribute = text.partition(":")
    sys.path.insert(0, "")  # as `python -m` has it
    try:
        found = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{text}: {error}", hint="module:attribute, importable from this directory") from error
    finally:
        sys.path.remove("")
    if not isinstance(found, Pipeline) and callable(found):
        found = found()
    if not isinstance(found, Pipeline):
        raise ConfigError(f"{text} is {type(found).__name__}, not a pipeline", hint="ps.shards(url), or what gives one")
    return found


class Bar:
    """Progress on a terminal's stderr; silent elsewhere and with --json."""

    def __init__(self, what: str, *, as_json: bool) -> None:
        self._what = what
        self._progress: Any = None
        self._task: Any = None
        self._shown = sys.stderr.isatty() and not as_json

    def __enter__(self) -> Self:
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn
            from rich.progress import TimeElapsedColumn as Elapsed
            from rich.progress import TransferSpeedColumn as Speed

            counted = [DownloadColumn(binary_units=True), Speed()] if self._what == "bytes" else [MofNCompleteColumn()]
            columns = [TextColumn("{task.description}"), BarColumn(), *counted, Elapsed()]
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task(self._what, total=None)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def expect(self, total: int | None) -> None:
        """So much is to come."""
        if self._progress is not None:
            self._progress.update(self._task, total=total)

    def advance(self, count: int, size_bytes: int) -> None:
        """So much was done."""
        if self._progress is not None:
            self._progress.update(self._task, advance=size_bytes if self._what == "bytes" else count)


def _listed(store: Store, key: str, url: str) -> Iterator[PlanItem]:
    """The object at `key`, or all below it."""
    from penstock.errors import ObjectMissingError
    from penstock.fetch import PlanItem

    if url.startswith(_HTTP):  # there is nothing to list: it can only be one object
        info = store.stat(key)
        yield PlanItem(info.key, etag=info.etag, size_bytes=info.size_bytes)
        return
    found = False
    for info in store.list(key):
        if key.endswith("/") or not key or info.key == key or info.key.startswith(key + "/"):
            found = True
            yield PlanItem(info.key, etag=info.etag, size_bytes=info.size_bytes)
    if not found:
        raise ObjectMissingError("nothing there to warm", url=url)


def _accessed(store: Store, file: str) -> Iterator[PlanItem]:
    """Objects and ranges that a file of JSON lines names, each once.

    Ranges are of the version that is there now: of one that is not known, nothing could be kept.
    """
    from pathlib import Path

    from penstock.errors import ConfigError
    from penstock.fetch import PlanItem
    from penstock.types import ByteRange, ObjectInfo

    versions: dict[str, ObjectInfo] = {}
    seen: set[str] = set()
    for number, line in enumerate(Path(file).read_text().splitlines(), 1):
        if line in seen:
            continue
        seen.add(line)
        try:
            row = json.loads(line)
            key = str(row["key"])
            span = ByteRange(int(row["start"]), int(row["end"])).checked() if "start" in row else None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{file}:{number}: no access: {error}", hint='{"key": "a.tar", "start": 0, "end": 4096}'
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
