"""The base directory of a run: it is created and locked, and files of a killed run are removed from it.

All processes of a run inherit its mark, a variable of the environment, by which orphaned processes are found.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import signal
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from penstock.channels.environment import ContainerLayout
from penstock.channels.runner.supervisor import END_S_MAX, LOCK_NAME, clean, has_results
from penstock.errors import ConfigError
from penstock.system.locks import try_lock_file
from penstock.system.private import is_trusted

PREFIX = "penstock-run-"

MARK = "PENSTOCK_RUN_MARK"

_LENGTH = 32
_FORM = re.compile(f"[0-9a-f]{{{_LENGTH}}}")


class BaseDirectory:
    """The base directory of a run, which no other run uses at the same time. ``close`` cleans it.

    Args:
        path: The directory; one that is made is private to this user. None makes one among the temporary files, which
            ``close`` removes unless it has results.

    Attributes:
        layout: The paths in it.
        is_private: Whether it was made for this run.
        lock_fd: Descriptor of its lock, for the supervisor.
        mark: The mark of the run. It is written to the lock, so that a later run can end the processes of a killed run.

    Raises:
        ConfigError: Another run uses it, or it cannot be written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.is_private = path is None
        self.layout = ContainerLayout(base=Path(tempfile.mkdtemp(prefix=PREFIX)) if path is None else path.absolute())
        base = self.layout.base
        # Another run may look for abandoned directories at this moment: a private one gets its lock's name when it is locked.
        lock = base / (f"{LOCK_NAME}.new" if self.is_private else LOCK_NAME)
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.lock_fd = _open_lock(lock)
        except OSError as error:
            raise _refusal(base, error) from error
        try:
            self._prepare(lock)
        except OSError as error:
            os.close(self.lock_fd)
            raise _refusal(base, error) from error
        except ConfigError:
            os.close(self.lock_fd)
            raise

    def _prepare(self, lock: Path) -> None:
        base = self.layout.base
        if not try_lock_file(self.lock_fd):
            raise ConfigError(f"another run uses the base directory {base}", hint="--base names another one")
        end_marked(read_mark(self.lock_fd))  # of a run before, which was killed together with its supervisor
        self.mark = new_mark()
        write_mark(self.lock_fd, self.mark)
        lock.replace(base / LOCK_NAME)
        if not self.is_private:
            clean(base, is_private=False)
        for directory in self.layout.written_directories():
            if directory.is_symlink():
                raise ConfigError(
                    f"the base directory has a link, {directory}, and a run writes below its base directory only",
                    hint="--base names a directory on another disk; or mount the link's target there (mount --bind)",
                )
            directory.mkdir(exist_ok=True)
        for directory in self.layout.directories():
            directory.mkdir(exist_ok=True)
        if not self.layout.failure.is_dir():
            self.layout.failure.unlink(missing_ok=True)

    @property
    def has_results(self) -> bool:
        """Whether files of model, output or checkpoints are in it."""
        return has_results(self.layout.base)

    def forget_results(self) -> None:
        """Remove the results, which are stored elsewhere now, so that ``close`` removes a private directory as a whole."""
        if self.is_private:
            for directory in (self.layout.model, self.layout.output, self.layout.checkpoints):
                shutil.rmtree(directory, ignore_errors=True)

    def close(self) -> None:
        """Unmount and remove everything that the run made; files of an explicit directory stay. Idempotent."""
        if self.lock_fd < 0:
            return
        clean(self.layout.base, is_private=self.is_private)
        os.close(self.lock_fd)  # the file of an explicit directory stays, since another run may wait for its lock
        self.lock_fd = -1


def _open_lock(path: Path) -> int:
    """Open the lock of a run, which nothing but a file of one name may be, as the mark is written to it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(fd)
        raise PermissionError(errno.EPERM, "it is not a file of one name", os.fspath(path))
    return fd


def _refusal(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the base directory {error.filename or path}: {error.strerror}", hint="--base names another one"
    )


def clean_abandoned() -> None:
    """End and clean up this user's runs that were killed together with their supervisors.

    Processes are those that carry the mark of such a run, also in sessions of their own; directories are the private ones.
    """
    for base in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if not is_trusted(base.lstat()) or base.is_symlink():
                continue
            fd = os.open(base / LOCK_NAME, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if try_lock_file(fd) and end_marked(read_mark(fd)):
                    clean(base, is_private=True)
            finally:
                os.close(fd)


def new_mark() -> str:
    """Return a mark that no other run has."""
    return secrets.token_hex(_LENGTH // 2)


def write_mark(fd: int, mark: str) -> None:
    """Write the mark of a run to its lock, an open file."""
    os.pwrite(fd, mark.encode(), 0)


def read_mark(fd: int) -> str:
    """Return the mark in the lock of a run, an open file; empty if there is none."""
    text = os.pread(fd, _LENGTH, 0).decode("ascii", "replace")
    return text if _FORM.fullmatch(text) else ""


def end_marked(mark: str) -> bool:
    """Kill every process that has the mark of a run in its environment, until there is none. An empty mark is nobody's.

    Returns:
        False if this process has the mark itself; it then ends nothing, because it would end itself.
    """
    if os.environ.get(MARK, "") == mark:
        return not mark
    deadline_s = time.monotonic() + END_S_MAX
    while mark and (found := _marked(mark)) and time.monotonic() < deadline_s:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return True


def _marked(mark: str) -> list[int]:
    """Return the processes that have inherited a mark; those that have ended have no environment."""
    entry = f"{MARK}={mark}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found
