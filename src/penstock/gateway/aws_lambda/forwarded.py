"""The head of an answer that a handler or a webhook sends: ``x-amz-fwd-*`` headers become a result's headers, or an error.

Source: the model of ``WriteGetObjectResponse`` in botocore.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from penstock.gateway.objects import S3Error
from penstock.gateway.results.record import HEADERS_OF_GATEWAY

if TYPE_CHECKING:
    from collections.abc import Mapping

STATUSES = frozenset({200, 206, 304, 400, 401, 403, 404, 405, 409, 411, 412, 416, 500, 503})
"""Statuses that ``x-amz-fwd-status`` may have."""

ERROR_CODES = {
    400: "InvalidRequest",
    401: "AccessDenied",
    403: "AccessDenied",
    404: "NoSuchKey",
    405: "MethodNotAllowed",
    409: "OperationAborted",
    411: "MissingContentLength",
    412: "PreconditionFailed",
    416: "InvalidRange",
    500: "InternalError",
    503: "ServiceUnavailable",
}
"""Error codes by status, for handlers that name none."""

CHECKSUMS = frozenset(
    {"crc32", "crc32c", "crc64nvme", "sha1", "sha256", "sha512", "md5", "xxhash64", "xxhash3", "xxhash128"}
)
PREFIX = "x-amz-fwd-header-"
CHECKSUM_PREFIX = "x-amz-checksum-"
METADATA_PREFIX = "x-amz-meta-"
KEPT = (
    *("Cache-Control", "Content-Disposition", "Content-Encoding", "Content-Language", "Content-Type", "Expires"),
    *("x-amz-delete-marker", "x-amz-expiration", "x-amz-missing-meta", "x-amz-object-lock-mode"),
    *("x-amz-object-lock-legal-hold", "x-amz-object-lock-retain-until-date", "x-amz-replication-status"),
    *("x-amz-request-charged", "x-amz-restore", "x-amz-storage-class", "x-amz-tagging-count", "x-amz-version-id"),
    *("x-amz-server-side-encryption", "x-amz-server-side-encryption-customer-algorithm"),
    *("x-amz-server-side-encryption-aws-kms-key-id", "x-amz-server-side-encryption-customer-key-MD5"),
    "x-amz-server-side-encryption-bucket-key-enabled",
)
"""Headers that readers of the result get."""

DROPPED = frozenset({"etag", "last-modified", "accept-ranges", "content-range", "x-amz-mp-parts-count"})
"""Headers that a handler may send and that are dropped: the gateway sets them for the results that it keeps and cuts."""

KEPT_NAMES = {name.lower(): name for name in KEPT}
ERROR_CODE = re.compile(r"[A-Z][a-zA-Z]+")
_INTEGER = re.compile(r"[0-9]{1,19}")
_STATUS_OF_WEBHOOK = re.compile(r"[1-5][0-9]{2}")
_ERROR_CODE_OF_WEBHOOK = re.compile(r"[A-Za-z][A-Za-z0-9]{0,127}")
MESSAGE_CHARACTERS_MAX = 4096


class ForwardedHead(NamedTuple):
    """The head of a handler's answer.

    Attributes:
        status: HTTP status.
        headers: Headers of the result, with the names that are sent.
        checksum: Algorithm and value, in base64, of the body's checksum; None if the handler sent none.
        error_code: Code of the error; empty if the handler sent none.
        error_message: Message of the error.
        size_bytes: Length of the body; None if it is not known.
    """

    status: int
    headers: dict[str, str]
    checksum: tuple[str, str] | None
    error_code: str
    error_message: str
    size_bytes: int | None

    @property
    def is_error(self) -> bool:
        """Whether the answer is an error for the client."""
        return self.status >= 400

    def error(self, code: str = "", message: str = "") -> S3Error:
        """Return the client's error; code and message are used if the handler's headers contain none."""
        known = code if ERROR_CODE.fullmatch(code) else ""
        code = self.error_code or known or ERROR_CODES.get(self.status, "InvalidRequest")
        message = self.error_message or message or f"The transformation answered with status {self.status}."
        return S3Error(code, message, status=self.status)


def refuse(message: str) -> NoReturn:
    """Raise the error of a request that does not follow the model."""
    raise S3Error("ValidationError", message)


def forwarded_head(headers: Mapping[str, str], *, status_default: int = 200) -> ForwardedHead:
    """Parse the headers of an answer.

    Args:
        headers: Headers of the request to ``WriteGetObjectResponse``, or of a webhook's response.
        status_default: Status if ``x-amz-fwd-status`` is missing.

    Raises:
        S3Error: ``ValidationError``: the status is not one of ``STATUSES``, an error's code is malformed or accompanies a
            success, there are several checksums, or a header is unknown.
    """
    status = status_default
    error = {"code": "", "message": ""}
    kept: dict[str, str] = {}
    checksums: list[tuple[str, str]] = []
    size_bytes = None
    for name, value in headers.items():
        lower = name.lower()
        if lower == "content-length":
            size_bytes = _integer(name, value)
        elif lower == "x-amz-fwd-status":
            status = _integer(name, value)
        elif lower.startswith("x-amz-fwd-error-") and lower[16:] in error:
            error[lower[16:]] = value
        elif lower.startswith(METADATA_PREFIX):
            kept[lower] = value
        elif lower.startswith(PREFIX + CHECKSUM_PREFIX):
            checksums.append((lower[len(PREFIX + CHECKSUM_PREFIX) :], value))
        elif lower.startswith(PREFIX):
            _keep(kept, lower[len(PREFIX) :], value)
    checksum = _only_checksum(checksums)
    if checksum is not None:
        kept[CHECKSUM_PREFIX + checksum[0]] = checksum[1]
    _check_status(status, error["code"], error["message"])
    message = error["message"][:MESSAGE_CHARACTERS_MAX]
    return ForwardedHead(status, kept, checksum, error["code"], message, size_bytes)


def _integer(name: str, value: str) -> int:
    if not _INTEGER.fullmatch(value.strip()):
        refuse(f"The header {name} is not a number.")
    return int(value)


def _keep(kept: dict[str, str], lower: str, value: str) -> None:
    if lower.startswith(METADATA_PREFIX):  # MinIO's dialect sends them with the prefix, too
        kept[lower] = value
    elif lower in KEPT_NAMES:
        kept[KEPT_NAMES[lower]] = value
    elif lower not in DROPPED:
        refuse(f"The header {PREFIX}{lower} is unknown.")


def _only_checksum(checksums: list[tuple[str, str]]) -> tuple[str, str] | None:
    if len(checksums) > 1:
        refuse("Only one checksum is allowed.")
    if checksums and checksums[0][0] not in CHECKSUMS:
        refuse(f"The checksum algorithm {checksums[0][0]} is unknown.")
    return checksums[0] if checksums else None


def _check_status(status: int, code: str, message: str) -> None:
    if status not in STATUSES:
        refuse(f"The status {status} is not allowed.")
    if (code or message) and status < 400:
        refuse("An error code or message is allowed only with an error status.")
    if code and not ERROR_CODE.fullmatch(code):
        refuse("The error code must consist of letters, the first of them a capital.")


def webhook_head(headers: Mapping[str, str], *, status: int) -> ForwardedHead:
    """Parse the headers of a webhook's response: MinIO forwards more freely than ``WriteGetObjectResponse``.

    Any ``x-amz-fwd-header-NAME`` becomes the header ``NAME`` of the result, except HTTP's own transfer headers and those that
    the gateway makes itself. Checksums are not forwarded.

    Args:
        headers: The headers.
        status: HTTP status of the response, unless ``x-amz-fwd-status`` overrides it.

    Raises:
        S3Error: ``LambdaFunctionStatusError``: ``x-amz-fwd-status`` is not a status.
    """
    sent = {name.lower(): value for name, value in headers.items()}
    text = sent.get("x-amz-fwd-status", str(status)).strip()
    if not _STATUS_OF_WEBHOOK.fullmatch(text):
        raise S3Error("LambdaFunctionStatusError", "The webhook's x-amz-fwd-status is not an HTTP status.")
    kept = {}
    for name, value in headers.items():
        inner = name[len(PREFIX) :] if name.lower().startswith(PREFIX) else ""
        if name.lower().startswith(METADATA_PREFIX):
            kept[name.lower()] = value
        elif inner and inner.lower() not in HEADERS_OF_GATEWAY and not inner.lower().startswith(CHECKSUM_PREFIX):
            kept[inner] = value
    code, message = sent.get("x-amz-fwd-error-code", ""), sent.get("x-amz-fwd-error-message", "")
    if not (message and _ERROR_CODE_OF_WEBHOOK.fullmatch(code)):
        code, message = "InvalidRequest", "The webhook answered with an error that it does not describe."
    length = sent.get("content-length", "")
    size_bytes = int(length) if _INTEGER.fullmatch(length) else None
    return ForwardedHead(int(text), kept, None, code, message[:MESSAGE_CHARACTERS_MAX], size_bytes)
