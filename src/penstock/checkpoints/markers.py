"""Markers of saves that have not ended, by which the files of killed saves are told from those of running ones.

A save writes its marker below the run's URL before anything else, writes it again every minute, and deletes it when it has
ended. A save is over, and what it wrote without committing may be deleted, if

- its process has ended, which a process of the same machine can see, or it ended its save in this process; or
- its marker was not renewed for ``LEASE_S``. Both times that are compared are the store's own, so no clock has to be right. If
  a store does not tell its time, as a directory does not, this machine's time is used.

A process that was stopped for longer than that and goes on will not commit a checkpoint of which files were deleted: whoever
commits lists the directory first (``saving.py``).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoints import layout
from penstock.errors import ObjectMissingError, StoreError
from penstock.store.answers import http_date_s
from penstock.text.json_text import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.store import Store
    from penstock.types import ObjectInfo

RENEWAL_S = 60.0
LEASE_S = 15 * 60.0
"""A running save renews its marker 15 times in this time, so a store that fails for minutes makes nobody believe it is over."""

MARKER_BYTES_MAX = 64 * 1024

_running: set[str] = set()  # IDs of the saves that run in this process


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveMarker:
    """The marker of a save that has not ended, or was killed.

    Attributes:
        save_id: ID of the save.
        directory: Prefix of the checkpoint's directory below the run's URL.
        over: Whether the save has ended, so that its files may be deleted.
        renewed_s: When the marker was written last, in seconds since the epoch, by the store's clock.
        holder: Description of the process in the marker; empty if it cannot be read.
    """

    save_id: str
    directory: str
    over: bool
    renewed_s: float
    holder: dict[str, Any]


def _this_process() -> dict[str, Any]:
    return {
        "machine": _text("/proc/sys/kernel/random/boot_id"),
        "namespace": _link("/proc/self/ns/pid"),
        "process_id": os.getpid(),
        "started": _started(os.getpid()),
        "host": socket.gethostname(),
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return str(Path(path).readlink())
    except OSError:
        return ""


def _started(process_id: int) -> str | None:
    """Return when a process started, in ticks since the machine did; None if it has ended."""
    fields = _text(f"/proc/{process_id}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in ("Z", "X") else None


def write_marker(store: Store, save_id: str, directory: str) -> None:
    """Write the marker of a save of this process, or renew it. Cost: one request."""
    body = {"penstock_save": 1, "directory": directory, **_this_process()}
    store.write(layout.saving_name(save_id), json.dumps(body).encode())


def remember(save_id: str) -> None:
    """Note that a save of this process runs, so that its files stay."""
    _running.add(save_id)


def forget(save_id: str) -> None:
    """Note that a save of this process has ended, so that its files may be deleted if they were not committed."""
    _running.discard(save_id)


class Renewal:
    """A thread that renews a save's marker until ``close()``.

    Args:
        store: The store of the run.
        save_id: ID of the save.
        directory: Prefix of the checkpoint's directory.
    """

    def __init__(self, store: Store, save_id: str, directory: str) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=_renew, args=(store, save_id, directory, self._ended), name="penstock-save", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Let the thread end, without waiting for it. Any thread may call it, and a finaliser."""
        self._ended.set()

    def close(self) -> None:
        """End the thread, so that the marker is not written again. Idempotent."""
        self._ended.set()
        self._thread.join()


def _renew(store: Store, save_id: str, directory: str, ended: threading.Event) -> None:
    while not ended.wait(RENEWAL_S):
        with suppress(StoreError):  # the save itself will notice a store that fails
            write_marker(store, save_id, directory)


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def find_markers(store: Store) -> list[SaveMarker]:
    """Return the markers below the run's URL, that of every save which has not ended or was killed.

    Cost: one request per 1 000 names directly below the URL, and one for each marker; one more if no save of this process runs.
    """
    return read_markers(store, store.list("saving-", recursive=False))


def read_markers(store: Store, listed: Iterable[ObjectInfo]) -> list[SaveMarker]:
    """Read the markers among the objects `listed` below the run's URL. Cost: one request for each."""
    infos = {save_id: info for info in listed if (save_id := layout.save_of_marker(info.key)) is not None}
    newest_s = max((info.last_modified_s or 0 for info in infos.values()), default=0)
    if infos and not _running & set(infos):  # no marker of ours tells the store's time
        newest_s = max(newest_s, _store_time_s(store, infos.values()))
    here = _this_process()
    found = []
    for save_id, info in infos.items():
        renewed_s = info.last_modified_s or newest_s
        try:
            holder = _decoded(bytes(store.read(info.key).data)) if info.size_bytes <= MARKER_BYTES_MAX else {}
        except ObjectMissingError:  # that save has just ended
            continue
        over = _is_over(save_id, holder, here) or newest_s - renewed_s > LEASE_S
        directory = holder.get("directory")
        found.append(
            SaveMarker(
                save_id=save_id,
                directory=directory if isinstance(directory, str) else "",
                over=over and isinstance(directory, str),
                renewed_s=renewed_s,
                holder=holder,
            )
        )
    return found


def _store_time_s(store: Store, infos: Iterable[ObjectInfo]) -> float:
    """Return the store's time in seconds since the epoch. Cost: one request, for an object of `infos` that is still there."""
    for info in infos:
        with suppress(ObjectMissingError):
            date_s = http_date_s(store.stat(info.key).headers.get(b"date", b""))
            return time.time() if date_s is None else date_s
    return 0


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        row = parse_json(data)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}


def _is_over(save_id: str, holder: dict[str, Any], here: dict[str, Any]) -> bool:
    """Whether the process that made a marker can be seen to have ended, or to have ended its save."""
    if not here["machine"] or any(holder.get(name) != here[name] for name in ("machine", "namespace")):
        return False
    process_id = holder.get("process_id")
    if not isinstance(process_id, int):
        return False
    if process_id == here["process_id"] and holder.get("started") == here["started"]:
        return save_id not in _running
    started = _started(process_id)
    return started is None or started != holder.get("started")
