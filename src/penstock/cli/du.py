"""``penstock du``: counts bytes and objects."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from penstock.cli.options import AsJson, ConnectionGroup, Stores, expand_groups
from penstock.cli.output import print_result
from penstock.cli.selection import FilterGroup, Selection
from penstock.text.sizes import format_bytes


@expand_groups
def du(
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://bucket/prefix/, a pattern, or a directory.")],
    *,
    depth: Annotated[
        int, typer.Option("--depth", "-d", metavar="N", min=0, help="Also count the folders below, N levels deep.")
    ] = 0,
    human: Annotated[bool, typer.Option("--human", help="Print sizes in KiB, MiB, and so on.")] = False,
    filters: FilterGroup,
    as_json: AsJson = False,
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
            if as_json:
                described = selection.location.store.describe(key)
                print_result(json.dumps({"key": key, "url": described, "size_bytes": size_bytes, "objects": count}))
            else:
                size = format_bytes(size_bytes) if human else str(size_bytes)
                print_result(f"{size:>12}  {count:>9}  {key or selection.location.url}")
