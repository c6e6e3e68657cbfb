"""``penstock gateway fill``, ``ls`` and ``gc``: make results in advance, list the stored ones, and remove them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli.gateway import CONFIG_FILE, KEEPING, TRANSFORM, UPSTREAM, make_config, pairs_of
from penstock.cli.options import AS_JSON, Given, argument, expand_groups, flag, option
from penstock.cli.output import ProgressReport, print_message, print_record
from penstock.errors import ConfigError
from penstock.redaction import public_url
from penstock.text.sizes import format_bytes, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from penstock.gateway.config import GatewayConfig
    from penstock.gateway.filling import Filled
    from penstock.gateway.keeping import Holding
    from penstock.gateway.results.record import ResultRecord


ERRORS_SHOWN_MAX = 100
DETAIL_LINES_MAX = 8


@expand_groups
def fill(
    points: list[str] | None = argument(
        "[NAME]...", "Access points; default: all that have a transform.", default=None
    ),
    *,
    config: str | None = CONFIG_FILE,
    upstream: Given = UPSTREAM,
    transform: Given = TRANSFORM,
    keeping: Given = KEEPING,
    source: list[str] | None = option(
        "PATTERN",
        "A key, a prefix ending with a slash, or a pattern such as '**/*.tar'; may be repeated; default: all.",
    ),
    manifest: str | None = option("FILE", "A manifest of sources, instead of --source."),
    into: str | None = option(
        "results|cache|both", "Where to keep them; default: the bucket of --results, or the cache."
    ),
    query: list[str] | None = option("NAME=VALUE", "A parameter of the requests, e.g. x-penstock-epoch=3."),
    caller: str = option("KEY_ID", "The access key of the requests, if a handler's answer depends on it.", default=""),
    index: bool = flag("Make the index of all results too, for random access by a Loader."),
    jobs: int | None = option("N", "Transform processes, or tasks on Ray; default: one per processor."),
    executor: str = option("processes|ray", "Run on this machine, or on a Ray cluster.", default="processes"),
    address: str | None = option("ADDRESS", "Address of the Ray cluster."),
    as_json: bool = AS_JSON,
) -> None:
    """Make results ahead, so that gateways find them in the bucket of --results or in the node's cache.

    Configure it as the gateway that will serve the results, by the same file or the same flags. What exists is skipped: after
    Ctrl-C, the same command continues. The exit code is 1 if a result could not be made; the others are made nevertheless.

    For example:

        penstock gateway fill --config gateway.toml train --source "**/*.tar"
        penstock gateway fill --upstream s3://bucket/train/ --transform tar2tfrecord --results s3://bucket/derived/
        penstock gateway fill --config gateway.toml train --index
        penstock gateway fill --config gateway.toml --executor ray --address auto
    """
    from penstock.gateway.filling import FillOptions, fill_job
    from penstock.gateway.filling import fill as run

    made = make_config(config, upstream, transform=transform, keeping=keeping)
    job = fill_job(
        made, points or (), into=into, query=pairs_of(query, example="--query x-penstock-epoch=3"), caller=caller
    )
    options = FillOptions(
        patterns=source or (),
        manifest=manifest or "",
        executor=executor,  # type: ignore[arg-type]
        address=address,
        jobs=jobs,
        has_index=index,
    )
    with FillReport(as_json=as_json) as report:
        run(job, options, report)
    report.end()
    if report.errors:
        raise typer.Exit(1)


class FillReport(ProgressReport):
    """The report of ``fill``; a ``FillListener``.

    Attributes:
        errors: Results that could not be made.
    """

    shown = ("Bar", "MofNComplete", "Rate", "TimeRemaining")

    def __init__(self, *, as_json: bool) -> None:
        super().__init__(as_json=as_json)
        self.errors: list[Filled] = []
        self._counts = {"made": 0, "copied": 0, "present": 0, "left-out": 0, "failed": 0}
        self._made_bytes = 0

    def planned(self, results_count: int, source_bytes: int) -> None:
        """So many results are to be made or found."""
        self.update(description="filling", total=results_count)
        self.print_json(action="begin", results=results_count, source_bytes=source_bytes)

    def filled(self, result: Filled) -> None:
        """Something has become of one result."""
        self._counts[result.outcome] += 1
        self._made_bytes += result.size_bytes
        if result.error:
            self.errors.append(result)
        self.update(advance=1, rate=self.rate(self._made_bytes))
        fields = {"error": result.error} if result.error else {"etag": result.etag, "size_bytes": result.size_bytes}
        self.print_json(action=result.outcome, point=result.source.point, key=result.source.key, **fields)

    def end(self) -> None:
        """Print the summary, and what failed."""
        counts = self._counts
        if self.as_json:
            figures = {name.replace("-", "_"): count for name, count in counts.items()}
            self.print_summary(**figures, size_bytes=self._made_bytes)
            return
        words = [f"{counts['made'] + counts['copied']} results made, {format_bytes(self._made_bytes)}"]
        names = {
            "copied": "of them copied",
            "present": "there already",
            "left-out": "keys left out",
            "failed": "failed",
        }
        words += [f"{counts[name]} {what}" for name, what in names.items() if counts[name]]
        print_message(f"{', '.join(words)}; {self.seconds:.1f} s")
        for each in self.errors[:ERRORS_SHOWN_MAX]:
            lines = each.error.splitlines()
            shown = lines if len(lines) <= DETAIL_LINES_MAX else [*lines[:2], "...", *lines[3 - DETAIL_LINES_MAX :]]
            print_message(f"failed: {each.source.point}: {each.source.key}: {shown[0]}")
            for line in shown[1:]:
                print_message(f"    {line}")
        if len(self.errors) > ERRORS_SHOWN_MAX:
            print_message(f"and {len(self.errors) - ERRORS_SHOWN_MAX} others; --json prints all of them")


PLACE = option("cache|results", "Only the node's cache, or only the bucket.")


@expand_groups
def ls(
    *,
    config: str | None = CONFIG_FILE,
    upstream: Given = UPSTREAM,
    transform: Given = TRANSFORM,
    keeping: Given = KEEPING,
    place: str | None = PLACE,
    as_json: bool = AS_JSON,
) -> None:
    """List the results that are kept: place, size, age, ETag, transform, access points, upstream and key.

    The age is the time since the last use in the cache (known to 10 minutes), and the time since it was stored in the bucket.

    For example:

        penstock gateway ls --config gateway.toml
        penstock gateway ls --results s3://bucket/derived/ --place results --json
    """
    from penstock.gateway.keeping import read_contents

    made = _config(config, upstream, transform=transform, keeping=keeping)
    contents = read_contents(made, place=place)
    for each in contents.holdings:
        print_record(_fields(each), _text(each), as_json=as_json)
    total_bytes = sum(each.size_bytes for each in contents.holdings)
    print_message(f"{len(contents.holdings)} results, {format_bytes(total_bytes)}")
    if contents.leftovers:
        print_message(f"{len(contents.leftovers)} leftovers in the bucket; penstock gateway gc removes them")


@expand_groups
def gc(
    *,
    config: str | None = CONFIG_FILE,
    upstream: Given = UPSTREAM,
    transform: Given = TRANSFORM,
    keeping: Given = KEEPING,
    place: str | None = PLACE,
    older_than: str | None = option("TIME", "Also results unused, or stored in the bucket, for longer: 30d."),
    bytes_max: str | None = option("SIZE", "Also the oldest results of a place that has more than SIZE."),
    leftovers_after: str = option("TIME", "Age of unfinished results and uploads.", default="24h"),
    remove: bool = flag("Remove them; without it, they are only shown.", names=("--remove/--dry-run",)),
    as_json: bool = AS_JSON,
) -> None:
    """Remove results that no request can find any more: their source is gone, or it or the transform has changed since.

    Give it the configuration of the gateway, by the same file or the same flags: its transforms say which versions they have.
    Results of upstreams and transforms that are not in it are left alone, unless --older-than or --bytes-max says otherwise.
    Without --remove, nothing is removed.

    For example:

        penstock gateway gc --config gateway.toml
        penstock gateway gc --config gateway.toml --older-than 90d --remove
    """
    from penstock.gateway.keeping import CollectionRules, collect, plan_collection, read_contents, stale_reasons

    made = _config(config, upstream, transform=transform, keeping=keeping)
    rules = CollectionRules(
        age_s_max=None if older_than is None else parse_seconds(older_than, option="--older-than"),
        place_bytes_max=None if bytes_max is None else parse_bytes(bytes_max, option="--bytes-max"),
        leftover_s=parse_seconds(leftovers_after, option="--leftovers-after"),
    )
    contents = read_contents(made, place=place)
    stale = asyncio.run(stale_reasons(made, contents.holdings))
    collection = plan_collection(contents, stale, rules)
    action = "removed" if remove else "would-remove"
    if remove:
        collect(made, collection)
    for each, reason in collection.removals:
        fields = {"action": action, "reason": reason, **_fields(each)}
        print_record(fields, f"{_text(each)}: {reason}", as_json=as_json)
    for left in collection.leftovers:
        values = {"action": action, "reason": "a leftover", "place": "results", "object": left.key}
        text = f"results {format_bytes(left.size_bytes):>11}  {left.key}: a leftover"
        print_record({**values, "size_bytes": left.size_bytes}, text, as_json=as_json)
    count, all_count = len(collection.removals), len(contents.holdings)
    done = "removed" if remove else "would remove"
    leftovers = f" and {len(collection.leftovers)} leftovers" if collection.leftovers else ""
    print_message(f"{done} {count} of {all_count} results{leftovers}, {format_bytes(collection.size_bytes)}")
    if not remove and (collection.removals or collection.leftovers):
        print_message("nothing was removed; --remove removes it")


def _config(path: str | None, upstream: Given, *, transform: Given, keeping: Given) -> GatewayConfig:
    """Return the configuration; one without access points if no flag names any.

    Raises:
        ConfigError: It is not valid.
    """
    from penstock.gateway.serving.checks import check_config
    from penstock.gateway.serving.startup import with_defaults

    if path is None and not upstream:
        if transform:
            raise ConfigError("a transform without --upstream says nothing about results", hint="--upstream URL")
        made = make_config(None, {"upstream": "/", "name": "none"}, keeping=keeping)
        return with_defaults(replace(made, access_points=()))
    made = with_defaults(make_config(path, upstream, transform=transform, keeping=keeping))
    check_config(made)
    return made


def _fields(holding: Holding) -> dict[str, Any]:
    record = holding.record
    return {
        "place": holding.place,
        "upstream": _upstream(record),
        "key": record.key,
        "points": list(holding.points),
        "transform": record.transform,
        "arguments": dict(record.arguments),
        "etag": record.etag,
        "size_bytes": record.size_bytes,
        "age_s": round(holding.age_s, 1),
        "complete": record.is_complete,
        "source_modified": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.last_modified_s)),
    }


def _text(holding: Holding) -> str:
    record = holding.record
    points = ",".join(holding.points) or "-"
    size = format_bytes(record.size_bytes) if record.size_bytes is not None else "unfinished"
    where = f"{_upstream(record).rstrip('/')}/{record.key}"
    return (
        f"{holding.place:<7} {size:>11} {_age(holding.age_s):>6}  {record.etag}  {record.transform}  {points}  {where}"
    )


def _upstream(record: ResultRecord) -> str:
    return public_url(record.scope.partition("\n")[0])


def _age(seconds: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.0f}{unit}"
    return f"{seconds:.0f}s"
