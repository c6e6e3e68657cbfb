"""``penstock mount`` and ``penstock umount``: a store as a read-only directory.

Options are also taken in the spelling of ``mount``, ``/etc/fstab`` and other FUSE programs: ``-o allow_other,uid=1000``.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from penstock.cli.options import CACHE, ConnectionGroup, argument, expand_groups, flag, option
from penstock.cli.output import print_message
from penstock.config import RetryConfig
from penstock.errors import ConfigError
from penstock.redaction import public_url
from penstock.text.sizes import parse_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.mount.config import MountConfig

MINIMAL_TTL_S = 1.0
"""What Mountpoint's ``--metadata-ttl minimal`` means for directories."""

_FULFILLED = re.compile(
    "ro|rw|defaults|auto|noauto|nofail|_netdev|user|nouser|users|owner|group|dev|nodev|suid|nosuid|exec|noexec|"
    "atime|noatime|relatime|norelatime|diratime|nodiratime|async|sync|default_permissions"
)
"""Options that are for ``mount`` itself, or that a read-only mount fulfils anyway. ``mount`` adds ``rw`` if there is no ``ro``,
whether somebody asked for it or not."""
_REMOTE = re.compile(r"[A-Za-z0-9_.-]+:(?!//)[^/].*")
_HINTS = {
    "--daemon": "the mount goes to the background by itself; --foreground keeps it in the terminal",
    "--dir-cache-time": "--metadata-ttl TIME",
    "--attr-timeout": "--metadata-ttl TIME",
    "--poll-interval": "--metadata-ttl TIME",
    "--vfs-cache-mode": "--cache PATH:SIZE keeps what is read on this node's disk",
    "--vfs-cache-max-size": "--cache PATH:SIZE",
    "--cache-dir": "--cache PATH:SIZE",
    "--vfs-read-ahead": "reading ahead follows the reader by itself",
    "--vfs-read-chunk-size": "reading ahead follows the reader by itself",
    "--vfs-read-chunk-streams": "reading ahead follows the reader by itself",
    "--buffer-size": "reading ahead follows the reader by itself",
    "--transfers": "the number of requests follows the store by itself",
    "--allow-non-empty": "--nonempty",
    "--volname": "mount shows the URL",
    "--allow-delete": "the mount is read-only; penstock rm deletes",
    "--allow-overwrite": "the mount is read-only; penstock cp writes",
    "--maximum-throughput-gbps": "the number of requests follows the store by itself",
    "--max-threads": "the number of requests does not depend on threads",
    "--log-directory": "--log-file FILE",
    "--no-sign-request": "--anonymous",
    "--url": "--endpoint-url URL",
    "--endpoint": "--region NAME",
    "--use-path-request-style": "--force-path-style",
    "--use-cache": "--cache PATH:SIZE",
    "--passwd-file": "keys come from the AWS variables and files, as --profile NAME selects them",
    "--iam-role": "a role of the instance is found by itself",
    "--fsname": "mount shows the URL",
    "--subtype": "mount shows the type fuse.penstock",
    "--entry-timeout": "--metadata-ttl TIME",
    "--negative-timeout": "--negative-metadata-ttl TIME",
    "-o": "options follow it: -o allow_other,uid=1000",
}
"""Options of rclone mount, Mountpoint, s3fs and libfuse that do not exist here, and what takes their place."""


def flags_of(options: str) -> list[str]:
    """Return the flags of ``penstock mount`` for options that are separated by commas.

    Each ``name=value`` becomes ``--name=value``, with dashes for underscores; options for ``mount`` itself are left out.
    """
    flags = []
    for each in options.split(","):
        if not each or _FULFILLED.fullmatch(each) or each.startswith(("x-", "comment=")):
            continue
        name, equals, value = each.partition("=")
        flags.append(f"--{name.replace('_', '-')}{equals}{value}")
    return flags


def with_flags(words: Sequence[str]) -> list[str]:
    """Return a command line with flags in the place of each ``-o OPTIONS``; a last ``-o`` without options stays."""
    taken: list[str] = []
    waiting = iter(words)
    for word in waiting:
        if word == "--":
            return [*taken, word, *waiting]
        if word == "-o":
            options = next(waiting, None)
            taken += [word] if options is None else flags_of(options)
        elif word.startswith("-o"):
            taken += flags_of(word.removeprefix("-o"))
        else:
            taken.append(word)
    return taken


