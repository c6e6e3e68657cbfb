"""Records of stored objects: everything but their bytes, and how it is kept with the file."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from penstock.gateway.buckets.requests import PARTS_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ATTRIBUTE = b"user.penstock.s3"
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


class SidecarRecords:
    """Records in files of a hidden folder, for file systems without extended attributes.

    A record becomes visible in the same instant as its file is renamed.
    A record's name is the inode, time and size of its file. Renaming a file changes none of them, so a record that was
    written before its file was renamed is visible with it.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, status: os.stat_result) -> Path:
        name = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}.json"
        return self.folder / f"{status.st_ino & 0xFF:02x}" / name

    def load(self, place: int | str, status: os.stat_result) -> StoredRecord | None:
        """Return the record of a file, by descriptor or path; None if it has none, or was changed since."""
        try:
            record = decoded_record(self._path(status).read_bytes())
        except OSError:
            return None
        return record if record is not None and record.matches(status) else None

    def save(self, fd: int, record: StoredRecord) -> StoredRecord:
        """Keep a record of a file that is open for writing, and return it with the file's size and time."""
        status = os.fstat(fd)
        stamped = replace(record, size_bytes=status.st_size, modified_ns=status.st_mtime_ns)
        path = self._path(status)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.urandom(6).hex()}")
        try:
            with temporary.open("xb") as file:
                file.write(stamped.encoded())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return stamped

    def drop(self, status: os.stat_result) -> None:
        """Forget the record of a version that was replaced or removed."""
        with suppress(FileNotFoundError, NotADirectoryError):
            self._path(status).unlink()


class AttributeRecords(SidecarRecords):
    """Records in an extended attribute of the file itself; one that is too long for it is kept beside it.

    Args:
        folder: The folder in which long records are kept: ext4 has room for 4 KB.
    """

    def load(self, place: int | str, status: os.stat_result) -> StoredRecord | None:
        """Return the record of a file; None if it has none, or was changed since."""
        try:
            data = os.getxattr(place, ATTRIBUTE)
        except OSError as error:
            if error.errno in _NONE:
                return None
            raise
        if data == _ELSEWHERE:
            return super().load(place, status)
        record = decoded_record(data)
        return record if record is not None and record.matches(status) else None

    def save(self, fd: int, record: StoredRecord) -> StoredRecord:
        """Set the attribute."""
        status = os.fstat(fd)
        stamped = replace(record, size_bytes=status.st_size, modified_ns=status.st_mtime_ns)
        try:
            os.setxattr(fd, ATTRIBUTE, stamped.encoded())
        except OSError as error:
            if error.errno not in _FULL:
                raise
            stamped = super().save(fd, record)
            os.setxattr(fd, ATTRIBUTE, _ELSEWHERE)
        return stamped


def records_in(folder: Path, *, sidecars: Path) -> SidecarRecords:
    """Return where the records of a bucket are kept: in extended attributes, if the file system of `folder` has them.

    Args:
        folder: An existing folder of the file system.
        sidecars: Folder for the records that cannot be kept as attributes; it is made when it is needed.
    """
    try:
        os.getxattr(folder, ATTRIBUTE)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return SidecarRecords(sidecars)
    return AttributeRecords(sidecars)
