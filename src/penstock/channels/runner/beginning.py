"""Begins the channels of a run, several at a time: each waits for its store most of the time."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from penstock.channels.interruptible import Interruptible
from penstock.channels.modes import open_channel

if TYPE_CHECKING:
    from contextlib import ExitStack

    from penstock.channels.environment import ContainerLayout
    from penstock.channels.file import ChannelProgress
    from penstock.channels.inputs import InputChannel
    from penstock.channels.modes import RunningChannel
    from penstock.channels.runner.job import Job
    from penstock.channels.runner.stores import RunStores
    from penstock.store import Store

AT_ONCE_MAX = 8
"""Channels that are begun at the same time. Each download has its own read-ahead, and all share the process's budget."""


def begin_channels(
    job: Job, layout: ContainerLayout, stores: RunStores, *, stack: ExitStack, progress: ChannelProgress | None
) -> list[RunningChannel]:
    """Begin all channels of a job, and return them in its order. `stack` ends those that have begun.

    Args:
        job: The job.
        layout: Where the channels are.
        stores: The stores of the run.
        stack: The stack that ends the channels when it is closed.
        progress: Hears of downloads.

    Raises:
        PenstockError: A channel cannot give the program its data; those that were still beginning are given up.

    Cost: a thread for each channel, up to ``AT_ONCE_MAX``, until all have begun.
    """
    sources = _Sources(stores)
    heard = None if progress is None else _OneAtATime(progress)

    begun: dict[str, RunningChannel] = {}

    def begin(channel: InputChannel) -> None:
        found = open_channel(
            channel,
            sources.open,
            path=layout.data / channel.name,
            hosts=job.hosts,
            connection=stores.options,
            progress=heard,
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
            sources.interrupt()
            raise
    return [begun[channel.name] for channel in job.channels]


class _Sources:
    """The stores that channels read, which can be interrupted. All threads may use it."""

    def __init__(self, stores: RunStores) -> None:
        self._stores = stores
        self._opened: dict[str, Interruptible] = {}
        self._interrupted = False
        self._lock = threading.Lock()

    def open(self, root_url: str) -> Store:
        """Return the store at a URL; each call returns the same one."""
        with self._lock:
            if root_url not in self._opened:
                self._opened[root_url] = Interruptible(self._stores.open(root_url))
                if self._interrupted:
                    self._opened[root_url].interrupt()
            return self._opened[root_url]

    def interrupt(self) -> None:
        """End what is in flight, and everything that begins later."""
        with self._lock:
            self._interrupted = True
            for store in self._opened.values():
                store.interrupt()


class _OneAtATime:
    """Passes progress on from several threads, one call at a time; see ``ChannelProgress``."""

    def __init__(self, progress: ChannelProgress) -> None:
        self._progress = progress
        self._lock = threading.Lock()

    def planned(self, channel: InputChannel, count: int, size_bytes: int) -> None:
        """So many files of so many bytes are missing."""
        with self._lock:
            self._progress.planned(channel, count, size_bytes)

    def progressed(self, channel: InputChannel, count: int, size_bytes: int) -> None:
        """So many files, and bytes, have arrived since the last call."""
        with self._lock:
            self._progress.progressed(channel, count, size_bytes)
