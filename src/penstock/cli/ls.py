"""``penstock ls``: what is there."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import Anonymous, AsJson, Connection, EndpointUrl, Place, Profile, Region
from penstock.cli.saying import show
from penstock.cli.selection import Exclude, Filter, Include, Selection, nothing_left
from penstock.errors import ObjectMissingError
from penstock.patterns import is_pattern
from penstock.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.types import ObjectInfo


def ls(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="s3://bucket/prefix, a pattern, a directory; s3:// for buckets.")
    ],
    *,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Also everything below.")] = False,
    include: Include = None,
    exclude: Exclude = None,
    human: Annotated[bool, typer.Option("--human", help="Sizes as KiB, MiB, ...")] = False,
    as_json: AsJson = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    anonymous: Anonymous = False,
) -> None:
    """List objects in key order: size in bytes, time in UTC, key.

    A prefix need not end at a slash: s3://bucket/tr lists train/ and trial.txt. Wildcards and braces make a pattern, as
    in penstock.shards; quote it, or the shell takes it for its own. Exits with 1 if nothing matches. s3:// lists the
    buckets that your keys may list, with the time of their creation.

    For example:

        penstock ls s3://
        penstock ls s3://bucket/train/
        penstock ls "s3://bucket/train/*-0000{0..3}.tar"
        penstock ls -r --json s3://bucket | jq .size_bytes
    """
    connection = Connection(endpoint_url=endpoint_url, region=region, profile=profile, anonymous=anonymous)
    if url == "s3://":
        _show_buckets(connection, Filter(include, exclude), as_json=as_json)
        return
    with connection:
        place = connection.place(url)
        kept = Filter(include, exclude)
        folder = place.key[: place.key.rfind("/") + 1]
        shown_count = left_out_count = 0
        try:
            for info in _entries(place, recursive=recursive):
                if kept.takes(info.key[len(folder) :].rstrip("/")):
                    shown_count += 1
                    show(_as_json(place, info) if as_json else _as_text(info, human=human))
                else:
                    left_out_count += 1
        except ObjectMissingError:
            if not is_pattern(url):
                raise
            matching = Selection(connection, url, include=include, exclude=exclude)
            for info in matching:
                show(_as_json(matching.place, info) if as_json else _as_text(info, human=human))
            matching.check_found()
        if left_out_count and not shown_count:
            raise nothing_left(left_out_count, place.url)


def _show_buckets(connection: Connection, kept: Filter, *, as_json: bool) -> None:
    for bucket in connection.buckets():
        name = bucket.key.removesuffix("/")
        if kept.takes(name):
            created = _moment(bucket)
            line = {"bucket": name, "url": f"s3://{name}/", "created": created}
            show(json.dumps(line) if as_json else f"{'':>12}  {created or '':20}  s3://{name}/")


def _entries(place: Place, *, recursive: bool) -> Iterator[ObjectInfo]:
    """What is at the place.

    Raises:
        ObjectMissingError: no key begins with the place's, before anything was given.
    """
    found = place.store.list(place.key, recursive=recursive)
    first, second = next(found, None), next(found, None)
    if first is None:
        if place.key:
            here = f"this is a path on this machine; a bucket is s3://{place.url}"
            raise ObjectMissingError(
                "no key begins with this",
                operation="LIST",
                url=place.url,
                hint="check its spelling: list a shorter prefix" if "://" in place.url else here,
            )
        return
    if second is None and first.is_prefix and first.key == place.key + "/":
        yield from place.store.list(first.key, recursive=False)  # a folder named without its slash
        return
    yield from chain([first], [second] if second is not None else [], found)


def _as_text(info: ObjectInfo, *, human: bool) -> str:
    if info.is_prefix:
        return f"{'':>12}  {'':20}  {info.key}"
    size = format_bytes(info.size_bytes) if human else str(info.size_bytes)
    return f"{size:>12}  {_moment(info) or '':20}  {info.key}"


def _as_json(place: Place, info: ObjectInfo) -> str:
    if info.is_prefix:
        return json.dumps({"key": info.key, "url": place.store.describe(info.key), "is_prefix": True})
    return json.dumps(
        {
            "key": info.key,
            "url": place.store.describe(info.key),
            "size_bytes": info.size_bytes,
            "etag": info.etag,
            "last_modified": _moment(info),
        }
    )


def _moment(info: ObjectInfo) -> str | None:
    if info.last_modified_s is None:
        return None
    return datetime.fromtimestamp(info.last_modified_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
