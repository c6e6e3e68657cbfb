"""Requests of multipart uploads to a folder."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from penstock.gateway.buckets.directory.copying import open_source
from penstock.gateway.buckets.directory.object_requests import checksum_headers, condition_of
from penstock.gateway.buckets.directory.records import StoredRecord
from penstock.gateway.buckets.directory.uploads import MultipartUpload, MultipartUploads, NamedPart
from penstock.gateway.buckets.directory.writing import BODY_BYTES_MAX, receive
from penstock.gateway.buckets.documents import (
    CHECKSUM_ELEMENTS,
    checksum_elements,
    document,
    malformed,
    parsed,
)
from penstock.gateway.buckets.object_headers import checksum_wanted, object_headers
from penstock.gateway.buckets.requests import (
    PARTS_MAX,
    check_copy_conditions,
    copied_span,
    invalid_argument,
    number_in,
    part_number,
    read_document,
    tags_in_header,
)
from penstock.gateway.objects import Answer, S3Error
from penstock.gateway.s3_text import OWNER, timestamp, url_encoded
from penstock.redaction import public_url

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from xml.etree import ElementTree as ET

    from penstock.gateway.buckets.directory.copying import FindBucket
    from penstock.gateway.buckets.directory.files import BucketFiles, StoredObject
    from penstock.gateway.buckets.directory.threads import FileThreads
    from penstock.gateway.buckets.directory.uploads import StoredPart
    from penstock.gateway.objects import GatewayRequest, RequestBody

_LOCKED_S = 0.1  # between two looks at an upload that another request is completing, in seconds


class MultipartRequests:
    """Multipart uploads of one bucket.

    Args:
        name: Name of the bucket.
        files: Files of the bucket.
        threads: Threads for operations on files.
        find_bucket: Finds the bucket of the source of a copied part.
    """

    def __init__(self, name: str, files: BucketFiles, *, threads: FileThreads, find_bucket: FindBucket) -> None:
        self.uploads = MultipartUploads(files)
        self._name = name
        self._files = files
        self._threads = threads
        self._find_bucket = find_bucket

    async def begin(self, request: GatewayRequest, _body: RequestBody) -> Answer:
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

    async def put_part(self, request: GatewayRequest, body: RequestBody) -> Answer:
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

    async def copy_part(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """UploadPartCopy."""
        number = part_number(request)
        upload = await self._upload(request)
        async with AsyncExitStack() as stack:
            opened = await open_source(request, find_bucket=self._find_bucket, threads=self._threads, stack=stack)
            check_copy_conditions(request.headers, etag=opened.etag, modified_s=opened.modified_s)
            span = copied_span(request.headers, opened.size_bytes)
            if span.length_bytes > BODY_BYTES_MAX:
                message = "The specified copy source is larger than the maximum allowable size for a copy source"
                raise S3Error("InvalidRequest", message, status=400)
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

    async def complete(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """CompleteMultipartUpload; a client that repeats it, because the answer was lost or late, gets the same answer."""
        tree = parsed(await read_document(body), root="CompleteMultipartUpload")
        named = [_named_part(row) for row in tree.findall("Part")]
        if not 0 < len(named) <= PARTS_MAX:
            raise malformed()
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
        rows = [("Location", public_url(request.url))]
        rows += [("Bucket", self._name), ("Key", request.key), ("ETag", stored.etag)]
        rows += checksum_elements(record.checksums, record.checksum_type)
        return document("CompleteMultipartUploadResult", rows)

    async def _completed(self, request: GatewayRequest, named: list[NamedPart]) -> StoredObject:
        upload = await self._upload(request)
        headers = request.headers
        kind = headers.get("x-amz-checksum-type", "").upper()
        if kind and upload.algorithm and kind != upload.checksum_type:
            message = "The checksum type of the request is not that with which the upload was begun."
            raise S3Error("InvalidRequest", message, status=400)
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

    async def abort(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """AbortMultipartUpload."""
        upload = await self._upload(request)
        await self._threads.run(self.uploads.abort, upload)
        return Answer(204)

    # ── listing ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def list_uploads(self, request: GatewayRequest, _body: RequestBody) -> Answer:
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


def _part_row(part: StoredPart) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [
        ("PartNumber", part.number),
        ("LastModified", timestamp(part.modified_s)),
        ("ETag", f'"{part.etag}"'),
        ("Size", part.size_bytes),
    ]
    return rows + list(checksum_elements(part.checksums))


def _named_part(row: ET.Element) -> NamedPart:
    number, etag = (row.findtext("PartNumber") or "").strip(), row.findtext("ETag")
    if not (number.isascii() and number.isdigit() and len(number) <= 5) or etag is None:
        raise malformed()
    sums: Mapping[str, str] = {
        name: value.strip() for name, tag in CHECKSUM_ELEMENTS.items() if (value := row.findtext(tag))
    }
    return NamedPart(int(number), etag.strip().strip('"'), sums)


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
