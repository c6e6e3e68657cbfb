"""Turns requests that write into operations of a store: for S3 the client's requests, for others the methods of ``Store``.

Directories and memory keep headers and tags, and honour conditions. File systems of fsspec keep only bytes: headers are left
out; tags and conditions are refused.
"""

from __future__ import annotations

import asyncio
import mmap
import tempfile
import time
from typing import IO, TYPE_CHECKING, Any

from penstock.cache import Cached
from penstock.gateway.buckets.documents import (
    completed_upload,
    deletion,
    document,
    malformed,
    named_parts,
    parsed_deletion,
    tagging,
)
from penstock.gateway.buckets.forwarding import ForwardedOperations
from penstock.gateway.buckets.operations import BucketOperations
from penstock.gateway.buckets.requests import (
    WRITE_CONDITIONS,
    body_incomplete,
    check_copy_conditions,
    checked_length_bytes,
    collected,
    copied_span,
    is_replacing,
    object_headers,
    part_number,
    precondition_failed,
    read_document,
    tags_in_header,
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
    strong_etag,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from penstock.gateway.objects import GatewayRequest, RequestBody
    from penstock.store.base import Store
    from penstock.types import ObjectInfo

_HELD_BYTES_MAX = 16 << 20
"""Largest body that is held in memory, because a store takes each part whole; a larger one is written to a file first."""


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

    def __init__(self, store: Store) -> None:
        self._store = store
        conditions = WRITE_CONDITIONS if store.keeps_records else ("if-none-match",)
        self.honoured = dict.fromkeys(("put_object", "complete_multipart_upload"), conditions)

    # ── objects ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def put_object(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """PutObject: a large body goes to the store in parts, as it comes."""
        kept, conditions = self._kept(request), _conditions(request)
        length_bytes = checked_length_bytes(body)
        if length_bytes <= _HELD_BYTES_MAX:
            data = await read_document(body, _HELD_BYTES_MAX)
            completion = await perform_on_loop(self._store, Put(request.key, data, **kept, **conditions))
            return Answer(200, _etag_header(completion.info))
        info = await self._put_in_parts(CreateMultipart(request.key, **kept), body, conditions)
        return Answer(200, _etag_header(info))

    def _kept(self, request: GatewayRequest) -> dict[str, Any]:
        """Return what the store keeps of a request besides its bytes.

        Raises:
            S3Error: A header is not valid, or the request has tags, which the store cannot keep.
        """
        headers, tags = object_headers(request.headers), tags_in_header(request.headers)
        if self._store.keeps_records:
            return {"headers": headers, "tags": tags}
        if tags:
            raise not_implemented("tags, for this kind of upstream")
        return {}

    async def _put_in_parts(
        self, create: CreateMultipart, body: RequestBody, conditions: Mapping[str, Any]
    ) -> ObjectInfo | None:
        key = create.key
        upload_id = (await perform_on_loop(self._store, create)).value
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
                if len(held) >= _HELD_BYTES_MAX:
                    await send()
            if held or not parts:
                await send()
            complete = CompleteMultipart(key, upload_id, tuple(parts), **conditions)
            return (await perform_on_loop(self._store, complete)).info
        except BaseException:
            await perform_on_loop(self._store, AbortMultipart(key, upload_id))
            raise

    async def copy_object(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """CopyObject, inside the store, with the headers and tags of the source or those of the request."""
        info = await self._source(request)
        replaced = self._kept(request)
        kept = {
            name: replaced[name]
            for name, directive in (("headers", "x-amz-metadata-directive"), ("tags", "x-amz-tagging-directive"))
            if is_replacing(request.headers, directive) and name in replaced
        }
        completion = await perform_on_loop(self._store, Copy(info.key, request.key, info.etag, **kept))
        etag = completion.info.etag if completion.info is not None else None
        return document("CopyObjectResult", [("LastModified", timestamp(time.time())), ("ETag", etag or "")])

    async def _source(self, request: GatewayRequest) -> ObjectInfo:
        source = copy_source(request.headers)
        if source.bucket != request.bucket:
            raise not_implemented("copying from another bucket or access point than the one that is written")
        info = await self._info(source.key)
        check_copy_conditions(request.headers, etag=info.etag or "", modified_s=info.last_modified_s or 0)
        return info

    async def _info(self, key: str) -> ObjectInfo:
        info = (await perform_on_loop(self._store, Head(key, headers=self._store.keeps_headers))).info
        assert info is not None  # the contract of Head
        return info

    async def get_object_tagging(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """GetObjectTagging."""
        return tagging((await self._info(request.key)).tags)

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
        upload_id = (await perform_on_loop(self._store, CreateMultipart(request.key, **self._kept(request)))).value
        rows = [("Bucket", request.bucket), ("Key", request.key), ("UploadId", upload_id)]
        return document("InitiateMultipartUploadResult", rows)

    async def upload_part(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """UploadPart: a large one is written to a file without a name first, of which the store gets a view."""
        number, upload_id = part_number(request), request.query.get("uploadId", "")
        length_bytes = checked_length_bytes(body)
        if length_bytes <= _HELD_BYTES_MAX:
            data = await read_document(body, _HELD_BYTES_MAX)
            done = await perform_on_loop(self._store, PutPart(request.key, upload_id, number, data))
        else:
            with tempfile.TemporaryFile(prefix="penstock-part-") as file:
                await _spooled(body, file, length_bytes)
                # Not closed here: if the client leaves, the store's thread may still read it for a moment.
                view = memoryview(mmap.mmap(file.fileno(), length_bytes, access=mmap.ACCESS_READ))
                done = await perform_on_loop(self._store, PutPart(request.key, upload_id, number, view))
        part: Part = done.value
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
        upload_id = request.query.get("uploadId", "")
        operation = CompleteMultipart(request.key, upload_id, tuple(parts), **_conditions(request))
        info = (await perform_on_loop(self._store, operation)).info
        return completed_upload(request, (info.etag if info is not None else "") or "")

    async def abort_multipart_upload(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """AbortMultipartUpload."""
        await perform_on_loop(self._store, AbortMultipart(request.key, request.query.get("uploadId", "")))
        return Answer(204)


def _etag_header(info: ObjectInfo | None) -> dict[str, str]:
    return {"ETag": info.etag} if info is not None and info.etag else {}


def _conditions(request: GatewayRequest) -> dict[str, Any]:
    """Return the conditions of a write, as operations have them."""
    none_match, match = request.headers.get("If-None-Match"), request.headers.get("If-Match")
    if none_match not in (None, "*"):
        raise not_implemented("If-None-Match with an ETag, for this kind of upstream")
    if match is not None and (match == "*" or "," in match):
        raise not_implemented("If-Match with anything but one ETag, for this kind of upstream")
    found: dict[str, Any] = {"if_absent": True} if none_match == "*" else {}
    if match is not None:
        found["if_match"] = strong_etag(match)
        if found["if_match"] is None:  # a weak one matches nothing
            raise precondition_failed("If-Match")
    return found


async def _spooled(body: RequestBody, file: IO[bytes], length_bytes: int) -> None:
    """Write a body to a file, on threads; a few MiB of it are held."""
    async for pieces in collected(body):
        await asyncio.to_thread(file.writelines, pieces)
    await asyncio.to_thread(file.flush)
    if file.tell() != length_bytes:
        raise body_incomplete()
