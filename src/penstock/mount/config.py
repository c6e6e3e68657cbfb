"""The configuration of a mount, which is sent to the process that serves it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

TTL_S = 60.0
"""How long names may be used if nothing else is said."""

MODE_MAX = 0o777


@dataclass(frozen=True, slots=True, kw_only=True)
class MountConfig:
    """A mount.

    Attributes:
        url: URL to mount: ``s3://bucket/prefix/``, a directory, or any URL that ``connect`` takes.
        directory: Absolute path of the mount point.
        connection: Further arguments of ``connect``.
        manifest: URL of a manifest; if it is given, nothing is listed.
        metadata_ttl_s: Seconds for which a name and its node may be used without asking the store; ``math.inf``
            for as long as the mount lives.
        negative_ttl_s: The same for names that do not exist; None takes `metadata_ttl_s`.
        uid: Owner of all files; None takes the user of the process.
        gid: Group of all files; None takes the group of the process.
        file_mode: Permissions of files.
        directory_mode: Permissions of directories.
        umask: Permissions that neither files nor directories have.
        allow_other: Whether other users may use the mount.
        nonempty: Whether the directory may have contents, which the mount hides.
        auto_unmount: Whether the mount disappears when the process that serves it is killed.
    """

    url: str
    directory: str
    connection: Mapping[str, Any] = field(default_factory=dict)
    manifest: str | None = None
    metadata_ttl_s: float = TTL_S
    negative_ttl_s: float | None = None
    uid: int | None = None
    gid: int | None = None
    file_mode: int = 0o444
    directory_mode: int = 0o555
    umask: int = 0
    allow_other: bool = False
    nonempty: bool = False
    auto_unmount: bool = True

    def __post_init__(self) -> None:
        if not os.path.isabs(self.directory):  # noqa: PTH117 - the path is text
            raise ConfigError(f"directory={self.directory!r} must be an absolute path")
        for name in ("metadata_ttl_s", "negative_ttl_s"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 <= value <= math.inf):
                raise ConfigError(f"{name}={value!r} must be at least 0 seconds", hint="math.inf never asks again")
        for name in ("file_mode", "directory_mode", "umask"):
            mode = getattr(self, name)
            if not isinstance(mode, int) or not 0 <= mode <= MODE_MAX:
                raise ConfigError(f"{name}={mode!r} must lie in [0o000, 0o777]")
        for name in ("uid", "gid"):
            number = getattr(self, name)
            if number is not None and (not isinstance(number, int) or not 0 <= number < 1 << 32):
                raise ConfigError(f"{name}={number!r} must be a number in [0, 2**32)")
