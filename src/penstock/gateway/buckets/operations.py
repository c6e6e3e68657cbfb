"""The operations of S3 beyond reading and listing, each by its name, and the one answer for those that a bucket lacks.

A bucket has one ``BucketOperations``, with a method for each operation of its store, named as in S3's API. A bucket that
cannot be written has ``ReadOnlyOperations``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from penstock.gateway.buckets.documents import default_setting, object_attributes
from penstock.gateway.buckets.requests import check_version, refuse_unsupported
from penstock.gateway.objects import SUB_RESOURCES, Answer, S3Error, access_denied, not_implemented

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping

    from penstock.gateway.objects import Bucket, GatewayRequest, RequestBody

    Handler = Callable[[GatewayRequest, RequestBody], Awaitable[Answer]]

_OF_OBJECTS = {
    ("PUT", ""): "put_object",
    ("PUT", "copy"): "copy_object",
    ("DELETE", ""): "delete_object",
    ("POST", "uploads"): "create_multipart_upload",
    ("PUT", "uploadId"): "upload_part",
    ("PUT", "uploadId copy"): "upload_part_copy",
    ("GET", "uploadId"): "list_parts",
    ("POST", "uploadId"): "complete_multipart_upload",
    ("DELETE", "uploadId"): "abort_multipart_upload",
    ("GET", "tagging"): "get_object_tagging",
    ("PUT", "tagging"): "put_object_tagging",
    ("DELETE", "tagging"): "delete_object_tagging",
    ("GET", "attributes"): "get_object_attributes",
    ("GET", "acl"): "get_object_acl",
    ("PUT", "acl"): "put_object_acl",
}
_OF_BUCKETS = {
    ("POST", "delete"): "delete_objects",
    ("GET", "uploads"): "list_multipart_uploads",
    ("GET", "versions"): "list_object_versions",
}
OPERATIONS = frozenset({*_OF_OBJECTS.values(), *_OF_BUCKETS.values()})
"""The names of all operations that a bucket may have."""


def setting_named(request: GatewayRequest) -> str | None:
    """Return the name of the sub-resource that a request is about; None if it is about none."""
    return next((name for name in request.query if name in SUB_RESOURCES and name != "uploadId"), None)


def operation_named(request: GatewayRequest) -> str:
    """Return the name of the operation that a request is, as in S3's API (``put_object``); empty if it is none of them."""
    method = "GET" if request.method == "HEAD" else request.method
    name = setting_named(request) or ""
    if not request.key:
        return _OF_BUCKETS.get((method, name), "")
    if not name and ("uploadId" in request.query or "partNumber" in request.query):
        name = "uploadId"
    if method == "PUT" and name in ("", "uploadId") and "x-amz-copy-source" in request.headers:
        name = f"{name} copy".strip()
    return _OF_OBJECTS.get((method, name), "")


class BucketOperations:
    """The operations of a bucket beyond reading and listing: its methods that are named as operations of S3.

    A handler takes the request and its body, and returns an ``Answer``.

    Attributes:
        honoured: Conditions and demands that an operation honours, as lower-case names of headers, by its name. A write with
            any other is refused.
    """

    honoured: Mapping[str, Collection[str]] = MappingProxyType({})

    async def perform(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """Perform the operation that a request is; a GET of a setting that nobody made is answered as S3 does.

        Raises:
            S3Error: The operation failed, or is not one of this bucket's.
            PenstockError: The store failed.
        """
        check_version(request)
        name = operation_named(request)
        is_question = request.method in ("GET", "HEAD")
        if not is_question:
            self.check_may_write(request)
            refuse_unsupported(request, honoured=self.honoured.get(name, ()))
        handler: Handler | None = getattr(self, name, None) if name else None
        if handler is not None:
            return await handler(request, body)
        setting = setting_named(request)
        if is_question and setting is not None:
            await self.check_exists()
            return default_setting(request, setting)
        if request.method == "POST" and setting is None:
            raise S3Error("MethodNotAllowed", "The specified method is not allowed against this resource.")
        raise not_implemented(f"{request.method} {setting or ''}".strip())

    def check_may_write(self, request: GatewayRequest) -> None:
        """Refuse a write that this bucket never accepts, from this caller; raises ``S3Error``."""

    async def check_exists(self) -> None:
        """Refuse a question about a bucket that was removed; raises ``S3Error``."""

    async def close(self) -> None:
        """Release all resources; idempotent."""


class ReadOnlyOperations(BucketOperations):
    """The operations of a bucket that can only be read.

    Args:
        bucket: The bucket.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def check_may_write(self, request: GatewayRequest) -> None:
        """Refuse every write."""
        raise access_denied("This bucket can only be read.")

    async def get_object_attributes(self, request: GatewayRequest, _body: RequestBody) -> Answer:
        """GetObjectAttributes, as far as the object's head has the attributes."""
        return object_attributes(await self._bucket.head(request), request)
