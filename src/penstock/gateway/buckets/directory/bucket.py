"""``DirectoryBucket``: a folder as a bucket."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from penstock.errors import DirectoryMissingError
from penstock.gateway.buckets.directory.files import BucketFiles
from penstock.gateway.buckets.directory.layout import REGION_FILE
from penstock.gateway.buckets.directory.listing import BucketListing
from penstock.gateway.buckets.directory.multipart_requests import MultipartRequests
from penstock.gateway.buckets.directory.object_requests import ObjectRequests
from penstock.gateway.buckets.directory.reading import WHOLE_BYTES_MAX, OpenBytes, OpenFile, read_whole
from penstock.gateway.buckets.directory.staging import bucket_missing
from penstock.gateway.buckets.documents import document
from penstock.gateway.buckets.object_headers import refuse_shared_access, with_checksums
from penstock.gateway.buckets.requests import (
    DELETE_CONDITIONS,
    WRITE_CONDITIONS,
    access_denied,
    check_version,
    not_implemented,
    number_in,
    read_document,
    refuse_unsupported,
)
from penstock.gateway.buckets.subresources import default_setting, setting_named
from penstock.gateway.objects import Answer, S3Error
from penstock.gateway.s3_text import OWNER, timestamp, url_encoded
from penstock.types import ListPage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from penstock.gateway.buckets.directory.copying import FindBucket
    from penstock.gateway.buckets.directory.threads import FileThreads
    from penstock.gateway.objects import GatewayRequest, ObjectHead, OpenObject, RequestBody
    from penstock.types import ByteRange, Page

    Handler = Callable[[GatewayRequest, RequestBody], Awaitable[Answer]]

_HONOURED = {
    ("PUT", ""): WRITE_CONDITIONS,
    ("PUT", "copy"): WRITE_CONDITIONS,
    ("POST", "uploadId"): WRITE_CONDITIONS,
    ("DELETE", ""): DELETE_CONDITIONS,
}
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DirectoryBucket:
    """A folder as a bucket that is read and written.

    Args:
        folder: The folder, which exists.
        threads: Threads for operations on files.
        find_bucket: Finds the bucket of the source of a copy.
        may_write: Whether the bucket is writable at all.
        is_durable: Whether a change is synced to the disk before it is confirmed.
    """

    def __init__(
        self, folder: Path, *, threads: FileThreads, find_bucket: FindBucket, may_write: bool, is_durable: bool = True
    ) -> None:
        self.name = folder.name
        self.created_s = folder.stat().st_mtime
        self.region = ""
        with suppress(OSError, UnicodeError):
            self.region = (folder / REGION_FILE).read_text(encoding="ascii").strip()
        self.files = BucketFiles(folder, is_durable=is_durable)
        self._threads = threads
        self._may_write = may_write
        self._listing = BucketListing(self.files)
        objects = ObjectRequests(self.name, self.files, threads=threads, find_bucket=find_bucket)
        uploads = MultipartRequests(self.name, self.files, threads=threads, find_bucket=find_bucket)
        self._uploads = uploads.uploads
        self._of_objects: dict[tuple[str, str], Handler] = {
            ("PUT", ""): objects.put,
            ("PUT", "copy"): objects.copy,
            ("PUT", "uploadId"): uploads.put_part,
            ("PUT", "uploadId copy"): uploads.copy_part,
            ("PUT", "tagging"): objects.put_tags,
            ("GET", "tagging"): objects.get_tags,
            ("DELETE", "tagging"): objects.delete_tags,
            ("GET", "attributes"): objects.attributes,
            ("GET", "uploadId"): uploads.list_parts,
            ("GET", "acl"): self._object_acl,
            ("PUT", "acl"): self._put_object_acl,
            ("POST", "uploads"): uploads.begin,
            ("POST", "uploadId"): uploads.complete,
            ("DELETE", "uploadId"): uploads.abort,
            ("DELETE", ""): objects.delete,
        }
        self._of_bucket: dict[tuple[str, str], Handler] = {
            ("POST", "delete"): objects.delete_many,
            ("GET", "uploads"): uploads.list_uploads,
            ("GET", "versions"): self._list_versions,
        }

    # ── reading ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def head(self, request: GatewayRequest) -> ObjectHead:
        """Describe an object."""
        check_version(request)
        with s3_errors():
            stored = await self._threads.run(self.files.find, request.key)
        if stored is None:
            raise self.files.key_missing(request.key)
        return stored.head(with_checksums=with_checksums(request.headers))

    async def open(self, request: GatewayRequest, hint: ByteRange | None) -> OpenObject:
        """Open the current version of an object; one of at most 256 KiB is read at once, in the same step."""
        check_version(request)
        with s3_errors():
            return await self._threads.run(self._opened, request)

    def _opened(self, request: GatewayRequest) -> OpenObject:
        fd, stored = self.files.open(request.key)
        try:
            head = stored.head(with_checksums=with_checksums(request.headers))
            if stored.size_bytes > WHOLE_BYTES_MAX:
                opened = OpenFile(fd, stored, head=head, threads=self._threads)
                fd = -1
                return opened
            return OpenBytes(head, read_whole(fd, stored))
        finally:
            if fd >= 0:
                os.close(fd)

    async def list_objects(self, request: GatewayRequest, operation: ListPage) -> Page | Answer:
        """Return one page of keys."""
        with s3_errors():
            try:
                return await self._threads.run_long(self._listing.page, operation)
            except DirectoryMissingError as error:
                raise bucket_missing(self.name) from error

    # ── everything else ────────────────────────────────────────────────────────────────────────────────────────────

    async def other(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """Write, remove, or answer a question about a setting."""
        check_version(request)
        setting = setting_named(request)
        method = "GET" if request.method == "HEAD" else request.method
        name = _operation(request, method, setting)
        if method != "GET":
            self._check_may_write(request)
            refuse_unsupported(request, honoured=_HONOURED.get((method, name), ()) if request.key else ())
        with s3_errors():
            handler = (self._of_objects if request.key else self._of_bucket).get((method, name))
            if handler is not None:
                return await handler(request, body)
            if method == "GET" and setting is not None:
                if not await self._threads.run(self.files.folder.is_dir):
                    raise bucket_missing(self.name)
                return default_setting(request, setting)
        if method == "POST" and setting is None:
            message = "The specified method is not allowed against this resource."
            raise S3Error("MethodNotAllowed", message, status=405)
        raise not_implemented(f"{request.method} {setting or ''}".strip())

    def _check_may_write(self, request: GatewayRequest) -> None:
        if not self._may_write:
            raise access_denied("This gateway serves the bucket read-only.")
        if not request.caller.may_write:
            raise access_denied("This access key may only read.")
        if self.files.folder.is_symlink():
            raise access_denied("The bucket is a link, through which nothing is written.")

    async def _object_acl(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        await self.head(request)
        return default_setting(request, "acl")

    async def _put_object_acl(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """PutObjectAcl: what changes nothing is accepted."""
        await self.head(request)
        refuse_shared_access(request.headers)
        if "x-amz-acl" not in request.headers or await read_document(body):
            raise S3Error("AccessControlListNotSupported", "The bucket does not allow ACLs", status=400)
        return Answer(200)

    async def _list_versions(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """ListObjectVersions: the current version of each object, which has no ID."""
        query = request.query
        prefix, delimiter, marker = query.get("prefix", ""), query.get("delimiter", ""), query.get("key-marker", "")
        most = number_in(query, "max-keys", default=1000, most=1000)
        page = await self._threads.run_long(self._listing.page, ListPage(prefix, delimiter, None, marker, most))
        is_encoded = query.get("encoding-type") == "url"

        def text(value: str) -> str:
            return url_encoded(value) if is_encoded else value

        last = max([*(info.key for info in page.objects[-1:]), *page.prefixes[-1:]], default="")
        rows: list[tuple[str, object]] = [
            ("Name", self.name),
            ("Prefix", text(prefix)),
            ("KeyMarker", text(marker)),
            ("VersionIdMarker", query.get("version-id-marker", "")),
            ("MaxKeys", most),
            ("Delimiter", text(delimiter) if delimiter else None),
            ("EncodingType", "url" if is_encoded else None),
            ("IsTruncated", str(page.next_token is not None).lower()),
            ("NextKeyMarker", text(last) if page.next_token is not None else None),
            ("NextVersionIdMarker", "null" if page.next_token is not None else None),
        ]
        rows += [
            (
                "Version",
                [
                    ("Key", text(info.key)),
                    ("VersionId", "null"),
                    ("IsLatest", "true"),
                    ("LastModified", timestamp(info.last_modified_s or 0)),
                    ("ETag", info.etag or ""),
                    ("Size", info.size_bytes),
                    ("StorageClass", "STANDARD"),
                    ("Owner", OWNER),
                ],
            )
            for info in page.objects
        ]
        rows += [("CommonPrefixes", [("Prefix", text(name))]) for name in page.prefixes]
        return document("ListVersionsResult", rows)

    # ── the bucket itself ──────────────────────────────────────────────────────────────────────────────────────────

    def remove_debris(self) -> None:
        """Remove what killed processes left. Blocks."""
        self.files.staging.remove_debris()
        self._uploads.remove_debris()

    def is_empty(self) -> bool:
        """Whether the bucket has no object. Blocks."""
        return self._listing.is_empty()

    async def close(self) -> None:
        """Nothing is held open between requests."""


def _operation(request: GatewayRequest, method: str, setting: str | None) -> str:
    """Return the name of what a request does, beside its method."""
    if not request.key:
        return setting or ""
    name = setting or ("uploadId" if "uploadId" in request.query or "partNumber" in request.query else "")
    if method == "PUT" and name in ("", "uploadId") and "x-amz-copy-source" in request.headers:
        name = f"{name} copy".strip()
    return name


@contextmanager
def s3_errors() -> Iterator[None]:
    """Turn errors of the file system into S3's; their messages name no path."""
    try:
        yield
    except S3Error:
        raise
    except OSError as error:
        if isinstance(error, DirectoryMissingError):
            raise
        if error.errno in _DENIED:
            raise access_denied("The file system refuses this.") from error
        if error.errno in _FULL:
            raise S3Error("InsufficientStorage", "The file system is full.", status=507) from error
        if error.errno == errno.EXDEV:
            raise not_implemented("writing into another file system that is mounted in the bucket") from error
        reason = error.strerror or type(error).__name__
        raise S3Error("InternalError", f"The file system failed: {reason}.", status=500) from error
