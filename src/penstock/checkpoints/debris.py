"""Debris: files of saves that were killed or failed, and of checkpoints that a later save into the same directory replaced.

A save writes its marker below the run's URL before anything else, writes it again every minute, and deletes it when it has
ended. A save is over, and the files that it did not commit may be deleted, if

- its process has ended, which a process of the same machine can see, or it ended its save in this process; or
- its marker was not renewed for ``LEASE_S``. Both times that are compared are the store's own, so no clock has to be right. If
  a store does not tell its time, as a directory does not, this machine's time is used.

A process that was stopped for longer than that and continues will not commit a checkpoint whose files were deleted, because
a commit lists the directory first (``saving.py``).

Only files whose name carries the ID of such a save are removed. Files of a running save, files of the committed checkpoint,
and all other files in the directory stay.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.checkpoints import layout
from penstock.checkpoints.directory import committed_manifest, is_replaced, list_directory
from penstock.errors import CheckpointError, ObjectMissingError, StoreError
from penstock.store.answers import http_date_s
from penstock.text.json_text import parse_json

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable

    from penstock.checkpoints.manifest import CheckpointManifest
    from penstock.store import Store
    from penstock.types import ObjectInfo


RENEWAL_S = 60.0
LEASE_S = 15 * 60.0
"""A running save renews its marker 15 times in this time, so a store that fails for minutes makes nobody believe it is over."""

MARKER_BYTES_MAX = 64 * 1024

running: set[str] = set()
"""IDs of the saves that run in this process. Their files stay."""


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


def renew_marker(store: Store, save_id: str, directory: str, ended: threading.Event) -> None:
    """Renew the marker of a save of this process until `ended` is set. Run by a thread of its own."""
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
    if infos and not running & set(infos):  # no marker of ours tells the store's time
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
        return save_id not in running
    started = _started(process_id)
    return started is None or started != holder.get("started")


def find_debris(store: Store) -> list[SaveMarker]:
    """Return the markers of the saves below a run's URL that are over.

    Cost: one request per 1 000 names directly below the URL, and one for each marker.
    """
    return [marker for marker in find_markers(store) if marker.over]


def remove_debris(store: Store, found: list[SaveMarker]) -> list[SaveMarker]:
    """Remove the files of the saves `found` below a run's URL, and return the saves.

    Raises:
        StoreError: The store failed; remaining files will be found again.

    Cost: for each save a listing of its directory and a request per 1 000 files.
    """
    for marker in found:
        remove_save(store, marker.directory, marker.save_id)
    return found


def remove_save(store: Store, directory: str, save_id: str) -> None:
    """Remove the files of a save, its marker last; if it was committed after all, remove only the marker.

    Args:
        store: Store of the run.
        directory: Prefix of the checkpoint's directory.
        save_id: ID of the save.
    """
    present = list_directory(store, directory)
    committed = False
    if layout.COMMIT_MARKER in present:
        try:
            manifest = committed_manifest(store, directory, present)
            committed = manifest is not None and manifest.save_id == save_id
        except CheckpointError:  # nobody can tell which save it is of, so nothing is removed
            committed = True
    if not committed:
        _delete(store, directory, [name for name in present if _save_of(name) == save_id])
    store.delete(layout.saving_name(save_id))


def remove_replaced(store: Store, directory: str, manifest: CheckpointManifest) -> None:
    """Remove the files of the checkpoints that were committed in a directory before this one.

    Files of saves that are running stay, and so do files that no save with a manifest wrote. If another save has committed in
    the directory meanwhile, nothing is removed: that save removes the files that it replaces.

    Args:
        store: Store of the run.
        directory: Prefix of the checkpoint's directory.
        manifest: Manifest of the checkpoint that is committed there.
    """
    present = list_directory(store, directory)
    replaced = {save for name in present if (save := _save_of(name)) is not None} - {manifest.save_id}
    if replaced:
        replaced -= {marker.save_id for marker in find_markers(store)}
        # Only now: one of these saves may have committed and ended after this one committed.
        if is_replaced(store, directory, manifest.metadata_crc32c):
            return
        _delete(store, directory, [name for name in present if _save_of(name) in replaced])


def find_replaced(store: Store) -> list[SaveMarker]:
    """Return the saves without a marker whose files lie beside those of a later checkpoint of the same step.

    Two runs that save the same steps leave such files if one is killed while the other replaces its checkpoint. Files that
    are newer than the checkpoint are not counted, because somebody may be copying another one there.

    Cost: a listing of everything below the run's URL, that of ``find_markers``, and one to three requests for each step with
    files of several saves.
    """
    steps: dict[str, dict[str, ObjectInfo]] = {}
    for key, info in list_directory(store, "").items():
        directory, slash, name = key.partition("/")
        if slash and layout.step_of(directory) is not None:
            steps.setdefault(directory + slash, {})[name] = info
    running = {marker.save_id for marker in find_markers(store)}  # after the listing: each save begins with a marker
    found = []
    for directory, present in steps.items():
        saves = {save for name in present if (save := _save_of(name)) is not None}
        if len(saves) < 2 or layout.COMMIT_MARKER not in present:
            continue
        try:
            manifest = committed_manifest(store, directory, present)
        except (CheckpointError, ObjectMissingError):  # nobody can tell, or it is being replaced
            continue
        committed_s = present[layout.COMMIT_MARKER].last_modified_s or 0
        for save_id in sorted(saves - running - {manifest.save_id if manifest is not None else ""}):
            times = [info.last_modified_s for name, info in present.items() if _save_of(name) == save_id]
            if manifest is not None and all(each is not None and each <= committed_s for each in times):
                found.append(
                    SaveMarker(save_id=save_id, directory=directory, over=True, renewed_s=committed_s, holder={})
                )
    return found


def _save_of(name: str) -> str | None:
    return layout.save_of_data(name) or layout.save_of_manifest(name)


def _delete(store: Store, directory: str, names: list[str]) -> None:
    """Delete files, manifests last: a directory with nothing but data could belong to anybody."""
    last = [name for name in names if layout.save_of_manifest(name)]
    for group in ([name for name in names if name not in last], last):
        if group:
            store.delete([directory + name for name in group])
