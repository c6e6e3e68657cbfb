"""Buckets whose HEAD and LIST a handler answers, by JSON that becomes the head of an object or a listing.

Source: the user guide of S3 Object Lambda, "Working with HeadObject requests" and "Working with ListObjects requests".
"""

from __future__ import annotations

import hashlib
import json
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.gateway.aws_lambda.events import required_headers
from penstock.gateway.aws_lambda.forwarded import (
    ERROR_CODE,
    ERROR_CODES,
    KEPT_NAMES,
    MESSAGE_CHARACTERS_MAX,
    METADATA_PREFIX,
)
from penstock.gateway.objects import Answer, BucketWrapper, ObjectHead, S3Error
from penstock.gateway.s3_text import DECLARATION, NAMESPACE, date_s, escaped
from penstock.types import strong_etag

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.gateway.aws_lambda.transform import LambdaTransform
    from penstock.gateway.objects import Bucket, GatewayRequest
    from penstock.types import ListPage, Page

HEAD_PARAMETERS = ("versionId",)
_PAGE = (("name", str, True), ("prefix", str, False), ("delimiter", str, False), ("encodingType", str, False),
         ("maxKeys", int, True), ("isTruncated", bool, True))  # fmt: skip
_PAGE_V1 = (("marker", str, False), ("nextMarker", str, False))
_PAGE_V2 = (("keyCount", int, True), ("startAfter", str, False), ("continuationToken", str, False),
            ("nextContinuationToken", str, False))  # fmt: skip
_OBJECT = (("key", str, True), ("lastModified", str, False), ("eTag", str, False), ("size", int, True),
           ("storageClass", str, False))  # fmt: skip
_OWNER = (("displayName", str, True), ("id", str, True))
_PREFIX = (("prefix", str, True),)
_Fields = tuple[tuple[str, type, bool], ...]


class LambdaBucket(BucketWrapper):
    """A bucket whose HEAD or LIST is answered by the return value of a handler; implements ``Bucket``.

    Args:
        inner: Answers everything else.
        transform: The handler.
        actions: The operations that the handler answers: ``HeadObject``, ``ListObjects``, ``ListObjectsV2``.
        sign: Signs ``inputS3Url``: takes the method, the key (empty for the bucket itself), and `query` and `headers`, which
            the signature covers.
    """

    def __init__(
        self, inner: Bucket, *, transform: LambdaTransform, actions: tuple[str, ...], sign: Callable[..., str]
    ) -> None:
        super().__init__(inner)
        self._transform = transform
        self._actions = frozenset(actions)
        self._sign = sign

    async def head(self, request: GatewayRequest) -> ObjectHead:
        """Describe an object; raises ``S3Error`` if the handler refuses, or returns no head."""
        if "HeadObject" not in self._actions:
            return await super().head(request)
        query = {name: request.query[name] for name in HEAD_PARAMETERS if name in request.query}
        headers = required_headers(self._transform.seen(request))
        sign = partial(self._sign, "HEAD", request.key, query=query, headers=headers)
        return head_of(await self._transform.invoke("HeadObject", request, sign), request.key)

    async def list_objects(self, request: GatewayRequest, operation: ListPage) -> Page | Answer:
        """Return one page of the listing; raises ``S3Error`` if the handler refuses, or returns no listing."""
        is_v2 = request.query.get("list-type") == "2"
        action = "ListObjectsV2" if is_v2 else "ListObjects"
        if action not in self._actions:
            return await super().list_objects(request, operation)
        headers = required_headers(self._transform.seen(request))
        sign = partial(self._sign, "GET", "", query=request.query, headers=headers)
        return listing_of(await self._transform.invoke(action, request, sign), is_v2=is_v2)


def head_of(returned: Any, key: str) -> ObjectHead:
    """Return the head that a handler returned for ``HeadObject``.

    A head without an ETag gets a digest of itself.

    Raises:
        S3Error: The handler returned an error, or nothing that is a head: ``LambdaInvalidResponse``.
    """
    answer = _successful(returned)
    headers = answer.get("headers")
    if not isinstance(headers, dict):
        _invalid("headers is missing")
    by_name = {str(name).lower(): value for name, value in headers.items()}
    size_bytes = by_name.get("content-length")
    if not isinstance(size_bytes, int) or isinstance(size_bytes, bool) or size_bytes < 0:
        _invalid("the header Content-Length must be a number")
    kept = {}
    for lower, value in by_name.items():
        if lower in KEPT_NAMES or lower.startswith(METADATA_PREFIX):
            kept[KEPT_NAMES.get(lower, lower)] = _header_text(lower, value)
    digest = hashlib.sha256(json.dumps(by_name, sort_keys=True).encode()).hexdigest()[:32]
    etag = strong_etag(_header_text("ETag", by_name["etag"])) if by_name.get("etag") else f'"{digest}"'
    return ObjectHead(
        key=key,
        size_bytes=size_bytes,
        etag=etag or f'"{digest}"',
        last_modified_s=_seconds_of(by_name.get("last-modified")),
        headers=kept,
    )


