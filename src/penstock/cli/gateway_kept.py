"""``penstock gateway ls`` and ``penstock gateway gc``: what is kept of results."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.gateway import ConfigFile, KeepingGroup, TransformGroup, UpstreamGroup, make_config
from penstock.cli.options import AsJson, expand_groups
from penstock.cli.output import print_message, print_result
from penstock.errors import ConfigError
from penstock.redaction import public_url
from penstock.text.sizes import format_bytes, parse_bytes, parse_seconds

if TYPE_CHECKING:
    from penstock.gateway.config import GatewayConfig
    from penstock.gateway.keeping.contents import Holding
    from penstock.gateway.results.record import ResultRecord

Place = Annotated[
    str | None, typer.Option("--place", metavar="cache|results", help="Only the node's cache, or only the bucket.")
]


@expand_groups
def ls(
    *,
    config: ConfigFile = None,
    upstream: UpstreamGroup,
    transform: TransformGroup,
    keeping: KeepingGroup,
    place: Place = None,
    as_json: AsJson = False,
) -> None:
    """List the results that are kept: place, size, age, ETag, transform, access points, upstream and key.

    The age is the time since the last use in the cache (known to 10 minutes), and the time since it was stored in the bucket.

    For example:

        penstock gateway ls --config gateway.toml
        penstock gateway ls --results s3://bucket/derived/ --place results --json
    """
    from penstock.gateway.keeping.contents import read_contents

    made = _config(config, upstream, transform=transform, keeping=keeping)
    contents = read_contents(made, place=place)
    for each in contents.holdings:
        print_result(json.dumps(_fields(each)) if as_json else _text(each))
    total_bytes = sum(each.size_bytes for each in contents.holdings)
    print_message(f"{len(contents.holdings)} results, {format_bytes(total_bytes)}")
    if contents.leftovers:
        print_message(f"{len(contents.leftovers)} leftovers in the bucket; penstock gateway gc removes them")


@expand_groups
def gc(
    *,
    config: ConfigFile = None,
    upstream: UpstreamGroup,
    transform: TransformGroup,
    keeping: KeepingGroup,
    place: Place = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than", metavar="TIME", help="Also results unused, or stored in the bucket, for longer: 30d."
        ),
    ] = None,
    bytes_max: Annotated[
        str | None,
        typer.Option("--bytes-max", metavar="SIZE", help="Also the oldest results of a place that has more than SIZE."),
    ] = None,
    leftovers_after: Annotated[
        str, typer.Option("--leftovers-after", metavar="TIME", help="Age of unfinished results and uploads.")
    ] = "24h",
    remove: Annotated[
        bool, typer.Option("--remove/--dry-run", help="Remove them; without it, they are only shown.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove results that no request can find any more: their source is gone, or it or the transform has changed since.

    Give it the configuration of the gateway, by the same file or the same flags: its transforms say which versions they have.
    Results of upstreams and transforms that are not in it are left alone, unless --older-than or --bytes-max says otherwise.
    Without --remove, nothing is removed.

    For example:

        penstock gateway gc --config gateway.toml
        penstock gateway gc --config gateway.toml --older-than 90d --remove
    """
    from penstock.gateway.keeping.collecting import CollectionRules, collect, plan_collection
    from penstock.gateway.keeping.contents import read_contents
    from penstock.gateway.keeping.versions import stale_reasons

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
        print_result(json.dumps(fields) if as_json else f"{_text(each)}: {reason}")
    for left in collection.leftovers:
        values = {"action": action, "reason": "a leftover", "place": "results", "object": left.key}
        if as_json:
            print_result(json.dumps({**values, "size_bytes": left.size_bytes}))
        else:
            print_result(f"results {format_bytes(left.size_bytes):>11}  {left.key}: a leftover")
    count, all_count = len(collection.removals), len(contents.holdings)
    done = "removed" if remove else "would remove"
    leftovers = f" and {len(collection.leftovers)} leftovers" if collection.leftovers else ""
    print_message(f"{done} {count} of {all_count} results{leftovers}, {format_bytes(collection.size_bytes)}")
    if not remove and (collection.removals or collection.leftovers):
        print_message("nothing was removed; --remove removes it")


def _config(
    path: str | None, upstream: UpstreamGroup, *, transform: TransformGroup, keeping: KeepingGroup
) -> GatewayConfig:
    """Return the configuration; one without access points if no flag names any.

    Raises:
        ConfigError: It is not valid.
    """
    from penstock.gateway.serving.checks import check_config
    from penstock.gateway.serving.startup import with_defaults

    if path is None and upstream == UpstreamGroup():
        if transform.is_given():
            raise ConfigError("a transform without --upstream says nothing about results", hint="--upstream URL")
        made = make_config(None, replace(upstream, upstream="/", name="none"), keeping=keeping)
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
