"""What a well-behaved S3 answers, as a pure function of a request and a dict of objects: no socket, no thread.

Small on purpose: one bucket, no signatures (the real servers check those), no versions. ``faulty.py`` puts it on a
socket and lets it misbehave.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from email.utils import formatdate
from typing import Any
from urllib.parse import quote, unquote
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from servers.records import PROLOGUE, Objects, Request, Response, Stored, checksum, error, parse_span

XMLNS = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


ETAGS: dict[str, tuple[Callable[[str], str], Callable[[str], str]]] = {
    "quoted": (str, str),
    "none": (lambda _: "", lambda _: ""),
    "weak": (lambda etag: f"W/{etag}", lambda etag: f"W/{etag}"),
    "unquoted": (lambda etag: etag.strip('"'), lambda etag: etag.strip('"')),
    "unquoted in listings": (str, lambda etag: etag.strip('"')),
    "weak in headers": (lambda etag: f"W/{etag}", str),
}
"""How a store may write the ETag of a version in headers and in listings; an empty one is left out."""


class Shape:
    """A bucket's behaviour.

    Args:
        objects: What it holds.
        bucket: The only bucket there is.
        page_keys_max: Keys in one page of a listing at most.
        etags: One of ``ETAGS``: how ETags look, and where.
    """

    def __init__(self, objects: Objects, *, bucket: str, page_keys_max: int = 1000, etags: str = "quoted") -> None:
        self.objects = objects
        self.bucket = bucket
        self.page_keys_max = page_keys_max
        self._header_etag, self._listed_etag = ETAGS[etags]
        self.uploads: dict[str, tuple[str, dict[int, Stored]]] = {}
        self._upload_numbers = itertools.count(1)

    def answer(self, request: Request) -> Response:
        """The right answer to `request`."""
        if request.bucket != self.bucket:
            return error(404, "NoSuchBucket", "The specified bucket does not exist", BucketName=request.bucket)
        if not request.key:
            return self._answer_bucket(request)
        match request.method:
            case "GET" | "HEAD":
                return self._read(request)
            case "PUT" if "partNumber" in request.query:
                return self._put_part(request)
            case "PUT":
                return self._put(request)
            case "DELETE" if "uploadId" in request.query:
                return self._abort(request)
            case "DELETE":
                if request.key in self.objects:
                    del self.objects[request.key]
                return Response(204)
            case "POST" if "uploads" in request.query:
                return self._create(request)
            case "POST" if "uploadId" in request.query:
                return self._complete(request)
        return error(405, "MethodNotAllowed")

    def _answer_bucket(self, request: Request) -> Response:
        match request.method:
            case "GET" if "uploads" in request.query:
                return self._list_uploads()
            case "GET" if "location" in request.query:
                return _xml(f"<LocationConstraint {XMLNS}/>")
            case "GET":
                return self._list(request)
            case "POST" if "delete" in request.query:
                return self._delete_many(request)
            case "HEAD" | "PUT":
                return Response(200)
        return error(405, "MethodNotAllowed")

    # ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _read(self, request: Request) -> Response:
        version = self.objects.versions.get(request.key)
        if version is None:
            return error(404, "NoSuchKey", "The specified key does not exist.", Key=request.key)
        if_match, if_none_match = request.headers.get("if-match"), request.headers.get("if-none-match")
        if if_match not in (None, "*", version.etag, version.etag.strip('"')):
            return error(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
        if if_none_match in ("*", version.etag):
            return Response(304)
        headers = self._describe(version, with_checksum=request.headers.get("x-amz-checksum-mode") == "ENABLED")
        size = len(version.data)
        if request.span is None:
            if request.method == "HEAD":
                return Response(200, headers, b"", size)
            return Response(200, headers, memoryview(version.data))
        start, end = request.span
        start, end = (max(0, size + start), size) if start < 0 else (start, size if end is None else min(end, size))
        if start >= size or end <= start:
            answer = error(416, "InvalidRange", "The requested range is not satisfiable", ActualObjectSize=str(size))
            answer.headers["Content-Range"] = f"bytes */{size}"
            return answer
        if (start, end) != (0, size):  # S3 tells a full object's checksum only with the full object
            headers = {name: value for name, value in headers.items() if "checksum" not in name}
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        if request.method == "HEAD":
            return Response(206, headers, b"", end - start)
        return Response(206, headers, memoryview(version.data)[start:end])

    def _describe(self, version: Stored, *, with_checksum: bool) -> dict[str, str]:
        headers = {
            "Content-Type": "binary/octet-stream",
            "Accept-Ranges": "bytes",
            "Last-Modified": formatdate(version.modified_s, usegmt=True),
        }
        if etag := self._header_etag(version.etag):
            headers["ETag"] = etag
        if with_checksum and version.crc32c:
            headers |= {"x-amz-checksum-crc32c": version.crc32c, "x-amz-checksum-type": "FULL_OBJECT"}
        return headers

    def _list(self, request: Request) -> Response:
        query = request.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        limit = min(int(query.get("max-keys", self.page_keys_max)), self.page_keys_max)
        token = query.get("continuation-token")
        after = base64.urlsafe_b64decode(token) if token else query.get("start-after", "").encode()
        found, prefixes, last, truncated = self._page(prefix.encode(), delimiter.encode(), after, limit)
        encode = quote if query.get("encoding-type") == "url" else escape
        parts = [f"<Name>{self.bucket}</Name><Prefix>{encode(prefix)}</Prefix><MaxKeys>{limit}</MaxKeys>"]
        parts.append(
            f"<KeyCount>{len(found) + len(prefixes)}</KeyCount><IsTruncated>{str(truncated).lower()}</IsTruncated>"
        )
        if truncated:
            parts.append(f"<NextContinuationToken>{base64.urlsafe_b64encode(last).decode()}</NextContinuationToken>")
        if "encoding-type" in query:
            parts.append("<EncodingType>url</EncodingType>")
        for key in found:
            version = self.objects.versions[key]
            moment = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(version.modified_s))
            etag = self._listed_etag(version.etag)
            etag = f"<ETag>{escape(etag, {chr(34): '&quot;'})}</ETag>" if etag else ""
            parts.append(
                f"<Contents><Key>{encode(key)}</Key><LastModified>{moment}</LastModified>{etag}"
                f"<Size>{len(version.data)}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            )
        parts.extend(f"<CommonPrefixes><Prefix>{encode(each)}</Prefix></CommonPrefixes>" for each in prefixes)
        return _xml(f"<ListBucketResult {XMLNS}>{''.join(parts)}</ListBucketResult>")

    def _page(
        self, prefix: bytes, delimiter: bytes, after: bytes, limit: int
    ) -> tuple[list[str], list[str], bytes, bool]:
        keys = self.objects.ordered()
        at = max(bisect_left(keys, prefix), bisect_right(keys, after) if after else 0)
        found: list[str] = []
        prefixes: list[str] = []
        last = b""
        while at < len(keys) and keys[at].startswith(prefix):
            key = keys[at]
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            group = key[: cut + len(delimiter)] if cut >= 0 else b""
            if len(found) + len(prefixes) == limit:
                return found, prefixes, last, True
            if group:
                prefixes.append(group.decode())
                last = group + b"\xff"  # past every key of the group: UTF-8 has no such byte
                at = bisect_left(keys, last, at)
            else:
                found.append(key.decode())
                last = key
                at += 1
        return found, prefixes, last, False

    # ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _refusal(self, request: Request) -> Response | None:
        if request.headers.get("if-none-match") == "*" and request.key in self.objects:
            return error(412, "PreconditionFailed", Condition="If-None-Match")
        announced = request.headers.get("x-amz-checksum-crc32c")
        if request.body and not request.is_complete and announced not in (None, checksum(request.body)):
            return error(400, "BadDigest", "The CRC32C you specified did not match what was received")
        return None

    def _source(self, request: Request) -> bytes | Response:
        bucket, _, key = unquote(request.headers["x-amz-copy-source"]).lstrip("/").partition("/")
        version = self.objects.versions.get(key)
        if bucket != self.bucket or version is None:
            return error(404, "NoSuchKey", Key=key)
        if request.headers.get("x-amz-copy-source-if-match", version.etag) != version.etag:
            return error(412, "PreconditionFailed")
        span = parse_span(request.headers.get("x-amz-copy-source-range"))
        return version.data[span[0] : span[1]] if span else version.data

    def _put(self, request: Request) -> Response:
        if refusal := self._refusal(request):
            return refusal
        if "x-amz-copy-source" in request.headers:
            data = self._source(request)
            if isinstance(data, Response):
                return data
            self.objects[request.key] = data
            return _xml(f"<CopyObjectResult><ETag>{self.objects.versions[request.key].etag}</ETag></CopyObjectResult>")
        self.objects[request.key] = request.body
        version = self.objects.versions[request.key]
        return Response(200, {"ETag": version.etag, "x-amz-checksum-crc32c": version.crc32c})

    def _create(self, request: Request) -> Response:
        upload_id = f"upload-{next(self._upload_numbers)}"
        self.uploads[upload_id] = (request.key, {})
        return _xml(
            f"<InitiateMultipartUploadResult {XMLNS}><Bucket>{self.bucket}</Bucket><Key>{escape(request.key)}</Key>"
            f"<UploadId>{upload_id}</UploadId></InitiateMultipartUploadResult>"
        )

    def _put_part(self, request: Request) -> Response:
        upload = self.uploads.get(request.query.get("uploadId", ""))
        if upload is None:
            return error(404, "NoSuchUpload")
        if refusal := self._refusal(request):
            return refusal
        data: Any = self._source(request) if "x-amz-copy-source" in request.headers else request.body
        if isinstance(data, Response):
            return data
        etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
        part = Stored(data, etag, time.time(), checksum(data))
        upload[1][int(request.query["partNumber"])] = part
        if "x-amz-copy-source" in request.headers:
            return _xml(f"<CopyPartResult><ETag>{escape(etag)}</ETag></CopyPartResult>")
        return Response(200, {"ETag": etag, "x-amz-checksum-crc32c": part.crc32c})

    def _complete(self, request: Request) -> Response:
        upload = self.uploads.get(request.query["uploadId"])
        if upload is None:
            return error(404, "NoSuchUpload")
        if refusal := self._refusal(request):
            return refusal
        key, parts = upload
        asked = []
        for element in ET.fromstring(request.body).iter():
            if element.tag.endswith("}PartNumber") or element.tag == "PartNumber":
                asked.append(int(element.text or "0"))
        if asked != sorted(set(asked)):
            return error(400, "InvalidPartOrder")
        if not asked or any(number not in parts for number in asked):
            return error(400, "InvalidPart", "One or more of the specified parts could not be found")
        data = b"".join(parts[number].data for number in asked)
        digests = b"".join(bytes.fromhex(parts[number].etag.strip('"')) for number in asked)
        etag = f'"{hashlib.md5(digests, usedforsecurity=False).hexdigest()}-{len(asked)}"'
        self.objects.store(key, data, etag=etag)
        del self.uploads[request.query["uploadId"]]
        return _xml(
            f"<CompleteMultipartUploadResult {XMLNS}><Bucket>{self.bucket}</Bucket><Key>{escape(key)}</Key>"
            f"<ETag>{escape(etag)}</ETag></CompleteMultipartUploadResult>"
        )

    def _abort(self, request: Request) -> Response:
        if self.uploads.pop(request.query["uploadId"], None) is None:
            return error(404, "NoSuchUpload")
        return Response(204)

    def _list_uploads(self) -> Response:
        parts = "".join(
            f"<Upload><Key>{escape(key)}</Key><UploadId>{upload_id}</UploadId></Upload>"
            for upload_id, (key, _) in self.uploads.items()
        )
        return _xml(f"<ListMultipartUploadsResult {XMLNS}>{parts}</ListMultipartUploadsResult>")

    def _delete_many(self, request: Request) -> Response:
        for element in ET.fromstring(request.body).iter():
            key = element.text or ""
            if element.tag.rpartition("}")[2] == "Key" and key in self.objects:
                del self.objects[key]
        return _xml(f"<DeleteResult {XMLNS}/>")


def _xml(text: str) -> Response:
    return Response(200, {"Content-Type": "application/xml"}, (PROLOGUE + text).encode())
