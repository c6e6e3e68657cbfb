"""Verifies the signatures of requests: Signature Version 4, in a header or in the query, and presigned URLs of version 2.

A typical GET of boto3 costs 10 to 13 µs, a presigned one twice that. The day's key is kept for each scope, but only once a
signature of that scope has been right, so that nobody without a key can fill the memory or push the kept keys out.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import time
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from penstock.gateway.authentication import canonical
from penstock.gateway.authentication.bodies import open_body, payload_of
from penstock.gateway.authentication.chunks import ChunkSigner
from penstock.gateway.authentication.claims import (
    ALGORITHM,
    SignatureClaim,
    read_claim,
    stamp_s,
    unsupported,
    wrong_scope,
)
from penstock.gateway.authentication.keys import AccessKey, AccessKeys
from penstock.gateway.authentication.version_2 import Version2Claim, matches_version_2
from penstock.gateway.objects import Caller, S3Error, VerifiedRequest
from penstock.transport import UNSIGNED_PAYLOAD, signing_key

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.gateway.objects import RequestHead

SKEW_S_MAX = 15 * 60
"""Largest difference between the time of a signed request and this host's clock, in seconds; S3's own limit."""

SERVICES = frozenset({"s3", "s3-object-lambda"})
_DAY_KEYS_MAX = 1024
_TIME_S_MAX = 253402300799  # the end of the year 9999
_NOBODY = AccessKey(access_key="", secret_key="a secret of the usual length, 40 letters")
"""Verifies requests of unknown keys, so that they cost the same time as those with a wrong signature."""


class SignatureAuthenticator:
    """Verifies requests with a set of keys.

    Args:
        keys: The keys; ``keys`` may be assigned at any time, for example when their file was read again.
        region: Region that signatures must name; empty accepts every region.
        accepts_version_2: Whether presigned URLs of Signature Version 2 are accepted; they name no region.
        clock: Returns the time in seconds since 1970.
    """

    def __init__(
        self,
        keys: AccessKeys,
        *,
        region: str = "",
        accepts_version_2: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keys = keys
        self._region = region
        self._accepts_version_2 = accepts_version_2
        self._clock = clock
        self._day_keys: dict[tuple[str, str, str], bytes] = {}

    @property
    def keys(self) -> AccessKeys:
        """The keys that requests are verified with; each request sees one set from its beginning to its end."""
        return self._keys

    @keys.setter
    def keys(self, keys: AccessKeys) -> None:
        self._keys = keys
        self._day_keys = {}

    def may_use(self, caller: Caller, bucket: str) -> bool:
        """Return whether a caller may use a bucket or access point."""
        return self._keys.may_use(caller.access_key, bucket)

    def verify(self, head: RequestHead) -> VerifiedRequest:
        """Verify the signature of a request, in its headers or its query; see ``Authenticator.verify``."""
        claim = read_claim(head)
        if claim is None:
            return self._anonymous(head)
        if isinstance(claim, Version2Claim):
            return self._version_2(head, claim)
        if claim.signer.service not in SERVICES or (self._region and claim.signer.region != self._region):
            raise wrong_scope(claim, region=self._region)
        if claim.token:
            raise _token_refused()
        self._check_time(claim)
        _check_signed(head, claim)
        payload = payload_of(claim.payload, is_presigned=claim.expires_s is not None)
        key = self._keys.get(claim.signer.access_key)
        owner = key or _NOBODY
        day_key = self._day_keys.get((owner.access_key, owner.secret_key, claim.signer.scope))
        is_kept = day_key is not None
        if day_key is None:
            day_key = signing_key(owner.secret_key, claim.signer.scope)
        is_right = _matches(head, claim, day_key)
        key = _checked(key, claim.signer.access_key, is_right=is_right)
        if not is_kept:
            self._keep(key, claim.signer.scope, day_key)
        signer = ChunkSigner(day_key, claim.stamp, claim.signer.scope, claim.signature)
        return VerifiedRequest(
            Caller(key.access_key, key.may_write), partial(open_body, head=head, payload=payload, signer=signer)
        )

    def _version_2(self, head: RequestHead, claim: Version2Claim) -> VerifiedRequest:
        if not self._accepts_version_2:
            raise unsupported("Signature Version 2")
        if "x-amz-security-token" in claim.headers or "x-amz-security-token" in head.headers:
            raise _token_refused()
        now_s = self._clock()
        if now_s > claim.expires_s:
            raise _expired(claim.expires_s, now_s)
        payload = payload_of(head.headers.get("x-amz-content-sha256", UNSIGNED_PAYLOAD), is_presigned=True)
        key = self._keys.get(claim.access_key)
        is_right = matches_version_2(head, claim, (key or _NOBODY).secret_key)
        key = _checked(key, claim.access_key, is_right=is_right)
        return VerifiedRequest(
            Caller(key.access_key, key.may_write), partial(open_body, head=head, payload=payload, signer=None)
        )

    def _anonymous(self, head: RequestHead) -> VerifiedRequest:
        if self._keys.anonymous is None:
            raise S3Error("AccessDenied", "Access Denied. Requests to this endpoint must be signed.")
        return unsigned_request(head, may_write=False)

    def _check_time(self, claim: SignatureClaim) -> None:
        now_s, signed_s = self._clock(), stamp_s(claim.stamp)
        if signed_s is None:
            raise S3Error("AccessDenied", "x-amz-date must be in the form YYYYMMDDThhmmssZ.")
        if claim.expires_s is None:
            if abs(now_s - signed_s) > SKEW_S_MAX:
                details = {
                    "RequestTime": claim.stamp,
                    "ServerTime": _iso(now_s),
                    "MaxAllowedSkewMilliseconds": str(SKEW_S_MAX * 1000),
                }
                what = "The difference between the request time and the current time is too large."
                raise S3Error("RequestTimeTooSkewed", what, details=details)
        elif signed_s - now_s > SKEW_S_MAX:
            raise S3Error("AccessDenied", "Request is not valid yet", details={"ServerTime": _iso(now_s)})
        elif now_s > signed_s + claim.expires_s:
            raise _expired(signed_s + claim.expires_s, now_s, details={"X-Amz-Expires": str(claim.expires_s)})

    def _keep(self, key: AccessKey, scope: str, day_key: bytes) -> None:
        """Keep the day's key, and that of the unknown caller, so that both kinds of refusal still cost the same."""
        if len(self._day_keys) >= _DAY_KEYS_MAX:
            self._day_keys = {}
        self._day_keys[key.access_key, key.secret_key, scope] = day_key
        self._day_keys[_NOBODY.access_key, _NOBODY.secret_key, scope] = signing_key(_NOBODY.secret_key, scope)


