"""``penstock cat``: objects to a pipe, at full speed."""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress
from itertools import groupby
from typing import Annotated

import typer

from penstock.cli.options import Anonymous, Connection, EndpointUrl, Place, Profile, Region
from penstock.errors import ConfigError

PIPE_BYTES = 1 << 20
"""What Linux lets everybody ask for; the default of 64 KiB costs 16 times the switches between us and the reader."""


def cat(
    urls: Annotated[list[str], typer.Argument(metavar="URL", help="Objects, written one after the other.")],
    *,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    anonymous: Anonymous = False,
) -> None:
    """Write objects to stdout, in the order given; their parts are fetched in parallel.

    Ends at the first byte that cannot be had, with exit code 1: what came before it is right, and nothing after it is
    written. Check it: set -o pipefail.

    For example:

        penstock cat s3://bucket/train-{0000..0009}.tar | tar -t --ignore-zeros
        penstock cat s3://bucket/model.bin > model.bin
    """
    output = sys.stdout.fileno()
    with suppress(OSError):
        fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # a file or terminal has no such size
    with Connection(endpoint_url=endpoint_url, region=region, profile=profile, anonymous=anonymous) as connection:
        places = [connection.place(url) for url in urls]
        for place in places:
            if place.is_folder:
                raise ConfigError(f"{place.url} is not one object", hint="penstock ls lists it, penstock cp copies it")
        for _, group in groupby(places, key=lambda place: place.root_url):
            _write(list(group), output)


def _write(places: list[Place], output: int) -> None:
    for chunk in places[0].store.read_parts([place.key for place in places]):
        rest = chunk.data
        while rest:
            rest = rest[os.write(output, rest) :]