class MountCommand(TyperCommand):
    """A command that also takes its options as ``-o NAME,NAME=VALUE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line."""
        return super().parse_args(ctx, with_flags(args))


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewGroup:
    """The options that say what the files look like, and to whom."""

    uid: int | None = option("ID", "Owner of all files; default: you.")
    gid: int | None = option("ID", "Group of all files; default: yours.")
    file_mode: str = option("MODE", "Permissions of files, in octal digits.", default="0444")
    dir_mode: str = option("MODE", "Permissions of directories, in octal digits.", default="0555")
    umask: str = option("MODE", "Permissions that neither files nor directories have.", default="0")
    allow_other: bool = flag("Let other users use the mount; without root, /etc/fuse.conf must allow it.")
    allow_root: bool = flag("Let root use the mount too.", hidden=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesGroup:
    """The options that say which names exist, and for how long that is known."""

    prefix: str = option("PREFIX", "Mount only what is below this prefix of URL.", default="")
    manifest: str | None = option("URL", "A manifest, whose objects are the files: nothing is listed.")
    metadata_ttl: str = option(
        "TIME",
        "How long names and sizes are used without asking the store: 90s, 5min, 0, indefinite.",
        default="60s",
    )
    negative_metadata_ttl: str | None = option("TIME", "The same for names that do not exist; default: the same.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCacheGroup:
    """The cache, in penstock's spelling and in Mountpoint's."""

    cache: str | None = CACHE
    max_cache_size: int | None = option("MIB", "Size of the cache in MiB, if --cache is only a path.")

    def chosen(self) -> str | None:
        """Return the cache as ``PATH:SIZE``.

        Raises:
            ConfigError: There is a size without a path.
        """
        if self.max_cache_size is None:
            return self.cache
        if self.cache is None:
            raise ConfigError("--max-cache-size needs --cache", hint="--cache PATH:SIZE says both")
        return f"{self.cache}:{self.max_cache_size}MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingGroup:
    """The options of the process that serves the mount."""

    foreground: bool = flag("Stay in the terminal, and log there; Ctrl-C unmounts.", names=("--foreground", "-f"))
    log_file: Path | None = option("FILE", "Where the background process logs; default: as printed.")
    nonempty: bool = flag("Mount on a directory that has contents, and hide them.")
    auto_unmount: bool = flag(
        "Unmount if the process that serves the mount is killed.",
        names=("--auto-unmount/--no-auto-unmount",),
        default=True,
    )
    read_only: bool = flag("Mounts are always read-only.", hidden=True)
    force_path_style: bool = flag("Put the bucket into the path of URLs, not into the host name.")


@expand_groups
def mount(
    context: typer.Context,
    url: str | None = argument("URL", "s3://bucket/prefix/, a directory, https://...", default=None),
    directory: str | None = argument("DIR", "An empty directory.", default=None),
    *,
    names: NamesGroup,
    disk: DiskCacheGroup,
    view: ViewGroup,
    process: ServingGroup,
    connection: ConnectionGroup,
) -> None:
    """Mount a store as a read-only directory, for any program.

    The command returns when the directory can be used, and a process in the background serves it until
    `penstock umount DIR`. Files are read lazily, ahead of programs that read in sequence, and through the cache if there
    is one. An open file remains the version that was opened: if the object is replaced, reading it fails with ESTALE.

    The spelling of /etc/fstab is understood as well: -o allow_other,uid=1000,umask=077.

    For example:

        penstock mount s3://bucket/train/ /mnt/train --cache /nvme/penstock:200GB
        penstock mount s3://bucket/train/ /mnt/train --manifest s3://bucket/train.jsonl --metadata-ttl indefinite
        penstock umount /mnt/train
    """
    _check_words(context.args, url, directory)
    assert url is not None
    assert directory is not None
    config = _config(url, directory, names=names, disk=disk, view=view, process=process, connection=connection)
    if process.foreground:
        _serve(config)
        return
    from penstock.mount import start_mount

    is_verbose = logging.getLogger("penstock").isEnabledFor(logging.DEBUG)
    running = start_mount(config, is_bound=False, log_file=process.log_file, is_verbose=is_verbose)
    quoted = shlex.quote(str(running.directory))
    print_message(f"{running.url} is mounted on {running.directory}; penstock umount {quoted} unmounts it")
    print_message(f"process {running.process_id} serves it, and logs to {running.log_file}")


def _check_words(unknown: list[str], url: str | None, directory: str | None) -> None:
    """Refuse unknown options before anything else: their values would be taken for the URL or the directory."""
    for word in [*unknown, url or "", directory or ""]:
        if word.startswith("-"):
            name = word.partition("=")[0]
            hint = _HINTS.get(name)
            raise typer.BadParameter(f"No such option: {name}" + (f"; here, {hint}" if hint else ""))
    if url is None or directory is None:
        raise typer.BadParameter("URL and DIR are needed: penstock mount s3://bucket/prefix/ /mnt/data")
    if unknown:
        raise typer.BadParameter(f"unexpected argument {unknown[0]!r}: only URL and DIR are wanted")
    if _REMOTE.fullmatch(url) and not Path(url).exists():
        raise ConfigError(
            f"{url!r} is not a URL", hint=f"rclone's remote:bucket is s3://{url.partition(':')[2]} --endpoint-url URL"
        )
    if "://" not in url and "/" not in url and not Path(url).exists():
        raise ConfigError(f"{url!r} is neither a URL nor a directory here", hint=f"a bucket is s3://{url}")


def _config(
    url: str,
    directory: str,
    *,
    names: NamesGroup,
    disk: DiskCacheGroup,
    view: ViewGroup,
    process: ServingGroup,
    connection: ConnectionGroup,
) -> MountConfig:
    from penstock.mount import MountConfig

    if view.allow_root and os.geteuid() != 0:
        raise ConfigError(
            "--allow-root without root is not possible with this FUSE", hint="--allow-other includes root"
        )
    ttl_s = _ttl_s(names.metadata_ttl, option="--metadata-ttl")
    negative = names.negative_metadata_ttl
    path = str(Path(url).absolute()) if "://" not in url else url
    return MountConfig(
        url=path.rstrip("/") + "/" + names.prefix if names.prefix else path,
        directory=os.path.abspath(directory),  # noqa: PTH100 - a link stays as it is written
        connection={
            **connection.options(retry_s=RetryConfig().total_s_max),
            "addressing": "path" if process.force_path_style else "auto",
            "cache": disk.chosen(),
        },
        manifest=names.manifest,
        metadata_ttl_s=ttl_s,
        negative_ttl_s=None if negative is None else _ttl_s(negative, option="--negative-metadata-ttl"),
        uid=view.uid,
        gid=view.gid,
        file_mode=_mode(view.file_mode, option="--file-mode"),
        directory_mode=_mode(view.dir_mode, option="--dir-mode"),
        umask=_mode(view.umask, option="--umask"),
        allow_other=view.allow_other,
        nonempty=process.nonempty,
        auto_unmount=process.auto_unmount,
    )


def _ttl_s(text: str, *, option: str) -> float:
    if text == "indefinite":
        return math.inf
    return MINIMAL_TTL_S if text == "minimal" else parse_seconds(text, option=option)


def _mode(text: str, *, option: str) -> int:
    if not re.fullmatch(r"(0o)?[0-7]{1,4}", text):
        raise ConfigError(f"{option} {text!r} must be octal digits, e.g. 0444")
    return int(text.removeprefix("0o"), 8)


def _serve(config: MountConfig) -> None:
    """Serve a mount in this process, until it is unmounted or a signal arrives."""
    from penstock.mount.serving import MountServer, collect_rarely, serve_until_signal

    collect_rarely()
    said = f"{public_url(config.url)} is mounted on {config.directory}; Ctrl-C unmounts it"
    with MountServer(config) as server:
        serve_until_signal(server, announce=lambda: print_message(said))


@expand_groups
def umount(
    directory: str = argument("DIR", "Where it is mounted."),
    *,
    lazy: bool = flag(
        "Take the directory away now; programs go on with the files they have open.", names=("--lazy", "-z")
    ),
) -> None:
    """Unmount what `penstock mount` has mounted on DIR, also if its process was killed.

    For example:

        penstock umount /mnt/train
        penstock umount -z /mnt/train
    """
    from penstock.mount.fuse.mounting import unmount

    unmount(directory, is_lazy=lazy)
