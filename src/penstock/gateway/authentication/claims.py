"""Claims of requests about their signature, in the header ``Authorization`` or in the query. Nothing here is verified."""

from __future__ import annotations

import calendar
import re
import time
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote_plus

from penstock.gateway.authentication import version_2
from penstock.gateway.authentication.canonical import SIGNATURE_PARAMETER
from penstock.gateway.objects import S3Error
from penstock.transport import EMPTY_SHA256, EXPIRES_S_MAX, UNSIGNED_PAYLOAD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from penstock.gateway.authentication.version_2 import Version2Claim
    from penstock.gateway.objects import RequestHead

ALGORITHM = "AWS4-HMAC-SHA256"
_VERSION_4 = frozenset(
    {
        "X-Amz-Algorithm",
        "X-Amz-Credential",
        "X-Amz-Date",
        "X-Amz-Expires",
        "X-Amz-Security-Token",
        SIGNATURE_PARAMETER,
        "X-Amz-SignedHeaders",
    }
)
SIGNING_PARAMETERS = _VERSION_4 | version_2.QUERY_PARAMETERS
"""Query parameters that belong to a signature of either version. The front removes them."""

_REQUIRED = _VERSION_4 - {"X-Amz-Security-Token"}
_FIELDS_MAX = 3
_NAMES_MAX = 128
_SIGNED_NAMES = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]+(?:;[a-z0-9!#$%&'*+.^_`|~-]+)*")
_SIGNATURE = re.compile(r"[!-+\--~]+")  # anything that can be compared: a wrong length is a wrong signature
_STAMP = re.compile(r"[0-9]{8}T[0-9]{6}Z")


class Signer(NamedTuple):
    """The header before its signature, which is the same in all requests of a client on one day.

    Attributes:
        access_key: ID of the access key.
        scope: Scope of the signature: ``20260102/us-east-1/s3/aws4_request``.
        day: Day in the scope.
        region: Region in the scope.
        service: Service in the scope.
        names: Names of the signed headers, in lower case.
    """

    access_key: str
    scope: str
    day: str
    region: str
    service: str
    names: tuple[str, ...]


class SignatureClaim(NamedTuple):
    """The signature of a request, and how it was made.

    Attributes:
        signer: The signer, and the scope of the signature.
        signature: The signature: 64 hexadecimal digits, if it is right.
        stamp: Time of signing: ``20260102T030405Z``.
        payload: Hash of the payload, or what stands for it.
        token: Session token; empty if there is none.
        expires_s: Life of a presigned URL in seconds; None if the signature is in a header.
    """

    signer: Signer
    signature: str
    stamp: str
    payload: str
    token: str
    expires_s: int | None


def read_claim(head: RequestHead) -> SignatureClaim | Version2Claim | None:
    """Return the claim of a request about its signature; None if it has none.

    Raises:
        S3Error: The request cannot be read, is signed twice, or is signed in a way that is not supported.
    """
    authorization = head.headers.get("authorization")
    query = head.raw_query
    in_query = "X-Amz-" in query and ("X-Amz-Algorithm=" in query or "X-Amz-Signature=" in query)
    is_version_2 = bool(query) and version_2.is_version_2(query)
    if (authorization is not None) + in_query + is_version_2 > 1:
        raise S3Error("InvalidArgument", "Only one way of signing is allowed: the Authorization header, or the query.")
    if authorization is not None:
        return _from_header(authorization, head.headers)
    if in_query:
        return _from_query(query, head.headers)
    return version_2.read_claim_of_version_2(head) if is_version_2 else None


def _from_header(authorization: str, headers: Mapping[str, str]) -> SignatureClaim:
    rest, _, signature = authorization.rpartition("Signature=")
    signer = _signer(rest)
    if signer is None or not _SIGNATURE.fullmatch(signature):
        signer, signature = _parsed(authorization)
    get = headers.get
    stamp = get("x-amz-date")
    if stamp is None:
        stamp = _stamp_of_date(get("date", ""))
    if signer.day != stamp[:8]:
        raise _malformed(f"the date {signer.day[:16]!r} of the Credential is not that of x-amz-date")
    payload, token = get("x-amz-content-sha256", EMPTY_SHA256), get("x-amz-security-token", "")
    return SignatureClaim(signer, signature, stamp, payload, token, None)


@lru_cache(maxsize=256)
def _signer(text: str) -> Signer | None:
    """Return the part of the header before its signature; None if the text is anything else than most clients send."""
    if not text.rstrip(" ").endswith(","):
        return None
    try:
        return _parsed(f"{text}Signature={'0' * 64}")[0]
    except S3Error:
        return None


def _parsed(authorization: str) -> tuple[Signer, str]:
    """Return the fields of a header, and the signature.

    Raises:
        S3Error: It cannot be read, or has another algorithm.
    """
    algorithm, _, rest = authorization.partition(" ")
    if algorithm != ALGORITHM:
        raise unsupported("Signature Version 2" if algorithm == "AWS" else algorithm[:40])
    fields = dict(field.strip().partition("=")[::2] for field in rest.split(","))
    try:
        credential, names, signature = fields["Credential"], fields["SignedHeaders"], fields["Signature"]
    except KeyError as missing:
        raise _malformed(f"{missing.args[0]} is missing") from None
    if len(fields) != _FIELDS_MAX or rest.count(",") != _FIELDS_MAX - 1:
        raise _malformed("it must have Credential, SignedHeaders and Signature, each once")
    return _signer_of(credential, names, signature, refuse=_malformed), signature


def _signer_of(credential: str, names: str, signature: str, *, refuse: Callable[[str], S3Error]) -> Signer:
    """Parse a credential and the names of the signed headers; `refuse` makes the error."""
    parts = credential.split("/")
    if len(parts) < 5 or parts[-1] != "aws4_request":
        raise refuse("the Credential must be ACCESS/DATE/REGION/SERVICE/aws4_request")
    if not _SIGNED_NAMES.fullmatch(names) or not _SIGNATURE.fullmatch(signature):
        raise refuse("SignedHeaders or Signature cannot be read")
    return Signer("/".join(parts[:-4]), "/".join(parts[-4:]), parts[-4], parts[-3], parts[-2], _names(names))


def _from_query(query: str, headers: Mapping[str, str]) -> SignatureClaim:
    found: dict[str, str] = {}
    for part in query.split("&"):
        name, _, value = part.partition("=")
        if name in _VERSION_4:
            if name in found:
                raise _bad_query(f"{name} is given twice.")
            found[name] = unquote_plus(value, errors="surrogateescape")
    if missing := _REQUIRED - found.keys():
        raise _bad_query(f"{min(missing)} is missing.")
    if found["X-Amz-Algorithm"] != ALGORITHM:
        raise _bad_query(f"X-Amz-Algorithm must be {ALGORITHM}.")
    stamp, expires = found["X-Amz-Date"], found["X-Amz-Expires"]
    if not _STAMP.fullmatch(stamp):
        raise _bad_query("X-Amz-Date must be in the form YYYYMMDDThhmmssZ.")
    if not (expires.isascii() and expires.isdigit() and len(expires) <= 9 and 1 <= int(expires) <= EXPIRES_S_MAX):
        raise _bad_query(f"X-Amz-Expires must be a number of seconds from 1 to {EXPIRES_S_MAX}.")
    signature = found[SIGNATURE_PARAMETER]
    signer = _signer_of(found["X-Amz-Credential"], found["X-Amz-SignedHeaders"], signature, refuse=_bad_query)
    if signer.day != stamp[:8]:
        raise _bad_query("The date of X-Amz-Credential is not that of X-Amz-Date.")
    payload, token = headers.get("x-amz-content-sha256", UNSIGNED_PAYLOAD), found.get("X-Amz-Security-Token", "")
    return SignatureClaim(signer, signature, stamp, payload, token, int(expires))


@lru_cache(maxsize=256)
def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(";"))
    if len(names) > _NAMES_MAX or len(set(names)) != len(names):
        raise _malformed("SignedHeaders has a name twice, or too many names")
    return names


@lru_cache(maxsize=256)
def stamp_s(stamp: str) -> float | None:
    """Return the time of ``20260102T030405Z`` in seconds since 1970; None if the text has another form."""
    if not _STAMP.fullmatch(stamp):
        return None
    try:
        return float(calendar.timegm(time.strptime(stamp, "%Y%m%dT%H%M%SZ")))
    except ValueError:
        return None


@lru_cache(maxsize=64)
def _stamp_of_date(text: str) -> str:
    """Return the time of a ``Date`` header as signatures contain it; requests without ``x-amz-date`` are rare."""
    try:
        date_s = parsedate_to_datetime(text).timestamp()
        return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(date_s))
    except (ValueError, TypeError, IndexError, OverflowError, OSError):
        raise S3Error("AccessDenied", "A signed request needs a valid Date or x-amz-date header.") from None


