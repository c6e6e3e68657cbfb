"""On which thread the kernel's requests are read and answered."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING

from penstock.store.carriers import plain_transport_of
from penstock.transport import engine

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.config import TransportConfig
    from penstock.mount.fuse.session import FuseSession
    from penstock.store.base import Store


class ThreadServing:
    """Serves a session on a thread of its own: for stores that have no event loop, or whose loop decrypts."""

    def __init__(self, session: FuseSession) -> None:
        self._session = session
        self._ended: Callable[[BaseException | None], object] | None = None
        self._thread = threading.Thread(target=self._run, name="penstock-mount", daemon=True)

    def start(self, ended: Callable[[BaseException | None], object]) -> None:
        """Begin; `ended` is called when the session has ended, with the error that ended it."""
        self._ended = ended
        self._thread.start()

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            self._session.run()
        except BaseException as error:
            failure = error
        assert self._ended is not None
        self._ended(failure)

    def join(self) -> None:
        """Wait for the thread, after the session has ended."""
        self._thread.join()


class LoopServing:
    """Serves a session on the thread that receives what the store sends, which is faster than two threads that take turns."""

    def __init__(self, session: FuseSession, transport: TransportConfig) -> None:
        self._session = session
        self._transport = transport

    def start(self, ended: Callable[[BaseException | None], object]) -> None:
        """Begin; see ``ThreadServing.start``."""
        self._session.start_on(partial(engine.add_reader, config=self._transport), ended=ended)

    def join(self) -> None:
        """Return at once, because the thread is the engine's."""


def serving_of(session: FuseSession, store: Store) -> ThreadServing | LoopServing:
    """Return what serves a session over a store."""
    transport = plain_transport_of(store)
    return ThreadServing(session) if transport is None else LoopServing(session, transport)
