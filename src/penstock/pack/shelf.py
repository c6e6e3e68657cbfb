"""Where shards are written: a folder of a store, the index beside them, and what packing keeps there.

Who writes is said by ``pack/run``: a run leaves its name there before anything else, and looks before it shows a shard.
Two runs at one destination are nobody's wish, but happen (a queue starts a job again while the first is still alive),
and each would replace the other's shards: the one that began last goes on, the other stops at its next shard.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.crc import crc32c
from penstock.errors import AccessDeniedError, ConfigError, ObjectMissingError
from penstock.index import FOLDER, IndexPlace

if TYPE_CHECKING:
    from penstock.store import Store

KEPT = f"{FOLDER}pack/"
"""What packing keeps beside the shards: plans, and"""

RUN_KEY = f"{KEPT}run"
"""which run writes here;"""

UPLOADS = f"{KEPT}uploads/"
"""of each shard whose parts are going up, and were not committed yet as far as anybody knows, the upload;"""

ENTRIES = f"{FOLDER}mds/"
"""of each MDS shard its entry in ``index.json``."""


class Shelf:
    """Where shards are written.

    Args:
        store: Rooted at the folder.
        run: Name of the run that writes, as ``begin_run`` gave it; None: nobody's yet.
    """

    def __init__(self, store: Store, *, run: str | None = None) -> None:
        self.store = store
        self.run = run
        self.url = store.describe("")
        self.place = IndexPlace(store, FOLDER, base=self.url)

    def note_upload(self, name: str, upload_id: str) -> str:
        """Write down that parts of a shard are going up, so that a later run can drop them; the note's key."""
        key = f"{UPLOADS}{name}.{crc32c(upload_id.encode()):08x}"  # another attempt at the shard has another upload
        self.store.write(key, json.dumps([name, upload_id]).encode())
        return key

    def begin_run(self) -> None:
        """From now on this run writes here, and no other."""
        self.run = f"{socket.gethostname()}, process {os.getpid()}, {secrets.token_hex(4)}"
        self.store.write(RUN_KEY, self.run.encode())

    def check_run(self) -> None:
        """Whether this is still the run that writes here.

        Raises:
            ConfigError: another one has begun.

        Cost: one request.
        """
        if self.run is not None and (other := self._now()) not in (None, self.run):
            raise ConfigError(
                f"another run ({other}) has begun to write to {self.url}, so this one ({self.run}) stops",
                hint="let one end before the next begins there, or give each a folder of its own",
            )

    def end_run(self) -> None:
        """Nobody writes here. Where nothing may be deleted, the name stays, until the next run writes its own."""
        if self._now() == self.run:
            with suppress(AccessDeniedError):
                self.store.delete(RUN_KEY)
        self.run = None

    def _now(self) -> str | None:
        try:
            return bytes(self.store.read(RUN_KEY).data).decode(errors="replace")
        except ObjectMissingError:
            return None
