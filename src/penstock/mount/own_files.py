"""The files below a directory that this process uses."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_MAPS_FIELDS_COUNT = 6


def own_files(directory: str) -> list[str]:
    """Return the paths below a directory that this process has open, has mapped, or is in; sorted.

    Only links of ``/proc`` are read: the file system of the directory is not asked, and need not answer.

    Args:
        directory: Absolute path without links.
    """
    found = {path for path in (*_opened(), *_mapped()) if path.startswith(directory + "/")}
    with suppress(OSError):
        here = str(Path("/proc/self/cwd").readlink())
        if (here + "/").startswith(directory + "/"):
            found.add(here)
    return sorted(found)


def _opened() -> list[str]:
    paths = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile, such as the descriptor of this listing
            paths.append(str(link.readlink()))
    return paths


def _mapped() -> list[str]:
    lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    fields = (line.split(maxsplit=_MAPS_FIELDS_COUNT - 1) for line in lines)
    return [each[-1] for each in fields if len(each) == _MAPS_FIELDS_COUNT]
