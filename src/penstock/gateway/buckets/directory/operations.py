"""``DirectoryOperations``: everything that a folder can do as a bucket beyond reading and listing."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from penstock.gateway.buckets.directory.bodies import open_source, receive
from penstock.gateway.buckets.directory.files import bucket_missing
from penstock.gateway.buckets.directory.uploads import MultipartUpload, MultipartUploads
from penstock.gateway.buckets.documents import (
    CHECKSUM_ELEMENTS,
    access_control_list,
    checksum_elements,
    completed_upload,
    deletion,
    document,
    malformed,
    named_parts,
    object_attributes,
    parsed,
    parsed_deletion,
    tagging,
)
from penstock.gateway.buckets.operations import BucketOperations
from penstock.gateway.buckets.requests import (
    BODY_BYTES_MAX,
    DELETE_CONDITIONS,
    WRITE_CONDITIONS,
    check_copy_conditions,
    check_delete_conditions,
    check_write_conditions,
    checked_tags,
    checksum_wanted,
    copied_span,
    is_replacing,
    object_headers,
    part_number,
    read_document,
    refuse_shared_access,
    tags_in_header,
)
from penstock.gateway.objects import (
    Answer,
    S3Error,
    access_denied,
    copy_source,
    invalid_argument,
    number_in,
    version_missing,
)
from penstock.gateway.s3_text import OWNER, timestamp, url_encoded
from penstock.store.records import StoredRecord
from penstock.types import ListPage, Part

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping
    from pathlib import Path
    from xml.etree import ElementTree as ET

    from penstock.gateway.buckets.directory.bodies import FileThreads, FindBucket
    from penstock.gateway.buckets.directory.files import BucketFiles, StagedFile, StoredObject
    from penstock.gateway.buckets.directory.listing import BucketListing
    from penstock.gateway.buckets.directory.uploads import StoredPart
    from penstock.gateway.objects import GatewayRequest, RequestBody

_CONDITION_ELEMENTS = ("ETag", "Size", "LastModifiedTime")  # of DeleteObjects, in the order of DELETE_CONDITIONS
_LOCKED_S = 0.1  # between two looks at an upload that another request is completing, in seconds


class DirectoryOperations(BucketOperations):
    """The operations of one bucket that is a folder.

    Args:
        files: Files of the bucket.
        listing: The keys of the bucket, in order.
        threads: Threads for operations on files.
        find_bucket: Finds the bucket of the source of a copy.
        may_write: Whether the bucket is writable at all.

    Attributes:
        uploads: The bucket's multipart uploads.
    """

    honoured: Mapping[str, Collection[str]] = MappingProxyType(
        {
            "put_object": WRITE_CONDITIONS,
            "copy_object": WRITE_CONDITIONS,
            "complete_multipart_upload": WRITE_CONDITIONS,
            "delete_object": DELETE_CONDITIONS,
        }
    )

    def __init__(
        self,
        files: BucketFiles,
        listing: BucketListing,
        *,
        threads: FileThreads,
        find_bucket: FindBucket,
        may_write: bool,
    ) -> None:
        self.uploads = MultipartUploads(files)
        self._name = files.folder.name
        self._files = files
        self._listing = listing
        self._threads = threads
        self._find_bucket = find_bucket
        self._may_write = may_write

    def check_may_write(self, request: GatewayRequest) -> None:
        """Refuse a write if the gateway, the caller's key or a link forbids it."""
        if not self._may_write:
            raise access_denied("This gateway serves the bucket read-only.")
        if not request.caller.may_write:
            raise access_denied("This access key may only read.")
        if self._files.folder.is_symlink():
            raise access_denied("The bucket is a link, through which nothing is written.")

    async def check_exists(self) -> None:
        """Refuse a question about a folder that was removed."""
        if not await self._threads.run(self._files.folder.is_dir):
            raise bucket_missing(self._name)

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def put_object(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """PutObject: the object becomes visible whole, when all of it has been received and verified."""
        headers = request.headers
        record = StoredRecord(headers=object_headers(headers), tags=tags_in_header(headers))
        check = condition_of(headers)
        if "If-Match" in headers or "If-None-Match" in headers:
            check(await self._threads.run(self._files.find, request.key))
        staged = await self._staged(request.key)
        try:
            received = await receive(body, staged, threads=self._threads)
            record = replace(record, etag=received.md5, checksums=received.checksums)
            stored = await self._threads.run(self._files.commit, request.key, staged, record=record, check=check)
        finally:
            await self._threads.run(staged.close)
        return Answer(200, {"ETag": stored.etag, **checksum_headers(record)})

    async def _staged(self, key: str) -> StagedFile:
        self._files.places(key)
        return await self._threads.run(self._files.staging.create)

    # ── copying ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def copy_object(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """CopyObject, from this bucket or another one of the gateway."""
        headers = request.headers
        source = copy_source(headers)
        is_replaced = is_replacing(headers, "x-amz-metadata-directive")
        new_tags = tags_in_header(headers) if is_replacing(headers, "x-amz-tagging-directive") else None
        written = object_headers(headers)  # also refuses what is not done here
        algorithm, _ = checksum_wanted(headers)
        if (source.bucket, source.key) == (self._name, request.key) and not (
            is_replaced or "x-amz-storage-class" in headers
        ):
            message = (
                "This copy request is illegal because it is trying to copy an object to itself without changing the "
                "object's metadata, storage class, website redirect location or encryption attributes."
            )
            raise S3Error("InvalidRequest", message)
        async with AsyncExitStack() as stack:
            opened = await open_source(request, find_bucket=self._find_bucket, threads=self._threads)
            stack.push_async_callback(opened.close)
            check_copy_conditions(headers, etag=opened.etag, modified_s=opened.modified_s)
            if opened.size_bytes > BODY_BYTES_MAX:
                message = f"The copy source is larger than the largest size that one request copies: {BODY_BYTES_MAX}"
                raise S3Error("InvalidRequest", message)
            staged = await self._staged(request.key)
            stack.push_async_callback(self._threads.run, staged.close)
            record = await opened.copy_whole(staged, algorithm)
            record = replace(
                record,
                headers=written if is_replaced else opened.headers,
                tags=opened.tags if new_tags is None else new_tags,
            )
            stored = await self._threads.run(
                self._files.commit, request.key, staged, record=record, check=condition_of(headers)
            )
        rows = [("LastModified", timestamp(stored.modified_s)), ("ETag", stored.etag)]
        return document("CopyObjectResult", rows + checksum_elements(record.checksums, record.checksum_type))

    # ── removing ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def delete_object(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """DeleteObject; a missing object is no error."""
        await self._threads.run(self._delete_synced, request.key, request.headers)
        return Answer(204)

    def _delete_synced(self, key: str, conditions: Mapping[str, str | None]) -> None:
        folder = self._files.delete(key, check=_delete_condition(conditions))
        self._files.sync([] if folder is None else [folder])

    async def delete_objects(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """DeleteObjects: at most 1 000 keys, of which some may fail."""
        rows, is_quiet = parsed_deletion(await read_document(body))
        return deletion(await self._threads.run_long(self._delete_rows, rows), is_quiet=is_quiet)

    def _delete_rows(self, rows: list[ET.Element]) -> list[tuple[str, S3Error | None]]:
        folders: set[Path] = set()
        outcomes: list[tuple[str, S3Error | None]] = []
        for row in rows:
            key, version = row.findtext("Key") or "", row.findtext("VersionId")
            conditions = dict(zip(DELETE_CONDITIONS, map(row.findtext, _CONDITION_ELEMENTS), strict=True))
            try:
                if version not in (None, "", "null"):
                    raise version_missing(version or "")
                folder = self._files.delete(key, check=_delete_condition(conditions))
                folders |= set() if folder is None else {folder}
            except S3Error as error:
                if error.code == "NoSuchBucket":
                    raise
                outcomes.append((key, error))
            except OSError:
                outcomes.append((key, S3Error("InternalError", "The file could not be removed.")))
            else:
                outcomes.append((key, None))
        self._files.sync(folders)
        return outcomes

    # ── tags and attributes ────────────────────────────────────────────────────────────────────────────────────────

    async def get_object_tagging(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """GetObjectTagging."""
        stored = await self._threads.run(self._current, request.key)
        return tagging(stored.record.tags if stored.record is not None else {})

    async def put_object_tagging(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """PutObjectTagging."""
        tree = parsed(await read_document(body), root="Tagging")
        rows = tree.findall("TagSet/Tag")
        if tree.find("TagSet") is None or any(row.find("Key") is None or row.find("Value") is None for row in rows):
            raise malformed()
        tags = checked_tags([(row.findtext("Key") or "", row.findtext("Value") or "") for row in rows])
        await self._threads.run(self._files.set_tags, request.key, tags)
        return Answer(200)

    async def delete_object_tagging(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """DeleteObjectTagging."""
        await self._threads.run(self._files.set_tags, request.key, {})
        return Answer(204)

    async def get_object_attributes(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """GetObjectAttributes."""
        stored = await self._threads.run(self._current, request.key)
        return object_attributes(stored.head(with_checksums=True), request)

    def _current(self, key: str) -> StoredObject:
        with self._files.opened(key) as (_, stored):
            return stored

    async def get_object_acl(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """GetObjectAcl: the one owner may do everything."""
        await self._threads.run(self._current, request.key)
        return access_control_list()

    async def put_object_acl(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """PutObjectAcl: what changes nothing is accepted."""
        await self._threads.run(self._current, request.key)
        refuse_shared_access(request.headers)
        if "x-amz-acl" not in request.headers or await read_document(body):
            raise S3Error("AccessControlListNotSupported", "The bucket does not allow ACLs")
        return Answer(200)

    async def list_object_versions(self, request: GatewayRequest, _body: RequestBody) -> Answer:
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
            ("Name", self._name),
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

    # ── multipart uploads ──────────────────────────────────────────────────────────────────────────────────────────

    async def create_multipart_upload(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """CreateMultipartUpload."""
        algorithm, kind = checksum_wanted(request.headers)
        upload = MultipartUpload(
            upload_id=uuid.uuid4().hex,
            key=request.key,
            created_s=time.time(),
            headers=object_headers(request.headers),
            tags=tags_in_header(request.headers),
            algorithm=algorithm,
            checksum_type=kind,
        )
        await self._threads.run(self.uploads.begin, upload)
        headers = {}
        if algorithm:
            headers = {"x-amz-checksum-algorithm": algorithm.upper(), "x-amz-checksum-type": kind}
        rows = [("Bucket", self._name), ("Key", request.key), ("UploadId", upload.upload_id)]
        return document("InitiateMultipartUploadResult", rows, headers=headers)

    async def _upload(self, request: GatewayRequest) -> MultipartUpload:
        return await self._threads.run(self.uploads.get, request.key, request.query.get("uploadId", ""))

    # ── parts ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def upload_part(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """UploadPart."""
        number = part_number(request)
        upload = await self._upload(request)
        staged = await self._threads.run(self._files.staging.create)
        try:
            received = await receive(body, staged, threads=self._threads, algorithm=upload.algorithm)
            record = StoredRecord(etag=received.md5, checksums=received.checksums)
            await self._threads.run(self.uploads.put_part, upload, number, staged=staged, record=record)
        finally:
            await self._threads.run(staged.close)
        sums = {name: value for name, value in checksum_headers(record).items() if name != "x-amz-checksum-type"}
        return Answer(200, {"ETag": f'"{received.md5}"', **sums})

    async def upload_part_copy(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """UploadPartCopy."""
        number = part_number(request)
        upload = await self._upload(request)
        async with AsyncExitStack() as stack:
            opened = await open_source(request, find_bucket=self._find_bucket, threads=self._threads)
            stack.push_async_callback(opened.close)
            check_copy_conditions(request.headers, etag=opened.etag, modified_s=opened.modified_s)
            span = copied_span(request.headers, opened.size_bytes)
            if span.length_bytes > BODY_BYTES_MAX:
                message = "The specified copy source is larger than the maximum allowable size for a copy source"
                raise S3Error("InvalidRequest", message)
            staged = await self._threads.run(self._files.staging.create)
            stack.push_async_callback(self._threads.run, staged.close)
            received = await opened.copy_span(staged, span, upload.algorithm)
            record = StoredRecord(etag=received.md5, checksums=received.checksums)
            part = await self._threads.run(self.uploads.put_part, upload, number, staged=staged, record=record)
        rows = [("LastModified", timestamp(part.modified_s)), ("ETag", f'"{part.etag}"')]
        return document("CopyPartResult", rows + checksum_elements(part.checksums))

    async def list_parts(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """ListParts."""
        upload = await self._upload(request)
        parts = await self._threads.run(self.uploads.parts, upload)
        most = number_in(request.query, "max-parts", default=1000, most=1000)
        marker = number_in(request.query, "part-number-marker", default=0, most=1 << 31)
        later = [part for part in parts if part.number > marker]
        shown = later[:most]
        rows: list[tuple[str, object]] = [
            ("Bucket", self._name),
            ("Key", upload.key),
            ("UploadId", upload.upload_id),
            ("Initiator", OWNER),
            ("Owner", OWNER),
            ("StorageClass", upload.headers.get("x-amz-storage-class", "STANDARD")),
            ("PartNumberMarker", marker),
            ("NextPartNumberMarker", shown[-1].number if shown else 0),
            ("MaxParts", most),
            ("IsTruncated", str(len(later) > len(shown)).lower()),
        ]
        if upload.algorithm:
            rows += [("ChecksumAlgorithm", upload.algorithm.upper()), ("ChecksumType", upload.checksum_type)]
        rows += [("Part", _part_row(part)) for part in shown]
        return document("ListPartsResult", rows)

    # ── ending ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def complete_multipart_upload(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """CompleteMultipartUpload; a client that repeats it, because the answer was lost or late, gets the same answer."""
        named = named_parts(await read_document(body))
        try:
            stored = await self._completed(request, named)
        except S3Error as error:
            if error.code != "NoSuchUpload":
                raise
            upload_id = request.query["uploadId"]
            found = await self._threads.run(self.uploads.completed, request.key, upload_id, named)
            if found is None:
                raise
            stored = found
        record = stored.record or StoredRecord()
        return completed_upload(request, stored.etag, checksum_elements(record.checksums, record.checksum_type))

    async def _completed(self, request: GatewayRequest, named: list[Part]) -> StoredObject:
        upload = await self._upload(request)
        headers = request.headers
        kind = headers.get("x-amz-checksum-type", "").upper()
        if kind and upload.algorithm and kind != upload.checksum_type:
            message = "The checksum type of the request is not that with which the upload was begun."
            raise S3Error("InvalidRequest", message)
        size = headers.get("x-amz-mp-object-size")
        if size is not None and not (size.isascii() and size.isdigit() and len(size) < 20):
            raise invalid_argument("x-amz-mp-object-size", "Not an integer", size)
        while True:
            try:
                return await self._threads.run_long(
                    self.uploads.complete,
                    upload,
                    named,
                    expected={
                        name: value for name in CHECKSUM_ELEMENTS if (value := headers.get(f"x-amz-checksum-{name}"))
                    },
                    size_bytes=int(size) if size is not None else None,
                    check=condition_of(headers),
                )
            except S3Error as error:
                if error.code != "OperationAborted":
                    raise
            await asyncio.sleep(_LOCKED_S)  # another request completes it; the client's own first one, if it repeats it

    async def abort_multipart_upload(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """AbortMultipartUpload."""
        upload = await self._upload(request)
        await self._threads.run(self.uploads.abort, upload)
        return Answer(204)

    # ── listing ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def list_multipart_uploads(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """ListMultipartUploads."""
        query = request.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        most = number_in(query, "max-uploads", default=1000, most=1000)
        key_marker, id_marker = query.get("key-marker", ""), query.get("upload-id-marker", "")
        encoding = query.get("encoding-type", "")
        if encoding not in ("", "url"):
            raise invalid_argument("encoding-type", "Invalid Encoding Method specified in Request", encoding)
        uploads = await self._threads.run_long(self.uploads.all)
        behind = _behind(uploads, key_marker, id_marker)
        found = _grouped(behind, prefix=prefix, delimiter=delimiter)
        shown, is_truncated = found[:most], len(found) > most

        def text(value: str) -> str:
            return url_encoded(value) if encoding else value

        last = shown[-1] if shown else None
        rows: list[tuple[str, object]] = [
            ("Bucket", self._name),
            ("KeyMarker", text(key_marker)),
            ("UploadIdMarker", id_marker),
            (
                "NextKeyMarker",
                text(last if isinstance(last, str) else last.key) if last is not None and is_truncated else None,
            ),
            ("NextUploadIdMarker", last.upload_id if isinstance(last, MultipartUpload) and is_truncated else None),
            ("Prefix", text(prefix)),
            ("Delimiter", text(delimiter) if delimiter else None),
            ("EncodingType", encoding or None),
            ("MaxUploads", most),
            ("IsTruncated", str(is_truncated).lower()),
        ]
        rows += [
            ("Upload", _upload_row(entry, text(entry.key))) for entry in shown if isinstance(entry, MultipartUpload)
        ]
        rows += [("CommonPrefixes", [("Prefix", text(entry))]) for entry in shown if isinstance(entry, str)]
        return document("ListMultipartUploadsResult", rows)


def condition_of(headers: Mapping[str, str]) -> Callable[[StoredObject | None], None]:
    """Return the check of a write's ``If-Match`` and ``If-None-Match`` against the version that it replaces."""

    def check(current: StoredObject | None) -> None:
        check_write_conditions(headers, current.etag if current is not None else None)

    return check


def _delete_condition(conditions: Mapping[str, str | None]) -> Callable[[StoredObject | None], None]:
    def check(current: StoredObject | None) -> None:
        if current is not None:
            check_delete_conditions(
                conditions, etag=current.etag, size_bytes=current.size_bytes, modified_s=current.modified_s
            )

    return check


def checksum_headers(record: StoredRecord) -> dict[str, str]:
    """Return the checksums of what was written, as headers of the answer."""
    headers = {f"x-amz-checksum-{name}": value for name, value in record.checksums.items()}
    return {**headers, "x-amz-checksum-type": record.checksum_type} if headers else {}


def _part_row(part: StoredPart) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [
        ("PartNumber", part.number),
        ("LastModified", timestamp(part.modified_s)),
        ("ETag", f'"{part.etag}"'),
        ("Size", part.size_bytes),
    ]
    return rows + list(checksum_elements(part.checksums))


def _behind(uploads: list[MultipartUpload], key: str, upload_id: str) -> list[MultipartUpload]:
    """Return the uploads that a page with these markers shows: those of later keys, and of the same key later ones."""
    if not upload_id:
        return [upload for upload in uploads if upload.key > key]
    same = [upload for upload in uploads if upload.key == key]
    at = next((index for index, upload in enumerate(same) if upload.upload_id == upload_id), len(same) - 1)
    return same[at + 1 :] + [upload for upload in uploads if upload.key > key]


def _grouped(uploads: Iterable[MultipartUpload], *, prefix: str, delimiter: str) -> list[MultipartUpload | str]:
    found: list[MultipartUpload | str] = []
    for upload in uploads:
        if not upload.key.startswith(prefix):
            continue
        at = upload.key.find(delimiter, len(prefix)) if delimiter else -1
        if at < 0:
            found.append(upload)
            continue
        group = upload.key[: at + len(delimiter)]
        if not found or found[-1] != group:
            found.append(group)
    return found


def _upload_row(upload: MultipartUpload, key: str) -> list[tuple[str, object]]:
    return [
        ("Key", key),
        ("UploadId", upload.upload_id),
        ("Initiator", OWNER),
        ("Owner", OWNER),
        ("StorageClass", upload.headers.get("x-amz-storage-class", "STANDARD")),
        ("Initiated", timestamp(upload.created_s)),
        ("ChecksumAlgorithm", upload.algorithm.upper() or None),
        ("ChecksumType", upload.checksum_type if upload.algorithm else None),
    ]
