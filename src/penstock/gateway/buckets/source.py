"""``BucketSource``: an object of a bucket as the source of a transform."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.errors import ObjectChangedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from penstock.gateway.objects import Bucket, GatewayRequest, ObjectHead, SourceLinks
    from penstock.types import Buffer, ByteRange


class BucketSource:
    """One version of an object of a bucket.

    Args:
        bucket: The bucket.
        request: The request that caused the reading; its conditions and its range do not apply to the source.
        key: Key in the bucket.
        head: The version.
        links: How other processes reach the object; None if they cannot.

    Attributes:
        key: Key in the bucket.
        head: The version.
    """

    def __init__(
        self, bucket: Bucket, request: GatewayRequest, *, key: str, head: ObjectHead, links: SourceLinks | None
    ) -> None:
        self.key = key
        self.head = head
        self._bucket = bucket
        self._request = source_request(request, bucket, key)
        self._links = links
        self._is_linked = False

    def worker_url(self) -> tuple[str, str]:
        """Return a URL for ``penstock.connect``, and the key in it; see ``Source.worker_url``."""
        self._is_linked = True
        return self._known_links().worker_url(self.key, self.head)

    def signed_url(self, headers: Mapping[str, str]) -> str:
        """Return a URL at the gateway's own endpoint; see ``Source.signed_url``."""
        self._is_linked = True
        return self._known_links().signed_url(self.key, self.head, headers)

    def _known_links(self) -> SourceLinks:
        if self._links is None:
            raise RuntimeError("this source cannot be reached from other processes")
        return self._links

    def read(self, span: ByteRange | None = None) -> AsyncIterator[Buffer]:
        """Iterate over the object's bytes, all of the version in `head`.

        Raises:
            ObjectChangedError: The object was replaced.
        """
        return self._read(span)

    async def _read(self, span: ByteRange | None) -> AsyncIterator[Buffer]:
        opened = await self._bucket.open(self._request, span)
        try:
            self._check(opened.head)
            pieces = opened.read(span)
            async with aclosing(pieces):  # type: ignore[type-var]
                async for piece in pieces:
                    yield piece
        finally:
            await opened.close()

    async def check_unchanged(self) -> None:
        """Check that the object behind the URLs that were handed out is still the version in `head`.

        Raises:
            ObjectChangedError: The object was replaced.

        Cost: nothing if no URL was handed out; otherwise what the bucket needs to describe an object.
        """
        if self._is_linked:
            self._check(await self._bucket.head(replace(self._request, method="HEAD")))

    def _check(self, head: ObjectHead) -> None:
        if head.etag != self.head.etag:
            raise ObjectChangedError(f"the source {self.key} was replaced while it was being transformed")


def source_request(request: GatewayRequest, bucket: Bucket, key: str) -> GatewayRequest:
    """Return a request for a source on behalf of the caller, without conditions, range and sub-resources."""
    return replace(request, method="GET", bucket=bucket.name, key=key, query={}, headers={})
