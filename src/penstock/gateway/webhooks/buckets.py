"""Buckets whose objects are transformed if a request names a webhook: ``GET /bucket/key?lambdaArn=ARN``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.gateway.objects import BucketWrapper, S3Error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.gateway.objects import Authenticator, Bucket, GatewayRequest, ObjectHead, OpenObject
    from penstock.types import ByteRange

PARAMETER = "lambdaArn"
_ARN = re.compile(r"arn:minio:s3-object-lambda:[^:]*:([^:]+):webhook")


class ArnBucket(BucketWrapper):
    """A bucket that serves its objects as they are, or through the webhook that a request names; implements ``Bucket``.

    MinIO takes the parameter only for GET. Here it also works for HEAD, which then describes the transformed object.

    Args:
        plain: The bucket.
        targets: The same bucket through a transform, by the ID of the webhook in ARNs: the name of its access point.
        authenticator: Says whether the caller may use that access point.
    """

    def __init__(self, plain: Bucket, *, targets: Mapping[str, Bucket], authenticator: Authenticator) -> None:
        super().__init__(plain)
        self._targets = dict(targets)
        self._authenticator = authenticator

    async def head(self, request: GatewayRequest) -> ObjectHead:
        """Describe an object, transformed if the request names a webhook."""
        return await self._chosen(request).head(request)

    async def open(self, request: GatewayRequest, hint: ByteRange | None) -> OpenObject:
        """Begin to read an object, transformed if the request names a webhook."""
        return await self._chosen(request).open(request, hint)

    async def close(self) -> None:
        """Close the bucket and its targets; idempotent."""
        for bucket in (self._inner, *self._targets.values()):
            await bucket.close()

    def _chosen(self, request: GatewayRequest) -> Bucket:
        """Return the bucket that a request means.

        Raises:
            S3Error: The ARN is malformed, names no webhook of the configuration, or one that the caller may not use.
        """
        arn = request.query.get(PARAMETER)
        if arn is None:
            return self._inner
        match = _ARN.fullmatch(arn)
        if match is None:
            raise S3Error("LambdaARNInvalid", "The specified lambda ARN is invalid.")
        if not self._authenticator.may_use(request.caller, match[1]):
            raise S3Error("AccessDenied", "Access Denied")
        target = self._targets.get(match[1])
        if target is None:
            raise S3Error("LambdaARNNotFound", "The specified lambda ARN does not exist.")
        return target
