"""``penstock doctor``: finds out why a URL cannot be used, one check after the other."""

from __future__ import annotations

import socket
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.request import getproxies, proxy_bypass

import typer

from penstock.advise.probes import StoreProbe, largest
from penstock.cli.info import credentials_text
from penstock.cli.options import AS_JSON, ConnectionGroup, StoreLocation, Stores, argument, expand_groups, flag
from penstock.cli.output import print_record
from penstock.errors import CredentialsError, ObjectMissingError, PenstockError, StoreError
from penstock.redaction import url_parts
from penstock.store.answers import http_date_s, transport_error
from penstock.store.base import innermost
from penstock.store.exchange import RemoteStore
from penstock.store.inflight import perform
from penstock.store.s3 import S3Store
from penstock.store.writing import check_writable
from penstock.text.sizes import format_bytes
from penstock.transport import HttpAnswer, HttpRequest, engine
from penstock.types import ByteRange, Get, ListPage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.types import Landing, ObjectInfo

SKEW_S_MAX = 300.0
"""S3 refuses requests whose time is 15 minutes off; a third of that needs attention."""
READ_BYTES = 1024
THROUGHPUT_S = 2.0
"""Seconds for which one connection is measured at most."""


class Finding(NamedTuple):
    """What one check found.

    Attributes:
        check: Name of the check.
        is_ok: Whether it passed; None if it was skipped.
        text: Result of the check, or the reason why it failed.
        hint: Advice on how to mend a failure; empty if there is none.
    """

    check: str
    is_ok: bool | None
    text: str
    hint: str = ""


def failed(check: str, error: PenstockError) -> Finding:
    """Return the finding of a check that ended in an error."""
    facts = (getattr(error, "status", None), getattr(error, "code", None))
    told = " ".join(str(fact) for fact in facts if fact)
    return Finding(check, False, f"{error.what} ({told})" if told else error.what, error.hint or "")


@expand_groups
def doctor(
    url: str = argument("URL", "Object, prefix or bucket that is to be used."),
    *,
    write: bool = flag("Also find out whether something may be written there; nothing is stored."),
    as_json: bool = AS_JSON,
    connection: ConnectionGroup,
) -> None:
    """Find out why URL cannot be used: a line for each check, with what to do if it failed.

    The checks are the credentials and where they come from, the name of the host, the connection, TLS, the clock of this
    machine, the rights to list, to read and (with --write) to write, the region, the addressing, and the throughput of one
    connection. Nothing is tried twice. --write begins a multipart upload and drops it, so nothing is stored. Secrets are
    never shown. The exit code is 1 if a check failed.

    For example:

        penstock doctor s3://bucket/train/
        penstock doctor --write --profile training s3://bucket/checkpoints/
        penstock doctor --json s3://bucket | jq -r 'select(.ok == false) | .hint'
    """
    has_failed = False
    with Stores(connection) as stores:
        for check, is_ok, text, hint in _findings(stores.locate(url), write=write):
            has_failed |= is_ok is False
            word = {True: "ok", False: "failed", None: "skipped"}[is_ok]
            line = f"{check:<12}{word}: {text}" + (f"; {hint}" if hint else "")
            print_record({"check": check, "ok": is_ok, "text": text, "hint": hint}, line, as_json=as_json)
    if has_failed:
        raise typer.Exit(1)


def _findings(location: StoreLocation, *, write: bool) -> Iterator[Finding]:
    core = innermost(location.store)
    if isinstance(core, RemoteStore):
        if isinstance(core, S3Store):
            found = _credentials(core)
            yield found
            if not found.is_ok:
                return
        is_connected = True
        for finding in _connection(core):
            is_connected &= finding.is_ok is not False
            yield finding
        if not is_connected:
            return
    listing = _listing(core, location)
    yield listing
    if isinstance(core, S3Store):  # the answer to the listing has corrected them
        yield Finding("region", True, core.endpoint.region)
        style = "path" if core.address.endswith(f"/{core.endpoint.bucket}/") else "virtual-hosted"
        yield Finding("addressing", True, f"{style}: {core.address}")
    if listing.is_ok or not location.is_folder:
        yield from _reading(core, location, is_new=write or location.is_folder)
    else:
        yield Finding("read", None, "no object is known that could be read")
    if not write:
        yield Finding("write", None, "--write finds out whether something may be written")
        return
    try:
        check_writable(core, f"{location.key}write-check" if location.is_folder else location.key)
    except PenstockError as error:
        yield failed("write", error)
    else:
        yield Finding("write", True, "a multipart upload was begun, and dropped")


