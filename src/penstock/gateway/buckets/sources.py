"""Sources of transforms: an object of a bucket as a source, and the keys of results and of their sources."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, ObjectChangedError

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
        links: Makes the URLs by which other processes reach the object; None if they cannot.

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

    async def read(self, span: ByteRange | None = None) -> AsyncIterator[Buffer]:
        """Iterate over the object's bytes, all of the version in `head`.

        Raises:
            ObjectChangedError: The object was replaced.
        """
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

        Cost: nothing if no URL was handed out; otherwise the bucket's cost of describing an object.
        """
        if self._is_linked:
            self._check(await self._bucket.head(replace(self._request, method="HEAD")))

    def _check(self, head: ObjectHead) -> None:
        if head.etag != self.head.etag:
            raise ObjectChangedError(f"the source {self.key} was replaced while it was being transformed")


def source_request(request: GatewayRequest, bucket: Bucket, key: str) -> GatewayRequest:
    """Return a request for a source on behalf of the caller, without conditions, range and sub-resources."""
    return replace(request, method="GET", bucket=bucket.name, key=key, query={}, headers={})


class KeyRenaming:
    """Maps keys of sources to keys of results, and back: ``a.tar`` may be served as ``a.tfrecord``.

    With suffixes, only sources that have one of them are served: an object that the transform is not meant for must not be
    served as it is, because the transform may be there to redact it.

    Args:
        suffixes: New suffix by old suffix; a new one may be empty. No suffixes serve every source under its own key.

    Raises:
        ConfigError: An old suffix is empty, a suffix contains a slash, or two old suffixes have the same new one.
    """

    def __init__(self, suffixes: Mapping[str, str]) -> None:
        if "" in suffixes:
            raise ConfigError("renamed_suffixes: an old suffix must not be empty", hint='".gz" = "" removes a suffix')
        for suffix in (*suffixes, *suffixes.values()):
            if "/" in suffix:
                raise ConfigError(f"renamed_suffixes: {suffix!r} must not contain a slash")
        if len(set(suffixes.values())) < len(suffixes):
            raise ConfigError("renamed_suffixes: two suffixes become the same one, so keys would have two sources")
        # The longest suffix wins, so that .tar.gz is not taken for .gz.
        self._new_by_old = dict(sorted(suffixes.items(), key=lambda pair: -len(pair[0])))
        self._old_by_new = {new: old for old, new in sorted(suffixes.items(), key=lambda pair: -len(pair[1]))}

    def result_key(self, source_key: str) -> str | None:
        """Return the key under which a source is served; None if it is not served."""
        if not self._new_by_old:
            return source_key
        for old, new in self._new_by_old.items():
            if source_key.endswith(old):
                return source_key[: -len(old)] + new
        return None

    def source_keys(self, key: str) -> list[str]:
        """Return the keys that the source of a result may have, the most probable first."""
        if not self._new_by_old:
            return [key]
        found = [key.removesuffix(new) + old for new, old in self._old_by_new.items() if key.endswith(new)]
        return [source_key for source_key in found if self.result_key(source_key) == key]

    def has_in_suffix(self, text: str) -> bool:
        """Whether a suffix contains `text`."""
        return any(text in suffix for suffix in (*self._new_by_old, *self._old_by_new))

    def source_prefix(self, prefix: str) -> str:
        """Return a prefix of all sources whose results begin with `prefix`. Sources of other results may have it, too."""
        shortest = prefix
        for new in self._old_by_new:
            for length in range(1, len(new) + 1):
                if prefix.endswith(new[:length]):
                    shortest = min(shortest, prefix[:-length], key=len)
        return shortest
