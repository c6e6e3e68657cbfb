"""Which bucket a name means: access points first, then the folders of a directory if there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.gateway.buckets.upstream import UpstreamBucket
from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.gateway.objects import Bucket, BucketAtHand, BucketTable, Caller


class AccessPointTable:
    """The access points of a gateway, before another table. Implements ``BucketTable``.

    Args:
        access_points: Buckets by name.
        others: Table of the buckets that are not access points; None if there are no others.
    """

    def __init__(self, access_points: Mapping[str, Bucket], *, others: BucketTable | None = None) -> None:
        self._access_points = dict(access_points)
        self._others = others

    async def get(self, name: str, caller: Caller) -> Bucket | None:
        """Return the bucket of a name."""
        found = self._access_points.get(name)
        if found is None and self._others is not None:
            return await self._others.get(name, caller)
        return found

    def at_hand(self, name: str) -> BucketAtHand | None:
        """Return an access point that serves a store's objects as they are."""
        found = self._access_points.get(name)
        return found if isinstance(found, UpstreamBucket) else None

    async def names(self, caller: Caller) -> list[Bucket]:
        """Return all buckets, in the order of their names."""
        buckets = dict(self._access_points)
        if self._others is not None:
            buckets = {bucket.name: bucket for bucket in await self._others.names(caller)} | buckets
        return [buckets[name] for name in sorted(buckets)]

    async def create(self, name: str, caller: Caller, *, region: str) -> None:
        """Create a bucket in the other table."""
        if name in self._access_points:
            raise S3Error("BucketAlreadyExists", "An access point of the gateway has this name.", status=409)
        await self._writable().create(name, caller, region=region)

    async def delete(self, name: str, caller: Caller) -> None:
        """Remove a bucket from the other table."""
        if name in self._access_points:
            raise S3Error(
                "AccessDenied", "This is an access point of the gateway, which its configuration names.", status=403
            )
        await self._writable().delete(name, caller)

    def _writable(self) -> BucketTable:
        if self._others is None:
            raise S3Error(
                "AccessDenied", "This gateway serves the buckets of its configuration, and no others.", status=403
            )
        return self._others