def _credentials(core: S3Store) -> Finding:
    try:
        return Finding("credentials", True, credentials_text(core))
    except CredentialsError as error:
        return failed("credentials", error)


class _Probe:
    """An unsigned HEAD request for a store's address; any answer shows that the store can be reached."""

    def __init__(self, core: RemoteStore) -> None:
        self._ended = threading.Event()
        self._answer = HttpAnswer()
        engine.submit(HttpRequest("HEAD", core.address, sink=self, config=core.transport))

    def on_head(self, _status: int, _headers: dict[bytes, bytes]) -> Landing | None:
        """Take no body."""
        return None

    def on_end(self, answer: HttpAnswer) -> None:
        """Take the answer."""
        self._answer = answer
        self._ended.set()

    def wait_answer(self) -> HttpAnswer:
        """Wait for the end of the request, for which the transport has its deadlines."""
        self._ended.wait()
        return self._answer


def _connection(core: RemoteStore) -> Iterator[Finding]:
    """Find out whether the store's host is found and answers, and compare the clocks."""
    parts = url_parts(core.address)
    assert parts is not None
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    if core.transport.proxy or (parts.scheme in getproxies() and not proxy_bypass(host)):
        yield Finding("dns", None, f"a proxy looks {host} up")
    else:
        try:
            found = {str(row[4][0]) for row in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        except (OSError, UnicodeError) as error:
            yield Finding("dns", False, f"{host}: {error}", "check the endpoint's host name, and DNS on this machine")
            return
        yield Finding("dns", True, f"{host} is {', '.join(sorted(found))}")
    answer = _Probe(core).wait_answer()
    failure = None if answer.status else failed("tcp", transport_error(answer))
    is_tls = failure is not None and failure.text.startswith("TLS failed")
    if failure is not None and not is_tls:
        yield failure
        return
    times = f"connected in {1000 * answer.connect_s:.0f} ms, answered in {1000 * answer.first_byte_s:.0f} ms"
    yield Finding("tcp", True, f"port {port}" if failure else f"port {port}: {times}")
    if failure is not None:
        yield failure._replace(check="tls")
        return
    if parts.scheme == "https":
        yield Finding("tls", True, "the certificate is valid")
    else:
        yield Finding("tls", None, "the endpoint is not encrypted")
    yield _clock(answer)


def _clock(answer: HttpAnswer) -> Finding:
    date_s = http_date_s(answer.headers.get(b"date", b""))
    if date_s is None:
        return Finding("clock", None, "the store does not tell the time")
    ahead_s = time.time() - date_s
    text = f"this machine is {abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the store"
    if abs(ahead_s) > SKEW_S_MAX:
        hint = "set this machine's clock, e.g. by NTP: S3 refuses signatures that are 15 minutes off"
        return Finding("clock", False, text, hint)
    return Finding("clock", True, text)


def _listing(core: Any, location: StoreLocation) -> Finding:
    try:
        page = perform(core, ListPage(prefix=location.key, delimiter="/", keys_max=1)).value
    except PenstockError as error:
        return failed("list", error)
    return Finding("list", True, f"{'something' if page.objects or page.prefixes else 'nothing'} is there")


def _reading(core: Any, location: StoreLocation, *, is_new: bool) -> Iterator[Finding]:
    """Read the beginning of an object, and measure one connection; if `is_new`, there may be none yet."""
    try:
        found: ObjectInfo = largest(location.store, location.key, url=location.url)
        span = ByteRange(0, min(found.size_bytes, READ_BYTES)) if found.size_bytes else None
        perform(core, Get(found.key, span))
        yield Finding("read", True, location.store.describe(found.key))
        if found.size_bytes:
            rate = StoreProbe(location.store, [found], seconds=THROUGHPUT_S).measure(1)
            yield Finding("throughput", True, f"{format_bytes(rate.bytes_per_s)}/s on one connection")
    except StoreError as error:
        if is_new and type(error) is ObjectMissingError:
            yield Finding("read", None, "there is no object yet")
        else:
            yield failed("read", error)
