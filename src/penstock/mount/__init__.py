"""A bucket as a read-only file system. See README.md in this folder.

``penstock.mount`` can be called: ``ps.mount(url, directory)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.system.lazy import lazy_getattr, make_callable

if TYPE_CHECKING:
    from penstock.mount.config import MountConfig as MountConfig
    from penstock.mount.mount_process import RunningMount as RunningMount
    from penstock.mount.mount_process import mount as mount
    from penstock.mount.mount_process import start_mount as start_mount

_ORIGIN = {
    "MountConfig": "config",
    "RunningMount": "mount_process",
    "mount": "mount_process",
    "start_mount": "mount_process",
}

__all__ = sorted(_ORIGIN)  # noqa: PLE0605 - computed from the one table


if TYPE_CHECKING:
    from penstock.mount import mount_process as _mount_process

    class MountModule:
        """The type of ``ps.mount`` for type checkers; a ``ModuleType`` would accept every name."""

        __call__ = mount = staticmethod(mount)
        RunningMount = _mount_process.RunningMount

else:
    __getattr__ = lazy_getattr(__name__, _ORIGIN)
    make_callable(__name__, "mount")
