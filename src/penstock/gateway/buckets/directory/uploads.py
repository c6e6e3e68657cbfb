"""Multipart uploads of one bucket: a hidden folder for each, with a file for each part. Every function here blocks.

An upload survives a restart, as in S3. Its folder is locked while parts are renamed into it (shared) and while it is completed
or aborted (alone), so that a part that arrives late never becomes visible in half.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import shutil
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from penstock.checksums import algorithms as checksums
from penstock.checksums.combining import CRCS, combined_crc
from penstock.gateway.buckets.directory.files import bucket_missing, make_below
from penstock.gateway.objects import S3Error
from penstock.gateway.s3_text import UPLOAD_MESSAGES
from penstock.store.local import copy_range, sync_directory
from penstock.store.records import StoredRecord
from penstock.store.upload import multipart_etag
from penstock.types import ByteRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from penstock.gateway.buckets.directory.files import BucketFiles, StagedFile, StoredObject
    from penstock.types import Part

PART_BYTES_MIN = 5 << 20
"""Smallest size of a part in bytes, except for the last part; S3's limit."""

_ID = re.compile(r"[0-9a-f]{32}")
_ABOUT = "upload.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class MultipartUpload:
    """A multipart upload that is in progress.

    Attributes:
        upload_id: ID of the upload.
        key: Key of the object to be.
        created_s: When it was started, in seconds since 1970.
        headers: Headers that will be sent with the object.
        tags: Tags of the object to be.
        algorithm: Checksum that each part has; empty for none.
        checksum_type: ``"COMPOSITE"`` or ``"FULL_OBJECT"``.
    """

    upload_id: str
    key: str
    created_s: float
    headers: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    algorithm: str = ""
    checksum_type: str = "COMPOSITE"


class StoredPart(NamedTuple):
    """A part that was received.

    Attributes:
        number: Number of the part, from 1.
        size_bytes: Size in bytes.
        modified_s: When it arrived, in seconds since 1970.
        etag: MD5 of the part in hexadecimal.
        checksums: Checksums of the part in base64, by algorithm.
    """

    number: int
    size_bytes: int
    modified_s: float
    etag: str
    checksums: Mapping[str, str]


