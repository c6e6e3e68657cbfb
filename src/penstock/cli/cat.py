"""``penstock cat``: writes objects to a pipe at full speed."""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress
from itertools import groupby
from typing import Annotated

import typer

from penstock.cli.options import ConnectionGroup, StoreLocation, Stores, expand_groups
from penstock.errors import ConfigError

PIPE_BYTES = 1 << 20
"""The largest pipe that Linux gives to everybody; the default of 64 KiB needs 16 times as many context switches."""


@expand_groups
def cat(
    urls: Annotated[list[str], typer.Argument(metavar="URL", help="Objects to write, one after the other.")],
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
