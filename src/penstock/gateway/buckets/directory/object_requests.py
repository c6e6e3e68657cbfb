"""Requests that write, copy, remove and describe single objects of a folder."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.gateway.buckets.attributes import object_attributes
from penstock.gateway.buckets.directory.copying import open_source
from penstock.gateway.buckets.directory.records import StoredRecord
from penstock.gateway.buckets.directory.writing import BODY_BYTES_MAX, receive
from penstock.gateway.buckets.documents import (
    checksum_elements,
    document,
    malformed,
    parsed,
)
from penstock.gateway.buckets.object_headers import checksum_wanted, object_headers
from penstock.gateway.buckets.requests import (
    DELETE_CONDITIONS,
    check_copy_conditions,
    check_delete_conditions,
    check_write_conditions,
    checked_tags,
    invalid_argument,
    read_document,
    tags_in_header,
    version_missing,
)
from penstock.gateway.copy_sources import copy_source
from penstock.gateway.objects import Answer, S3Error
from penstock.gateway.s3_text import timestamp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from xml.etree import ElementTree as ET

    from penstock.gateway.buckets.directory.copying import FindBucket
    from penstock.gateway.buckets.directory.files import BucketFiles, StoredObject
    from penstock.gateway.buckets.directory.staging import StagedFile
    from penstock.gateway.buckets.directory.threads import FileThreads
    from penstock.gateway.objects import GatewayRequest, RequestBody

_KEYS_MAX = 1000
_CONDITION_ELEMENTS = ("ETag", "Size", "LastModifiedTime")  # of DeleteObjects, in the order of DELETE_CONDITIONS


class ObjectRequests:
    """Operations on the objects of one bucket.

    Args:
        name: Name of the bucket.
        files: Files of the bucket.
        threads: Threads for operations on files.
        find_bucket: Finds the bucket of the source of a copy.
    """

    def __init__(self, name: str, files: BucketFiles, *, threads: FileThreads, find_bucket: FindBucket) -> None:
        self._name = name
        self._files = files
        self._threads = threads
        self._find_bucket = find_bucket

    # ── writing ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def put(self, request: GatewayRequest, body: RequestBody) -> Answer:
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

    async def copy(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """CopyObject, from this bucket or another one of the gateway."""
        headers = request.headers
        source = copy_source(headers)
        is_replaced = _directive(headers, "x-amz-metadata-directive") == "REPLACE"
        new_tags = tags_in_header(headers) if _directive(headers, "x-amz-tagging-directive") == "REPLACE" else None
        written = object_headers(headers)  # also refuses what is not done here
        algorithm, _ = checksum_wanted(headers)
        if (source.bucket, source.key) == (self._name, request.key) and not (
            is_replaced or "x-amz-storage-class" in headers
        ):
            message = (
                "This copy request is illegal because it is trying to copy an object to itself without changing the "
                "object's metadata, storage class, website redirect location or encryption attributes."
            )
            raise S3Error("InvalidRequest", message, status=400)
        async with AsyncExitStack() as stack:
            opened = await open_source(request, find_bucket=self._find_bucket, threads=self._threads, stack=stack)
            check_copy_conditions(headers, etag=opened.etag, modified_s=opened.modified_s)
            if opened.size_bytes > BODY_BYTES_MAX:
                message = f"The copy source is larger than the largest size that one request copies: {BODY_BYTES_MAX}"
                raise S3Error("InvalidRequest", message, status=400)
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

    async def delete(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """DeleteObject; a missing object is no error."""
        await self._threads.run(self._delete_synced, request.key, request.headers)
        return Answer(204)

    def _delete_synced(self, key: str, conditions: Mapping[str, str | None]) -> None:
        folder = self._files.delete(key, check=_delete_condition(conditions))
        self._files.sync([] if folder is None else [folder])

    async def delete_many(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """DeleteObjects: at most 1 000 keys, of which some may fail."""
        tree = parsed(await read_document(body), root="Delete")
        rows = tree.findall("Object")
        if not 0 < len(rows) <= _KEYS_MAX:
            raise malformed()
        is_quiet = (tree.findtext("Quiet") or "").strip().lower() == "true"
        outcomes = await self._threads.run_long(self._delete_rows, rows)
        children: list[tuple[str, object]] = []
        for key, error in outcomes:
            if error is not None:
                children.append(("Error", [("Key", key), ("Code", error.code), ("Message", error.message)]))
            elif not is_quiet:
                children.append(("Deleted", [("Key", key)]))
        return document("DeleteResult", children)

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
                outcomes.append((key, S3Error("InternalError", "The file could not be removed.", status=500)))
            else:
                outcomes.append((key, None))
        self._files.sync(folders)
        return outcomes

    # ── tags and attributes ────────────────────────────────────────────────────────────────────────────────────────

    async def get_tags(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """GetObjectTagging."""
        stored = await self._threads.run(self._current, request.key)
        tags = stored.record.tags if stored.record is not None else {}
        return document("Tagging", [("TagSet", [("Tag", [("Key", name), ("Value", tags[name])]) for name in tags])])

    async def put_tags(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """PutObjectTagging."""
        tree = parsed(await read_document(body), root="Tagging")
        rows = tree.findall("TagSet/Tag")
        if tree.find("TagSet") is None or any(row.find("Key") is None or row.find("Value") is None for row in rows):
            raise malformed()
        tags = checked_tags([(row.findtext("Key") or "", row.findtext("Value") or "") for row in rows])
        await self._threads.run(self._files.set_tags, request.key, tags)
        return Answer(200)

    async def delete_tags(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """DeleteObjectTagging."""
        await self._threads.run(self._files.set_tags, request.key, {})
        return Answer(204)

    async def attributes(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """GetObjectAttributes."""
        stored = await self._threads.run(self._current, request.key)
        return object_attributes(stored.head(with_checksums=True), request)

    def _current(self, key: str) -> StoredObject:
        with self._files.opened(key) as (_, stored):
            return stored


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


def _directive(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name, "COPY").upper()
    if value not in ("COPY", "REPLACE"):
        raise invalid_argument(name, f"Unknown {name.removeprefix('x-amz-')}.", value)
    return value
