"""libcurl as a carrier, for TLS, proxies, redirects, and requests with a body. Every option of libcurl is set here.

Handles are reused with as few ``setopt`` as a request needs, and header lines go to ``list.append`` without a Python frame.
libcurl passes bodies on in pieces of 16 KiB (``CURL_MAX_WRITE_SIZE``), each a new ``bytes``. For large landings in an ``mmap``
they go to its C-level ``write``, which took 250 ms of CPU per GB, where a Python callback took 330 ms.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.config import KIB, MIB
from penstock.memory.buffers import whole_bytes
from penstock.system.libcurl import pycurl
from penstock.transport.head import parse_head

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.config import TransportConfig
    from penstock.transport.http import HttpTransfer
    from penstock.types import Buffer

UPLOAD_BUFFER_BYTES = 256 * KIB
"""Through which libcurl sends, small enough for a processor's second-level cache; measured together with bodies that are read
where they lie (docs/development/measurements.md)."""

DIRECT_BYTES_MIN = 1 * MIB
"""Smallest landing in an mmap that takes the body without a Python frame per piece. An error document goes there too, and has
to fit; it has a few hundred bytes."""

_SEEK_OK, _CANT_SEEK = 0, 2  # CURL_SEEKFUNC_OK, CURL_SEEKFUNC_CANTSEEK
_DNS_SHUFFLE_ADDRESSES = 275  # CURLOPT_DNS_SHUFFLE_ADDRESSES, which pycurl 7.49 does not name
_CA_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Ubuntu, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL, Amazon Linux
    "/etc/ssl/ca-bundle.pem",  # SUSE
    "/etc/ssl/cert.pem",  # Alpine, macOS
)


def attach(transfer: HttpTransfer, curl: Any) -> None:
    """Configure a handle for this exchange."""
    transfer.carrier = curl
    transfer.started_s = transfer.watch_s = time.monotonic()
    request = transfer.request
    setopt = curl.setopt
    url, headers = request.url, request.headers
    setopt(pycurl.URL, url)
    if request.signing is not None:
        scheme, _, rest = url.partition("://")
        host, slash, target = rest.partition("/")
        host = host.removesuffix(":443" if scheme == "https" else ":80")
        signature = request.signing.sign(request.method, host, slash + target, headers)
        headers = [*headers, f"Host: {host}", *signature]
    if request.body is not None and not any(line.lower().startswith("content-type:") for line in headers):
        headers = [*headers, "Content-Type:"]  # removes the header; libcurl would call the body a form
    if any("\n" in line or "\r" in line for line in headers):
        raise ValueError("a header line with a line break")
    setopt(pycurl.HTTPHEADER, headers)
    setopt(pycurl.HEADERFUNCTION, transfer.header_lines.append)
    landing = transfer.landing
    if landing is not None and landing.direct is not None and landing.end - landing.position >= DIRECT_BYTES_MIN:
        transfer.direct = landing.direct
        transfer.direct.seek(landing.position)
        setopt(pycurl.MAXFILESIZE_LARGE, landing.end - landing.position)
        setopt(pycurl.WRITEFUNCTION, transfer.direct.write)
    else:
        setopt(pycurl.MAXFILESIZE_LARGE, 0)
        setopt(pycurl.WRITEFUNCTION, transfer.take)


def record_outcome(transfer: HttpTransfer, curl: Any) -> None:
    """Take over what libcurl knows of an exchange that ended; the handle may be reused afterwards.

    Raises:
        ValueError: The head cannot be read.
    """
    curl.setopt(pycurl.WRITEFUNCTION, _discard)  # so that an idle handle keeps neither buffer nor sinks alive
    getinfo = curl.getinfo
    started_s = transfer.started_s
    transfer.sent_s = started_s + getinfo(pycurl.PRETRANSFER_TIME)
    if first_s := getinfo(pycurl.STARTTRANSFER_TIME):
        transfer.first_s = started_s + first_s
    if getinfo(pycurl.NUM_CONNECTS):
        transfer.connected_s = started_s + max(getinfo(pycurl.CONNECT_TIME), getinfo(pycurl.APPCONNECT_TIME))
    if transfer.header_lines and transfer.head is None:
        transfer.head = parse_head(transfer.header_lines)
    if transfer.direct is None or transfer.landing is None:
        return
    landing, position = transfer.landing, transfer.direct.tell()
    if transfer.head is not None and 200 <= transfer.head[0] < 300:
        landing.position = position
    else:
        transfer.take_document(bytes(memoryview(landing.buffer)[transfer.initial_position : position]))


def _discard(_piece: bytes) -> None:
    """Replace a landing's ``write`` on an idle handle."""


