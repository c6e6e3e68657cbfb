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


class FileThreads:
    """A bounded number of threads for file operations.

    Args:
        threads_max: Largest number of threads.
    """

    def __init__(self, threads_max: int) -> None:
        self._pool = ThreadPoolExecutor(threads_max, thread_name_prefix="penstock-files")

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on a thread and return its result.

        If the task is cancelled, the function still ends before this returns, because its caller is about to close the files
        that it uses.
        """
        future = asyncio.get_running_loop().run_in_executor(self._pool, partial(job, *args, **kwargs))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            if not future.cancelled():
                future.exception()  # retrieved, so that the loop does not complain of it
            raise

    def close(self) -> None:
        """Wait for what runs and end the threads; idempotent."""
        self._pool.shutdown(wait=True)
