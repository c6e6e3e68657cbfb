"""``penstock mount`` and ``penstock umount``: a store as a read-only directory."""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options import ConnectionGroup, expand_groups
from penstock.cli.output import print_message
from penstock.errors import ConfigError
from penstock.redaction import public_url
from penstock.text.sizes import parse_seconds

if TYPE_CHECKING:
    from penstock.mount.config import MountConfig

MINIMAL_TTL_S = 1.0
"""What Mountpoint's ``--metadata-ttl minimal`` means for directories."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewGroup:
    """The options that say what the files look like, and to whom."""

    uid: Annotated[int | None, typer.Option("--uid", metavar="ID", help="Owner of all files; default: you.")] = None
    gid: Annotated[int | None, typer.Option("--gid", metavar="ID", help="Group of all files; default: yours.")] = None
    file_mode: Annotated[
        str, typer.Option("--file-mode", metavar="MODE", help="Permissions of files, in octal digits.")
    ] = "0444"
    dir_mode: Annotated[
        str, typer.Option("--dir-mode", metavar="MODE", help="Permissions of directories, in octal digits.")
    ] = "0555"
    umask: Annotated[
        str, typer.Option("--umask", metavar="MODE", help="Permissions that neither files nor directories have.")
    ] = "0"
    allow_other: Annotated[
        bool,
        typer.Option(
            "--allow-other", help="Let other users use the mount; without root, /etc/fuse.conf must allow it."
        ),
    ] = False
    allow_root: Annotated[bool, typer.Option("--allow-root", help="Let root use the mount too.", hidden=True)] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesGroup:
    """The options that say which names exist, and for how long that is known."""

    prefix: Annotated[
        str, typer.Option("--prefix", metavar="PREFIX", help="Mount only what is below this prefix of URL.")
    ] = ""
    manifest: Annotated[
        str | None,
        typer.Option("--manifest", metavar="URL", help="A manifest, whose objects are the files: nothing is listed."),
    ] = None
    metadata_ttl: Annotated[
        str,
        typer.Option(
            "--metadata-ttl",
            metavar="TIME",
            help="How long names and sizes are used without asking the store: 90s, 5min, 0, indefinite.",
        ),
    ] = "60s"
    negative_metadata_ttl: Annotated[
        str | None,
        typer.Option(
            "--negative-metadata-ttl", metavar="TIME", help="The same for names that do not exist; default: the same."
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskCacheGroup:
    """The cache, in penstock's spelling and in Mountpoint's."""

    cache: Annotated[
        str | None,
        typer.Option(
            "--cache", metavar="PATH:SIZE", help="Cache what is read on this node's disk, e.g. /nvme/penstock:200GB."
        ),
    ] = None
    max_cache_size: Annotated[
        int | None,
        typer.Option("--max-cache-size", metavar="MIB", help="Size of the cache in MiB, if --cache is only a path."),
    ] = None

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

    foreground: Annotated[
        bool, typer.Option("--foreground", "-f", help="Stay in the terminal, and log there; Ctrl-C unmounts.")
    ] = False
    log_file: Annotated[
        Path | None,
        typer.Option("--log-file", metavar="FILE", help="Where the background process logs; default: as printed."),
    ] = None
    nonempty: Annotated[
        bool, typer.Option("--nonempty", help="Mount on a directory that has contents, and hide them.")
    ] = False
    auto_unmount: Annotated[
        bool,
        typer.Option(
            "--auto-unmount/--no-auto-unmount", help="Unmount if the process that serves the mount is killed."
        ),
    ] = True
    read_only: Annotated[bool, typer.Option("--read-only", help="Mounts are always read-only.", hidden=True)] = False
    force_path_style: Annotated[
        bool, typer.Option("--force-path-style", help="Put the bucket into the path of URLs, not into the host name.")
    ] = False


@expand_groups
def mount(
    context: typer.Context,
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="s3://bucket/prefix/, a directory, https://...")
    ] = None,
    directory: Annotated[str | None, typer.Argument(metavar="DIR", help="An empty directory.")] = None,
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
            **connection.options(),
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


def umount(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Where it is mounted.")],
    *,
    lazy: Annotated[
        bool,
        typer.Option("--lazy", "-z", help="Take the directory away now; programs go on with the files they have open."),
    ] = False,
) -> None:
    """Unmount what `penstock mount` has mounted on DIR, also if its process was killed.

    For example:

        penstock umount /mnt/train
        penstock umount -z /mnt/train
    """
    from penstock.mount.fuse.mounting import unmount

    unmount(directory, is_lazy=lazy)
