"""Serves one mount in this process: makes its parts, answers the kernel, and closes the parts again."""

from __future__ import annotations

import gc
import logging
import math
import os
import select
import signal
import threading
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Self

from penstock.compose import connect, split
from penstock.config import MIB
from penstock.errors import (
    AccessDeniedError,
    ConfigError,
    DirectoryMissingError,
    ObjectMissingError,
    UnavailableError,
)
from penstock.mount.filesystem import NodeView, StoreFileSystem
from penstock.mount.fuse.mounting import MountOptions, mount
from penstock.mount.fuse.session import FuseSession
from penstock.mount.namespace.directories import StoreDirectories
from penstock.mount.namespace.manifest import ManifestStore, manifest_objects
from penstock.mount.reading.files import StoreFiles
from penstock.redaction import public_url
from penstock.store.exchange import plain_transport_of
from penstock.store.inflight import perform
from penstock.transport import engine
from penstock.types import ListPage

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.mount.config import MountConfig
    from penstock.store.base import Store
    from penstock.types import Page

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that take a mount down."""

READY_S_MAX = 30.0
"""Longest time until the kernel has answered; it does so at once."""

DRAIN_S_MAX = 10.0
"""How long programs may go on with the files that they have open when the mount is taken down."""

HURRIED_DRAIN_S_MAX = 1.0
"""The same if the program that takes it down is the one that has files open."""

_READ_AHEAD_BYTES = 1 * MIB

_COLLECTOR_THRESHOLDS = (50_000, 20, 100)
"""Nodes and names make no cycles, so looking for some among a million of them is in vain. With the usual thresholds, that took
a fifth of the time of a walk."""

_log = logging.getLogger("penstock")


class MountServer:
    """A mounted store. A context manager that unmounts at its end.

    Args:
        config: The mount.

    Attributes:
        warning: One sentence if there is nothing to be seen; otherwise empty.

    Raises:
        ConfigError: The configuration or the system does not permit the mount.
        StoreError: The store refuses to list the URL, or cannot be reached.

    Cost: one request to see that the store answers; a thread for the kernel's requests, unless the store is read over plain
        HTTP: then the thread of that event loop answers them.
    """

    def __init__(self, config: MountConfig) -> None:
        with ExitStack() as stack:
            store, self.warning = _opened(config)
            stack.enter_context(store)
            self._drain_s_max = DRAIN_S_MAX
            self._file_system = _file_system(config, store)
            options = MountOptions(
                source=public_url(config.url),
                allow_other=config.allow_other,
                nonempty=config.nonempty,
                auto_unmount=config.auto_unmount,
            )
            self._mounted = mount(config.directory, options)
            stack.callback(self._mounted.unmount)
            self._session = FuseSession(self._mounted.descriptor, self._file_system)
            stack.callback(self._session.close)
            self._file_system.when_outdated(self._session.forget_names)
            self._failure: BaseException | None = None
            self._lock = threading.Lock()
            self._on_end: Callable[[], object] | None = None
            self._ended = threading.Event()
            self._join = _begin_session(self._session, store, self._has_ended)
            if not self._session.wait_ready(READY_S_MAX):
                self._session.stop()
                self._ended.wait()
                self._join()
                if self._failure is not None:
                    raise self._failure
                raise UnavailableError(f"the kernel did not answer within {READY_S_MAX:.0f} s")
            self._mounted.set_read_ahead(_READ_AHEAD_BYTES)
            self._resources = stack.pop_all()
        if self.warning:
            _log.warning("%s", self.warning)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _has_ended(self, failure: BaseException | None) -> None:
        self._failure = failure
        with self._lock:
            self._ended.set()
            if self._on_end is not None:
                self._on_end()

    def when_ended(self, then: Callable[[], object] | None) -> None:
        """Have `then` called when the file system was unmounted, at once if it is; None takes it back."""
        with self._lock:
            self._on_end = then
            if then is not None and self._ended.is_set():
                then()

    def hurry(self) -> None:
        """Let programs go on with open files for ``HURRIED_DRAIN_S_MAX`` seconds only."""
        self._drain_s_max = HURRIED_DRAIN_S_MAX

    def close(self) -> None:
        """Unmount, let programs go on with open files for ``DRAIN_S_MAX`` seconds, and drop everything; idempotent.

        Raises:
            OSError: The kernel's requests could not be read any more.
        """
        if not self._ended.is_set():
            self._mounted.unmount()
            self._ended.wait(self._drain_s_max)
        self._session.stop()
        self._ended.wait()
        self._join()
        self._resources.close()
        if self._failure is not None:
            raise self._failure


def _begin_session(
    session: FuseSession, store: Store, ended: Callable[[BaseException | None], object]
) -> Callable[[], object]:
    """Begin to answer the kernel's requests, and return a function that waits for their thread after the session has ended.

    The thread is the one that receives the store's answers, which is faster than two threads that take turns. Stores that have
    no event loop, or whose loop decrypts, get a thread of their own.

    Args:
        session: The session.
        store: The store that it reads.
        ended: Called when the session has ended, with the error that ended it.
    """
    transport = plain_transport_of(store)
    if transport is not None:
        session.start_on(partial(engine.add_reader, config=transport), ended=ended)
        return lambda: None  # the thread is the engine's

    def run() -> None:
        failure: BaseException | None = None
        try:
            session.run()
        except BaseException as error:
            failure = error
        ended(failure)

    thread = threading.Thread(target=run, name="penstock-mount", daemon=True)
    thread.start()
    return thread.join


def _opened(config: MountConfig) -> tuple[Store, str]:
    """Return the store of a mount, after one request has shown that it answers, and a warning if it has no object."""
    store = connect(config.url, **config.connection)
    try:
        if config.manifest is not None:
            objects = manifest_objects(config.manifest, store, url=config.url, connection=config.connection)
            warning = "" if objects else f"{public_url(config.manifest)} names no object: the mount is empty."
            return ManifestStore(store, objects), warning
        page: Page = perform(store, ListPage(keys_max=1)).value
        if page.objects or page.prefixes or page.next_token:
            return store, ""
        _refuse_object(config)
    except DirectoryMissingError:
        store.close()
        _refuse_object(config)
        raise
    except BaseException:
        store.close()
        raise
    url = public_url(config.url)
    until = "" if config.metadata_ttl_s == math.inf else " until one is written"
    return (
        store,
        f"There is no object below {url}: the mount is empty{until}. `penstock ls` shows what there is above it.",
    )


def _refuse_object(config: MountConfig) -> None:
    """Say so if a URL below which nothing lies names an object, which would be mounted as an empty directory.

    Raises:
        ConfigError: It does.

    Cost: one request.
    """
    root, key = split(config.url.rstrip("/"))
    if not key or config.manifest is not None:
        return
    with connect(root, **config.connection) as store:
        try:
            store.stat(key)
        except (
            ObjectMissingError,
            AccessDeniedError,
        ):  # without the right to list, S3 does not say that one is missing
            return
        folder = store.describe(key[: key.rfind("/") + 1])
    raise ConfigError(f"{public_url(config.url)} is an object, and only folders can be mounted", hint=f"mount {folder}")


def _file_system(config: MountConfig, store: Store) -> StoreFileSystem:
    directories = StoreDirectories(store, ttl_s=config.metadata_ttl_s)
    view = NodeView(
        uid=os.geteuid() if config.uid is None else config.uid,
        gid=os.getegid() if config.gid is None else config.gid,
        file_mode=config.file_mode & ~config.umask,
        directory_mode=config.directory_mode & ~config.umask,
    )
    negative_ttl_s = config.metadata_ttl_s if config.negative_ttl_s is None else config.negative_ttl_s
    return StoreFileSystem(
        directories,
        StoreFiles(store, following=directories.following),
        view=view,
        ttl_s=config.metadata_ttl_s,
        negative_ttl_s=negative_ttl_s,
    )


def collect_rarely() -> None:
    """Have this process look for reference cycles rarely. For a process that does nothing but serve a mount."""
    gc.set_threshold(*_COLLECTOR_THRESHOLDS)
    gc.freeze()  # the modules that were imported stay


def serve_until_signal(server: MountServer, *, announce: Callable[[], object]) -> None:
    """Wait until the file system is unmounted, or SIGTERM, SIGINT or SIGHUP arrives, and close it. For the main thread only.

    Signals that arrive while it is closed change nothing: a process that gets two signals must still unmount.

    Args:
        server: The file system.
        announce: Tells others of the mount. Called when signals are waited for, because they may send one at once.
    """
    waiting, waking = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before_wakeup = signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    before = {number: signal.signal(number, _take_note) for number in STOP_SIGNALS}
    try:
        server.when_ended(partial(os.write, waking, b"."))
        announce()
        select.select([waiting], [], [])
        server.when_ended(None)
        server.close()
    finally:
        server.when_ended(None)
        signal.set_wakeup_fd(before_wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(waiting)
        os.close(waking)


def _take_note(_number: int, _frame: object) -> None:
    """Let the signal's number be written to the pipe, which Python does if there is a handler."""
