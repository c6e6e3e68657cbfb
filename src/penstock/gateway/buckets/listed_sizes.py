"""Sizes of results in listings. Clients rely on them: they read as many bytes as the listing says.

A size is known if the result is stored, or if its transform computes the size beforehand. For other results, a setting of the
access point decides.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from penstock.errors import PenstockError
from penstock.gateway.objects import S3Error

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from penstock.types import ObjectInfo

log = logging.getLogger("penstock.gateway")

_PRODUCED_TOGETHER_MAX = 8
MODES = ("known-only", "source", "transform")
"""What ``AccessPoint.list_sizes`` may be."""


class ListedResult:
    """A result in a listing.

    Attributes:
        info: Key, ETag and time of the result, and the size of its source.
        source: Source of the result.
        size_bytes: Size of the result in bytes; None if that is not known, which leaves it out of the listing.
        produce: Produces it, and returns its size.
    """

    __slots__ = ("info", "produce", "size_bytes", "source")

    def __init__(self, info: ObjectInfo, *, source: ObjectInfo, produce: Callable[[], Awaitable[int]]) -> None:
        self.info = info
        self.source = source
        self.size_bytes: int | None = None
        self.produce = produce


async def decide_sizes(listed: Sequence[ListedResult], mode: str, *, time_s_max: float = 20.0) -> int:
    """Set the sizes of results that are to be listed, and return how many, from the first on, are decided: at least one.

    Args:
        listed: The results, in the order of their sources.
        mode: ``AccessPoint.list_sizes``: ``"known-only"`` leaves results of unknown size out of the listing. ``"source"`` shows
            the sizes of the sources, which are wrong, for clients that only look at the keys. ``"transform"`` produces them:
            a page then takes a bounded time, and ends before the first result that is not ready.
        time_s_max: Time after which such a page ends, in seconds; the first result may take longer.
    """
    unknown = [each for each in listed if each.size_bytes is None]
    if mode == "source":
        for each in unknown:
            each.size_bytes = each.info.size_bytes
    if mode != "transform" or not unknown:
        return len(listed)
    turns = asyncio.Semaphore(_PRODUCED_TOGETHER_MAX)
    tasks = {id(each): asyncio.ensure_future(_produce(each, turns)) for each in unknown}
    try:
        await asyncio.wait(list(tasks.values()), timeout=time_s_max)
        await asyncio.wait([tasks[id(unknown[0])]])
        for index, each in enumerate(listed):
            task = tasks.get(id(each))
            if task is not None and not task.done():
                return index
        return len(listed)
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.wait(list(tasks.values()))


async def _produce(listed: ListedResult, turns: asyncio.Semaphore) -> None:
    async with turns:
        try:
            listed.size_bytes = await listed.produce()
        except (PenstockError, S3Error) as error:  # it cannot be read either, so it is left out
            log.warning("%r is left out of a listing, because it cannot be produced: %s", listed.info.key, error)
