"""The directory of a channel is exactly its objects: what an earlier run has put there leaves, and what others have is refused.

A record beside the directory names the files that runs have put there. Without it, and for names that it lacks, only files
that are the channel's objects already are taken for its own.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.channels.inside import is_temporary, read_file, write_file
from penstock.errors import ConfigError
from penstock.text.json_text import parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path


def claim(path: Path, names: Collection[str], *, channel: str, is_there: Callable[[str], bool]) -> None:
    """Make the directory of a channel, remove what earlier runs have left there, and record the files that it will have.

    A link in its place, which an earlier run has left, is removed.

    Args:
        path: The directory.
        names: Names of all files that it will have.
        channel: Name of the channel, for errors.
        is_there: Says whether the file of a name is the object as it is now.

    Raises:
        ConfigError: Somebody else has put something there. Nothing was changed.

    Cost: one reading of the directory tree.
    """
    if path.is_symlink():
        path.unlink()
    elif path.exists() and not path.is_dir():
        raise _in_the_way(path, channel)
    path.mkdir(parents=True, exist_ok=True)
    record = path.with_name(f".{path.name}.files")
    known = _read(record)
    leftovers, folders = [], []
    for entry, name in _below(os.fspath(path), ""):
        if entry.is_dir(follow_symlinks=False):
            folders.append(entry.path)
            continue
        is_known = name in known or is_temporary(entry.name)
        is_wanted = name in names and entry.is_file(follow_symlinks=False)
        if not is_known and not (is_wanted and is_there(name)):
            raise _in_the_way(entry.path, channel)
        if not is_wanted:
            leftovers.append(entry.path)
    wanted = set(names)
    if not wanted <= known:
        write_file(
            record, json.dumps(sorted(known | wanted)).encode()
        )  # before anything changes, as a run may be killed
    for each in leftovers:
        os.unlink(each)  # noqa: PTH108 - without a Path for each
    for each in reversed(folders):
        with suppress(OSError):  # it has files
            os.rmdir(each)  # noqa: PTH106
    if not known <= wanted:
        write_file(record, json.dumps(sorted(wanted)).encode())


def link_directory(path: Path, directory: Path, *, channel: str) -> None:
    """Make a link to a directory of this machine in the place of a channel's own, whose files are removed.

    Raises:
        ConfigError: Somebody else has put something there. Nothing was changed.
    """
    claim(path, (), channel=channel, is_there=lambda _: False)
    path.rmdir()
    path.symlink_to(directory, target_is_directory=True)


def _in_the_way(path: str | Path, channel: str) -> ConfigError:
    return ConfigError(
        f"channel {channel!r}: {os.fspath(path)} is in the way: no run has put it there",
        hint="move it elsewhere, or name another directory by --base",
    )


def _read(record: Path) -> set[str]:
    try:
        names = parse_json(read_file(record) or b"[]")
    except ValueError:
        return set()
    return set(names) if isinstance(names, list) and all(isinstance(name, str) for name in names) else set()


def _below(folder: str, base: str) -> Iterator[tuple[os.DirEntry[str], str]]:
    """Iterate over what lies below a directory, by its name, each directory before its contents; no link is followed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry, base + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _below(entry.path, f"{base}{entry.name}/")
