"""Which operation a verified request names, and how it is answered."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.gateway.http.documents import (
    XML_TYPE,
    ListQuery,
    bucket_list,
    bucket_location,
    object_list,
    opened_token,
    sealed_token,
)
from penstock.gateway.http.object_answers import answer_get, answer_head
from penstock.gateway.objects import (
    SUB_RESOURCES,
    Answer,
    S3Error,
    access_denied,
    copy_source,
    not_implemented,
    number_in,
)
from penstock.types import Page

if TYPE_CHECKING:
    from penstock.gateway.http.addressing import Address
    from penstock.gateway.http.exchanges import ClientExchange
    from penstock.gateway.objects import Authenticator, Bucket, BucketTable, GatewayRequest, RequestBody

METHODS = frozenset({"GET", "HEAD", "PUT", "POST", "DELETE"})
_WRITES = frozenset({"PUT", "POST", "DELETE"})
_PARAMETERS_OF_WRITES = SUB_RESOURCES | {"partNumber", "versionId", "x-id"}
_HARMLESS = (
    "x-amz-checksum-",
    "x-amz-content-",
    "x-amz-meta-",
    "x-amz-request-payer",
    "x-amz-sdk-",
    "x-amz-user-agent",
)
_PROTECTIONS_OF_BUCKETS = ("x-amz-bucket-object-lock-enabled", "x-amz-expected-bucket-owner")
_BUCKET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}\Z")
_LOCATION = re.compile(rb"<(?:\w+:)?LocationConstraint[^<>/]*>([^<]*)</")
_REGION = re.compile(r"[A-Za-z0-9-]{2,64}")
_BUCKETS_COUNT_MAX = 10_000
_NO_VERSION = ("", "null")


class Service:
    """Answers verified requests.

    Args:
        buckets: The buckets and access points.
        authenticator: Says who may use which bucket.
        region: Region of all buckets; empty for ``us-east-1``, but buckets may be created in others.
    """

    def __init__(self, buckets: BucketTable, authenticator: Authenticator, *, region: str) -> None:
        self._buckets = buckets
        self._authenticator = authenticator
        self._only_region = region
        self._region = region or "us-east-1"

    async def find(self, address: Address, request: GatewayRequest) -> tuple[str, Bucket | None]:
        """Return the name and the bucket that an address means; None if there is none.

        Raises:
            S3Error: The caller may not use it.
        """
        for name in filter(None, (address.bucket, address.other_bucket)):
            if not _BUCKET_NAME.match(name):
                continue
            if not self._authenticator.may_use(request.caller, name):
                if name == address.bucket and address.other_bucket:
                    continue
                raise access_denied()
            bucket = await self._buckets.get(name, request.caller)
            if bucket is not None:
                return name, bucket
        return address.bucket, None

    async def answer(
        self, exchange: ClientExchange, bucket: Bucket | None, request: GatewayRequest, body: RequestBody
    ) -> None:
        """Answer a request.

        Args:
            exchange: The exchange with the client.
            bucket: The addressed bucket; None if no bucket has this name.
            request: The request.
            body: Body of the request.
        """
        if request.method in _WRITES:
            if not request.caller.may_write:
                raise access_denied()
            _refuse_unknown_parameters(request)
        if not request.bucket:
            await self._answer_service(exchange, request)
            return
        if not request.key and not (request.query.keys() & SUB_RESOURCES) and request.method in ("PUT", "DELETE"):
            await self._change_bucket(exchange, request, body)
            return
        if bucket is None:
            raise S3Error(
                "NoSuchBucket", "The specified bucket does not exist", details={"BucketName": request.bucket[:255]}
            )
        if request.method not in ("GET", "HEAD") or request.query.keys() & SUB_RESOURCES:
            self._check_copy_source(request)
            await _send(exchange, await bucket.perform(request, body))
        elif not request.key:
            await self._answer_bucket(exchange, bucket, request)
        else:
            _refuse_versions(request)
            if request.method == "GET":
                await answer_get(exchange, bucket.open, request)
            else:
                await answer_head(exchange, bucket, request)

    async def _answer_service(self, exchange: ClientExchange, request: GatewayRequest) -> None:
        if request.method not in ("GET", "HEAD"):
            raise method_not_allowed()
        query = request.query
        prefix, region, token = query.get("prefix", ""), query.get("bucket-region"), query.get("continuation-token")
        count_max = number_in(query, "max-buckets", default=_BUCKETS_COUNT_MAX, most=_BUCKETS_COUNT_MAX)
        after = opened_token(token) if token is not None else ""
        found = [
            (bucket, self._region_of(bucket))
            for bucket in await self._buckets.names(request.caller)
            if bucket.name.startswith(prefix)
            and bucket.name > after
            and self._authenticator.may_use(request.caller, bucket.name)
            and region in (None, self._region_of(bucket))
        ]
        shown = found[: max(1, count_max)]
        next_token = sealed_token(shown[-1][0].name) if len(found) > len(shown) else None
        await _send(exchange, Answer(body=bucket_list(shown, prefix=prefix, next_token=next_token)))

    def _region_of(self, bucket: Bucket) -> str:
        """Return the region of a bucket: the gateway's, unless its creator has named another one."""
        return getattr(bucket, "region", "") or self._region

    async def _change_bucket(self, exchange: ClientExchange, request: GatewayRequest, body: RequestBody) -> None:
        name = request.bucket
        if not _BUCKET_NAME.match(name):
            raise S3Error("InvalidBucketName", "The specified bucket is not valid.", details={"BucketName": name[:255]})
        if not self._authenticator.may_use(request.caller, name):
            raise access_denied()
        for header in _PROTECTIONS_OF_BUCKETS:
            if request.headers.get(header, "false").lower() != "false":
                raise not_implemented(header)
        region = await self._wanted_region(body)
        if request.method == "PUT":
            await self._buckets.create(name, request.caller, region=region)
            await _send(exchange, Answer(headers={"Location": f"/{name}"}))
        else:
            await self._buckets.delete(name, request.caller)
            await _send(exchange, Answer(status=204))

    async def _wanted_region(self, body: RequestBody) -> str:
        """Return the region that the document of CreateBucket names; empty for none."""
        data = b"".join([piece async for piece in body])
        found = _LOCATION.search(data)
        region = found[1].decode("ascii", "replace").strip() if found else ""
        if self._only_region and region not in ("", self._only_region):
            message = f"The {region[:64]} location constraint is incompatible with this endpoint's region, {self._only_region}."
            raise S3Error("IllegalLocationConstraintException", message)
        if region and not _REGION.fullmatch(region):
            details = {"LocationConstraint": region[:64]}
            message = "The specified location-constraint is not valid"
            raise S3Error("InvalidLocationConstraint", message, details=details)
        return region

    async def _answer_bucket(self, exchange: ClientExchange, bucket: Bucket, request: GatewayRequest) -> None:
        region = {"x-amz-bucket-region": self._region_of(bucket)}
        if request.method == "HEAD":
            await _send(exchange, Answer(headers=region))
        elif "location" in request.query:
            await _send(exchange, Answer(body=bucket_location(self._region_of(bucket))))
        else:
            await self._list(exchange, bucket, request, region)

    async def _list(
        self, exchange: ClientExchange, bucket: Bucket, request: GatewayRequest, headers: dict[str, str]
    ) -> None:
        query = ListQuery.parse(request.query)
        page: Page | Answer = Page([], [], None)
        if query.keys_max > 0:
            page = await bucket.list_objects(request, query.operation())
        if isinstance(page, Page):
            page = Answer(headers=headers, body=object_list(request.bucket, query, page))
        await _send(exchange, page)

    def _check_copy_source(self, request: GatewayRequest) -> None:
        """Refuse a copy of an object in a bucket that the caller may not use."""
        if "x-amz-copy-source" not in request.headers:
            return
        name = copy_source(request.headers).bucket
        if not self._authenticator.may_use(request.caller, name):
            raise access_denied()


