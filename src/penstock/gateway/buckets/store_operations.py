"""Turns requests that write into operations of a store: for S3 the client's requests, for others the methods of ``Store``.

Stores other than S3 (memory, a prefix of files, fsspec) keep bytes and no headers, so content headers, user metadata and tags
are not kept. Requests that a store cannot carry out at all are refused.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, ClassVar

from penstock.cache import Cached
from penstock.gateway.buckets.documents import (
    completed_upload,
    deletion,
    document,
    malformed,
    named_parts,
    parsed_deletion,
)
from penstock.gateway.buckets.forwarding import ForwardedOperations
from penstock.gateway.buckets.operations import BucketOperations
from penstock.gateway.buckets.requests import (
    check_copy_conditions,
    copied_span,
    object_headers,
    part_number,
    read_document,
)
from penstock.gateway.buckets.submitting import perform_on_loop
from penstock.gateway.objects import Answer, S3Error, copy_source, not_implemented
from penstock.gateway.s3_text import timestamp
from penstock.store.base import innermost
from penstock.store.s3 import S3Store
from penstock.types import (
    AbortMultipart,
    CompleteMultipart,
    Copy,
    CopyPart,
    CreateMultipart,
    Delete,
    Head,
    Part,
    Put,
    PutPart,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from penstock.gateway.objects import GatewayRequest, RequestBody
    from penstock.store.base import Store
    from penstock.types import ObjectInfo

BODY_BYTES_MAX = 64 << 20
"""Largest part that is held in memory, because a store takes each part whole; clients send 5 to 16 MiB."""

_PART_BYTES = 16 << 20


def operations_for(store: Store) -> BucketOperations:
    """Return the operations that write to a store: requests are passed on to S3, and become operations of other stores.

    Args:
        store: The store, with all its wrappers.
    """

    async def note_written(keys: Collection[str]) -> None:
        cached = _cached(store)
        if cached is not None and keys:
            await asyncio.to_thread(cached.note_written, keys)

    core = innermost(store)
    if isinstance(core, S3Store):
        return ForwardedOperations(core, note_written=note_written)
    return StoreOperations(store)


def _cached(store: Store) -> Cached | None:
    while not isinstance(store, Cached):
        inner = getattr(store, "inner", None)
        if inner is None:
            return None
        store = inner
    return store


class StoreOperations(BucketOperations):
    """Performs requests as operations of a store.

    Args:
        store: The store.
    """

    honoured: ClassVar[Mapping[str, Collection[str]]] = {
        "put_object": ("if-none-match",),
        "complete_multipart_upload": ("if-none-match",),
    }

    def __init__(self, store: Store) -> None:
        self._store = store

    # ── objects ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def put_object(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """PutObject: a large body goes to the store in parts, as it comes."""
        object_headers(request.headers)  # refuses invalid headers
        if_absent = _is_only_if_absent(request)
        if body.length_bytes is None:
            raise S3Error("MissingContentLength", "You must provide the Content-Length HTTP header.")
        if body.length_bytes <= _PART_BYTES:
            data = await read_document(body, _PART_BYTES)
            completion = await perform_on_loop(self._store, Put(request.key, data, if_absent))
            return Answer(200, _etag_header(completion.info))
        return Answer(200, _etag_header(await self._put_in_parts(request.key, body, if_absent)))

    async def _put_in_parts(self, key: str, body: RequestBody, if_absent: bool) -> ObjectInfo | None:
        upload_id = (await perform_on_loop(self._store, CreateMultipart(key))).value
        parts: list[Part] = []
        held = bytearray()

        async def send() -> None:
            nonlocal held
            data, held = held, bytearray()
            done = await perform_on_loop(self._store, PutPart(key, upload_id, len(parts) + 1, data))
            parts.append(done.value)

        try:
            async for piece in body:
                held += piece
                if len(held) >= _PART_BYTES:
                    await send()
            if held or not parts:
                await send()
            return (await perform_on_loop(self._store, CompleteMultipart(key, upload_id, tuple(parts), if_absent))).info
        except BaseException:
            await perform_on_loop(self._store, AbortMultipart(key, upload_id))
            raise

    async def copy_object(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """CopyObject, inside the store."""
        info = await self._source(request)
        completion = await perform_on_loop(self._store, Copy(info.key, request.key, info.etag))
        etag = completion.info.etag if completion.info is not None else None
        return document("CopyObjectResult", [("LastModified", timestamp(time.time())), ("ETag", etag or "")])

    async def _source(self, request: GatewayRequest) -> ObjectInfo:
        source = copy_source(request.headers)
        if source.bucket != request.bucket:
            raise not_implemented("copying from another bucket or access point than the one that is written")
        info = (await perform_on_loop(self._store, Head(source.key))).info
        assert info is not None  # the contract of Head
        check_copy_conditions(request.headers, etag=info.etag or "", modified_s=info.last_modified_s or 0)
        return info

    async def delete_object(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """DeleteObject; a missing object is no error."""
        failed = (await perform_on_loop(self._store, Delete((request.key,)))).value
        if failed:
            raise S3Error("InternalError", "The object could not be removed.")
        return Answer(204)

    async def delete_objects(self, _request: GatewayRequest, body: RequestBody) -> Answer:
        """DeleteObjects: at most 1 000 keys, of which some may fail."""
        objects, is_quiet = parsed_deletion(await read_document(body))
        keys = [row.findtext("Key") or "" for row in objects]
        if not all(keys):
            raise malformed()
        for child in (child for row in objects for child in row):
            if child.tag != "Key" and (child.tag, child.text or "null") != ("VersionId", "null"):
                raise not_implemented(f"{child.tag[:64]} in DeleteObjects, for this kind of upstream")
        failed = (await perform_on_loop(self._store, Delete(tuple(keys)))).value or {}
        error = S3Error("InternalError", "It could not be removed.")
        return deletion([(key, error if key in failed else None) for key in keys], is_quiet=is_quiet)

    # ── multipart ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def create_multipart_upload(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """CreateMultipartUpload."""
        object_headers(request.headers)
        upload_id = (await perform_on_loop(self._store, CreateMultipart(request.key))).value
        rows = [("Bucket", request.bucket), ("Key", request.key), ("UploadId", upload_id)]
        return document("InitiateMultipartUploadResult", rows)

    async def upload_part(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """UploadPart, which is held in memory."""
        number = part_number(request)
        if (body.length_bytes or 0) > BODY_BYTES_MAX:
            message = f"Parts for this kind of upstream must not be larger than {BODY_BYTES_MAX} bytes."
            raise S3Error("EntityTooLarge", message)
        data = await read_document(body, BODY_BYTES_MAX)
        operation = PutPart(request.key, request.query.get("uploadId", ""), number, data)
        part: Part = (await perform_on_loop(self._store, operation)).value
        return Answer(200, {"ETag": part.etag})

    async def upload_part_copy(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """UploadPartCopy, inside the store."""
        number, info = part_number(request), await self._source(request)
        span = copied_span(request.headers, info.size_bytes)
        operation = CopyPart(info.key, span, request.key, request.query.get("uploadId", ""), number, info.etag)
        part: Part = (await perform_on_loop(self._store, operation)).value
        return document("CopyPartResult", [("LastModified", timestamp(time.time())), ("ETag", part.etag)])

    async def complete_multipart_upload(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """CompleteMultipartUpload."""
        parts = [part._replace(etag=f'"{part.etag}"', checksums={}) for part in named_parts(await read_document(body))]
        if_absent = _is_only_if_absent(request)
        operation = CompleteMultipart(request.key, request.query.get("uploadId", ""), tuple(parts), if_absent)
        info = (await perform_on_loop(self._store, operation)).info
        return completed_upload(request, (info.etag if info is not None else "") or "")

    async def abort_multipart_upload(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """AbortMultipartUpload."""
        await perform_on_loop(self._store, AbortMultipart(request.key, request.query.get("uploadId", "")))
        return Answer(204)


def _etag_header(info: ObjectInfo | None) -> dict[str, str]:
    return {"ETag": info.etag} if info is not None and info.etag else {}


def _is_only_if_absent(request: GatewayRequest) -> bool:
    none_match = request.headers.get("If-None-Match")
    if none_match not in (None, "*"):
        raise not_implemented("If-None-Match with an ETag, for this kind of upstream")
    return none_match == "*"
