"""``penstock manifest``: stores a listing, so that jobs need none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, BinaryIO, cast

import typer

from penstock.cli.options import ConnectionGroup, StoreLocation, Stores, expand_groups
from penstock.cli.output import print_message
from penstock.errors import ConfigError, ObjectMissingError
from penstock.redaction import public_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.types import ObjectInfo


@expand_groups
def manifest(
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://bucket/prefix/ or a directory.")],
    *,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Path or URL of the manifest; .parquet writes Parquet, - writes to stdout.",
        ),
    ],
    connection: ConnectionGroup,
) -> None:
    """Write the key, size and ETag of each object below URL, in key order, as JSON lines or Parquet.

    A job that gets the manifest instead of the URL needs no listing, and reads the versions that the manifest names.
    Objects under .penstock/ are left out. FILE appears completely or not at all.

    For example:

        penstock manifest s3://bucket/train/ -o train.manifest.jsonl
        penstock manifest s3://bucket/train/ -o s3://bucket/train.manifest.parquet
    """
    from penstock.index.manifest import write_manifest

    with Stores(connection) as stores:
        location = stores.locate(url if url.endswith("/") else url + "/")
        kind = "parquet" if output.lower().endswith(".parquet") else "jsonl"
        base_url = location.store.describe(location.key)
        infos = _infos(location)
        if output == "-":
            write_manifest(infos, sys.stdout.buffer, base_url=base_url, format=kind)
            return
        target = stores.locate(output)
        if target.is_folder:
            raise ConfigError(f"{output!r} is a folder", hint="-o takes the name of a file")
        with target.store.writer(target.key) as writer:
            count = write_manifest(infos, cast("BinaryIO", writer), base_url=base_url, format=kind)
    print_message(f"{count} objects: {public_url(output)}")


def _infos(location: StoreLocation) -> Iterator[ObjectInfo]:
    """Yield the objects below `location`, with keys relative to it.

    Raises:
        ObjectMissingError: No object lies below `location`.
    """
    from penstock.index import FOLDER

    count = 0
    for info in location.store.list(location.key):
        key = info.key[len(location.key) :]
        if not key or f"/{FOLDER}" in f"/{key}":
            continue
        count += 1
        yield info._replace(key=key)
    if not count:
        raise ObjectMissingError("no object lies below this URL", operation="LIST", url=location.url)