class MultipartUploads:
    """The uploads of one bucket.

    Args:
        files: The bucket's files.
    """

    def __init__(self, files: BucketFiles) -> None:
        self._files = files
        self._folder = files.hidden / "uploads"

    def begin(self, upload: MultipartUpload) -> None:
        """Make the folder of an upload."""
        self._files.places(upload.key)  # refuses keys that are not valid
        folder = self._folder / upload.upload_id
        hidden = self._folder / f".{upload.upload_id}"
        make_below(self._files.folder, hidden)
        (hidden / _ABOUT).write_text(json.dumps(asdict(upload)), encoding="utf-8")
        hidden.rename(folder)

    def get(self, key: str, upload_id: str) -> MultipartUpload:
        """Return an upload.

        Raises:
            S3Error: There is no such upload of this key.
        """
        upload = self._loaded(upload_id) if _ID.fullmatch(upload_id) else None
        if upload is None or upload.key != key:
            if not self._files.folder.is_dir():
                raise bucket_missing(self._files.folder.name)
            raise _upload_missing(upload_id)
        return upload

    def _loaded(self, upload_id: str) -> MultipartUpload | None:
        try:
            return MultipartUpload(**json.loads((self._folder / upload_id / _ABOUT).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def all(self) -> list[MultipartUpload]:
        """Return all uploads, in the order of their keys, then of their starts."""
        try:
            names = os.listdir(self._folder)  # noqa: PTH208 - names are all that is needed
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = [upload for name in names if _ID.fullmatch(name) and (upload := self._loaded(name)) is not None]
        return sorted(found, key=lambda upload: (upload.key, upload.created_s, upload.upload_id))

    @contextmanager
    def _locked(self, upload: MultipartUpload, *, alone: bool) -> Iterator[Path]:
        folder = self._folder / upload.upload_id
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _upload_missing(upload.upload_id) from error
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink == 0:
                raise _upload_missing(upload.upload_id)
            yield folder
        except BlockingIOError as error:
            message = "A conflicting conditional operation is currently in progress against this resource."
            raise S3Error("OperationAborted", message) from error
        finally:
            os.close(fd)

    # ── parts ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def put_part(self, upload: MultipartUpload, number: int, *, staged: StagedFile, record: StoredRecord) -> StoredPart:
        """Make a file the part of a number, in the place of an earlier one."""
        stamped = self._files.records.save(staged.fd, record)
        if self._files.is_durable:
            os.fsync(staged.fd)
        with self._locked(upload, alone=False) as folder:
            path = folder / f"{number:05}"
            before = _status(path)
            staged.path.rename(path)
            staged.is_placed = True
            if before is not None:
                self._files.records.drop(before)
        status = os.fstat(staged.fd)
        return StoredPart(number, status.st_size, status.st_mtime_ns / 1e9, stamped.etag, stamped.checksums)

    def parts(self, upload: MultipartUpload) -> list[StoredPart]:
        """Return the parts that have arrived, in the order of their numbers."""
        folder = self._folder / upload.upload_id
        try:
            names = sorted(name for name in os.listdir(folder) if name.isdigit())  # noqa: PTH208
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _upload_missing(upload.upload_id) from error
        found = []
        for name in names:
            status = _status(folder / name)
            record = self._files.records.load(str(folder / name), status) if status is not None else None
            if status is not None and record is not None:
                modified_s = status.st_mtime_ns / 1e9
                found.append(StoredPart(int(name), status.st_size, modified_s, record.etag, record.checksums))
        return found

    def abort(self, upload: MultipartUpload) -> None:
        """Drop an upload and its parts."""
        with self._locked(upload, alone=True) as folder:
            self._drop(folder)

    def _drop(self, folder: Path) -> None:
        (folder / _ABOUT).unlink(missing_ok=True)  # first, so that a killed process does not leave an upload
        for path in folder.iterdir():
            status = _status(path)
            path.unlink(missing_ok=True)
            if status is not None:
                self._files.records.drop(status)
        folder.rmdir()

    def remove_debris(self) -> None:
        """Remove the folders of uploads that were being begun or dropped when their process was killed."""
        with suppress(FileNotFoundError, NotADirectoryError):
            for folder in self._folder.iterdir():
                is_old = time.time() - folder.stat().st_mtime > 3600
                if is_old and not (_ID.fullmatch(folder.name) and (folder / _ABOUT).exists()):
                    shutil.rmtree(folder, ignore_errors=True)

    # ── completing ─────────────────────────────────────────────────────────────────────────────────────────────────

    def complete(
        self,
        upload: MultipartUpload,
        named: list[Part],
        *,
        expected: Mapping[str, str],
        size_bytes: int | None,
        check: Callable[[StoredObject | None], None],
    ) -> StoredObject:
        """Join parts to an object.

        Args:
            upload: The upload.
            named: The parts that the client names.
            expected: Checksums of the whole object that the client expects, by algorithm.
            size_bytes: Size of the object that the client expects; None for any.
            check: Raises ``S3Error`` if the current version of the object forbids it.

        Cost: copies all parts inside the kernel; XFS and Btrfs share their blocks instead.
        """
        with self._locked(upload, alone=True) as folder:
            if (completed := self.completed(upload.key, upload.upload_id, named)) is not None:
                self._drop(folder)  # which a killed process did not get to
                return completed
            parts = _chosen(self.parts(upload), named)
            if size_bytes is not None and sum(part.size_bytes for part in parts) != size_bytes:
                message = "The provided 'x-amz-mp-object-size' header value does not match what was computed."
                raise S3Error("InvalidRequest", message)
            record = _joined_record(upload, parts)
            _check_expected(expected, record)
            check(self._files.find(upload.key))
            with self._files.staging.create() as staged:
                for part in parts:
                    _append(folder / f"{part.number:05}", part, staged)
                stored = self._files.commit(upload.key, staged, record=record, check=check)
            self._drop(folder)
        if self._files.is_durable:
            sync_directory(self._folder)
        return stored

    def completed(self, key: str, upload_id: str, named: list[Part]) -> StoredObject | None:
        """Return the object that an upload became, if it consists of the named parts and was not replaced; otherwise None."""
        stored = self._files.find(key)
        record = stored.record if stored is not None else None
        is_same = (
            record is not None
            and record.upload_id == upload_id
            and record.etag == multipart_etag(part.etag for part in named)
        )
        return stored if is_same else None


def _append(path: Path, part: StoredPart, staged: StagedFile) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        copy_range(fd, ByteRange(0, part.size_bytes), staged.fd)
    finally:
        os.close(fd)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None


def _chosen(stored: list[StoredPart], named: list[Part]) -> list[StoredPart]:
    """Return the stored parts that a client names, after all of S3's checks."""
    numbers = [part.part_number for part in named]
    if any(one >= other for one, other in pairwise(numbers)):
        raise S3Error("InvalidPartOrder", UPLOAD_MESSAGES["InvalidPartOrder"])
    by_number = {part.number: part for part in stored}
    found = []
    for part in named:
        match = by_number.get(part.part_number)
        if (
            match is None
            or match.etag != part.etag
            or any(match.checksums.get(n) != v for n, v in part.checksums.items())
        ):
            details = {"PartNumber": str(part.part_number)}
            raise S3Error("InvalidPart", UPLOAD_MESSAGES["InvalidPart"], details=details)
        found.append(match)
    for match in found[:-1]:
        if match.size_bytes < PART_BYTES_MIN:
            details = {
                "ProposedSize": str(match.size_bytes),
                "MinSizeAllowed": str(PART_BYTES_MIN),
                "PartNumber": str(match.number),
                "ETag": match.etag,
            }
            message = "Your proposed upload is smaller than the minimum allowed size"
            raise S3Error("EntityTooSmall", message, details=details)
    return found


def _joined_record(upload: MultipartUpload, parts: list[StoredPart]) -> StoredRecord:
    name, kind = upload.algorithm, upload.checksum_type
    sums = [part.checksums.get(name, "") for part in parts] if name else []
    has_sums = bool(sums) and all(sums)
    return StoredRecord(
        etag=multipart_etag(part.etag for part in parts) or "",
        upload_id=upload.upload_id,
        headers=upload.headers,
        tags=upload.tags,
        checksums={name: _joined_checksum(name, kind, parts)} if has_sums else {},
        checksum_type=kind if has_sums else "FULL_OBJECT",
        part_sizes_bytes=tuple(part.size_bytes for part in parts),
        part_checksums=tuple(sums) if has_sums else (),
    )


def _joined_checksum(name: str, kind: str, parts: list[StoredPart]) -> str:
    digests = [base64.b64decode(part.checksums[name]) for part in parts]
    if kind == "COMPOSITE":
        return f"{checksums.encode(name, b''.join(digests))}-{len(parts)}"
    crc = 0
    for digest, part in zip(digests, parts, strict=True):
        crc = combined_crc(crc, int.from_bytes(digest, "big"), part.size_bytes, algorithm=name)
    return base64.b64encode(crc.to_bytes(CRCS[name].bits // 8, "big")).decode()


def _check_expected(expected: Mapping[str, str], record: StoredRecord) -> None:
    for name, value in expected.items():
        known = record.checksums.get(name)
        if known is not None and known.partition("-")[0] != value.partition("-")[0]:
            raise S3Error("BadDigest", f"The {name} you specified did not match the calculated checksum.")


def _upload_missing(upload_id: str) -> S3Error:
    return S3Error("NoSuchUpload", UPLOAD_MESSAGES["NoSuchUpload"], details={"UploadId": upload_id[:1024]})
