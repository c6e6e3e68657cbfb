"""The folder that shards are written to, and one shard being written together with its index.

A shard is finished when its index describes the version that lies in the store. The index is written after the shard
was committed, so at whatever moment a run is killed, each shard is either finished or is written again, byte for byte.

Two runs may write to one destination at the same time, for example if a queue starts a job again while the first one is
still alive, and each would replace the other's shards. So a run stores its name in ``pack/run`` before anything else,
and reads it again before it commits a shard: the run that started last continues, and the other one stops at its next shard.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Self

import numpy as np

from penstock.checksums.crc32c import crc32c, sample_crc
from penstock.config import KIB, MIB
from penstock.errors import AccessDeniedError, ConfigError, DataError, ObjectMissingError
from penstock.formats import RESERVED_FIELDS
from penstock.formats.compression import COMPRESSORS
from penstock.formats.mds import MdsWriter
from penstock.index import FOLDER, IndexPlace, ShardIndex, ShardRow
from penstock.index.shard_index import members_of
from penstock.pack.written_formats import prepare, written_format
from penstock.types import lasting_etag

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Any

    from penstock.store import Store
    from penstock.types import Buffer

STATE_PREFIX = f"{FOLDER}pack/"
"""Prefix of what packing keeps beside the shards: plans, and the two below."""

RUN_KEY = f"{STATE_PREFIX}run"
"""Key of the object that names the run that is writing."""

UPLOADS_PREFIX = f"{STATE_PREFIX}uploads/"
"""Prefix of the notes about multipart uploads that have started and may not be committed."""

MDS_ENTRIES_PREFIX = f"{FOLDER}mds/"
"""Prefix of the entries that MDS shards have in ``index.json``, one object for each shard."""

BLOCK_WRITE_BYTES = 1 * MIB
"""Small pieces are collected to this size before they are given to the store's writer."""

PIECE_WRITE_BYTES = 32 * KIB
"""Pieces of this size and larger are given to the writer directly: a call costs as much as copying 20 KB."""

SPOOL_BYTES = 8 * MIB
"""A shard whose head is written last is held in memory up to this size, and in a temporary file beyond it."""


class ShardFolder:
    """The folder of a store that shards are written to, with the index beside them.

    Args:
        store: Store rooted at the folder.
        run: Name of the run that writes, from ``begin_run``; None if no run has begun.
    """

    def __init__(self, store: Store, *, run: str | None = None) -> None:
        self.store = store
        self.run = run
        self.url = store.describe("")
        self.place = IndexPlace(store, FOLDER, base=self.url)

    def note_upload(self, name: str, upload_id: str) -> str:
        """Record that parts of a shard are being uploaded, so that a later run can drop them; return the note's key."""
        key = f"{UPLOADS_PREFIX}{name}.{crc32c(upload_id.encode()):08x}"  # each attempt at a shard has its own upload
        self.store.write(key, json.dumps([name, upload_id]).encode())
        return key

    def begin_run(self) -> None:
        """Make this run the one that writes here."""
        self.run = f"{socket.gethostname()}, process {os.getpid()}, {secrets.token_hex(4)}"
        self.store.write(RUN_KEY, self.run.encode())

    def check_run(self) -> None:
        """Check that this is still the run that writes here.

        Raises:
            ConfigError: Another run has begun.

        Cost: one request.
        """
        if self.run is not None and (other := self._stored_run()) not in (None, self.run):
            raise ConfigError(
                f"another run ({other}) has begun to write to {self.url}, so this one ({self.run}) stops",
                hint="let one run end before the next one starts, or give each its own folder",
            )

    def end_run(self) -> None:
        """Remove this run's name. If the store forbids deleting, it stays until the next run replaces it."""
        if self._stored_run() == self.run:
            with suppress(AccessDeniedError):
                self.store.delete(RUN_KEY)
        self.run = None

    def _stored_run(self) -> str | None:
        try:
            return bytes(self.store.read(RUN_KEY).data).decode(errors="replace")
        except ObjectMissingError:
            return None