async def _send(exchange: ClientExchange, answer: Answer) -> None:
    headers = dict(answer.headers)
    if answer.body and not any(name.lower() == "content-type" for name in headers):
        headers["Content-Type"] = XML_TYPE
    await exchange.answer(answer.status, headers, answer.body)


def _refuse_unknown_parameters(request: GatewayRequest) -> None:
    """Refuse a write whose query means an operation that is unknown here, and must not be taken for a PUT or DELETE.

    Some SDKs put headers into the query of presigned requests. Those that describe the object were taken out before; others,
    such as a condition, the source of a copy or an ACL, must be headers, because nobody looks for them here.
    """
    for name in request.query:
        if name not in _PARAMETERS_OF_WRITES and not name.lower().startswith(_HARMLESS):
            raise not_implemented(f"{request.method} with the parameter {name[:64]}")


def _refuse_versions(request: GatewayRequest) -> None:
    """Refuse to read an old version: objects here have one version, which is called ``null``."""
    version = request.query.get("versionId", "")
    if version not in _NO_VERSION:
        raise S3Error(
            "NoSuchVersion",
            "The version ID specified in the request does not match an existing version.",
            details={"Key": request.key, "VersionId": version[:100]},
        )


def method_not_allowed() -> S3Error:
    """Return the refusal of a method that the resource does not have."""
    return S3Error("MethodNotAllowed", "The specified method is not allowed against this resource.")
