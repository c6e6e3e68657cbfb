"""The modes of a channel: the interface of a running channel, and the one factory that begins a channel in its mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from penstock.channels.entries import Entries, EpochOrder, open_source
from penstock.channels.file import open_file_channel
from penstock.channels.pipe import open_pipe_channel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from penstock.channels.entries import Connect
    from penstock.channels.environment import Hosts
    from penstock.channels.file import ChannelProgress
    from penstock.channels.inputs import InputChannel


class RunningChannel(Protocol):
    """A channel of a run, in one of the modes. The factory of its mode returns it when the program may start."""

    @property
    def path(self) -> Path:
        """What ``SM_CHANNEL_<NAME>`` says; in Pipe mode the program appends ``_<epoch>`` to it."""

    def check(self) -> None:
        """Raise the error that has occurred since the channel began.

        Raises:
            PenstockError: The channel cannot give the program its data.
        """

    def warnings(self) -> list[str]:
        """Return the objects and causes of failed reads, which the program cannot see."""

    def close(self) -> None:
        """End it. Nothing of it stays mounted, running or half-written; idempotent."""


CACHE_NAME = "lazy-cache"
"""Folder, beside the channels or among the downloads, that keeps what channels with ``start="lazy"`` have read."""


def open_channel(
    channel: InputChannel,
    connect: Connect,
    *,
    path: Path,
    hosts: Hosts,
    connection: Mapping[str, Any],
    progress: ChannelProgress | None = None,
    downloads: Path | None = None,
) -> RunningChannel:
    """Begin a channel; when this returns, the program may start.

    Args:
        channel: The channel.
        connect: Opens a store.
        path: Path in the directory of the channels.
        hosts: The hosts of the run.
        connection: Options of ``penstock.connect``, for the process that serves a mount.
        progress: Hears of downloads.
        downloads: Directory that keeps what File mode downloads; None keeps nothing.

    Raises:
        PenstockError: The channel cannot give the program its data.
    """
    entries = Entries(open_source(channel, connect))
    if channel.mode == "Pipe":
        return open_pipe_channel(channel, entries, path=path, host_rank=hosts.rank, hosts_count=hosts.count)
    is_sharded = channel.distribution == "ShardedByS3Key"
    order = EpochOrder(part=hosts.rank, parts_count=hosts.count) if is_sharded else EpochOrder()
    if channel.start == "lazy":
        from penstock.channels.fastfile import open_lazy_channel  # here, as other modes do without the mount

        cache = path.parent.parent if downloads is None else downloads
        return open_lazy_channel(
            channel, entries, path=path, order=order, connection=connection, cache=cache / CACHE_NAME
        )
    if channel.mode == "File":
        return open_file_channel(channel, entries, path=path, order=order, progress=progress, downloads=downloads)
    from penstock.channels.fastfile import open_fastfile_channel  # here, as other modes do without the mount

    return open_fastfile_channel(channel, entries, path=path, order=order, connection=connection)