def listing_of(returned: Any, *, is_v2: bool) -> Answer:
    """Return the listing that a handler returned: ``listResultXml`` as it is, or ``listBucketResult`` as XML.

    Raises:
        S3Error: The handler returned an error, or nothing that is a listing: ``LambdaInvalidResponse``.
    """
    answer = _successful(returned)
    xml, result = answer.get("listResultXml"), answer.get("listBucketResult")
    if (xml is None) == (result is None):
        _invalid("exactly one of listResultXml and listBucketResult is needed")
    if xml is not None:
        if not isinstance(xml, str):
            _invalid("listResultXml must be text")
        return Answer(body=xml.encode("utf-8", "replace"))
    page = _fields(result, _PAGE + (_PAGE_V2 if is_v2 else _PAGE_V1), "listBucketResult")
    page += "".join(_object(item) for item in _items(result, "contents"))
    page += "".join(
        f"<CommonPrefixes>{_fields(item, _PREFIX, 'commonPrefixes')}</CommonPrefixes>"
        for item in _items(result, "commonPrefixes")
    )
    document = f'{DECLARATION}<ListBucketResult xmlns="{NAMESPACE}">{page}</ListBucketResult>'
    return Answer(body=document.encode())


def _successful(returned: Any) -> Mapping[str, Any]:
    """Return the value that a handler returned with status 200; raise the error that it returned otherwise."""
    if not isinstance(returned, dict):
        _invalid("the handler must return a dictionary")
    status = returned.get("statusCode")
    if not isinstance(status, int) or isinstance(status, bool):
        _invalid("statusCode must be a number")
    if status == 200:
        return returned
    if status not in ERROR_CODES:
        _invalid(f"statusCode {status} is neither 200 nor an error")
    code, message = (
        returned.get("errorCode") or ERROR_CODES[status],
        returned.get("errorMessage") or "The handler refused.",
    )
    if not isinstance(code, str) or not ERROR_CODE.fullmatch(code) or not isinstance(message, str):
        _invalid("errorCode or errorMessage is malformed")
    raise S3Error(code, message[:MESSAGE_CHARACTERS_MAX], status=status)


def _object(item: Any) -> str:
    fields = _fields(item, _OBJECT, "contents")
    owner = item.get("owner")
    if owner is not None:
        fields += f"<Owner>{_fields(owner, _OWNER, 'owner')}</Owner>"
    return f"<Contents>{fields}</Contents>"


def _items(result: Any, name: str) -> list[Any]:
    items = result.get(name)
    if items is not None and not isinstance(items, list):
        _invalid(f"{name} must be a list")
    return items or []


def _fields(item: Any, fields: _Fields, place: str) -> str:
    """Render the known fields of an object of JSON; others are left out."""
    if not isinstance(item, dict):
        _invalid(f"{place} must be an object")
    rendered = []
    for name, kind, is_required in fields:
        value = item.get(name, item.get("etag") if name == "eTag" else None)
        if value is None and not is_required:
            continue
        is_wrong_number = kind is int and (not isinstance(value, int) or isinstance(value, bool) or value < 0)
        if not isinstance(value, kind) or is_wrong_number:
            _invalid(f"{place}.{name} is missing or has another type than {kind.__name__}")
        text = str(value).lower() if kind is bool else str(value)
        element = "ID" if name == "id" else name[0].upper() + name[1:]
        rendered.append(f"<{element}>{escaped(text)}</{element}>")
    return "".join(rendered)


def _header_text(name: str, value: Any) -> str:
    text = str(value) if isinstance(value, str | int) else ""
    if not isinstance(value, str | int) or any(ord(character) < 32 or ord(character) == 127 for character in text):
        _invalid(f"the header {name} must be text without control characters")
    return text


def _seconds_of(value: Any) -> float:
    if value is None or value == "":
        return 0.0
    seconds = date_s(value) if isinstance(value, str) else None
    if seconds is None:
        _invalid("the header Last-Modified must be an HTTP date")
    return seconds


def _invalid(problem: str) -> NoReturn:
    raise S3Error("LambdaInvalidResponse", f"The handler's response is not valid: {problem}.")
