"""``penstock ls``: lists objects."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import AsJson, ConnectionGroup, StoreLocation, Stores, expand_groups
from penstock.cli.output import print_result
from penstock.cli.selection import FilterGroup, KeyFilter, Selection, nothing_left
from penstock.errors import ObjectMissingError
from penstock.text.patterns import is_pattern
from penstock.text.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.types import ObjectInfo


@expand_groups
def ls(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="s3://bucket/prefix, a pattern, or a directory; s3:// lists buckets.")
    ],
    *,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="List everything below, not only the first level.")
    ] = False,
    filters: FilterGroup,
    human: Annotated[bool, typer.Option("--human", help="Print sizes in KiB, MiB, and so on.")] = False,
    as_json: AsJson = False,
    connection: ConnectionGroup,
) -> None:
    """List objects in key order: size in bytes, time in UTC, key.

    A prefix need not end at a slash: s3://bucket/tr lists train/ and trial.txt. A URL with wildcards or braces is a
    pattern, as in penstock.shards; quote it, so that the shell does not expand it. The exit code is 1 if nothing
    matches. s3:// lists the buckets that your keys may list, and when they were created.

    For example:

        penstock ls s3://
        penstock ls s3://bucket/train/
        penstock ls "s3://bucket/train/*-0000{0..3}.tar"
        penstock ls -r --json s3://bucket | jq .size_bytes
    """
    key_filter = KeyFilter(filters.include, filters.exclude)
    if url == "s3://":
        _print_buckets(Stores(connection), key_filter, as_json=as_json)
        return
    with Stores(connection) as stores:
        location = stores.locate(url)
        folder = location.key[: location.key.rfind("/") + 1]
        shown_count = left_out_count = 0
        try:
            for info in _objects(location, recursive=recursive):
                if key_filter.takes(info.key[len(folder) :].rstrip("/")):
                    shown_count += 1
                    print_result(_as_json(location, info) if as_json else _as_text(info, human=human))
                else:
                    left_out_count += 1
        except ObjectMissingError:
            if not is_pattern(url):
                raise
            matching = Selection(stores, url, filters)
            for info in matching:
                print_result(_as_json(matching.location, info) if as_json else _as_text(info, human=human))
            matching.check_found()
        if left_out_count and not shown_count:
            raise nothing_left(left_out_count, location.url)


def _print_buckets(stores: Stores, key_filter: KeyFilter, *, as_json: bool) -> None:
    for bucket in stores.buckets():
        name = bucket.key.removesuffix("/")
        if key_filter.takes(name):
            created = _moment(bucket)
            line = {"bucket": name, "url": f"s3://{name}/", "created": created}
            print_result(json.dumps(line) if as_json else f"{'':>12}  {created or '':20}  s3://{name}/")


def _objects(location: StoreLocation, *, recursive: bool) -> Iterator[ObjectInfo]:
    """Yield what is at `location`.

    Raises:
        ObjectMissingError: No key begins with the location's key. It is raised before anything is yielded.
    """
    found = location.store.list(location.key, recursive=recursive)
    first, second = next(found, None), next(found, None)
    if first is None:
        if location.key:
            is_path = f"this is a path on this machine; a bucket is s3://{location.url}"
            raise ObjectMissingError(
                "no key begins with this URL's key",
                operation="LIST",
                url=location.url,
                hint="check the spelling: list a shorter prefix" if "://" in location.url else is_path,
            )
        return
    if second is None and first.is_prefix and first.key == location.key + "/":
        yield from location.store.list(first.key, recursive=False)  # a folder named without its slash
        return
    yield from chain([first], [second] if second is not None else [], found)


def _as_text(info: ObjectInfo, *, human: bool) -> str:
    if info.is_prefix:
        return f"{'':>12}  {'':20}  {info.key}"
    size = format_bytes(info.size_bytes) if human else str(info.size_bytes)
    return f"{size:>12}  {_moment(info) or '':20}  {info.key}"


def _as_json(location: StoreLocation, info: ObjectInfo) -> str:
    if info.is_prefix:
        return json.dumps({"key": info.key, "url": location.store.describe(info.key), "is_prefix": True})
    return json.dumps(
        {
            "key": info.key,
            "url": location.store.describe(info.key),
            "size_bytes": info.size_bytes,
            "etag": info.etag,
            "last_modified": _moment(info),
        }
    )


def _moment(info: ObjectInfo) -> str | None:
    if info.last_modified_s is None:
        return None
    return datetime.fromtimestamp(info.last_modified_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
