"""The object that ``x-amz-copy-source`` names. Pure.

The front, which checks whether the caller may use the source's bucket, and the buckets, which read it, both ask here. If each
had its own reading of the header, a caller could name one bucket to the first and another one to the second.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from collections.abc import Mapping

_ACCESS_POINT = re.compile(r"arn:[^:]*:s3(?:-object-lambda)?:[^:]*:[^:]*:accesspoint[/:]([^/]+)/object/(.+)", re.DOTALL)


class CopySource(NamedTuple):
    """The object that ``x-amz-copy-source`` names.

    Attributes:
        bucket: Name of a bucket or access point.
        key: Key in it.
    """

    bucket: str
    key: str


def copy_source(headers: Mapping[str, str]) -> CopySource:
    """Return the source of a copy.

    Raises:
        S3Error: The header names no object, or a version other than the current one.
    """
    text, mark, version = headers["x-amz-copy-source"].partition("?versionId=")
    if mark and version not in ("", "null"):
        raise S3Error(
            "NoSuchVersion", "The specified version does not exist.", status=404, details={"VersionId": version[:1024]}
        )
    try:
        text = unquote(text, errors="strict").removeprefix("/")
    except UnicodeDecodeError as error:
        raise _bad_source() from error
    point = _ACCESS_POINT.fullmatch(text)
    bucket, _, key = (point[1], "/", point[2]) if point else text.partition("/")
    if not bucket or not key:
        raise _bad_source()
    return CopySource(bucket, key)


def _bad_source() -> S3Error:
    message = "Copy Source must mention the source bucket and key: sourcebucket/sourcekey"
    details = {"ArgumentName": "x-amz-copy-source", "ArgumentValue": ""}
    return S3Error("InvalidArgument", message, status=400, details=details)
