"""Where the object of a key lies in a bucket's folder. Pure, except that it knows the names of hidden folders.

A key that is an ordinary path is the file of that path, so that other programs find it. Every other key of S3 (``//``, ``..``,
a trailing slash, a segment of more than 255 bytes, a hidden name of penstock) is percent-encoded and lies in a hidden folder.
A key lies there, too, while a file system cannot hold it beside another one: ``a`` and ``a/b`` cannot both be paths.
"""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

from penstock.gateway.objects import S3Error
from penstock.store.base import KEY_BYTES_MAX
from penstock.store.tree import TEMPORARY_PREFIX, TEMPORARY_SUFFIX

HIDDEN = f"{TEMPORARY_PREFIX}gateway{TEMPORARY_SUFFIX}"
"""Folder of a bucket that holds what is not a plain file; ``LocalStore`` neither lists nor opens such names."""

REGION_FILE = f"{HIDDEN}/region"
"""File of a bucket that names its region, if its creator named one."""

_NAME_BYTES_MAX = 255
_CHUNK = 200  # characters of an encoded key in one name
_MORE, _END = "+", "!"  # end a chunk that another one follows, and the last one; both are percent-encoded in keys
_BUCKET = re.compile(
    r"(?!\d+\.\d+\.\d+\.\d+$)(?!xn--|sthree-|amzn-s3-demo-)[a-z0-9](?:[a-z0-9-]|\.(?!\.)){1,61}[a-z0-9]"
)
_RESERVED_ENDS = ("-s3alias", "--ol-s3", ".mrap", "--x-s3", "--table-s3")


def check_key(key: str) -> None:
    """Refuse a key that S3 does not accept, or that contains NUL, which no file name can hold.

    Raises:
        S3Error: The key is too long, is not UTF-8, or holds a NUL.
    """
    try:
        length_bytes = len(key.encode())
    except UnicodeEncodeError as error:
        raise S3Error("InvalidURI", "The key is not UTF-8.", status=400) from error
    if length_bytes > KEY_BYTES_MAX:
        raise S3Error(
            "KeyTooLongError",
            "Your key is too long",
            status=400,
            details={"Size": str(length_bytes), "MaxSizeAllowed": str(KEY_BYTES_MAX)},
        )
    if not key or "\0" in key:
        raise S3Error("InvalidArgument", "A key must not be empty, and must not hold a NUL.", status=400)


def check_bucket_name(name: str) -> None:
    """Refuse a name that S3 does not allow for new buckets.

    Raises:
        S3Error: ``InvalidBucketName``.
    """
    if not _BUCKET.fullmatch(name) or name.endswith(_RESERVED_ENDS) or ".-" in name or "-." in name:
        raise S3Error(
            "InvalidBucketName", "The specified bucket is not valid.", status=400, details={"BucketName": name}
        )


def is_folder_name(name: str) -> bool:
    """Whether a folder of this name is served as a bucket; hidden folders are not, and no name leads elsewhere."""
    return bool(name) and not name.startswith(".") and "/" not in name and "\0" not in name and name.isprintable()


def natural_path(key: str) -> str | None:
    """Return the path of a key below the bucket's folder; None if no path of a file can express it."""
    for segment in key.split("/"):
        if segment in ("", ".", "..") or len(segment.encode()) > _NAME_BYTES_MAX:
            return None
        if segment.startswith(TEMPORARY_PREFIX) and segment.endswith(TEMPORARY_SUFFIX):
            return None
    return key


def escaped_path(key: str) -> str:
    """Return the path of a key below the folder of escaped keys: its percent-encoded text in names of 200 characters."""
    text = quote(key, safe="")
    chunks = [text[start : start + _CHUNK] for start in range(0, len(text), _CHUNK)]
    return "/".join([chunk + _MORE for chunk in chunks[:-1]] + [chunks[-1] + _END])


def unescaped(path: str) -> str | None:
    """Return the key of a path that ``escaped_path`` returned; None for any other path."""
    *chunks, last = path.split("/")
    if not last.endswith(_END) or not all(chunk.endswith(_MORE) for chunk in chunks):
        return None
    try:
        key = unquote("".join(chunk[:-1] for chunk in chunks) + last[:-1], errors="strict")
    except UnicodeDecodeError:
        return None
    return key if escaped_path(key) == path else None