class OpenAuthenticator:
    """Accepts every request, for a gateway without keys, which listens on loopback only.

    A web page could reach such a gateway through the browser of a user of this host, under a name of its own that resolves to
    loopback. Therefore requests must name an address of loopback, ``localhost``, or one of `domains`.

    Args:
        may_write: Whether the callers may change objects.
        domains: Further host names under which the gateway is reached; their subdomains are names of buckets.
    """

    def __init__(self, *, may_write: bool = True, domains: Sequence[str] = ()) -> None:
        self._may_write = may_write
        self._domains = ("localhost", *(domain.lower() for domain in domains if domain))

    def may_use(self, caller: Caller, bucket: str) -> bool:
        """Return True: there are no keys to tell callers apart."""
        return True

    def verify(self, head: RequestHead) -> VerifiedRequest:
        """Accept a request. Its body is decoded, and compared with its checksums; signatures are not verified.

        Raises:
            S3Error: The request names a host that is not this one.
        """
        if not _is_local(head.headers.get("host", ""), self._domains):
            raise S3Error("AccessDenied", "A gateway without keys answers only to names of this host.")
        return unsigned_request(head, may_write=self._may_write)


@lru_cache(maxsize=256)
def _is_local(host: str, domains: tuple[str, ...]) -> bool:
    name = host.lower()
    if not name.endswith("]") and name.rpartition(":")[2].isdigit():
        name = name.rpartition(":")[0]
    name = name.strip("[]").removesuffix(".")
    if any(name == domain or name.endswith(f".{domain}") for domain in domains):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _checked(key: AccessKey | None, access_key: str, *, is_right: bool) -> AccessKey:
    """Return the key of a request, or refuse it; the signature of a request with an unknown key was computed as well."""
    if key is None:
        raise S3Error("InvalidAccessKeyId", "The access key ID you provided does not exist in our records.",
                      details={"AWSAccessKeyId": access_key[:128]})  # fmt: skip
    if not is_right:
        raise S3Error(
            "SignatureDoesNotMatch",
            "The request signature we calculated does not match the signature you provided. Check your secret access "
            "key and signing method.",
            details={"AWSAccessKeyId": access_key},
        )
    return key


