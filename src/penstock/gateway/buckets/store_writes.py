"""Requests that write become operations of a store other than S3: memory, a prefix of files, fsspec.

Such stores keep bytes and no headers, so content headers, user metadata and tags are not kept. What a store cannot do at all is
refused.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.gateway.buckets.documents import document, malformed, parsed
from penstock.gateway.buckets.object_headers import object_headers
from penstock.gateway.buckets.requests import (
    check_copy_conditions,
    check_version,
    copied_span,
    not_implemented,
    part_number,
    read_document,
    refuse_unsupported,
)
from penstock.gateway.buckets.submitting import perform_on_loop
from penstock.gateway.buckets.subresources import default_setting, setting_named
from penstock.gateway.copy_sources import copy_source
from penstock.gateway.objects import Answer, S3Error
from penstock.gateway.s3_text import timestamp
from penstock.redaction import public_url
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
    from collections.abc import Awaitable, Callable

    from penstock.gateway.objects import GatewayRequest, RequestBody
    from penstock.store.base import Store
    from penstock.types import ObjectInfo

    Operation = Callable[[GatewayRequest, RequestBody], Awaitable[Answer]]

BODY_BYTES_MAX = 64 << 20
"""Largest body that is held in memory, because a store takes each part whole; clients send 5 to 16 MiB."""

_PART_BYTES = 16 << 20


class StoreWrites:
    """Performs requests as operations of a store.

    Args:
        name: Name of the bucket, by which clients know it.
        store: The store.
    """

    def __init__(self, name: str, store: Store) -> None:
        self._name = name
        self._store = store
        self._operations: dict[tuple[str, str], Operation] = {
            ("PUT", ""): self._put,
            ("PUT", "copy"): self._copy,
            ("DELETE", ""): self._delete,
            ("POST", "uploads"): self._begin,
            ("PUT", "uploadId"): self._put_part,
            ("PUT", "uploadId copy"): self._copy_part,
            ("POST", "uploadId"): self._complete,
            ("DELETE", "uploadId"): self._abort,
        }

    async def perform(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """Perform a request; see ``Writes.perform``."""
        check_version(request)
        setting = setting_named(request)
        is_part = "uploadId" in request.query or "partNumber" in request.query
        method, name = request.method, setting or ("uploadId" if is_part else "")
        if method != "GET":
            can_be_conditional = (method, name) in (("PUT", ""), ("POST", "uploadId")) and not _is_copy(request)
            refuse_unsupported(request, honoured=("if-none-match",) if can_be_conditional else ())
        if not request.key:
            if (method, name) == ("POST", "delete"):
                return await self._delete_many(body)
        else:
            if method == "PUT" and _is_copy(request):
                name = f"{name} copy".strip()
            if (operation := self._operations.get((method, name))) is not None:
                return await operation(request, body)
        if method == "GET" and setting is not None:
            return default_setting(request, setting)
        raise not_implemented(f"{method} {setting or ''}".strip())

    # ── objects ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _put(self, request: GatewayRequest, body: RequestBody) -> Answer:
        object_headers(request.headers)  # refuses what is not valid
        if_absent = await self._is_only_if_absent(request)
        if body.length_bytes is None:
            raise S3Error("MissingContentLength", "You must provide the Content-Length HTTP header.", status=411)
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

    async def _is_only_if_absent(self, request: GatewayRequest) -> bool:
        none_match = request.headers.get("If-None-Match")
        if none_match not in (None, "*"):
            raise not_implemented("If-None-Match with an ETag, for this kind of upstream")
        return none_match == "*"

    async def _copy(self, request: GatewayRequest, _body: RequestBody) -> Answer:
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

    async def _delete(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        failed = (await perform_on_loop(self._store, Delete((request.key,)))).value
        if failed:
            raise S3Error("InternalError", "The object could not be removed.", status=500)
        return Answer(204)

    async def _delete_many(self, body: RequestBody) -> Answer:
        tree = parsed(await read_document(body), root="Delete")
        keys = [row.findtext("Key") or "" for row in tree.findall("Object")]
        if not 0 < len(keys) <= 1000 or not all(keys):
            raise malformed()
        for child in (child for row in tree.findall("Object") for child in row):
            if child.tag != "Key" and (child.tag, child.text or "null") != ("VersionId", "null"):
                raise not_implemented(f"{child.tag[:64]} in DeleteObjects, for this kind of upstream")
        failed = (await perform_on_loop(self._store, Delete(tuple(keys)))).value or {}
        is_quiet = (tree.findtext("Quiet") or "").strip().lower() == "true"
        rows: list[tuple[str, object]] = []
        for key in keys:
            if key in failed:
                rows.append(
                    ("Error", [("Key", key), ("Code", "InternalError"), ("Message", "It could not be removed.")])
                )
            elif not is_quiet:
                rows.append(("Deleted", [("Key", key)]))
        return document("DeleteResult", rows)

    # ── multipart ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def _begin(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        object_headers(request.headers)
        upload_id = (await perform_on_loop(self._store, CreateMultipart(request.key))).value
        rows = [("Bucket", self._name), ("Key", request.key), ("UploadId", upload_id)]
        return document("InitiateMultipartUploadResult", rows)

    async def _put_part(self, request: GatewayRequest, body: RequestBody) -> Answer:
        number = part_number(request)
        if (body.length_bytes or 0) > BODY_BYTES_MAX:
            message = f"Parts for this kind of upstream must not be larger than {BODY_BYTES_MAX} bytes."
            raise S3Error("EntityTooLarge", message, status=400)
        data = await read_document(body, BODY_BYTES_MAX)
        operation = PutPart(request.key, request.query.get("uploadId", ""), number, data)
        part: Part = (await perform_on_loop(self._store, operation)).value
        return Answer(200, {"ETag": part.etag})

    async def _copy_part(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        number, info = part_number(request), await self._source(request)
        span = copied_span(request.headers, info.size_bytes)
        operation = CopyPart(info.key, span, request.key, request.query.get("uploadId", ""), number, info.etag)
        part: Part = (await perform_on_loop(self._store, operation)).value
        return document("CopyPartResult", [("LastModified", timestamp(time.time())), ("ETag", part.etag)])

    async def _complete(self, request: GatewayRequest, body: RequestBody) -> Answer:
        tree = parsed(await read_document(body), root="CompleteMultipartUpload")
        parts = []
        for row in tree.findall("Part"):
            number, etag = (row.findtext("PartNumber") or "").strip(), (row.findtext("ETag") or "").strip().strip('"')
            if not (number.isascii() and number.isdigit()) or not etag:
                raise malformed()
            parts.append(Part(int(number), f'"{etag}"'))
        if not parts:
            raise malformed()
        if_absent = await self._is_only_if_absent(request)
        operation = CompleteMultipart(request.key, request.query.get("uploadId", ""), tuple(parts), if_absent)
        info = (await perform_on_loop(self._store, operation)).info
        rows = [("Location", public_url(request.url)), ("Bucket", self._name), ("Key", request.key)]
        return document(
            "CompleteMultipartUploadResult", [*rows, ("ETag", (info.etag if info is not None else "") or "")]
        )

    async def _abort(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        await perform_on_loop(self._store, AbortMultipart(request.key, request.query.get("uploadId", "")))
        return Answer(204)

    async def close(self) -> None:
        """Nothing is held."""


def _is_copy(request: GatewayRequest) -> bool:
    return "x-amz-copy-source" in request.headers


def _etag_header(info: ObjectInfo | None) -> dict[str, str]:
    return {"ETag": info.etag} if info is not None and info.etag else {}
