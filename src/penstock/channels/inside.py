"""Files in the directories of a run, which its program, or an earlier one, may have replaced by anything.

No link among them is followed out of its directory, neither to read nor to write, and only regular files are opened.
Anything else at a name is skipped, or is an error that names it.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, StoreError
from penstock.mount.namespace.names import NAME_BYTES_MAX, is_name
from penstock.store.tree import TEMPORARY_PREFIX, TEMPORARY_SUFFIX, info_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from penstock.types import ObjectInfo


_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def read_file(path: Path, *, bytes_max: int | None = None) -> bytes | None:
    """Return the contents of a regular file, at most `bytes_max` bytes of it; None if there is none. It never waits."""
    try:
        fd = os.open(path, _READ_FLAGS)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(-1 if bytes_max is None else bytes_max)
    except OSError:
        return None
    finally:
        os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Write a file, which replaces any other file, link or FIFO of this name.

    Raises:
        ConfigError: A directory lies there, or the directory above cannot be written.
    """
    new = path.with_name(f"{TEMPORARY_PREFIX}{path.name}{TEMPORARY_SUFFIX}")
    try:
        new.unlink(missing_ok=True)
        with new.open("xb") as file:
            file.write(data)
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", hint="--base names another directory") from error


def is_temporary(name: str) -> bool:
    """Whether a file has the name of a download or upload that a killed process has left."""
    return name.startswith(TEMPORARY_PREFIX) and name.endswith(TEMPORARY_SUFFIX)


def is_path(name: str) -> bool:
    """Whether a file can have this path below a directory: the same rule as that of a mount, which hides all others."""
    is_plain = "/." not in name and "//" not in name and "\0" not in name and name[-1:] != "/"
    if is_plain and 0 < len(name) * 4 <= NAME_BYTES_MAX and name[0] not in "./":
        return True
    return all(
        is_name(segment.encode(errors="surrogateescape")) and not is_temporary(segment) for segment in name.split("/")
    )


def check_folders(root: Path, names: Iterable[str]) -> None:
    """Refuse links through which files of these names, below `root`, would be written.

    Raises:
        ConfigError: A directory of one of them is a link.
    """
    seen: set[str] = set()
    for name in names:
        folder = name.rpartition("/")[0]
        while folder and folder not in seen:
            seen.add(folder)
            if (root / folder).is_symlink():
                raise ConfigError(
                    f"{root / folder} is a link, and files are written below {root} only", hint="remove the link"
                )
            folder = folder.rpartition("/")[0]


def files_below(root: Path) -> tuple[list[ObjectInfo], list[str]]:
    """Return the regular files below a directory, and the names of links in it that lead out of it.

    Links that stay inside are followed, but not to a directory that they lie in. A directory that does not exist is empty.

    Raises:
        StoreError: Something else lies in its place.
    """
    top = os.path.realpath(root)
    try:
        is_directory = stat.S_ISDIR(root.lstat().st_mode)
    except FileNotFoundError:
        return [], []
    if not is_directory:
        raise StoreError(f"{root} is not a directory any more, so its files are not stored")
    files: list[ObjectInfo] = []
    outward: set[str] = set()

    def look(folder: str, base: str, above: tuple[str, ...]) -> None:
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                name = base + entry.name
                if is_temporary(entry.name):
                    continue
                real = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
                if real != top and not real.startswith(f"{top}/"):
                    outward.add(entry.path[len(top) + 1 :])
                    continue
                with suppress(FileNotFoundError, NotADirectoryError):  # removed in the meantime, or a link to nothing
                    status = os.lstat(real)
                    if stat.S_ISREG(status.st_mode):
                        files.append(info_of(name, status))
                    elif stat.S_ISDIR(status.st_mode) and real not in above:
                        look(real, f"{name}/", (*above, real))

    with suppress(FileNotFoundError):
        look(top, "", (top,))
    return files, sorted(outward)


def outward_links_error(root: Path, names: list[str]) -> StoreError:
    """Return the error that says which links were not followed."""
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return StoreError(
        f"{root / names[0]}{others} lead out of the directory, and only what lies in it is stored",
        hint="copy the files instead of linking them",
    )