def _token_refused() -> S3Error:
    what = "The access keys of this endpoint have no session tokens; send the request without one."
    return S3Error("InvalidToken", what)


def _expired(expires_s: float, now_s: float, details: Mapping[str, str] | None = None) -> S3Error:
    details = {**(details or {}), "Expires": _iso(expires_s), "ServerTime": _iso(now_s)}
    return S3Error("AccessDenied", "Request has expired", details=details)


def unsigned_request(head: RequestHead, *, may_write: bool) -> VerifiedRequest:
    """Return an anonymous request, whose body no signature covers."""
    payload = payload_of(head.headers.get("x-amz-content-sha256", UNSIGNED_PAYLOAD), is_presigned=False)
    return VerifiedRequest(Caller("", may_write), partial(open_body, head=head, payload=payload, signer=None))


def _check_signed(head: RequestHead, claim: SignatureClaim) -> None:
    """Refuse requests with headers that somebody could have added: S3 wants its own to be signed."""
    names = claim.signer.names
    if "host" not in names:
        raise S3Error("AccessDenied", "The Host header must be signed.", details={"HeadersNotSigned": "host"})
    missing = [name for name in map(str.lower, head.headers) if name not in names and _must_be_signed(name)]
    if missing:
        what = "There were headers present in the request which were not signed"
        raise S3Error("AccessDenied", what, details={"HeadersNotSigned": ", ".join(sorted(set(missing)))})


def _must_be_signed(name: str) -> bool:
    return name.startswith("x-amz-") or name == "content-md5"


def _matches(head: RequestHead, claim: SignatureClaim, day_key: bytes) -> bool:
    """Return whether the signature is right, in constant time for each form of the request."""
    names = claim.signer.names
    path, query = canonical.canonical_path(head.raw_path), canonical.canonical_query(head.raw_query)
    lines = canonical.canonical_headers(head.headers, names)
    if _is_signature(claim, day_key, (head.method, path, query, lines)):
        return True
    raw_path, raw_lines = head.raw_path or "/", canonical.headers_as_sent(head.headers, names)
    sorted_query, raw_query = canonical.query_as_sent(head.raw_query)
    forms = {(head.method, raw_path, sent, line) for sent in (sorted_query, raw_query) for line in (lines, raw_lines)}
    forms.discard((head.method, path, query, lines))
    return any([_is_signature(claim, day_key, form) for form in forms])  # noqa: C419 - tries all, whichever is right


def _is_signature(claim: SignatureClaim, day_key: bytes, form: tuple[str, str, str, str]) -> bool:
    method, path, query, lines = form
    text = f"{method}\n{path}\n{query}\n{lines}\n{';'.join(claim.signer.names)}\n{claim.payload}"
    digest = hashlib.sha256(canonical.wire_bytes(text)).hexdigest()
    to_sign = f"{ALGORITHM}\n{claim.stamp}\n{claim.signer.scope}\n{digest}"
    expected = hmac.digest(day_key, canonical.wire_bytes(to_sign), "sha256").hex()
    return hmac.compare_digest(expected, claim.signature)


def _iso(time_s: float) -> str:
    time_s = min(time_s, _TIME_S_MAX)
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s))
