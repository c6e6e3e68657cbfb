"""The names of checkpoint directories, and of the files in them.

A checkpoint is a directory: data files, a manifest, and the commit marker ``.metadata``, which is written last. Each save has
a random ID, which is part of the names of its files, so that two saves into one directory never mix their files, and so that
the files of a replaced checkpoint stay usable until the new one is committed.

====================================  ==============================================================================
``step-0000001000/``                  directory of the checkpoint of step 1000, below the URL of the run
``__3_0-1f0c2a9b7d4e.distcp``         data file 0 of rank 3, by the save ``1f0c2a9b7d4e``; a prefix may come before it
``manifest-1f0c2a9b7d4e.json``        sizes and checksums of the files of that save
``.metadata``                         the commit marker, in the format of ``torch.distributed.checkpoint``
``saving-1f0c2a9b7d4e.json``          marker of a save that has not ended, below the URL of the run
====================================  ==============================================================================
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Any

from penstock.config import check_whole

if TYPE_CHECKING:
    from penstock.types import Buffer

COMMIT_MARKER = ".metadata"
DATA_SUFFIX = ".distcp"

STEP_DIGITS = 10
STEP_MAX = 10**STEP_DIGITS - 1
"""Largest step. The names of steps sort like the numbers, so the newest checkpoint is the last one of a listing."""

_STEP = re.compile(rf"step-(\d{{{STEP_DIGITS}}})/?")
_SAVE_ID = r"([0-9a-f]{12})"
_DATA = re.compile(rf"(?:.*/)?[^/]*__\d+_\d+-{_SAVE_ID}\{DATA_SUFFIX}")
_DATA_IN_MARKER = re.compile(rf"__\d+_\d+-{_SAVE_ID}\{DATA_SUFFIX}".encode())
_MANIFEST = re.compile(rf"manifest-{_SAVE_ID}\.json")
_SAVING = re.compile(rf"saving-{_SAVE_ID}\.json")


def check_step(step: Any) -> int:
    """Return `step`.

    Raises:
        ConfigError: It is not a whole number from 0 to ``STEP_MAX``; NaN and True are not.
    """
    check_whole("step", step, 0, STEP_MAX)
    return int(step)


def step_directory(step: int) -> str:
    """Return the name of a step's directory, with a slash at its end.

    Raises:
        ConfigError: `step` is not a whole number from 0 to ``STEP_MAX``.
    """
    return f"step-{check_step(step):0{STEP_DIGITS}d}/"


def step_of(name: str) -> int | None:
    """Return the step that a directory's name, with or without a slash at its end, stands for; None if it is another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def new_save_id() -> str:
    """Return a random ID: 12 hexadecimal digits."""
    return secrets.token_hex(6)


def data_name(save_id: str, *, rank: int, index: int, prefix: str = "") -> str:
    """Return the name of a data file.

    Args:
        save_id: ID of the save.
        rank: Rank that writes the file.
        index: Number of the file among those of the rank, from 0.
        prefix: Text that the name begins with; it may contain slashes.
    """
    return f"{prefix}__{rank}_{index}-{save_id}{DATA_SUFFIX}"


def manifest_name(save_id: str) -> str:
    """Return the name of a save's manifest."""
    return f"manifest-{save_id}.json"


def saving_name(save_id: str) -> str:
    """Return the name of the marker of a save that has not ended."""
    return f"saving-{save_id}.json"


def save_of_data(name: str) -> str | None:
    """Return the ID of the save that wrote a data file; None for other names."""
    return _id(_DATA, name)


def saves_of_marker(data: Buffer) -> set[str]:
    """Return the IDs of the saves whose data files a commit marker, uint8[n], names; it is not decoded."""
    return {save_id.decode() for save_id in _DATA_IN_MARKER.findall(data)}


def save_of_manifest(name: str) -> str | None:
    """Return the ID of the save that a manifest belongs to; None for other names."""
    return _id(_MANIFEST, name)


def save_of_marker(name: str) -> str | None:
    """Return the ID of the save whose marker this is; None for other names."""
    return _id(_SAVING, name)


def _id(pattern: re.Pattern[str], name: str) -> str | None:
    match = pattern.fullmatch(name)
    return match[1] if match else None
