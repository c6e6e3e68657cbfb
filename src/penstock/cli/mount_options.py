"""Options of mounts in the spelling of ``mount``, ``/etc/fstab`` and other FUSE programs: ``-o allow_other,uid=1000``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

if TYPE_CHECKING:
    from collections.abc import Sequence

_FULFILLED = re.compile(
    "ro|rw|defaults|auto|noauto|nofail|_netdev|user|nouser|users|owner|group|dev|nodev|suid|nosuid|exec|noexec|"
    "atime|noatime|relatime|norelatime|diratime|nodiratime|async|sync|default_permissions"
)
"""Options that are for ``mount`` itself, or that a read-only mount fulfils anyway. ``mount`` adds ``rw`` if there is no ``ro``,
whether somebody asked for it or not."""


def flags_of(options: str) -> list[str]:
    """Return the flags of ``penstock mount`` for options that are separated by commas.

    Each ``name=value`` becomes ``--name=value``, with dashes for underscores; options for ``mount`` itself are left out.
    """
    flags = []
    for option in options.split(","):
        if not option or _FULFILLED.fullmatch(option) or option.startswith(("x-", "comment=")):
            continue
        name, equals, value = option.partition("=")
        flags.append(f"--{name.replace('_', '-')}{equals}{value}")
    return flags


def with_flags(words: Sequence[str]) -> list[str]:
    """Return a command line with flags in the place of each ``-o OPTIONS``; a last ``-o`` without options stays."""
    taken: list[str] = []
    waiting = iter(words)
    for word in waiting:
        if word == "--":
            return [*taken, word, *waiting]
        if word == "-o":
            options = next(waiting, None)
            taken += [word] if options is None else flags_of(options)
        elif word.startswith("-o"):
            taken += flags_of(word.removeprefix("-o"))
        else:
            taken.append(word)
    return taken


class MountCommand(TyperCommand):
    """A command that also takes its options as ``-o NAME,NAME=VALUE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line."""
        return super().parse_args(ctx, with_flags(args))
