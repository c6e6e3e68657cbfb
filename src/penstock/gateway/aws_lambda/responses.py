"""Pending answers of handlers: each has a route, a token that is valid once, and a writer that takes the body."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.gateway.objects import ResultWriter


class PendingResponse:
    """The answer to one event.

    Attributes:
        route: ``outputRoute`` of the event.
        token: ``outputToken`` of the event.
        output: Takes the body.
        finished: A future that ends when the body has arrived to its end, or with the ``S3Error`` for the client.
        is_begun: Whether the head of the handler's answer has arrived.
    """

    def __init__(self, output: ResultWriter) -> None:
        self.route = f"io-{secrets.token_hex(8)}"
        self.token = secrets.token_urlsafe(32)
        self.output = output
        self.finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_begun = False
        self._copying: asyncio.Task[None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the body has arrived to its end."""
        return self.finished.done() and not self.finished.cancelled() and self.finished.exception() is None

    def begin(self, copying: asyncio.Task[None]) -> None:
        """Note that the head of the answer has arrived, and which task copies the body."""
        self.is_begun = True
        self._copying = copying
        copying.add_done_callback(self._ended)

    def close(self) -> None:
        """Stop copying; the answer is not needed any more."""
        if self._copying is not None:
            self._copying.cancel()
        if not self.finished.done():
            self.finished.cancel()
        elif not self.finished.cancelled():
            self.finished.exception()  # otherwise asyncio logs that it was never retrieved

    def _ended(self, copying: asyncio.Task[None]) -> None:
        if self.finished.done():
            return
        if copying.cancelled():
            message = "The call of WriteGetObjectResponse was broken off."
            self.finished.set_exception(S3Error("ConnectionClosedByRequester", message, status=400))
            return
        error = copying.exception()
        if error is None:
            self.finished.set_result(None)
        else:
            self.finished.set_exception(error)


class PendingResponses:
    """All answers that this process expects from its handlers."""

    def __init__(self) -> None:
        self._by_token: dict[bytes, PendingResponse] = {}

    def __len__(self) -> int:
        return len(self._by_token)

    @contextmanager
    def expect(self, output: ResultWriter) -> Iterator[PendingResponse]:
        """Accept one answer until the block ends; then its token expires."""
        pending = PendingResponse(output)
        digest = _digest(pending.token)
        self._by_token[digest] = pending
        try:
            yield pending
        finally:
            self._by_token.pop(digest, None)
            pending.close()

    def find(self, route: str, token: str) -> PendingResponse:
        """Return the answer that a route and a token name; ``take`` makes the token invalid.

        Raises:
            S3Error: ``InvalidTokenId``: the token is unknown, was used before, has expired, or belongs to another route.
        """
        pending = self._by_token.get(_digest(token))
        if pending is None or not secrets.compare_digest(pending.route.encode(), route.encode("utf-8", "replace")):
            message = "The request token is unknown, has expired, was used before, or belongs to another request route."
            raise S3Error("InvalidTokenId", message, status=400)
        return pending

    def take(self, pending: PendingResponse) -> None:
        """Make the token of an answer invalid."""
        self._by_token.pop(_digest(pending.token), None)


def _digest(token: str) -> bytes:
    """A digest, so that the time of looking a token up says nothing about the tokens that exist."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
