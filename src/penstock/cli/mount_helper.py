"""The program ``mount.penstock``, which ``mount -t penstock`` and ``/etc/fstab`` call."""

from __future__ import annotations

import sys
from contextlib import suppress

from penstock.cli.app import run
from penstock.cli.mount import flags_of


def helper() -> None:
    """Run as ``mount.penstock``, which ``mount -t penstock`` and ``/etc/fstab`` call: ``URL DIR [-sfnv] [-o OPTIONS]``."""
    sys.exit(run(["mount", *helper_arguments(sys.argv[1:])]))


def helper_arguments(arguments: list[str]) -> list[str]:
    """Return the arguments of ``penstock mount`` for those that ``mount`` gives to its helpers.

    Each option ``name=value`` of fstab becomes ``--name=value``; ``cache=...``, ``endpoint-url=...``, ``allow_other``, ...
    """
    words = iter(arguments)
    places: list[str] = []
    flags: list[str] = []
    for word in words:
        if word in ("-o", "-N", "-t"):
            with suppress(StopIteration):
                value = next(words)
                flags += flags_of(value) if word == "-o" else []
        elif not word.startswith("-"):
            places.append(word)
    return [*places, *flags]
