"""What is kept with an object besides its bytes: its headers, and the record of a file, which has them, tags and checksums.

Headers have three forms. A write has names in any case (``Put.headers``). A record has names as they are sent
(``canonical_headers``). An answer has lower-case bytes (``ObjectInfo.headers``).
"""

from __future__ import annotations

import errno
import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.store.tree import HIDDEN
from penstock.types import PARTS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from penstock.types import Copy, CreateMultipart, ObjectInfo, Put

CONTENT_HEADERS = {
    name.lower(): name
    for name in (
        "Content-Type",
        "Cache-Control",
        "Content-Disposition",
        "Content-Encoding",
        "Content-Language",
        "Expires",
    )
}
"""Headers that describe the content of an object, by lower-case name, with the names that are sent."""

_OTHER_HEADERS = ("x-amz-website-redirect-location", "x-amz-storage-class")
USER_METADATA = "x-amz-meta-"
CLAIM_HEADER = f"{USER_METADATA}penstock-claim"
"""Header that tells which write made an object that was not to exist yet; ``types.Put`` explains it."""

DEFAULT_TYPE = "binary/octet-stream"
"""The type that S3 gives an object that was written without one."""


# ── headers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def canonical_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a write with the names that are sent.

    Raises:
        ConfigError: An object has no such header, or a value holds a line break or another control character.
    """
    found = {}
    for name, value in headers.items():
        lower = name.lower()
        if not (lower in CONTENT_HEADERS or lower in _OTHER_HEADERS or lower.startswith(USER_METADATA)):
            hint = f"{', '.join(CONTENT_HEADERS.values())}, or {USER_METADATA}NAME"
            raise ConfigError(f"no object keeps the header {name!r}", hint=hint)
        if any(ord(character) < 32 or ord(character) == 127 for character in name + value) or ":" in name:
            raise ConfigError(f"the header {name!r} of an object holds a control character, or a colon in its name")
        found[CONTENT_HEADERS.get(lower, lower)] = value
    return found


def answered_headers(headers: Mapping[str, str]) -> dict[bytes, bytes]:
    """Return headers that were kept with an object as an ``ObjectInfo`` has them."""
    return {name.lower().encode(): value.encode("utf-8", "surrogateescape") for name, value in headers.items()}


def written_headers(info: ObjectInfo) -> dict[str, str]:
    """Return the headers that a copy of an object is written with: those of its content, and its user metadata.

    The type that S3 gives objects without one is left out, and so is the claim of the write that made the object.
    """
    found = {}
    for name, value in info.headers.items():
        lower = name.decode("latin-1")
        if (lower in CONTENT_HEADERS or lower.startswith(USER_METADATA)) and lower != CLAIM_HEADER:
            found[CONTENT_HEADERS.get(lower, lower)] = value.decode("utf-8", "surrogateescape")
    if found.get("Content-Type") == DEFAULT_TYPE:
        del found["Content-Type"]
    return found


# ── records of files ────────────────────────────────────────────────────────────────────────────────────────────────

RECORDS_FOLDER = f"{HIDDEN}/records"
"""Folder, below a directory that is a store or a bucket, of the records that are no attributes of their files."""

ATTRIBUTE = b"user.penstock.s3"
_MD5 = re.compile(r"[0-9a-f]{32}(-[0-9]{1,5})?")
_ELSEWHERE = b"@"  # value of the attribute if the record did not fit into it
_NONE = (errno.ENODATA, errno.EOPNOTSUPP, errno.EPERM, errno.EACCES)
_FULL = (errno.ENOSPC, errno.E2BIG, errno.ERANGE, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRecord:
    """Everything about one version of an object but its bytes.

    Attributes:
        size_bytes: Size of the file that the record was made for.
        modified_ns: Time of its modification. If the file differs in one of the two, another program has changed it, and the
            record is ignored.
        etag: ETag without quotes; empty if another program wrote the file.
        headers: Headers that the client sent with the object, with the names that are sent back.
        checksums: Checksums in base64, by algorithm; that of a composite one ends with the number of parts.
        checksum_type: ``"FULL_OBJECT"`` or ``"COMPOSITE"``.
        part_sizes_bytes: Sizes of the parts of a multipart upload.
        part_checksums: Checksums of the parts, if all have the same algorithm.
        upload_id: ID of the multipart upload that made this version, for clients that complete it again.
        tags: The object's tags.
    """

    size_bytes: int = 0
    modified_ns: int = 0
    etag: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)
    checksum_type: str = "FULL_OBJECT"
    part_sizes_bytes: tuple[int, ...] = ()
    part_checksums: tuple[str, ...] = ()
    upload_id: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """Return the record as JSON without the fields that have their default; equal parts in a row are counted."""
        values = {name: value for name, value in asdict(self).items() if value not in ("", (), {}, "FULL_OBJECT")}
        if self.part_sizes_bytes:
            values["part_sizes_bytes"] = [[size, len(list(run))] for size, run in groupby(self.part_sizes_bytes)]
        return json.dumps(values, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogateescape")

    def matches(self, status: os.stat_result) -> bool:
        """Whether the file is still as it was when the record was made."""
        return (self.size_bytes, self.modified_ns) == (status.st_size, status.st_mtime_ns)

    def described(self, info: ObjectInfo) -> ObjectInfo:
        """Return what a store says about the file, with what this record has of it."""
        checksums = self.checksums if self.checksum_type == "FULL_OBJECT" else {}
        return info._replace(headers=answered_headers(self.headers), tags=self.tags, checksums=checksums)


def record_of(operation: Put | CreateMultipart) -> StoredRecord | None:
    """Return the record of what is written; None if nothing is to be kept besides the bytes."""
    if not (operation.headers or operation.tags):
        return None
    return StoredRecord(headers=canonical_headers(operation.headers), tags=dict(operation.tags))


def copied_record(record: StoredRecord | None, operation: Copy) -> StoredRecord | None:
    """Return the record of a copy: that of its source, unless the operation has headers or tags; None if there is none."""
    headers, tags = operation.headers, operation.tags
    if record is None and not (headers or tags):
        return None
    kept = record or StoredRecord()
    is_whole = kept.checksum_type == "FULL_OBJECT"
    return StoredRecord(
        etag=kept.etag if "-" not in kept.etag else "",  # a copy in one piece has no parts
        headers=kept.headers if headers is None else canonical_headers(headers),
        checksums=kept.checksums if is_whole else {},
        tags=kept.tags if tags is None else dict(tags),
    )


def moved_record(info: ObjectInfo) -> StoredRecord | None:
    """Return the record of a file that has the bytes of an object of another store; None if there is nothing to keep."""
    headers, checksums = written_headers(info), dict(info.checksums)
    if not (headers or checksums or info.tags):
        return None
    etag = (info.etag or "").strip('"')
    return StoredRecord(
        etag=etag if _MD5.fullmatch(etag) else "", headers=headers, checksums=checksums, tags=dict(info.tags)
    )


def decoded_record(data: bytes) -> StoredRecord | None:
    """Return the record that was encoded; None if the data is something else."""
    try:
        values: dict[str, Any] = json.loads(data.decode("utf-8", "surrogateescape"))
        runs = values.pop("part_sizes_bytes", ())
        if sum(count for _, count in runs) > PARTS_MAX:
            return None
        sizes = [size for size, count in runs for _ in range(count)]
        checksums = tuple(values.pop("part_checksums", ()))
        return StoredRecord(**values, part_sizes_bytes=tuple(sizes), part_checksums=checksums)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


class FileRecords:
    """Keeps the records of files: in an extended attribute of the file itself, or else in a file of a hidden folder.

    The folder has the records of file systems without attributes, and those that are too long for one: ext4 has room for
    4 KB. There, a record's name is the inode, time and size of its file. Renaming a file changes none of them, so either kind
    of record becomes visible in the same instant as its file is renamed. All methods block.

    Args:
        folder: The folder; it is made when it is needed.
        has_attributes: Whether to use attributes if there are any.
    """

    def __init__(self, folder: Path, *, has_attributes: bool = True) -> None:
        self.folder = folder
        self._has_attributes = has_attributes

    def load(self, place: int | str, status: os.stat_result) -> StoredRecord | None:
        """Return the record of a file, by descriptor or path; None if it has none, or was changed since."""
        data = self._attribute(place)
        if data == _ELSEWHERE:
            try:
                data = self._path(status).read_bytes()
            except OSError:
                return None
        record = decoded_record(data) if data is not None else None
        return record if record is not None and record.matches(status) else None

    def _attribute(self, place: int | str) -> bytes | None:
        if not self._has_attributes:
            return _ELSEWHERE
        try:
            return os.getxattr(place, ATTRIBUTE)
        except OSError as error:
            if error.errno not in _NONE:
                raise
            return _ELSEWHERE if error.errno == errno.EOPNOTSUPP else None

    def save(self, fd: int, record: StoredRecord) -> StoredRecord:
        """Keep a record of a file that is open for writing, and return it with the file's size and time."""
        status = os.fstat(fd)
        stamped = replace(record, size_bytes=status.st_size, modified_ns=status.st_mtime_ns)
        data = stamped.encoded()
        if not self._has_attributes:
            self._save_beside(status, data)
            return stamped
        try:
            os.setxattr(fd, ATTRIBUTE, data)
        except OSError as error:
            if error.errno not in (*_FULL, errno.EOPNOTSUPP):
                raise
            self._save_beside(status, data)
            if error.errno != errno.EOPNOTSUPP:
                os.setxattr(fd, ATTRIBUTE, _ELSEWHERE)
        return stamped

    def _save_beside(self, status: os.stat_result, data: bytes) -> None:
        path = self._path(status)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.urandom(6).hex()}")
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)

    def drop(self, status: os.stat_result) -> None:
        """Forget the record of a version that was replaced or removed, of which this is the last status.

        The change is visible already, so a record that cannot be removed is left: it describes no other version.
        """
        with suppress(OSError):
            self._path(status).unlink()

    def _path(self, status: os.stat_result) -> Path:
        name = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}.json"
        return self.folder / f"{status.st_ino & 0xFF:02x}" / name
