"""Requests as S3 clients sign them, for the tests of the gateway's authentication: botocore signs, or a few lines by hand."""

from __future__ import annotations

import calendar
import hashlib
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

from botocore.auth import S3SigV4Auth, S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.crt.auth import CrtS3SigV4Auth, CrtS3SigV4QueryAuth
from multidict import CIMultiDict

from penstock.gateway.authentication import AccessKey, AccessKeys, SignatureAuthenticator
from penstock.gateway.authentication.chunks import ChunkSigner
from penstock.gateway.objects import RequestHead
from penstock.transport import signing_key

KEY = AccessKey(access_key="AKIDEXAMPLE", secret_key="wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", may_write=True)
READER = AccessKey(access_key="READER", secret_key="another/secret", access_points=frozenset({"train"}))
HOST = "127.0.0.1:9000"


class _Described(S3SigV4Auth):
    """botocore's signer; the header with the payload's hash may be given, as for bodies in chunks."""

    def payload(self, request: Any) -> str:
        given = request.context.get("payload")
        return str(given or super().payload(request))  # type: ignore[no-untyped-call]


def authenticator(*, region: str = "", now_s: float | None = None) -> SignatureAuthenticator:
    """An authenticator that knows ``KEY`` and ``READER``; its clock stands still if `now_s` says where."""
    clock = time.time if now_s is None else lambda: now_s
    return SignatureAuthenticator(AccessKeys([KEY, READER]), region=region, clock=clock)


def signed(
    target: str = "/bucket/key",
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    key: AccessKey = KEY,
    region: str = "us-east-1",
    service: str = "s3",
    token: str | None = None,
    body: bytes = b"",
) -> RequestHead:
    """What arrives of a request that botocore signs in its headers."""
    request = AWSRequest(method, f"http://{HOST}{target}", headers=dict(headers or {}), data=body)
    request.context["client_config"] = Config(s3={"payload_signing_enabled": True})
    request.context["payload"] = request.headers.get("X-Amz-Content-SHA256")
    _Described(Credentials(key.access_key, key.secret_key, token), service, region).add_auth(request)
    return arrived(request)


def presigned(
    target: str = "/bucket/key",
    *,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    key: AccessKey = KEY,
    region: str = "us-east-1",
    service: str = "s3",
    token: str | None = None,
    expires_s: int = 600,
) -> RequestHead:
    """What arrives of a request to a URL that botocore presigned."""
    request = AWSRequest(method, f"http://{HOST}{target}", headers=dict(headers or {}))
    signer = S3SigV4QueryAuth(Credentials(key.access_key, key.secret_key, token), service, region, expires=expires_s)
    signer.add_auth(request)
    return arrived(request)


def signed_by_crt(target: str, *, headers: dict[str, str] | None = None, is_presigned: bool = False) -> RequestHead:
    """What arrives of a GET that the AWS Common Runtime signs in its headers, or in its query."""
    request = AWSRequest("GET", f"http://{HOST}{target}", headers=dict(headers or {}))
    request.context["client_config"] = Config(s3={"payload_signing_enabled": True})
    kind = CrtS3SigV4QueryAuth if is_presigned else CrtS3SigV4Auth
    signer = kind(Credentials(KEY.access_key, KEY.secret_key), "s3", "us-east-1")
    signer.add_auth(request)
    return arrived(request)


def arrived(request: Any) -> RequestHead:
    """The head of botocore's request, as a server receives it."""
    path, _, query = str(request.url).removeprefix(f"http://{HOST}").partition("?")
    headers = CIMultiDict({"Host": HOST, "User-Agent": "test", "Accept-Encoding": "identity"})
    for name, value in request.headers.items():
        headers[name] = value if isinstance(value, str) else value.decode()
    return RequestHead(str(request.method), path, query, headers)


def changed(head: RequestHead, **headers: str) -> RequestHead:
    """A request with other headers; ``_`` stands for ``-``, and an empty value removes the header."""
    new = CIMultiDict(head.headers)
    for name, value in headers.items():
        new.pop(name.replace("_", "-"), None)
        if value:
            new[name.replace("_", "-")] = value
    return head._replace(headers=new)


def signed_at_s(head: RequestHead) -> float:
    """When a request was signed, in seconds since 1970."""
    stamp = head.headers.get("x-amz-date") or head.raw_query.split("X-Amz-Date=")[1][:16]
    return float(calendar.timegm(time.strptime(stamp, "%Y%m%dT%H%M%SZ")))


def signer_of(head: RequestHead, *, key: AccessKey = KEY) -> ChunkSigner:
    """The signer of the chunks that follow the head of a request."""
    authorization = head.headers["Authorization"]
    scope = authorization.split("Credential=")[1].split(",")[0].split("/", 1)[1]
    seed = authorization.split("Signature=")[1]
    return ChunkSigner(signing_key(key.secret_key, scope), head.headers["x-amz-date"], scope, seed)


def signed_chunks(head: RequestHead, chunks: Iterable[bytes], *, trailer: str = "") -> list[bytes]:
    """Encode chunks, each with its signature; `trailer` is lines ``name:value`` that end with a line break."""
    signer = signer_of(head)
    found = []
    for chunk in [*chunks, b""]:
        signature = signer.chunk(hashlib.sha256(chunk).hexdigest())
        found.append(f"{len(chunk):x};chunk-signature={signature}\r\n".encode() + chunk + (b"\r\n" if chunk else b""))
    if trailer:
        signature = signer.trailer(hashlib.sha256(trailer.encode()).hexdigest())
        lines = trailer.replace("\n", "\r\n") + f"x-amz-trailer-signature:{signature}\r\n"
        found[-1] += lines.encode()
    found[-1] += b"\r\n"
    return found


async def pieces_of(data: bytes, cuts: Iterable[int] = ()) -> AsyncIterator[bytes]:
    """A body that arrives in pieces, cut at these places."""
    start = 0
    for end in [*sorted(cuts), len(data)]:
        yield data[start:end]
        start = end
