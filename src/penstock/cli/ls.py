"""``penstock ls``, ``du`` and ``cat``: which objects there are, how many bytes they have, and the bytes themselves."""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from penstock.cli.options import AS_JSON, ConnectionGroup, StoreLocation, Stores, argument, expand_groups, flag, option
from penstock.cli.output import print_record, time_text
from penstock.cli.selection import FilterGroup, KeyFilter, Selection, nothing_left
from penstock.errors import ConfigError, ObjectMissingError
from penstock.text.patterns import is_pattern
from penstock.text.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.types import ObjectInfo


@expand_groups
def ls(
    url: str = argument("URL", "s3://bucket/prefix, a pattern, or a directory; s3:// lists buckets."),
    *,
    recursive: bool = flag("List everything below, not only the first level.", names=("--recursive", "-r")),
    filters: FilterGroup,
    human: bool = flag("Print sizes in KiB, MiB, and so on."),
    as_json: bool = AS_JSON,
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
                    _print(location, info, human=human, as_json=as_json)
                else:
                    left_out_count += 1
        except ObjectMissingError:
            if not is_pattern(url):
                raise
            matching = Selection(stores, url, filters)
            for info in matching:
                _print(matching.location, info, human=human, as_json=as_json)
            matching.check_found()
        if left_out_count and not shown_count:
            raise nothing_left(left_out_count, location.url)


def _print_buckets(stores: Stores, key_filter: KeyFilter, *, as_json: bool) -> None:
    for bucket in stores.buckets():
        name = bucket.key.removesuffix("/")
        if key_filter.takes(name):
            created = time_text(bucket.last_modified_s)
            line = {"bucket": name, "url": f"s3://{name}/", "created": created}
            print_record(line, f"{'':>12}  {created or '':20}  s3://{name}/", as_json=as_json)


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


def _print(location: StoreLocation, info: ObjectInfo, *, human: bool, as_json: bool) -> None:
    values: dict[str, Any] = {"key": info.key, "url": location.store.describe(info.key)}
    time, size = time_text(info.last_modified_s), ""
    if info.is_prefix:
        values["is_prefix"] = True
    else:
        values |= {"size_bytes": info.size_bytes, "etag": info.etag, "last_modified": time}
        size = format_bytes(info.size_bytes) if human else str(info.size_bytes)
    print_record(values, f"{size:>12}  {'' if info.is_prefix else time or '':20}  {info.key}", as_json=as_json)


@expand_groups
def du(
    url: str = argument("URL", "s3://bucket/prefix/, a pattern, or a directory."),
    *,
    depth: int = option("N", "Also count the folders below, N levels deep.", names=("--depth", "-d"), default=0, min=0),
    human: bool = flag("Print sizes in KiB, MiB, and so on."),
    filters: FilterGroup,
    as_json: bool = AS_JSON,
    connection: ConnectionGroup,
) -> None:
    """Count the bytes and objects below URL: bytes, objects, folder. The last line is the total.

    It costs a listing, that is one request per 1 000 objects. The exit code is 1 if there is no such folder.

    For example:

        penstock du --human s3://bucket/train/
        penstock du --depth 1 --json s3://bucket | jq -r '[.size_bytes, .url] | @tsv'
    """
    with Stores(connection) as stores:
        selection = Selection(stores, url, filters)
        sums = {"": (0, 0)}  # bytes and objects of each folder, by its name relative to URL
        for info in selection:
            folders = info.key[len(selection.prefix) :].split("/")[:-1]
            for level in range(min(depth, len(folders)) + 1):
                folder = "".join(f"{name}/" for name in folders[:level])
                size_bytes, count = sums.get(folder, (0, 0))
                sums[folder] = size_bytes + info.size_bytes, count + 1
        if selection.prefix or selection.is_pattern:  # an existing bucket or directory may be empty
            selection.check_found()
        for folder in [*sorted(sums)[1:], ""]:
            size_bytes, count = sums[folder]
            key = selection.prefix + folder
            described = selection.location.store.describe(key)
            values = {"key": key, "url": described, "size_bytes": size_bytes, "objects": count}
            size = format_bytes(size_bytes) if human else str(size_bytes)
            text = f"{size:>12}  {count:>9}  {key or selection.location.url}"
            print_record(values, text, as_json=as_json)


PIPE_BYTES = 1 << 20
"""The largest pipe that Linux gives to everybody; the default of 64 KiB needs 16 times as many context switches."""


@expand_groups
def cat(
    urls: list[str] = argument("URL", "Objects to write, one after the other."),
    *,
    connection: ConnectionGroup,
) -> None:
    """Write objects to stdout in the given order. Their parts are fetched in parallel.

    If a byte cannot be read, the command ends there with exit code 1: everything before it was written correctly, and
    nothing after it is written. In a pipeline, set -o pipefail makes the shell notice this.

    For example:

        penstock cat s3://bucket/train-{0000..0009}.tar | tar -t --ignore-zeros
        penstock cat s3://bucket/model.bin > model.bin
    """
    output = sys.stdout.fileno()
    with suppress(OSError):
        fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # a file or terminal has no such size
    with Stores(connection) as stores:
        locations = [stores.locate(url) for url in urls]
        for location in locations:
            if location.is_folder:
                raise ConfigError(
                    f"{location.url} is not one object", hint="penstock ls lists it, penstock cp copies it"
                )
        for _, group in groupby(locations, key=lambda location: location.root_url):
            _write(list(group), output)


def _write(locations: list[StoreLocation], output: int) -> None:
    for chunk in locations[0].store.read_parts([location.key for location in locations]):
        rest = chunk.data
        while rest:
            rest = rest[os.write(output, rest) :]
