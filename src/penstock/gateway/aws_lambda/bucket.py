"""Buckets whose HEAD and LIST a handler answers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from penstock.gateway.aws_lambda.events import required_headers
from penstock.gateway.aws_lambda.returned import head_of, listing_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.gateway.aws_lambda.transform import LambdaTransform
    from penstock.gateway.objects import Answer, Bucket, GatewayRequest, ObjectHead, OpenObject, RequestBody
    from penstock.types import ByteRange, ListPage, Page

HEAD_PARAMETERS = ("versionId",)


class SignsRequests(Protocol):
    """Signs URLs of the source bucket at the internal endpoint."""

    def __call__(self, method: str, key: str, *, query: Mapping[str, str], headers: Mapping[str, str]) -> str:
        """Return a signed URL.

        Args:
            method: HTTP method that the URL permits.
            key: Key in the source bucket; empty for the bucket itself.
            query: Parameters of the query, which the signature covers.
            headers: Headers that must be sent with the request.
        """


class LambdaBucket:
    """A bucket whose HEAD or LIST is answered by what a handler returns; implements ``Bucket``.

    Args:
        inner: Answers everything else.
        transform: The handler.
        actions: The operations that the handler answers: ``HeadObject``, ``ListObjects``, ``ListObjectsV2``.
        sign: Signs ``inputS3Url``.
    """

    def __init__(
        self, inner: Bucket, *, transform: LambdaTransform, actions: tuple[str, ...], sign: SignsRequests
    ) -> None:
        self.name = inner.name
        self.created_s = inner.created_s
        self._inner = inner
        self._transform = transform
        self._actions = frozenset(actions)
        self._sign = sign

    async def head(self, request: GatewayRequest) -> ObjectHead:
        """Describe an object; raises ``S3Error`` if the handler refuses, or returns no head."""
        if "HeadObject" not in self._actions:
            return await self._inner.head(request)
        query = {name: request.query[name] for name in HEAD_PARAMETERS if name in request.query}
        headers = required_headers(self._transform.seen(request))
        sign = partial(self._sign, "HEAD", request.key, query=query, headers=headers)
        return head_of(await self._transform.invoke("HeadObject", request, sign), request.key)

    async def open(self, request: GatewayRequest, hint: ByteRange | None) -> OpenObject:
        """Begin to read an object, which the inner bucket does."""
        return await self._inner.open(request, hint)

    async def list_objects(self, request: GatewayRequest, operation: ListPage) -> Page | Answer:
        """Return one page of the listing; raises ``S3Error`` if the handler refuses, or returns no listing."""
        is_v2 = request.query.get("list-type") == "2"
        action = "ListObjectsV2" if is_v2 else "ListObjects"
        if action not in self._actions:
            return await self._inner.list_objects(request, operation)
        headers = required_headers(self._transform.seen(request))
        sign = partial(self._sign, "GET", "", query=request.query, headers=headers)
        return listing_of(await self._transform.invoke(action, request, sign), is_v2=is_v2)

    async def other(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """Perform any other operation, which the inner bucket does."""
        return await self._inner.other(request, body)

    async def close(self) -> None:
        """Close the inner bucket; idempotent."""
        await self._inner.close()
