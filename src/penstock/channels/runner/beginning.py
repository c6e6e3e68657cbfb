"""The stores of a run, and its channels, several of which begin together, because each mostly waits for its store."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Self

from penstock import compose
from penstock.channels.interruptible import Interruptible
from penstock.channels.modes import open_channel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import ExitStack

    from penstock.channels.environment import ContainerLayout
    from penstock.channels.file import ChannelProgress
    from penstock.channels.inputs import InputChannel
    from penstock.channels.modes import RunningChannel
    from penstock.channels.runner.job import Job
    from penstock.store import Store

AT_ONCE_MAX = 8
"""Channels that are begun at the same time. Each download has its own read-ahead, and all share the process's budget."""


class RunStores:
    """The stores of a run, one for each URL. A context manager that closes them. All threads may use it.

    Args:
        options: Options of ``penstock.connect``.

    Attributes:
        options: The same.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self._stores: dict[str, Store] = {}
        self._interruptible: dict[str, Interruptible] = {}
        self._is_interrupted = False
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for store in self._stores.values():
            store.close()

    def open(self, root_url: str) -> Store:
        """Return the store at a URL; each call returns the same one."""
        with self._lock:
            if root_url not in self._stores:
                self._stores[root_url] = compose.connect(root_url, **self.options)
            return self._stores[root_url]

    def open_interruptible(self, root_url: str) -> Store:
        """Return the store at a URL as one that ``interrupt`` ends; each call returns the same one."""
        with self._lock:
            if root_url not in self._interruptible:
                self._interruptible[root_url] = Interruptible(self.open(root_url))
                if self._is_interrupted:
                    self._interruptible[root_url].interrupt()
            return self._interruptible[root_url]

    def interrupt(self) -> None:
        """End all operations of interruptible stores, also those that begin later."""
        with self._lock:
            self._is_interrupted = True
            for store in self._interruptible.values():
                store.interrupt()


def begin_channels(
    job: Job, layout: ContainerLayout, stores: RunStores, *, stack: ExitStack, progress: ChannelProgress | None
) -> list[RunningChannel]:
    """Begin all channels of a job, and return them in its order. `stack` ends those that have begun.

    Args:
        job: The job.
        layout: Paths of the run, among them that of the channels.
        stores: The stores of the run.
        stack: The stack that ends the channels when it is closed.
        progress: Hears of downloads, from several threads.

    Raises:
        PenstockError: A channel cannot give the program its data; those that were still beginning are given up.

    Cost: a thread for each channel, up to ``AT_ONCE_MAX``, until all have begun.
    """
    begun: dict[str, RunningChannel] = {}

    def begin(channel: InputChannel) -> None:
        found = open_channel(
            channel,
            stores.open_interruptible,
            path=layout.data / channel.name,
            hosts=job.hosts,
            connection=stores.options,
            progress=progress,
            downloads=job.downloads,
        )
        stack.callback(found.close)
        begun[channel.name] = found

    with ThreadPoolExecutor(AT_ONCE_MAX, thread_name_prefix="penstock-channel") as pool:
        try:
            futures = [pool.submit(begin, channel) for channel in job.channels if not channel.is_mounted]
            for channel in job.channels:
                if channel.is_mounted:  # here, as a signal interrupts this thread only
                    begin(channel)
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stores.interrupt()
            raise
    return [begun[channel.name] for channel in job.channels]
