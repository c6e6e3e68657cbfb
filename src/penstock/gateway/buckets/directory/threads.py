"""The threads on which files are opened, written and waited for."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")

_LONG_COUNT_MAX = 8


class FileThreads:
    """A bounded number of threads for file operations, and others for long ones, so that no client's copy stops all reading.

    Args:
        threads_max: Largest number of threads for short operations.
    """

    def __init__(self, threads_max: int) -> None:
        self._pool = ThreadPoolExecutor(threads_max, thread_name_prefix="penstock-files")
        self._long_pool = ThreadPoolExecutor(_LONG_COUNT_MAX, thread_name_prefix="penstock-copies")

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on a thread and return its result.

        If the task is cancelled, the function still ends before this returns, because its caller is about to close the files
        that it uses.
        """
        return await _ended(self._pool, partial(job, *args, **kwargs))

    async def run_long(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that may take seconds, such as a copy or a listing; otherwise as ``run``."""
        return await _ended(self._long_pool, partial(job, *args, **kwargs))

    def close(self) -> None:
        """Wait for what runs and end the threads; idempotent."""
        self._pool.shutdown(wait=True)
        self._long_pool.shutdown(wait=True)


async def _ended(pool: ThreadPoolExecutor, job: Callable[[], T]) -> T:
    future = asyncio.get_running_loop().run_in_executor(pool, job)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        if not future.cancelled():
            future.exception()  # retrieved, so that the loop does not complain of it
        raise
