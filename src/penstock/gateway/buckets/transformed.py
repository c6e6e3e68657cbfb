"""``TransformedBucket``: an access point whose objects are the results of a transform."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, ObjectMissingError
from penstock.gateway.buckets.documents import object_attributes
from penstock.gateway.buckets.known_objects import etag_of
from penstock.gateway.buckets.listed_sizes import MODES, ListedResult, decide_sizes
from penstock.gateway.buckets.sources import BucketSource, KeyRenaming, source_request
from penstock.gateway.objects import ObjectHead, S3Error
from penstock.gateway.results.identity import ResultIdentity, ResultName, ResultPlan
from penstock.gateway.results.reader import MappedResult, OpenResult
from penstock.gateway.results.record import DEFAULT_TYPE
from penstock.index.place import FOLDER
from penstock.types import ByteRange, ObjectInfo, Page

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

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
    from penstock.gateway.results.record import ResultRecord
    from penstock.gateway.results.results import Results
    from penstock.gateway.results.shared_result import SharedResult
    from penstock.types import ListPage


_SOURCE_PAGES_MAX = 32
"""Pages of sources that are looked through for one page: all results on a page may be left out."""

_NEXT_PAGE, _AFTER_KEY = "t", "a"
"""First character of a continuation token: the rest is a token of the source bucket, or a key of it."""

_AFTER_ALL = "\U0010ffff"

_LIST_PARAMETERS = frozenset(
    {"list-type", "encoding-type", "prefix", "delimiter", "max-keys", "continuation-token", "start-after", "marker"}
    | {"fetch-owner"}
)
"""Parameters of a listing itself. They do not reach the transform: a listing shows what a GET without them would get."""

EPOCH_NAMES = ("x-penstock-epoch", "x-penstock-seed")
"""Parameters of the query, or headers, that make a transform with random numbers deterministic."""

LENGTH_HEADER = "x-penstock-length"

_GRACE_S = 10.0
"""Time that a run has beyond the limit of its transform. The transform's error tells clients not to try again, so it should
come before that of the run."""


class TransformedBucket:
    """An access point with a transform.

    Args:
        access_point: Configuration of the access point.
        source_bucket: The bucket that holds the sources. It is closed with this one.
        scope: The upstream of that bucket, as ``scope_of`` names it.
        transform: The transform that turns a source into a result. It is closed with this bucket.
        results: The results of this process.
        links: Makes the URLs by which other processes reach the sources; None if only this process reads them.
        created_s: When the access point was created, in seconds since 1970; 0 if that is not known.

    Attributes:
        name: Name of the access point.
        created_s: When it was created.
        scope: The upstream.

    Raises:
        ConfigError: The suffixes that it renames, or ``list_sizes``, are not valid.
    """

    def __init__(
        self,
        access_point: AccessPoint,
        source_bucket: Bucket,
        *,
        scope: str,
        transform: Transform,
        results: Results,
        links: SourceLinks | None = None,
        created_s: float = 0.0,
    ) -> None:
        self.name = access_point.name
        self.created_s = created_s
        self.scope = scope
        self._access_point = access_point
        self._source_bucket = source_bucket
        self._transform = transform
        self._results = results
        self._links = links
        if access_point.list_sizes not in MODES:
            raise ConfigError(f"list_sizes={access_point.list_sizes!r} must be one of {', '.join(MODES)}")
        self._listing_s_max = 20.0
        self._renaming = KeyRenaming(access_point.renamed_suffixes)

    @property
    def _is_deterministic(self) -> bool:
        """Whether results are kept; a transform says so only once it has been started."""
        chosen = self._access_point.deterministic
        return self._transform.is_deterministic if chosen is None else chosen

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

        Cost: the source bucket's cost of describing the source; a look at the disk for a result that this process has not
        used before.
        """
        source = await self._find_source(request)
        if self._transform.maps_ranges:
            return await self._open_mapped(request, source)
        shared = await self._share(request, source)
        head = _head_of(request, source, shared.plan)
        length = self._length_mode(request)
        return OpenResult(shared, head, spools=length == "spool", hides_size=length == "stream")

    def keeps_results(self, request: GatewayRequest) -> bool:
        """Whether what a request gets is kept for later requests; only once the transform has been started."""
        return not self._transform.maps_ranges and (self._is_deterministic or bool(self._epoch(request)))

    def result_key(self, source_key: str) -> str | None:
        """Return the key under which clients find the result of a source; None if it is not served."""
        return self._renaming.result_key(source_key)

    def is_current(self, record: ResultRecord, source_etag: str) -> bool:
        """Whether a request may still find a result, if its source has a certain ETag now; only once the transform started."""
        identity = self._identity(record.key, source_etag, record.arguments)
        return record.etag == identity.etag or identity.with_nonce_of(record.etag) is not None

    async def share(self, request: GatewayRequest) -> SharedResult:
        """Return the result that a request gets, without beginning to produce it. Only if ``keeps_results``.

        Raises:
            ObjectMissingError: There is no source.
        """
        return await self._share(request, await self._find_source(request))

    def _length_mode(self, request: GatewayRequest) -> str:
        asked = request.headers.get(LENGTH_HEADER, "").strip().lower()
        if asked not in ("", "stream", "spool", "auto"):
            raise S3Error("InvalidArgument", f"{LENGTH_HEADER} must be stream, spool or auto.")
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
        name = await self._name_for(request, source, arguments)
        shared = self._results.shared(name)
        if shared is not None:
            return shared
        record = await self._results.find(name)
        size_bytes = None if record is not None else await self._transform.size_bytes(_as_info(source), arguments)
        plan = self._plan(request, source, name=name, arguments=arguments, size_bytes=size_bytes)
        return self._results.share(plan, record)

    async def _open_mapped(self, request: GatewayRequest, source: BucketSource) -> MappedResult:
        """Begin to read a result whose ranges the transform produces by themselves."""
        arguments = self._transform.arguments(request)
        name = self._identity(source.key, source.head.etag, arguments).name
        size_bytes = await self._transform.size_bytes(_as_info(source), arguments)
        plan = self._plan(request, source, name=name, arguments=arguments, size_bytes=size_bytes)
        return MappedResult(
            replace(_head_of(request, source, plan), size_bytes=size_bytes),
            plan=plan,
            results=self._results,
            produce=lambda span: self._producer(request, source, arguments, span),
        )

    def _plan(
        self,
        request: GatewayRequest,
        source: BucketSource,
        *,
        name: ResultName,
        arguments: Mapping[str, str],
        size_bytes: int | None,
    ) -> ResultPlan:
        return ResultPlan(
            name=name,
            produce=self._producer(request, source, arguments),
            transform=self._transform.name,
            access_point=self._access_point.name,
            arguments=arguments,
            is_deterministic=self._is_deterministic or bool(self._epoch(request)),
            size_bytes=size_bytes,
            last_modified_s=source.head.last_modified_s,
            time_s_max=_run_s_max(self._access_point),
            output_bytes_max=self._access_point.output_bytes_max,
        )

    async def _name_for(
        self, request: GatewayRequest, source: BucketSource, arguments: Mapping[str, str]
    ) -> ResultName:
        """Return the name of the result that a request gets.

        If the transform is not deterministic and the request names no epoch, it is the result whose ETag the request names,
        else the one that is held, else a new one.
        """
        identity = self._identity(source.key, source.head.etag, self._identifying(request, arguments))
        base = identity.name
        if self._is_deterministic or self._epoch(request):
            return base
        pinned = identity.with_nonce_of(request.headers.get("if-match") or request.headers.get("if-range") or "")
        if pinned is not None and await self._results.exists(name := base._replace(etag=pinned.etag)):
            return name
        return await self._results.held.name_for(base, lambda: base._replace(etag=identity.with_new_nonce().etag))

    def _identifying(self, request: GatewayRequest, arguments: Mapping[str, str]) -> Mapping[str, str]:
        """Return the arguments that are part of a result's identity."""
        return arguments if self._is_deterministic else {**arguments, **self._epoch(request)}

    def _epoch(self, request: GatewayRequest) -> dict[str, str]:
        """Return the epoch and the seed that a request or the configuration names."""
        found = {}
        for name in EPOCH_NAMES:
            value = request.query.get(name) or request.headers.get(name)
            if value:
                found[name] = value
        if not found and self._access_point.epoch:
            found[EPOCH_NAMES[0]] = self._access_point.epoch
        return found

    def _identity(self, key: str, etag: str, arguments: Mapping[str, str]) -> ResultIdentity:
        return ResultIdentity(
            scope=self.scope,
            key=key,
            source_etag=etag,
            transform=self._transform.identity,
            version=self._access_point.version,
            arguments=tuple(sorted(arguments.items())),
        )

    def _producer(
        self,
        request: GatewayRequest,
        source: BucketSource,
        arguments: Mapping[str, str],
        span: ByteRange | None = None,
    ) -> Callable[[ResultWriter], Awaitable[None]]:
        async def produce(output: ResultWriter) -> None:
            await self._transform.run(source, request, arguments, output, span)
            await source.check_unchanged()

        return produce

    # ── listings ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def list_objects(self, request: GatewayRequest, operation: ListPage) -> Page | Answer:
        """Return one page; see ``Bucket.list_objects``.

        Pages follow the order of the sources; within a page the keys of the results are sorted. The next page is found by its
        token, or by the last key.

        Cost: what the source bucket needs for a page, one look at the disk for each result that this process has not used
        before, and what ``AccessPoint.list_sizes`` says about sizes that are not known.
        """
        if operation.delimiter and self._renaming.has_in_suffix(operation.delimiter):
            raise S3Error("NotImplemented", "A delimiter that occurs in renamed suffixes is not supported.")
        wanted = self._source_page(operation)
        query = {name: value for name, value in request.query.items() if name not in _LIST_PARAMETERS}
        request = replace(request, query=query)
        for _ in range(_SOURCE_PAGES_MAX):
            page = await self._source_bucket.list_objects(source_request(request, self._source_bucket, ""), wanted)
            if not isinstance(page, Page):
                return page
            found = await self._listed_page(request, page, operation.prefix)
            if found.objects or found.prefixes or found.next_token is None:
                return found
            wanted = self._source_page(operation._replace(token=found.next_token))
        return found  # nothing so far is served here, but there is more

    def _source_page(self, operation: ListPage) -> ListPage:
        """Return the operation on the source bucket for one on this bucket."""
        after = operation.start_after
        token = operation.token
        if token is not None:
            kind, token = token[:1], token[1:]
            if kind not in (_NEXT_PAGE, _AFTER_KEY):
                raise S3Error("InvalidArgument", "The continuation token provided is incorrect")
            if kind == _AFTER_KEY:
                after, token = token, None
        elif after:
            after = next(iter(self._renaming.source_keys(after)), after)
        prefix = self._renaming.source_prefix(operation.prefix)
        return operation._replace(prefix=prefix, token=token, start_after=after if token is None else "")

    async def _listed_page(self, request: GatewayRequest, page: Page, prefix: str) -> Page:
        """Return the page of results that a page of sources stands for; shorter if not all sizes are ready."""
        listed = [each for info in page.objects if (each := self._listed(request, info, prefix)) is not None]
        await self._learn_sizes(request, listed)
        decided_count = await decide_sizes(listed, self._access_point.list_sizes, time_s_max=self._listing_s_max)
        token = None if page.next_token is None else _NEXT_PAGE + page.next_token
        prefixes = [each for each in page.prefixes if each.startswith(prefix) and not is_beside_shards(each)]
        if decided_count < len(listed):
            end = listed[decided_count].source.key
            prefixes = [each for each in prefixes if each < end]
            last = max([each.source.key for each in listed[:decided_count]], default="")
            token = _AFTER_KEY + max([last, *(each + _AFTER_ALL for each in prefixes[-1:])])
        objects = [
            each.info._replace(size_bytes=each.size_bytes)
            for each in listed[:decided_count]
            if each.size_bytes is not None
        ]
        return Page(sorted(objects, key=lambda info: info.key.encode()), prefixes, token)

    def _listed(self, request: GatewayRequest, info: ObjectInfo, prefix: str) -> ListedResult | None:
        """Return the result of a listed source; None if it is not served here, or not below `prefix`."""
        key = self._renaming.result_key(info.key)
        if key is None or not key.startswith(prefix) or is_beside_shards(info.key):
            return None
        name = self._identity(info.key, etag_of(info), self._transform.arguments(request)).name

        async def produce() -> int:
            head = await self.head(replace(request, key=key, method="HEAD"))
            assert head.size_bytes is not None
            return head.size_bytes

        return ListedResult(
            ObjectInfo(key, info.size_bytes, name.etag, info.last_modified_s), source=info, produce=produce
        )

    async def _learn_sizes(self, request: GatewayRequest, listed: Sequence[ListedResult]) -> None:
        """Set the sizes that are known without producing anything."""
        names = [ResultName(self.scope, each.source.key, each.info.etag or "") for each in listed]
        known = await self._results.known_sizes_bytes(names)
        unknown = []
        for each, name in zip(listed, names, strict=True):
            each.size_bytes = known.get(name)
            if each.size_bytes is None:
                unknown.append(each)
        arguments = self._transform.arguments(request)
        sizes = await asyncio.gather(*(self._transform.size_bytes(each.source, arguments) for each in unknown))
        for each, size_bytes in zip(unknown, sizes, strict=True):
            each.size_bytes = size_bytes

    # ── everything else ────────────────────────────────────────────────────────────────────────────────────────────

    async def perform(self, request: GatewayRequest, body: RequestBody) -> Answer:
        """Refuse changes, and pass other questions about the bucket on; see ``Bucket.perform``."""
        if request.method != "GET":
            raise S3Error("AccessDenied", "Objects of an access point with a transform can only be read.")
        if request.key and "attributes" in request.query:
            query = {name: value for name, value in request.query.items() if name not in ("attributes", "versionId")}
            return object_attributes(await self.head(replace(request, query=query)), request)
        return await self._source_bucket.perform(replace(request, bucket=self._source_bucket.name), body)

    async def close(self) -> None:
        """Close the transform and the source bucket; idempotent."""
        try:
            await self._transform.close()
        finally:
            await self._source_bucket.close()


def is_beside_shards(key: str) -> bool:
    """Whether a source is what penstock keeps beside shards. It describes the sources, and is no source itself."""
    return key.startswith(FOLDER) or f"/{FOLDER}" in key


def _head_of(request: GatewayRequest, source: BucketSource, plan: ResultPlan) -> ObjectHead:
    return ObjectHead(
        key=request.key,
        size_bytes=None,
        etag=plan.name.etag,
        last_modified_s=source.head.last_modified_s,
        headers={"Content-Type": DEFAULT_TYPE},
    )


def _run_s_max(access_point: AccessPoint) -> float:
    """Return the time after which a run is ended that does not keep to the limit of its transform, in seconds."""
    called = access_point.handler or access_point.webhook
    return max(access_point.time_s_max, called.time_s_max if called is not None else 0.0) + _GRACE_S


def _as_info(source: BucketSource) -> ObjectInfo:
    head = source.head
    return ObjectInfo(source.key, head.size_bytes or 0, head.etag, head.last_modified_s)