class ShardFile:
    """Writes one shard and its index. A context manager: leaving it by an exception leaves nothing behind.

    Args:
        folder: Folder of the shard.
        name: Key of the shard, relative to the store and to the index.
        format_name: A key of ``FORMATS_WRITTEN``.
        key_field: ``__key__`` stores the keys so that they are read back, see ``written_format``. Other values have no
            effect here.

    Cost: five parts of 8 MiB, and 20 bytes and the key for each sample. An MDS shard lies in a temporary file until it
        is complete, because its head says where all samples lie.
    """

    def __init__(self, folder: ShardFolder, name: str, *, format_name: str, key_field: str | None = None) -> None:
        self._folder = folder
        self._store = folder.store
        self._name = name
        self._written = written_format(format_name, key_field)
        self._writer = folder.store.writer(name)
        self._note_key: str | None = None  # key of the note about the multipart upload
        self._shard = self._written.writer(self._put)
        self._spool: IO[bytes] | None = None
        if hasattr(self._shard, "head"):
            self._spool = tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES)  # noqa: SIM115 - closed by _release
        self._compressor = COMPRESSORS[self._written.compression]() if self._written.compression else None
        self._stored_bytes = 0
        self._buffer = memoryview(bytearray(BLOCK_WRITE_BYTES))  # reused: fresh memory costs more than filling it
        self._filled = 0
        self._crc = 0
        self._crcs: list[int] = []
        self._bounds: list[int] = [0]
        self._keys: list[str] | None = []
        self._names: tuple[str, ...] | None = None  # field names that all samples so far share; () if they differ
        self._sizes: list[list[int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()

    @property
    def offset_bytes(self) -> int:
        """Bytes written so far, before compression."""
        return self._bounds[-1]

    @property
    def samples_count(self) -> int:
        """Samples written so far."""
        return len(self._crcs)

    def add(self, sample: Mapping[str, Any]) -> None:
        """Append one sample with its ``__key__``.

        Raises:
            DataError: The format cannot hold the sample; nothing of it was written.
            StoreError: Writing failed; the shard is abandoned.
        """
        key = sample["__key__"]
        prepared = prepare(sample, self._written)
        try:
            span = self._shard.add(prepared)
        except ConfigError as error:
            raise DataError(
                error.what, hint=error.hint, sample_key=key, shard=self._store.describe(self._name)
            ) from error
        self._bounds.append(span.end)
        self._crcs.append(self._crc)
        self._crc = 0
        self._record(prepared, key)

    def _record(self, prepared: dict[str, Any], key: str) -> None:
        """Keep the index's facts about a sample besides its bounds and checksum."""
        read_as = self._written.read_as
        if read_as.startswith("jsonl") and "json" in prepared:
            self._keys = None  # the line itself may hold another key
        if self._keys is not None:
            self._keys.append(key)
        if read_as != "tar" or self._names == ():
            return
        names = sorted(name for name in prepared if name not in RESERVED_FIELDS)
        if self._names is None:
            self._names = tuple(names)
        if names != list(self._names):
            self._names = ()
        else:
            self._sizes.append([len(prepared[name]) for name in names])

    def close(self) -> ShardRow:
        """Commit the shard, then write its index; return its row.

        Raises:
            ConfigError: Another run writes here now.
            StoreError: One of the two writes failed. A shard without an index is written again by the next run.
        """
        size_bytes = self._shard.finish()
        self._flush()
        if self._spool is not None:
            head = self._shard.head()
            size_bytes += len(head)
            self._bounds = [bound + len(head) for bound in self._bounds]
            self._send(head)
            self._spool.seek(0)
            while block := self._spool.read(BLOCK_WRITE_BYTES):
                self._send(block)
        if self._compressor is not None:
            self._store_bytes(self._compressor.flush())
        self._folder.check_run()
        self._writer.close()
        self._release()
        if self._note_key is not None:
            self._store.delete(self._note_key)
        info = self._writer.info
        if info is None or info.etag is None:
            info = self._store.stat(self._name)
        etag = lasting_etag(info.etag) or f"{info.size_bytes}-{info.last_modified_s}"
        written = self._written
        name = (getattr(self._shard, "decided_format", None) if written.has_offsets else None) or written.read_as
        row = ShardRow(self._name, self._stored_bytes, etag, len(self._crcs), name, written.has_offsets)
        if isinstance(self._shard, MdsWriter):
            self._save_mds_entry(self._shard, size_bytes)
        self._folder.place.save_shard(self._index(row))
        return row

    def _index(self, row: ShardRow) -> ShardIndex:
        keys = self._keys
        if not self._written.features.keys:
            keys = [f"{start:012d}" for start in self._bounds[:-1]]
        if not self._written.has_offsets:
            return ShardIndex(row, keys=keys if self._written.compression else None)
        bounds = np.array(self._bounds, np.int64)
        members = members_of(self._names, self._sizes, np.diff(bounds).tolist()) if self._names else None
        crcs = np.array(self._crcs, np.uint32)
        return ShardIndex(row, offsets=bounds, crc32c=crcs, keys=keys, members=members)

    def _save_mds_entry(self, shard: MdsWriter, size_bytes: int) -> None:
        basename = self._name.rpartition("/")[2]
        plain = basename[: basename.rfind(".mds") + 4]
        entry = shard.entry(
            plain, size_bytes=size_bytes, stored_bytes=self._stored_bytes, compression=self._written.compression
        )
        self._store.write(f"{MDS_ENTRIES_PREFIX}{self._name}.json", json.dumps(entry, sort_keys=True).encode())

    def abort(self) -> None:
        """Drop the bytes that were written; idempotent."""
        self._writer.abort()
        self._release()

    def _release(self) -> None:
        self._filled = 0
        self._buffer = memoryview(b"")
        if self._spool is not None:
            self._spool.close()

    # ── from the format's writer, through the buffer, the spool and the compressor, to the store ────────────────────

    def _put(self, data: Buffer) -> None:
        length = len(data)
        self._crc = sample_crc(data, self._crc)
        end = self._filled + length
        if length < PIECE_WRITE_BYTES and end <= BLOCK_WRITE_BYTES:
            self._buffer[self._filled : end] = data
            self._filled = end
            return
        self._flush()
        self._spool_or_send(data)

    def _flush(self) -> None:
        if self._filled:
            self._spool_or_send(self._buffer[: self._filled])
            self._filled = 0

    def _spool_or_send(self, data: Buffer) -> None:
        if self._spool is None:
            self._send(data)
        else:
            self._spool.write(data)

    def _send(self, data: Buffer) -> None:
        self._store_bytes(data if self._compressor is None else self._compressor.compress(data))

    def _store_bytes(self, data: Buffer) -> None:
        self._writer.write(data)
        self._stored_bytes += len(data)
        if self._note_key is None and (upload_id := self._writer.upload_id) is not None:
            self._note_key = self._folder.note_upload(self._name, upload_id)
