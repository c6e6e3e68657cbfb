"""The body of a request becomes a staged file: written and hashed on a thread, while the next bytes arrive."""

from __future__ import annotations

import asyncio
import hashlib
import os
from typing import TYPE_CHECKING, NamedTuple

from penstock.checksums import algorithms as checksums
from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from penstock.checksums.algorithms import Hasher
    from penstock.gateway.buckets.directory.staging import StagedFile
    from penstock.gateway.buckets.directory.threads import FileThreads
    from penstock.gateway.objects import RequestBody
    from penstock.types import Buffer, ByteRange

STEP_BYTES = 1 << 20
"""Bytes that are collected before a thread writes them: MD5 takes 1.5 ms for them, handing them over 0.1 ms."""

BODY_BYTES_MAX = 5 << 30
"""Largest body of one PUT or part; S3's limit."""


class Received(NamedTuple):
    """The hashes of a body that was written.

    Attributes:
        md5: MD5 of the body in hexadecimal.
        checksums: Checksums in base64, by algorithm: those that the client sent, and the requested one.
    """

    md5: str
    checksums: Mapping[str, str]


class HashingFile:
    """A staged file that is hashed while it is written.

    Args:
        staged: The file.
        algorithm: A checksum to compute besides the MD5; empty for none.
    """

    def __init__(self, staged: StagedFile, algorithm: str = "") -> None:
        self._staged = staged
        self._algorithm = algorithm
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._hasher: Hasher | None = checksums.hasher(algorithm) if algorithm else None

    def write(self, pieces: list[Buffer]) -> None:
        """Append pieces."""
        self._staged.write(pieces)
        for piece in pieces:
            self._md5.update(piece)
            if self._hasher is not None:
                self._hasher.update(piece)

    def copy(self, source: int, span: ByteRange) -> None:
        """Append a range of an open file.

        Raises:
            S3Error: The file ends before the range.
        """
        at = span.start
        while at < span.end:
            data = os.pread(source, min(STEP_BYTES, span.end - at), at)
            if not data:
                raise S3Error("InternalError", "The source became shorter while it was copied.", status=500)
            self.write([data])
            at += len(data)

    def result(self, sent: Mapping[str, str]) -> Received:
        """Return what was written; `sent` are checksums that the client sent and that were verified."""
        found = dict(sent)
        if self._hasher is not None and self._algorithm not in found:
            found[self._algorithm] = checksums.text(self._hasher)
        return Received(self._md5.hexdigest(), found)


async def receive(body: RequestBody, staged: StagedFile, *, threads: FileThreads, algorithm: str = "") -> Received:
    """Write a body to a file.

    Args:
        body: The body.
        staged: The file.
        threads: Threads for operations on files.
        algorithm: A checksum to compute if the client did not send it; empty for none.

    Raises:
        S3Error: The body has no length, is too long, or is not what its headers say.

    Cost: holds at most about 3 MiB, whatever the size of the body.
    """
    if body.length_bytes is None:
        raise S3Error("MissingContentLength", "You must provide the Content-Length HTTP header.", status=411)
    if body.length_bytes > BODY_BYTES_MAX:
        details = {"ProposedSize": str(body.length_bytes), "MaxSizeAllowed": str(BODY_BYTES_MAX)}
        message = "Your proposed upload exceeds the maximum allowed size"
        raise S3Error("EntityTooLarge", message, status=400, details=details)
    file = HashingFile(staged, algorithm)
    writing: asyncio.Future[None] | None = None
    total = 0
    try:
        async for pieces in _collected(body):
            total += sum(map(len, pieces))
            if writing is not None:
                await writing
            writing = asyncio.ensure_future(threads.run(file.write, pieces))
        if writing is not None:
            await writing
    finally:
        if writing is not None and not writing.done():
            await asyncio.wait([writing])  # the thread uses the file, which the caller is about to close
    if total != body.length_bytes:
        message = "You did not provide the number of bytes specified by the Content-Length HTTP header"
        raise S3Error("IncompleteBody", message, status=400)
    sent = {name: value for name, value in body.checksums.items() if name in checksums.ALGORITHMS}
    return file.result(sent)


async def _collected(body: RequestBody) -> AsyncIterator[list[Buffer]]:
    """Iterate over a body in lists of pieces that have ``STEP_BYTES`` together."""
    pieces: list[Buffer] = []
    held_bytes = 0
    async for piece in body:
        pieces.append(piece)
        held_bytes += len(piece)
        if held_bytes >= STEP_BYTES:
            yield pieces
            pieces, held_bytes = [], 0
    if pieces:
        yield pieces
