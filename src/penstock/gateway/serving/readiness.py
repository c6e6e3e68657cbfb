"""Whether the upstreams answer: asked when the gateway starts, and again when ``/-/ready`` is asked for.

Each upstream gets one request for one page with one key, straight from its store, so that nothing waits for retries. The
answer is remembered for some seconds. Everyone may ask for ``/-/ready``, so it names the access point and the kind of the
failure; what the upstream said is for the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from penstock.errors import (
    AccessDeniedError,
    BucketMissingError,
    ConfigError,
    CredentialsError,
    DeadlineError,
    ObjectMissingError,
    PenstockError,
    ProtocolError,
    ThrottledError,
    UnavailableError,
)
from penstock.gateway.buckets.submitting import perform_on_loop
from penstock.store.base import innermost
from penstock.types import ListPage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from penstock.store.base import Store

CHECK_S_MAX = 5.0
"""Seconds for which an answer is waited for."""
REMEMBERED_S = 10.0
"""Seconds for which an answer counts: the usual period of a probe, so that several probes cost one request."""

_log = logging.getLogger("penstock.gateway.upstreams")
_WORDS: tuple[tuple[type[PenstockError], str], ...] = (
    (BucketMissingError, "the upstream's bucket does not exist"),
    (ObjectMissingError, "the upstream's bucket or endpoint does not exist"),
    (CredentialsError, "the upstream refuses the gateway's credentials"),
    (DeadlineError, "the upstream does not answer in time"),
    (UnavailableError, "the upstream cannot be reached"),
    (ProtocolError, "the upstream's answer is not one of S3"),
    (PenstockError, "the upstream cannot be used"),
)
"""What a failure is called where everyone can read it, subclasses first."""


class Readiness:
    """The state of the upstreams of one process.

    Args:
        stores: The upstreams by name of their access points.
    """

    def __init__(self, stores: Mapping[str, Store]) -> None:
        self._stores = stores
        self._failures: dict[str, PenstockError] = {}
        self._checked_s = -REMEMBERED_S
        self._lock = asyncio.Lock()

    async def failures(self) -> list[str]:
        """Return a line for each access point whose upstream cannot be used; none if all can be.

        Cost: one request to each upstream, all at once, unless the last ones are less than ``REMEMBERED_S`` old.
        """
        async with self._lock:
            if time.monotonic() - self._checked_s >= REMEMBERED_S:
                await asyncio.gather(*(self._check(name, store) for name, store in self._stores.items()))
                self._checked_s = time.monotonic()
        # Keys that may read but not list are sound, and their refusal looks like this.
        failures = {name: error for name, error in self._failures.items() if type(error) is not AccessDeniedError}
        return [f"{name}: {_in_words(failures[name])}" for name in sorted(failures)]

    async def _check(self, name: str, store: Store) -> None:
        """Ask one upstream, and log what has changed since the last time."""
        error: PenstockError | None = None
        try:
            async with asyncio.timeout(CHECK_S_MAX):
                await perform_on_loop(innermost(store), ListPage(delimiter="/", keys_max=1))
        except (ConfigError, ThrottledError):  # it has no listing, like a web server; it is busy, and so works
            pass
        except TimeoutError as late:
            error = late if isinstance(late, PenstockError) else DeadlineError(f"no answer within {CHECK_S_MAX:g} s")
        except PenstockError as failure:
            error = failure
        known = self._failures.pop(name, None)
        if error is not None:
            self._failures[name] = error
        if type(known) is type(error):
            return
        if error is None:
            _log.info("The upstream of access point %r can be used again.", name)
        elif type(error) is AccessDeniedError:
            _log.warning("The upstream of access point %r refuses a listing; reading may work: %s", name, error)
        else:
            _log.error("The upstream of access point %r cannot be used: %s", name, error)


def _in_words(error: PenstockError) -> str:
    return next(words for kind, words in _WORDS if isinstance(error, kind))
