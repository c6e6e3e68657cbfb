"""The head of a webhook's response: MinIO forwards more freely than ``WriteGetObjectResponse``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from penstock.gateway.aws_lambda.forwarded import METADATA_PREFIX, PREFIX, ForwardedHead
from penstock.gateway.objects import S3Error
from penstock.gateway.results.record import HEADERS_OF_GATEWAY

if TYPE_CHECKING:
    from collections.abc import Mapping

_STATUS = re.compile(r"[1-5][0-9]{2}")
_LENGTH = re.compile(r"[0-9]{1,19}")
_ERROR_CODE = re.compile(r"[A-Za-z][A-Za-z0-9]{0,127}")
MESSAGE_CHARACTERS_MAX = 4096


def response_head(headers: Mapping[str, str], *, status: int) -> ForwardedHead:
    """Parse the headers of a webhook's response.

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
    if not _STATUS.fullmatch(text):
        raise S3Error("LambdaFunctionStatusError", "The webhook's x-amz-fwd-status is not an HTTP status.", status=400)
    kept = {}
    for name, value in headers.items():
        inner = name[len(PREFIX) :] if name.lower().startswith(PREFIX) else ""
        if name.lower().startswith(METADATA_PREFIX):
            kept[name.lower()] = value
        elif inner and inner.lower() not in HEADERS_OF_GATEWAY and not inner.lower().startswith("x-amz-checksum-"):
            kept[inner] = value
    code, message = sent.get("x-amz-fwd-error-code", ""), sent.get("x-amz-fwd-error-message", "")
    if not (message and _ERROR_CODE.fullmatch(code)):
        code, message = "InvalidRequest", "The webhook answered with an error that it does not describe."
    length = sent.get("content-length", "")
    size_bytes = int(length) if _LENGTH.fullmatch(length) else None
    return ForwardedHead(int(text), kept, None, code, message[:MESSAGE_CHARACTERS_MAX], size_bytes)
