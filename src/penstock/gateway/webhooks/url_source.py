"""The source of a transform behind a signed URL of another server."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from yarl import URL

from penstock.gateway.objects import ObjectHead, S3Error
from penstock.gateway.s3_text import date_s

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from contextlib import AbstractAsyncContextManager

    import aiohttp

    from penstock.types import ByteRange

_SENDABLE = re.compile(r"[!-~]+")
_TOTAL = re.compile(r"bytes (?:[0-9]+-[0-9]+|\*)/([0-9]{1,19})")


def allowed_url(text: str, hosts: tuple[str, ...]) -> URL:
    """Return a URL whose host is allowed.

    Args:
        text: The URL, percent-encoded.
        hosts: Hosts, each as ``HOST``, which allows all ports, or ``HOST:PORT``.

    Raises:
        S3Error: The URL is malformed, is not percent-encoded, is not HTTP, or leads to another host.
    """
    refusal = S3Error("AccessDenied", "The host of inputS3Url is not allowed by the configuration.", status=403)
    if not _SENDABLE.fullmatch(text):  # it is sent as it came, so a line break in it would begin another header
        raise refusal
    try:
        url = URL(text, encoded=True)
        host, port = url.host, url.port
    except ValueError:
        raise refusal from None
    if url.scheme not in ("http", "https") or not host or url.user is not None:
        raise refusal
    shown = f"[{host}]" if ":" in host else host
    if not {shown.lower(), f"{shown}:{port}".lower()} & {name.lower() for name in hosts}:
        raise refusal
    return url


class UrlSource:
    """An object that a signed URL of a GET reads; implements ``Source``.

    Cost: one request for its head, one for each ``read``.

    Attributes:
        key: Key of the object.
        head: Version and size of the source; ``open`` sets it.
    """

    def __init__(self, session: aiohttp.ClientSession, url: URL, *, key: str) -> None:
        self.key = key
        self.head = ObjectHead(key=key, size_bytes=None, etag="", last_modified_s=0)
        self._session = session
        self._url = url

    async def open(self, *, size_bytes_max: int) -> None:
        """Ask for the object's first byte, and with it for its size and version.

        Raises:
            S3Error: The object cannot be read, or is too large.
        """
        async with self._get({"Range": "bytes=0-0"}) as response:
            if response.status not in (200, 206, 416):
                await _refuse(response)
            total = _TOTAL.fullmatch(response.headers.get("Content-Range", ""))
            size_bytes = int(total[1]) if total is not None else response.content_length
            headers = response.headers
        if size_bytes is None:
            raise S3Error("InvalidRequest", "The server of inputS3Url does not send a length.", status=400)
        if size_bytes > size_bytes_max:
            raise S3Error("EntityTooLarge", f"The source has more than {size_bytes_max} bytes.", status=400)
        kept = {name: headers[name] for name in ("Content-Type",) if name in headers}
        self.head = ObjectHead(
            key=self.key,
            size_bytes=size_bytes,
            etag=headers.get("ETag", ""),
            last_modified_s=date_s(headers.get("Last-Modified")) or 0.0,
            headers=kept,
        )

    def worker_url(self) -> tuple[str, str]:
        """Return the server's URL for ``penstock.connect``, and the path with its signature as the key."""
        return str(self._url.origin()), self._url.raw_path_qs.removeprefix("/")

    def signed_url(self, headers: Mapping[str, str]) -> str:
        """Return the URL as it came; it has been signed for one set of headers."""
        del headers
        return str(self._url)

    async def read(self, span: ByteRange | None = None) -> AsyncIterator[bytes]:
        """Iterate over the object's bytes, all of the version in `head`.

        Raises:
            S3Error: The object cannot be read, or was replaced.
        """
        size_bytes = self.head.size_bytes or 0
        start, end = (0, size_bytes) if span is None else (span.start, min(span.end, size_bytes))
        if start >= end:
            return
        headers = {"Range": f"bytes={start}-{end - 1}"}
        if self.head.etag.startswith('"'):
            headers["If-Match"] = self.head.etag
        received_bytes = 0
        async with self._get(headers) as response:
            is_whole = response.status == 200 and (start, end) == (0, size_bytes)
            if response.status != 206 and not is_whole:
                await _refuse(response)
            if response.headers.get("ETag", "") != self.head.etag:
                raise S3Error("PreconditionFailed", "The source was replaced while it was read.", status=412)
            async for piece in response.content.iter_any():
                received_bytes += len(piece)
                yield piece
        if received_bytes != end - start:
            raise S3Error("IncompleteBody", "The source ended early.", status=400)

    def _get(self, headers: Mapping[str, str]) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        return self._session.get(self._url, headers={"Accept-Encoding": "identity", **headers}, allow_redirects=False)


async def _refuse(response: aiohttp.ClientResponse) -> None:
    message = f"The server of inputS3Url answered with status {response.status}."
    raise S3Error("InvalidRequest", message, status=400)
