"""Debris: files of saves that were killed or failed, and of checkpoints that a later save into the same directory replaced.

Only files whose name carries the ID of such a save are removed. Files of a running save, files of the committed checkpoint, and
whatever else lies in the directory stay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.checkpoints import layout, markers
from penstock.checkpoints.directory import committed_manifest, is_replaced, list_directory
from penstock.checkpoints.markers import SaveMarker
from penstock.errors import CheckpointError, ObjectMissingError

if TYPE_CHECKING:
    from penstock.checkpoints.manifest import CheckpointManifest
    from penstock.store import Store
    from penstock.types import ObjectInfo


def find_debris(store: Store) -> list[SaveMarker]:
    """Return the markers of the saves below a run's URL that are over.

    Cost: one request per 1 000 names directly below the URL, and one for each marker.
    """
    return [marker for marker in markers.find_markers(store) if marker.over]


def remove_debris(store: Store, found: list[SaveMarker]) -> list[SaveMarker]:
    """Remove what the saves `found` left below a run's URL, and return them.

    Raises:
        StoreError: The store failed; what is left will be found again.

    Cost: for each save a listing of its directory and a request per 1 000 files.
    """
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
        if is_replaced(store, directory, manifest.metadata_crc32c):
            return
        _delete(store, directory, [name for name in present if _save_of(name) in replaced])


def remove_if_replaced(store: Store, directory: str, manifest: CheckpointManifest) -> None:
    """Remove the files of a save that has committed and ended if another one has committed in the directory since."""
    if is_replaced(store, directory, manifest.metadata_crc32c):
        remove_save(store, directory, manifest.save_id)


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
    running = {
        marker.save_id for marker in markers.find_markers(store)
    }  # after the listing: each save begins with a marker
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
