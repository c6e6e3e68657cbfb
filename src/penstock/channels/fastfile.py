"""A channel in FastFile mode: a mount, which reads objects when the program reads files."""

from __future__ import annotations

import math
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from penstock import compose
from penstock.channels.entries import objects_of
from penstock.channels.file.channel import linked_directory
from penstock.channels.file.claiming import link_directory
from penstock.errors import ConfigError, DirectoryMissingError
from penstock.index import write_manifest
from penstock.mount import MountConfig, start_mount
from penstock.types import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from penstock.channels.entries import Entries, EpochOrder
    from penstock.channels.inputs import InputChannel
    from penstock.mount import RunningMount
    from penstock.store import Store


class FastFileChannel:
    """A channel in FastFile mode; see ``RunningChannel``.

    Args:
        mount: The mount; its directory is removed at the end.
        manifest: File that names this host's share, to be removed at the end; None if the host gets all objects.
    """

    def __init__(self, mount: RunningMount, *, manifest: Path | None) -> None:
        self.path = mount.directory
        self._mount = mount
        self._manifest = manifest

    def check(self) -> None:
        """Raise an error if the mount has ended.

        Raises:
            WorkerDiedError: The process that serves the mount has ended.
        """
        self._mount.check()

    def warnings(self) -> list[str]:
        """Return the last warnings and errors of the mount."""
        return self._mount.warnings()

    def close(self) -> None:
        """Unmount; idempotent."""
        self._mount.close()
        _remove_if_empty(self.path)
        if self._manifest is not None:
            self._manifest.unlink(missing_ok=True)


class LinkedChannel:
    """A directory of this machine in the place of a mount; see ``RunningChannel``.

    Args:
        path: The link.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def check(self) -> None:
        """Return: there is nothing that can end."""

    def warnings(self) -> list[str]:
        """Return an empty list: the program reads the files themselves."""
        return []

    def close(self) -> None:
        """Remove the link; idempotent."""
        self.path.unlink(missing_ok=True)


def open_fastfile_channel(
    channel: InputChannel, entries: Entries, *, path: Path, order: EpochOrder, connection: Mapping[str, Any]
) -> FastFileChannel | LinkedChannel:
    """Mount a channel, or link a directory of this machine.

    Names are listed when the program asks for them, and once: what the program sees does not change while it runs. Files
    that an earlier run in File mode has left at `path` are hidden meanwhile, and stay.

    Args:
        channel: The channel.
        entries: Objects of the channel, in order; needed if hosts share it.
        path: The directory on which it is mounted.
        order: Says which entries this host gets.
        connection: Options of ``penstock.connect``.

    Raises:
        ConfigError: The URL is not a folder, or the system does not permit the mount.
        StoreError: The store cannot be listed.

    Cost: one request, and what ``penstock.mount`` costs; a listing of everything if hosts share the channel.
    """
    if (directory := linked_directory(channel, order)) is not None:
        link_directory(path, directory, channel=channel.name)
        return LinkedChannel(path)
    if path.is_symlink():
        path.unlink()  # of an earlier run with the same base directory
    url = folder_url(channel, entries.store)
    with ExitStack() as undone:
        manifest = None
        if not order.has_all:
            manifest = path.with_name(f".{path.name}.manifest.jsonl")
            undone.callback(manifest.unlink, missing_ok=True)
            _write_share(manifest, url, entries, order)
        path.mkdir(parents=True, exist_ok=True)
        undone.callback(_remove_if_empty, path)
        config = MountConfig(
            url=url,
            directory=str(path),
            connection=dict(connection),
            manifest=None if manifest is None else str(manifest),
            metadata_ttl_s=math.inf,
            nonempty=True,
        )
        mount = start_mount(config, is_bound=True)
        undone.pop_all()
    return FastFileChannel(mount, manifest=manifest)


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()


def folder_url(channel: InputChannel, store: Store) -> str:
    """Return the URL of a channel with a slash at its end.

    Raises:
        ConfigError: There is nothing below it: it is an object, the beginning of a name, or empty.
    """
    url = channel.url if channel.url.endswith("/") else f"{channel.url}/"
    _, prefix = compose.split(url)
    try:
        found = next(store.list(prefix), None)
    except DirectoryMissingError:
        found = None
    if found is None:
        raise ConfigError(
            f"channel {channel.name!r}: there is nothing below {url}, and FastFile mode mounts folders",
            hint="name the folder itself, with a slash at its end",
        )
    return url


def _write_share(file: Path, url: str, entries: Entries, order: EpochOrder) -> None:
    """Write a manifest of this host's share, with keys relative to the folder that is mounted."""
    objects = objects_of(order.entries(entries, epoch=0))
    infos = (ObjectInfo(each.name, each.size_bytes or 0, each.etag, each.modified_s) for each in objects)
    file.unlink(missing_ok=True)  # of a killed run; and no link is followed
    with file.open("xb") as output:
        write_manifest(infos, output, base_url=url)