def configure(config: TransportConfig, url: str, opened: Callable[[int, int], int]) -> Any:
    """Return a new libcurl handle with the options that no request changes."""
    curl = pycurl.Curl()
    tls = url.startswith("https:")
    setopt = curl.setopt
    setopt(pycurl.NOSIGNAL, 1)
    setopt(pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1)
    setopt(pycurl.BUFFERSIZE, config.receive_buffer_bytes)
    setopt(pycurl.CONNECTTIMEOUT_MS, max(1, int(config.connect_s_max * 1000)))
    setopt(pycurl.TCP_KEEPALIVE, 1)
    setopt(pycurl.SOCKOPTFUNCTION, opened)
    setopt(_DNS_SHUFFLE_ADDRESSES, 1)
    setopt(pycurl.USERAGENT, "penstock/0.1 libcurl")
    setopt(pycurl.PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
    setopt(pycurl.REDIR_PROTOCOLS, pycurl.PROTO_HTTP | pycurl.PROTO_HTTPS)
    setopt(pycurl.PATH_AS_IS, 1)  # so that the path is sent as it was signed
    if config.proxy is not None:
        setopt(pycurl.PROXY, config.proxy)
    elif not tls and "http_proxy" not in os.environ and (proxy := os.environ.get("HTTP_PROXY")):
        setopt(pycurl.PROXY, proxy)  # libcurl reads the lower-case name only; botocore and requests read both
    if tls:
        if config.verify_tls:
            setopt(pycurl.CAINFO, _ca_bundle(config))
        else:
            setopt(pycurl.SSL_VERIFYPEER, 0)
            setopt(pycurl.SSL_VERIFYHOST, 0)
    return curl


def _ca_bundle(config: TransportConfig) -> str:
    """Return the bundle to trust; the path in libcurl's wheel is not right on every system."""
    named = config.ca_bundle or os.environ.get("AWS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE")
    if named:
        return named
    return next((path for path in _CA_BUNDLES if os.path.exists(path)), _CA_BUNDLES[0])  # noqa: PTH110 - hot start


def prepare_method(transfer: HttpTransfer, curl: Any) -> None:
    """Set the options of requests other than plain GETs; such handles are used once."""
    request = transfer.request
    setopt = curl.setopt
    if request.redirects_max:
        setopt(pycurl.FOLLOWLOCATION, 1)
        setopt(pycurl.MAXREDIRS, request.redirects_max)
    if request.method == "HEAD":
        setopt(pycurl.NOBODY, 1)
    elif request.body is not None:
        _send(transfer, curl, request.body)
    elif request.method != "GET":
        setopt(pycurl.CUSTOMREQUEST, request.method)


def _send(transfer: HttpTransfer, curl: Any, body: Buffer) -> None:
    """Send `body`: libcurl reads a ``bytes`` object in place, without the GIL, and copies of any other memory."""
    method, setopt = transfer.request.method, curl.setopt
    whole = whole_bytes(body)
    if whole is not None:
        setopt(pycurl.POSTFIELDS, whole)  # makes it a POST; a PUT changes only the method's name
        transfer.count_sent = partial(curl.getinfo, pycurl.SIZE_UPLOAD_T)
    else:
        _stream(transfer, curl, memoryview(body).cast("B"))
    if method != "POST" and (whole is not None or method != "PUT"):
        setopt(pycurl.CUSTOMREQUEST, method)
    setopt(pycurl.UPLOAD_BUFFERSIZE, UPLOAD_BUFFER_BYTES)


def _stream(transfer: HttpTransfer, curl: Any, view: memoryview) -> None:
    """Pass `view` on in pieces, and again if libcurl has to send it again on a new connection."""
    setopt = curl.setopt

    def read(size: int) -> bytes:
        start = transfer.sent_bytes
        piece = bytes(view[start : start + size])
        transfer.sent_bytes = start + len(piece)
        return piece

    def seek(offset: int, origin: int) -> int:
        if origin != 0:
            return _CANT_SEEK
        transfer.sent_bytes = offset
        return _SEEK_OK

    if transfer.request.method == "POST":
        setopt(pycurl.POST, 1)
        setopt(pycurl.POSTFIELDSIZE_LARGE, len(view))
    else:
        setopt(pycurl.UPLOAD, 1)
        setopt(pycurl.INFILESIZE_LARGE, len(view))
    setopt(pycurl.READFUNCTION, read)
    setopt(pycurl.SEEKFUNCTION, seek)
