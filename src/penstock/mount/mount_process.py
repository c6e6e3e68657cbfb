"""``penstock.mount``: starts the process that serves a mount, and ends it."""

from __future__ import annotations

import logging
import math
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Literal, Self

from penstock.errors import WorkerDiedError
from penstock.mount.config import TTL_S, MountConfig
from penstock.mount.daemon import HURRY, DaemonRequest
from penstock.mount.log_file import LogPosition
from penstock.mount.own_files import own_files
from penstock.processes.starting import python_path
from penstock.redaction import public_url
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from penstock.cache import CacheConfig
    from penstock.config import FetchConfig, HedgeConfig, RetryConfig, TransportConfig
    from penstock.store.credentials import Credentials

END_S_MAX = 30.0
"""Longest wait for a daemon that was told to end; it waits 10 s for programs that have files open."""

_NAMED_COUNT_MAX = 3

_log = logging.getLogger("penstock")


class RunningMount:
    """A mount, and the process that serves it. A context manager that unmounts at its end.

    The mount also ends when this process does, however it ends.

    Attributes:
        directory: The mount point.
        url: URL that is mounted.
        log_file: Path of the log of the process that serves the mount.
    """

    def __init__(self, config: MountConfig, process: subprocess.Popen[bytes], log: LogPosition) -> None:
        self.directory = Path(config.directory)
        self.url = public_url(config.url)
        self.log_file = log.path
        self._log = log
        self._process = process
        self._real_directory = os.path.realpath(config.directory)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url!r} on {str(self.directory)!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __fspath__(self) -> str:
        return str(self.directory)

    @property
    def process_id(self) -> int:
        """Process that serves it."""
        return self._process.pid

    def check(self) -> None:
        """Raise an error if the mount has ended.

        Raises:
            WorkerDiedError: The process that serves it has ended: somebody unmounted or killed it.
        """
        code = self._process.poll()
        if code is not None:
            raise WorkerDiedError(
                f"the mount of {self.url} on {self.directory} has ended",
                hint=f"{self.log_file} says why",
                process_id=self._process.pid,
                exit_code=code,
            )

    def warnings(self, *, count_max: int = 10) -> list[str]:
        """Return the last warnings and errors in this mount's log: a program that fails to read sees only an errno.

        Args:
            count_max: The most messages.

        Returns:
            Messages of one line each, in the order in which they were logged; if the same request failed in the same way
            again, only the last message. Messages of a closed mount can still be read.
        """
        return self._log.warnings(count_max=count_max)

    def close(self) -> None:
        """Unmount. Other programs that have files open can go on reading them for 10 s. Idempotent.

        If this process itself has files open, a warning names them, and they can be read for 1 s.
        """
        pipe = self._process.stdin
        opened = own_files(self._real_directory) if pipe is not None and not pipe.closed else []
        if opened:
            self._warn_of(opened)
        if pipe is not None and not pipe.closed:
            with suppress(BrokenPipeError):
                pipe.write(HURRY if opened else b"")
                pipe.flush()
            pipe.close()
        if not opened:
            self._process.terminate()  # a forked child of this process may hold the other end of its input as well
        try:
            self._process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _warn_of(self, opened: list[str]) -> None:
        named = ", ".join(opened[:_NAMED_COUNT_MAX])
        more = f" and {len(opened) - _NAMED_COUNT_MAX} more" if len(opened) > _NAMED_COUNT_MAX else ""
        _log.warning(
            "This process still uses files of the mount that it closes: %s%s. Close or delete them before: later reads "
            "fail, and those of mapped memory end the process.",
            *(named, more),
        )


@boundary
def mount(
    url: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    manifest: str | None = None,
    metadata_ttl_s: float | Literal["indefinite"] = TTL_S,
    uid: int | None = None,
    gid: int | None = None,
    file_mode: int = 0o444,
    directory_mode: int = 0o555,
    umask: int = 0,
    allow_other: bool = False,
    nonempty: bool = False,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    credentials: Credentials | None = None,
    anonymous: bool = False,
    addressing: Literal["auto", "path", "virtual"] = "auto",
    transport: TransportConfig | None = None,
    retry: RetryConfig | None = None,
    hedge: HedgeConfig | None = None,
    fetch: FetchConfig | None = None,
    cache: CacheConfig | str | os.PathLike[str] | None = None,
) -> RunningMount:
    """Mount a store as a read-only directory. It is unmounted at the end of ``with``, or when this process ends.

    A process of its own serves the mount, so this program may use it like any other.

    Args:
        url: URL to mount: ``s3://bucket/prefix/``, a directory, or any URL that ``connect`` takes.
        directory: An empty directory, which shows the files.
        manifest: URL of a manifest; its objects are the files, and nothing is listed.
        metadata_ttl_s: Seconds for which names, sizes and versions may be used without asking the store; "indefinite" or
            ``math.inf`` for as long as the mount lives. An open file always remains the version that was opened.
        uid: Owner of all files; None is this user.
        gid: Group of all files; None is this user's.
        file_mode: Permissions of files.
        directory_mode: Permissions of directories.
        umask: Permissions that neither files nor directories have, such as 0o077.
        allow_other: Whether other users may use the mount. Without root, ``user_allow_other`` in ``/etc/fuse.conf`` is needed.
        nonempty: Whether the directory may have contents, which are hidden as long as the mount lives.
        endpoint_url: URL of an S3-compatible store. This and all further arguments are those of ``connect``.
        region: Region of the bucket.
        profile: Section of ``~/.aws/config``.
        credentials: Fixed access keys.
        anonymous: Whether to send unsigned requests.
        addressing: Place of the bucket in URLs.
        transport: Deadlines, connections, TLS and proxy.
        retry: Attempts and backoff.
        hedge: Second requests for late answers.
        fetch: Sizes of parts, read-ahead, and the byte budget of the process that serves the mount.
        cache: Directory of a cache on this node's disk, and its size: ``"/nvme/penstock:200GB"``.

    Raises:
        ConfigError: An argument is not valid, or the system does not permit the mount; the hint says what to do.
        StoreError: The store refuses to list the URL, or cannot be reached.

    Cost: a process of about 60 MB, and memory within its byte budget.
    """
    connection = {
        "endpoint_url": endpoint_url,
        "region": region,
        "profile": profile,
        "credentials": credentials,
        "anonymous": anonymous,
        "addressing": addressing,
        "transport": transport,
        "retry": retry,
        "hedge": hedge,
        "fetch": fetch,
        "cache": cache,
    }
    config = MountConfig(
        url=os.fspath(url),
        directory=os.path.abspath(directory),  # noqa: PTH100 - a link stays as it is written
        connection=connection,
        manifest=manifest,
        metadata_ttl_s=math.inf if metadata_ttl_s == "indefinite" else metadata_ttl_s,
        uid=uid,
        gid=gid,
        file_mode=file_mode,
        directory_mode=directory_mode,
        umask=umask,
        allow_other=allow_other,
        nonempty=nonempty,
    )
    return start_mount(config, is_bound=True)


def start_mount(
    config: MountConfig, *, is_bound: bool, log_file: Path | None = None, is_verbose: bool = False
) -> RunningMount:
    """Start the process that serves a mount, and wait until programs can use it.

    Args:
        config: The mount.
        is_bound: Whether it ends with this process; otherwise it stays until somebody unmounts it.
        log_file: Path of the log; None names a file after the directory.
        is_verbose: Whether it logs requests and retries as well.

    Raises:
        ConfigError: The mount is not possible.
        StoreError: The store does not answer.
        WorkerDiedError: The process has died.
    """
    log_file = (log_file or default_log_file(config.directory)).absolute()
    log = LogPosition.at_end(log_file)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "penstock.mount.daemon"],  # -P: not with modules of the current directory
        env=os.environ | {"PYTHONPATH": python_path()},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        warning = _begin(
            process, DaemonRequest(config=config, log_file=str(log_file), is_bound=is_bound, is_verbose=is_verbose)
        )
    except BaseException:
        with suppress(OSError):
            process.terminate()
        _close(process.stdin, process.stdout, process.stderr)
        process.wait()
        raise
    _close(process.stdout, process.stderr, None if is_bound else process.stdin)
    if warning:
        _log.warning("%s", warning)
    return RunningMount(config, process, log)


def _begin(process: subprocess.Popen[bytes], request: DaemonRequest) -> str:
    """Send the process its mount, and return its warning once programs can use the mount."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # it died, which the missing answer shows
        process.stdin.write(pickle.dumps(request))
        process.stdin.flush()
    error: BaseException | None
    try:
        error, warning = pickle.load(process.stdout)
    except EOFError:
        _, said = process.communicate()
        lines = said.decode(errors="replace").strip().splitlines()
        raise WorkerDiedError(
            f"the process that serves the mount ended at its start: {lines[-1] if lines else 'it said nothing'}",
            process_id=process.pid,
            exit_code=process.returncode,
        ) from None
    if error is not None:
        raise error
    return str(warning)


def _close(*pipes: IO[bytes] | None) -> None:
    for pipe in pipes:
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


def default_log_file(directory: str) -> Path:
    """Return the file in which the daemon of a mount logs: in ``$XDG_STATE_HOME/penstock``, named after the directory."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    name = directory.strip("/").replace("/", "-")[-60:] or "root"
    return Path(state) / "penstock" / f"mount-{name}.log"
