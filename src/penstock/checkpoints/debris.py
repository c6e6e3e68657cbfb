"""Debris: files of saves that were killed or failed, and of checkpoints that a later save into the same directory replaced.

Only files whose name carries the ID of such a save are removed. Files of a running save, files of the committed checkpoint, and
whatever else lies in the directory stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.checkpoints import layout, markers
from penstock.checkpoints.directory import committed_manifest, list_directory, read_metadata
from penstock.crc import crc32c
from penstock.errors import CheckpointError

if TYPE_CHECKING:
    from penstock.checkpoints.manifest import CheckpointManifest
    from penstock.checkpoints.markers import SaveMarker
    from penstock.store import Store


def find_debris(store: Store) -> list[SaveMarker]:
    """Return the markers of the saves below a run's URL that are over.

    Cost: one request per 1 000 names directly below the URL, and one for each marker.
    """
    return [marker for marker in markers.find_markers(store) if marker.over]


def remove_debris(store: Store) -> list[SaveMarker]:
    """Remove what killed saves left below a run's URL, and return their markers.

    Raises:
        StoreError: The store failed; what is left will be found again.

    Cost: that of ``find_debris``; for each save that is over, a listing of its directory and a request per 1 000 files.
    """
    found = find_debris(store)
    for marker in found:
        remove_save(store, marker.directory, marker.save_id)
    return found


def remove_save(store: Store, directory: str, save_id: str) -> None:
    """Remove what a save left, its marker last; if it was committed after all, remove only the marker.

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
    the directory meanwhile, nothing is removed: that save removes what it replaces.

    Args:
        store: Store of the run.
        directory: Prefix of the checkpoint's directory.
        manifest: Manifest of the checkpoint that is committed there.
    """
    present = list_directory(store, directory)
    replaced = {save for name in present if (save := _save_of(name)) is not None} - {manifest.save_id}
    if replaced:
        replaced -= {marker.save_id for marker in markers.find_markers(store)}
        # Only now: one of these saves may have committed and ended after this one committed.
        if not _is_committed(store, directory, manifest):
            return
        _delete(store, directory, [name for name in present if _save_of(name) in replaced])


def _is_committed(store: Store, directory: str, manifest: CheckpointManifest) -> bool:
    """Whether the commit marker that is there now is that of `manifest`."""
    try:
        metadata = read_metadata(store, directory)
    except CheckpointError:  # somebody has removed it
        return False
    return (len(metadata), crc32c(metadata)) == (manifest.metadata_bytes, manifest.metadata_crc32c)


def _save_of(name: str) -> str | None:
    return layout.save_of_data(name) or layout.save_of_manifest(name)


def _delete(store: Store, directory: str, names: list[str]) -> None:
    """Delete files, manifests last: a directory with nothing but data could belong to anybody."""
    last = [name for name in names if layout.save_of_manifest(name)]
    for group in ([name for name in names if name not in last], last):
        if group:
            store.delete([directory + name for name in group])
