"""``CheckpointSave``: one save from its marker to its commit, in the process that coordinates it."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Self

from penstock.checkpoints import debris, layout
from penstock.checkpoints.directory import check_files, is_replaced, list_directory
from penstock.checkpoints.manifest import BLOCK_BYTES, CheckpointManifest
from penstock.checksums.crc32c import crc32c
from penstock.config import check_whole
from penstock.errors import AccessDeniedError, ClosedError, StoreError
from penstock.version import __version__

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.checkpoints.manifest import CheckpointFile
    from penstock.store import Store
    from penstock.types import Buffer

_log = logging.getLogger("penstock.checkpoints")


class CheckpointSave:
    """A save that is running: it has a marker, which is renewed, until ``commit`` or ``close``.

    Any process may write the data files, under names from ``layout.data_name(save.save_id, ...)``.

    Args:
        store: Store of the run; ``close`` does not close it.
        directory: Prefix of the checkpoint's directory, such as ``step-0000001000/``; ``""`` for the run's URL itself.
        world_size: Number of ranks that save.
        step: Step of the training; None takes that of the directory's name, if it has one.

    Attributes:
        save_id: ID of the save.

    Raises:
        ConfigError: The step or the world size is not a whole number within its bounds.
        StoreError: The marker cannot be written.

    Cost: one request, and one each minute, from a thread of its own.
    """

    def __init__(self, store: Store, directory: str = "", *, world_size: int = 1, step: int | None = None) -> None:
        check_whole("world_size", world_size, 1)
        self.save_id = layout.new_save_id()
        self._step = layout.step_of(directory) if step is None else layout.check_step(step)
        self._store, self._directory, self._world_size = store, directory, world_size
        self._open = True
        debris.running.add(self.save_id)
        try:
            debris.write_marker(store, self.save_id, directory)
        except BaseException:
            debris.running.discard(self.save_id)
            raise
        ended = threading.Event()
        self._renewal = threading.Thread(
            target=debris.renew_marker, args=(store, self.save_id, directory, ended), name="penstock-save", daemon=True
        )
        self._renewal.start()
        self._finalizer = weakref.finalize(self, _drop, ended, self.save_id)
        self._ended = ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def commit(
        self,
        metadata: Buffer,
        files: Sequence[CheckpointFile],
        *,
        versions: Mapping[str, str] | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> CheckpointManifest:
        """Write the manifest and then the commit marker, and remove the files that it replaces and those of killed saves.

        Args:
            metadata: Contents of the commit marker, uint8[n].
            files: The data files, which have been written.
            versions: Versions of the programs that wrote the files.
            block_bytes: Length of the blocks of a tensor that have a checksum each.

        Raises:
            CheckpointError: A file is missing or has another size; nothing was committed.
            StoreError: The store failed. Nothing was committed, unless the answer to the very last write was lost.
            ClosedError: The save has ended.

        Cost: two writes, a read, a listing of the directory and one of the run, and a request per 1 000 files removed.
        """
        if not self._open:
            raise ClosedError(f"the save {self.save_id} has ended")
        manifest = CheckpointManifest(
            save_id=self.save_id,
            step=self._step,
            world_size=self._world_size,
            saved_s=round(time.time(), 3),
            versions={"penstock": __version__, **(versions or {})},
            metadata_bytes=len(metadata),
            metadata_crc32c=crc32c(metadata),
            block_bytes=block_bytes,
            files=tuple(files),
        )
        self._store.write(self._directory + layout.manifest_name(self.save_id), manifest.encode())
        self._check(manifest)
        self._store.write(self._directory + layout.COMMIT_MARKER, metadata)
        self._stop_renewing()
        try:
            debris.remove_replaced(self._store, self._directory, manifest)
            self._end(delete=True)
            # Only now: whoever replaced this checkpoint before has seen the marker, and kept its files.
            if is_replaced(self._store, self._directory, manifest.metadata_crc32c):
                debris.remove_save(self._store, self._directory, self.save_id)
            debris.remove_debris(self._store, debris.find_debris(self._store))
        except StoreError as error:  # credentials that may write need not be allowed to delete; the checkpoint is there
            _log.warning("The checkpoint is committed, but old files were not removed: %s", error)
        self._end()
        return manifest

    def _check(self, manifest: CheckpointManifest) -> None:
        try:
            present = list_directory(self._store, self._directory)
        except AccessDeniedError:  # credentials that may write need not be allowed to list
            return
        for error in check_files(self._store, self._directory, manifest, present):
            raise error

    def close(self) -> None:
        """End the save; if it was not committed, remove its files, as far as the store permits. Idempotent.

        When it is called, no process may be writing files of this save.
        """
        if not self._open:
            return
        self._end()
        try:
            debris.remove_save(self._store, self._directory, self.save_id)
        except StoreError as error:
            _log.warning("Files of a save that failed were not removed; the next save removes them: %s", error)

    def _stop_renewing(self) -> None:
        """End the thread that renews the marker, so that it is not written again. Idempotent."""
        self._ended.set()
        self._renewal.join()

    def _end(self, *, delete: bool = False) -> None:
        self._open = False
        self._stop_renewing()
        self._finalizer.detach()
        debris.running.discard(self.save_id)
        if delete:
            self._store.delete(layout.saving_name(self.save_id))


def _drop(ended: threading.Event, save_id: str) -> None:
    ended.set()
    debris.running.discard(save_id)