def _malformed(what: str) -> S3Error:
    return S3Error("AuthorizationHeaderMalformed", f"The authorization header is malformed; {what}.")


def _bad_query(what: str) -> S3Error:
    return S3Error("AuthorizationQueryParametersError", what)


def unsupported(what: str) -> S3Error:
    """Return the error for another way of signing."""
    message = f"{what} is not supported. Please use {ALGORITHM}; in boto3, Config(signature_version='s3v4') does."
    return S3Error("InvalidRequest", message)


def wrong_scope(claim: SignatureClaim, *, region: str) -> S3Error:
    """Return the error for a signature of another region or service; `region` is the right one, or empty for any."""
    signer = claim.signer
    if region and signer.region != region:
        what, details = f"the region {signer.region[:64]!r} is wrong; expecting {region!r}", {"Region": region}
    else:
        what, details = f"the service {signer.service[:64]!r} is wrong; expecting 's3'", {}
    if claim.expires_s is None:
        code, message = "AuthorizationHeaderMalformed", f"The authorization header is malformed; {what}."
    else:
        code, message = "AuthorizationQueryParametersError", f"Error in the X-Amz-Credential parameter; {what}."
    headers = {"x-amz-bucket-region": region} if region else {}
    return S3Error(code, message, status=400, headers=headers, details=details)
