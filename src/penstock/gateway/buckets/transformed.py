"""``TransformedBucket``: an access point whose objects are the results of a transform."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.errors import ObjectMissingError
from penstock.gateway.buckets.renaming import KeyRenaming
from penstock.gateway.buckets.source import BucketSource, source_request
from penstock.gateway.objects import ObjectHead, S3Error
from penstock.gateway.results.identity import ResultIdentity, ResultName
from penstock.gateway.results.open_result import OpenResult
from penstock.gateway.results.plan import ResultPlan
from penstock.gateway.results.record import DEFAULT_TYPE
from penstock.types import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from penstock.gateway.config import AccessPoint
    from penstock.gateway.objects import (
        Answer,
        Bucket,
        GatewayRequest,
        OpenObject,
        RequestBody,
        ResultWriter,
        SourceLinks,
        Transform,
    )
    from penstock.gateway.results.results import Results
    from penstock.gateway.results.shared_result import SharedResult
    from penstock.types import ByteRange

LENGTH_HEADER = "x-penstock-length"


class TransformedBucket:
    """An access point with a transform.

    Args:
        access_point: Its configuration.
        source_bucket: The bucket that holds the sources. It is closed with this one.
        transform: What turns a source into a result. It is closed with this bucket.
        results: The results of this process.
        links: How other processes reach the sources; None if the transform needs that not.
        created_s: When the access point was created, in seconds since 1970; 0 if that is not known.

    Attributes:
        name: Name of the access point.
        created_s: When it was created.

    Raises:
        ConfigError: The suffixes that it renames are not valid.
    """

    def __init__(
        self,
        access_point: AccessPoint,
        source_bucket: Bucket,
        *,
        transform: Transform,
        results: Results,
        links: SourceLinks | None = None,
        created_s: float = 0.0,
    ) -> None:
        self.name = access_point.name
        self.created_s = created_s
        self._access_point = access_point
        self._source_bucket = source_bucket
        self._transform = transform
        self._results = results
        self._links = links
        self._renaming = KeyRenaming(access_point.renamed_suffixes)
        self._is_deterministic = (
            transform.is_deterministic if access_point.deterministic is None else access_point.deterministic
        )

    # ── one object ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def head(self, request: GatewayRequest) -> ObjectHead:
        """Describe a result with its true size, for which it may be produced; see ``Bucket.head``."""
        opened = await self.open(request, None)
        try:
            if opened.head.size_bytes is None:
                await opened.wait_size_bytes()
            return opened.head
        finally:
            await opened.close()

    async def open(self, request: GatewayRequest, hint: ByteRange | None) -> OpenObject:
        """Begin to read a result; see ``Bucket.open``. The transform runs when its first byte or its size is requested.

        Cost: what the source bucket needs to describe the source; a look at the disk for a result that this process has not
        used before.
        """
        source = await self._find_source(request)
        shared = await self._share(request, source)
        head = ObjectHead(
            key=request.key,
            size_bytes=None,
            etag=shared.plan.name.etag,
            last_modified_s=source.head.last_modified_s,
            headers={"Content-Type": DEFAULT_TYPE},
        )
        length = self._length_mode(request)
        return OpenResult(shared, head, spools=length == "spool", hides_size=length == "stream")

    def _length_mode(self, request: GatewayRequest) -> str:
        asked = request.headers.get(LENGTH_HEADER, "").strip().lower()
        if asked not in ("", "stream", "spool", "auto"):
            raise S3Error("InvalidArgument", f"{LENGTH_HEADER} must be stream, spool or auto.", status=400)
        return asked or self._access_point.length

    async def _find_source(self, request: GatewayRequest) -> BucketSource:
        """Return the source of the result that a request names.

        Raises:
            ObjectMissingError: There is none.
        """
        for key in self._renaming.source_keys(request.key):
            try:
                head = await self._source_bucket.head(
                    replace(source_request(request, self._source_bucket, key), method="HEAD")
                )
            except ObjectMissingError:
                continue
            return BucketSource(self._source_bucket, request, key=key, head=head, links=self._links)
        raise ObjectMissingError(f"{self.name} has no object {request.key!r}", status=404)

    async def _share(self, request: GatewayRequest, source: BucketSource) -> SharedResult:
        """Return the result of a source. Nothing is computed for one that is kept, or that somebody reads already."""
        arguments = self._transform.arguments(request)
        identity = self._identity(source.key, source.head.etag, arguments)
        name = ResultName(identity.scope, identity.key, identity.etag)
        shared = self._results.shared(name)
        if shared is not None:
            return shared
        record = await self._results.find(name)
        size_bytes = None if record is not None else await self._transform.size_bytes(_as_info(source), arguments)
        plan = ResultPlan(
            name=name,
            produce=self._producer(request, source, arguments),
            transform=self._transform.name,
            arguments=arguments,
            is_deterministic=self._is_deterministic,
            size_bytes=size_bytes,
            last_modified_s=source.head.last_modified_s,
            time_s_max=self._access_point.time_s_max,
            output_bytes_max=self._access_point.output_bytes_max,
        )
        return self._results.share(plan, record)

    def _identity(self, key: str, etag: str, arguments: Mapping[str, str]) -> ResultIdentity:
        return ResultIdentity.of(
            arguments,
            scope=self._access_point.upstream,
            key=key,
            source_etag=etag,
            transform=self._transform.identity,
            version=self._access_point.version,
        )

    def _producer(
        self, request: GatewayRequest, source: BucketSource, arguments: Mapping[str, str]
    ) -> Callable[[ResultWriter], Awaitable[None]]:
        async def produce(output: ResultWriter) -> None:
            await self._transform.run(source, request, arguments, output)
            await source.check_unchanged()

        return produce

    # ── everything else ────────────────────────────────────────────────────────────────────────────────────────────

    async def other(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """Refuse changes, and pass other questions about the bucket on; see ``Bucket.other``."""
        if request.method != "GET":
            raise S3Error("AccessDenied", "Objects of an access point with a transform can only be read.", status=403)
        return await self._source_bucket.other(replace(request, bucket=self._source_bucket.name), body)

    async def close(self) -> None:
        """Close the transform and the source bucket; idempotent."""
        try:
            await self._transform.close()
        finally:
            await self._source_bucket.close()


def _as_info(source: BucketSource) -> ObjectInfo:
    head = source.head
    return ObjectInfo(source.key, head.size_bytes or 0, head.etag, head.last_modified_s)
