"""Holds results of transforms that are not deterministic while they are used, so that the ranges of one read fit together.

Such a result has a nonce in its ETag. Readers of the same source with the same arguments get the same result until ``hold_s``
after its last use, in all processes of the node; later readers get a new one. The *pointer*, a record under the ETag that
the result would have without a nonce, says which result is held; the time of its file is that of the last use.

A held result is produced once. If its bytes are lost, its readers get an error, and the next reader gets a new result.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from penstock.gateway.results.identity import ResultName
from penstock.gateway.results.record import ResultRecord, is_pointer

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.gateway.results.context import ResultsContext

_POLL_S = 0.004
_POLLS_MAX = 250


class _Held:
    """A result that is held by this process."""

    __slots__ = ("marked_s", "name", "used_s")

    def __init__(self, name: ResultName) -> None:
        self.name = name
        self.used_s = self.marked_s = time.monotonic()


class HeldResults:
    """The held results of one process. All methods run on the event loop.

    Args:
        context: The parts that the results of the process share.
        is_wanted: Whether somebody in this process is reading a result.
        retire: Forgets a result, so that later requests do not find it.
    """

    def __init__(
        self,
        context: ResultsContext,
        *,
        is_wanted: Callable[[ResultName], bool],
        retire: Callable[[ResultName], None],
    ) -> None:
        self._context = context
        self._hold_s = context.config.hold_s
        self._is_wanted = is_wanted
        self._retire = retire
        self._held: dict[ResultName, _Held] = {}
        self._sweeper: asyncio.Task[None] | None = None

    async def name_for(self, base: ResultName, make: Callable[[], ResultName]) -> ResultName:
        """Return the name of the result that is held, or of a new one.

        Args:
            base: Name that the result would have if it were deterministic.
            make: Returns the name of a new result.

        Cost: nothing if this process holds a result; else one or two small files, on a thread.
        """
        held = self._held.get(base)
        if held is None or time.monotonic() - held.used_s > self._hold_s:
            held = _Held(await self._name_on_node(base, make))
            self._held[base] = held
        held.used_s = time.monotonic()
        self._mark(base, held)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().create_task(self._sweep())
        return held.name

    async def _name_on_node(self, base: ResultName, make: Callable[[], ResultName]) -> ResultName:
        storage = self._context.storage
        is_taken = await self._take_lease(base)
        try:
            found = await self._context.on_thread(self._current, base)
            if found is not None:
                return ResultName(base.scope, base.key, found)
            name = make()
            pointer = ResultRecord(
                scope=base.scope, key=base.key, etag=base.etag, run=name.etag, block_bytes=storage.block_bytes
            )
            await self._context.on_thread(storage.put_record, pointer)
            return name
        finally:
            if is_taken:
                storage.release_lease(base)

    async def _take_lease(self, base: ResultName) -> bool:
        for _ in range(_POLLS_MAX):
            if self._context.storage.try_lease(base):
                return True
            await asyncio.sleep(_POLL_S)
        return False  # its holder was stopped; then two processes may hold results of their own

    def _current(self, base: ResultName) -> str | None:
        """Return the ETag of the result that a process of this node holds; None if there is none."""
        age_s = self._context.storage.unused_s(base)
        if age_s is None or not -self._hold_s <= age_s <= self._hold_s:
            return None
        record = self._context.storage.find(base)
        return record.run if record is not None and is_pointer(record) else None

    def _mark(self, base: ResultName, held: _Held) -> None:
        if held.used_s - held.marked_s > self._hold_s / 4:
            held.marked_s = held.used_s
            self._context.storage.mark_used(base)

    def drop(self, name: ResultName) -> None:
        """Stop holding a result, because its bytes are lost."""
        for base in [base for base, held in self._held.items() if held.name == name]:
            del self._held[base]
            self._retire(name)
            self._context.remove_soon(base)

    async def _sweep(self) -> None:
        """Remove results that are no longer used, for as long as any are held."""
        while self._held:
            await asyncio.sleep(self._hold_s / 4)
            now_s = time.monotonic()
            for base, held in list(self._held.items()):
                if self._is_wanted(held.name):
                    held.used_s = now_s
                    self._mark(base, held)
                elif now_s - held.used_s > self._hold_s:
                    del self._held[base]
                    self._retire(held.name)
                    await self._context.on_thread(self._remove, base, held.name)
        self._sweeper = None

    def _remove(self, base: ResultName, name: ResultName) -> None:
        """Remove a held result and its pointer, unless another process has used it."""
        storage = self._context.storage
        age_s = storage.unused_s(base)
        pointer = storage.find(base)
        if pointer is not None and pointer.run == name.etag:
            if age_s is not None and abs(age_s) < self._hold_s / 2:
                return  # the other process removes it
            storage.remove(pointer)
        record = storage.find(name)
        if record is not None:
            storage.remove(record)

    async def close(self) -> None:
        """Stop looking after held results; idempotent. Those whose time is not over remain until they are evicted."""
        sweeper, self._sweeper = self._sweeper, None
        if sweeper is not None:
            sweeper.cancel()
            await asyncio.wait([sweeper])
        self._held.clear()
