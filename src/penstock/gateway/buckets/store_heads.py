"""The heads of a store's objects: their headers as they are sent, and an ETag and a type for stores that have none. Pure."""

from __future__ import annotations

import mimetypes
from functools import lru_cache
from typing import TYPE_CHECKING

from penstock.cache.metadata import kept_headers
from penstock.gateway.objects import ObjectHead

if TYPE_CHECKING:
    from penstock.types import ObjectInfo

_SHOWN_NAMES = {
    b"cache-control": "Cache-Control",
    b"content-disposition": "Content-Disposition",
    b"content-encoding": "Content-Encoding",
    b"content-language": "Content-Language",
    b"content-type": "Content-Type",
    b"expires": "Expires",
}
_DEFAULT_TYPE = "binary/octet-stream"


def object_head(info: ObjectInfo) -> ObjectHead:
    """Return the head of an object of a store."""
    headers = {
        _SHOWN_NAMES.get(name) or name.decode("latin-1"): value.decode("utf-8", "surrogateescape")
        for name, value in kept_headers(info.headers).items()
    }
    if "Content-Type" not in headers:
        headers["Content-Type"] = content_type_of(info.key)
    return ObjectHead(
        key=info.key,
        size_bytes=info.size_bytes,
        etag=etag_of(info),
        last_modified_s=info.last_modified_s or 0.0,
        headers=headers,
    )


def etag_of(info: ObjectInfo) -> str:
    """Return the ETag of an object; if its store has none, one of size and time."""
    if info.etag is not None:
        return info.etag
    return f'"{info.size_bytes:x}-{int((info.last_modified_s or 0) * 1e6):x}"'


def content_type_of(key: str) -> str:
    """Return the type that the suffix of a key stands for."""
    _, dot, suffix = key.rpartition("/")[2].rpartition(".")
    return _type_of_suffix(suffix.lower()) if dot else _DEFAULT_TYPE


@lru_cache(maxsize=1024)
def _type_of_suffix(suffix: str) -> str:
    return mimetypes.guess_type(f"x.{suffix}")[0] or _DEFAULT_TYPE
