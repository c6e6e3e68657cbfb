"""Measures this machine: cores, memory, the network, and the disk on which a cache would lie."""

from __future__ import annotations

import math
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from penstock.advise.profiles import MachineProfile
from penstock.config import MIB, cores_count, memory_bytes_max

WRITTEN_BYTES = 64 * MIB  # of the file whose reading is timed, on a disk that has ten times as much free space
_DISKS = ("/dev/", "overlay")


def measure_machine() -> MachineProfile:
    """Return what this process may use of the machine.

    Cost: one file of 64 MiB, which is written, read and removed.
    """
    speeds = []
    for path in Path("/sys/class/net").glob("*/speed"):
        with suppress(OSError, ValueError):
            speeds.append(int(path.read_text()) * 1e6 / 8)  # the file has Mbit/s; -1 is unknown
    disks = _disks()
    disk_path = max(disks, key=disks.__getitem__, default=None)
    return MachineProfile(
        cores_count=cores_count(),
        memory_bytes=memory_bytes_max(),
        disk_path=disk_path,
        disk_free_bytes=disks.get(disk_path or "", 0),
        disk_bytes_per_s=math.inf if disk_path is None else _read_bytes_per_s(disk_path, disks[disk_path]),
        network_bytes_per_s=max((speed for speed in speeds if speed > 0), default=None),
    )


def _disks() -> dict[str, int]:
    """The free bytes of directories on disks that this user may write to; those in memory are left out."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    devices = {path: device for device, path, *_ in mounts}
    usual = [tempfile.gettempdir(), str(Path("~/.cache").expanduser()), str(Path.cwd())]
    found = {}
    for path in [*usual, *devices]:
        above = [mount for mount in devices if f"{os.path.realpath(path)}/".startswith(f"{mount.rstrip('/')}/")]
        if (
            above
            and devices[max(above, key=len)].startswith(_DISKS)
            and Path(path).is_dir()
            and os.access(path, os.W_OK)
        ):
            status = os.statvfs(path)
            found[path] = status.f_bavail * status.f_frsize
    return found


def _read_bytes_per_s(folder: str, free_bytes: int) -> float:
    """The rate at which a file is read that the kernel no longer has in memory; infinite if it cannot be measured."""
    block = bytearray(os.urandom(4 * MIB))
    with suppress(OSError):
        if free_bytes > 10 * WRITTEN_BYTES:
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                for _ in range(WRITTEN_BYTES // len(block)):
                    file.write(block)
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                file.seek(0)
                start_s = time.monotonic()
                while file.readinto(block):
                    pass
                return WRITTEN_BYTES / (time.monotonic() - start_s)
    return math.inf
