"""AWS Signature Version 4 for S3: in one header, or in the query of a URL that anybody can use for a limited time.

Sources: Amazon S3 API reference, "Signature Calculations" and "Authenticating requests: using query parameters".

libcurl can sign too, but derives the day's key each time, which takes 15 to 18 µs per request. This module keeps all values
that stay the same for a second, so signing takes 6 µs (bench/small_objects.py shows it).
"""

from __future__ import annotations

import hashlib
import hmac
import time
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
EXPIRES_S_MAX = 7 * 24 * 3600
"""Longest life of a presigned URL in seconds; S3 refuses more."""

UNSIGNED_PAYLOAD = "UNSIGNED-PAYLOAD"

_SIGNED = ("x-amz-", "content-type:", "content-md5:")
_BLOCKS_MAX = 64


class _Block(NamedTuple):
    """The parts of a signature that all requests with the same signed headers share for a second."""

    canonical: str  # header lines, their names, the payload's hash
    lines: list[str]  # to send, besides the request's own
    authorization: str  # up to the signature


class _Moment(NamedTuple):
    """The parts of a signature that stay the same for a second; replaced whole, so that threads never mix two of them."""

    second: int
    stamp: str
    scope: str
    key: bytes  # of the day
    to_sign: str  # all but the hash at its end
    blocks: dict[tuple[str, ...], _Block]


def signing_key(secret_key: str, scope: str) -> bytes:
    """Return the key of a day, which signs what has this scope: ``20260102/us-east-1/s3/aws4_request``."""
    key = b"AWS4" + secret_key.encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


class Signing:
    """Signs requests with the keys for one region of one store.

    Args:
        access_key: ID of the access key; sent with every request.
        secret_key: Secret key; never sent.
        token: Session token; None for permanent keys.
        region: Region to sign for.
        clock_offset_s: Seconds that the store's clock is ahead of this host's.
        service: Service to sign for: ``"s3"``, or ``"s3-object-lambda"`` for an Object Lambda access point.
    """

    __slots__ = ("_access_key", "_moment", "_offset_s", "_region", "_secret_key", "_service", "_token")

    def __init__(
        self,
        access_key: str,
        secret_key: str,
        token: str | None,
        region: str,
        *,
        clock_offset_s: float = 0.0,
        service: str = "s3",
    ) -> None:
        self._access_key = access_key
        self._secret_key = secret_key
        self._token = token
        self._region = region
        self._offset_s = clock_offset_s
        self._service = service
        self._moment: _Moment | None = None

    def __repr__(self) -> str:
        return f"<Signing region={self._region}>"

    def sign(self, method: str, host: str, target: str, headers: Sequence[str]) -> list[str]:
        """Return the header lines that sign a request; `headers` must be sent with them unchanged.

        Args:
            method: HTTP method.
            host: Value of the ``Host`` header.
            target: Path, percent-encoded as S3 does, and query, with each name and value percent-encoded.
            headers: Lines ``Name: value``; ``x-amz-content-sha256`` among them is the hash of the payload, which is else
                taken to be empty.
        """
        second = int(time.time() + self._offset_s)
        moment = self._moment
        if moment is None or moment.second != second:
            moment = self._moment = self._at(second, moment)
        signed = [line for line in headers if line.lower().startswith(_SIGNED)]
        block = moment.blocks.get((host, *signed)) or self._block(moment, host, signed)
        path, _, query = target.partition("?")
        if query:
            query = "&".join("=".join(pair) for pair in sorted(part.split("=", 1) for part in query.split("&")))
        canonical = f"{method}\n{path}\n{query}\n{block.canonical}"
        text = moment.to_sign + hashlib.sha256(canonical.encode()).hexdigest()
        signature = hmac.digest(moment.key, text.encode(), "sha256").hex()
        return [*block.lines, block.authorization + signature]

    def _at(self, second: int, before: _Moment | None) -> _Moment:
        """Return the parts for another second; the key changes only with the day."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))
        scope = f"{stamp[:8]}/{self._region}/{self._service}/aws4_request"
        key = before.key if before is not None and before.scope == scope else signing_key(self._secret_key, scope)
        return _Moment(second, stamp, scope, key, f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n", {})

    def _block(self, moment: _Moment, host: str, signed: list[str]) -> _Block:
        own = {"x-amz-date": moment.stamp}
        if self._token is not None:
            own["x-amz-security-token"] = self._token
        values = {"host": host, **own}
        for line in signed:
            name, _, value = line.partition(":")
            if value := " ".join(value.split()):  # libcurl does not send a header without a value
                values[name.lower()] = value
        if "x-amz-content-sha256" not in values:
            own["x-amz-content-sha256"] = values["x-amz-content-sha256"] = EMPTY_SHA256
        names = ";".join(sorted(values))
        lines = "".join(f"{name}:{values[name]}\n" for name in sorted(values))
        block = _Block(
            f"{lines}\n{names}\n{values['x-amz-content-sha256']}",
            [f"{name}: {value}" for name, value in own.items()],
            f"Authorization: AWS4-HMAC-SHA256 Credential={self._access_key}/{moment.scope}, SignedHeaders={names}, "
            "Signature=",
        )
        if len(moment.blocks) < _BLOCKS_MAX:
            moment.blocks[(host, *signed)] = block
        return block

    def presigned(
        self,
        method: str,
        url: str,
        *,
        expires_s: int,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        now_s: float | None = None,
    ) -> str:
        """Return `url` with a signature in its query.

        Args:
            method: HTTP method that the URL permits.
            url: ``http(s)://host/path`` without a query; the path is percent-encoded as S3 does.
            expires_s: Seconds for which the URL is valid, from 1 to 604 800.
            query: Further parameters of the query, which the signature covers.
            headers: Headers that must be sent with the request as they are, besides ``Host``.
            now_s: Time from which the URL is valid, in seconds since 1970; None takes the store's time.

        Raises:
            ConfigError: `expires_s` is out of bounds, or `url` has a query.
        """
        if not 1 <= expires_s <= EXPIRES_S_MAX:
            raise ConfigError(f"expires_s={expires_s} must be from 1 to {EXPIRES_S_MAX} seconds (7 days)")
        scheme, _, rest = url.partition("://")
        host, _, path = rest.partition("/")
        if scheme not in ("http", "https") or not host or "?" in url or "#" in url:
            raise ConfigError("a URL to sign must be http(s)://host/path without a query")
        moment = self._at(int(time.time() + self._offset_s if now_s is None else now_s), None)
        values = {"host": host} | {name.lower(): " ".join(value.split()) for name, value in (headers or {}).items()}
        names = ";".join(sorted(values))
        parameters = dict(query or {}) | {
            "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
            "X-Amz-Credential": f"{self._access_key}/{moment.scope}",
            "X-Amz-Date": moment.stamp,
            "X-Amz-Expires": str(expires_s),
            "X-Amz-SignedHeaders": names,
        }
        if self._token is not None:
            parameters["X-Amz-Security-Token"] = self._token
        pairs = sorted((quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in parameters.items())
        signed_query = "&".join(f"{name}={value}" for name, value in pairs)
        lines = "".join(f"{name}:{values[name]}\n" for name in sorted(values))
        canonical = f"{method}\n/{path}\n{signed_query}\n{lines}\n{names}\n{UNSIGNED_PAYLOAD}"
        text = moment.to_sign + hashlib.sha256(canonical.encode()).hexdigest()
        signature = hmac.digest(moment.key, text.encode(), "sha256").hex()
        return f"{scheme}://{host}/{path}?{signed_query}&X-Amz-Signature={signature}"
