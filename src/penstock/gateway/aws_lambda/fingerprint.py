"""A digest of a handler's code, so that changed code makes new results."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from penstock.config import MIB
from penstock.errors import ConfigError

FILES_MAX = 10_000
CONTENT_BYTES_MAX = 16 * MIB
"""Files larger than this, in bytes, that are not Python modules count by their size only."""
LEFT_OUT = frozenset({"__pycache__", "node_modules"})


def digest_of_code(folder: Path) -> str:
    """Return a digest of the files in a folder and below: of names and contents, never of times.

    Hidden files and folders, and virtual environments, are left out.

    Raises:
        ConfigError: The folder has too many files, or one of them cannot be read.
    """
    digest = hashlib.sha256()
    count = 0
    for root, folders, names in os.walk(folder, onerror=_refuse):
        here = Path(root)
        folders[:] = sorted(name for name in folders if _is_code(here / name))
        for name in sorted(names):
            if name.startswith(".") or name.endswith(".pyc"):
                continue
            count += 1
            if count > FILES_MAX:
                hint = "give the handler a folder of its own"
                raise ConfigError(f"code_dir {str(folder)!r} has more than {FILES_MAX} files", hint=hint)
            digest.update(_entry(here / name, str((here / name).relative_to(folder))))
    return digest.hexdigest()


def _is_code(folder: Path) -> bool:
    return not folder.name.startswith(".") and folder.name not in LEFT_OUT and not (folder / "pyvenv.cfg").exists()


def _entry(path: Path, name: str) -> bytes:
    """Return a digest of a file's name and content. A pipe or device counts by its name."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape") + b"\0")
    try:
        if path.is_file():
            size_bytes = path.stat().st_size
            digest.update(size_bytes.to_bytes(8, "big"))
            if path.suffix == ".py" or size_bytes <= CONTENT_BYTES_MAX:
                digest.update(path.read_bytes())
    except OSError as error:
        _refuse(error)
    return digest.digest()


def _refuse(error: OSError) -> None:
    raise ConfigError(f"the handler's file {error.filename!r} cannot be read: {error.strerror}") from error
