"""Makes a store from a URL: the core for its scheme, and the default stack of wrappers around it.

For S3 and HTTP the stack is ``Traced(Hedged(Retrying(Limited(core))))``: a request that backs off holds no permit, a hedge
is retried like any other request, and traces show operations as the caller sees them. Local files, memory and fsspec get only
``Traced``, because waiting does not fix their failures. With ``cache=``, ``Cached`` is around the whole stack, so a cached
block costs no request.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload
from urllib.parse import unquote

from penstock.config import check_configs, check_names
from penstock.errors import ConfigError, DataError
from penstock.fetch import configure_process_budget
from penstock.redaction import public_url, url_parts
from penstock.system import forks
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    import io
    from collections.abc import Iterable, Iterator, Mapping

    from penstock.cache import CacheConfig
    from penstock.config import FetchConfig, HedgeConfig, RetryConfig, TransportConfig
    from penstock.store.base import Store
    from penstock.store.credentials import Credentials
    from penstock.store.file import ObjectReader
    from penstock.store.writing import Writer
    from penstock.types import ObjectInfo

_ARN = "arn:aws"
_PLAIN_SCHEMES = ("s3://", "http://", "https://", "memory://")
"""Schemes of which "::" is part of the key; fsspec takes it for the beginning of another URL."""


@boundary
def connect(
    url: str | os.PathLike[str],
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    credentials: Credentials | None = None,
    anonymous: bool = False,
    addressing: Literal["auto", "path", "virtual"] = "auto",
    requester_pays: bool = False,
    sse_customer_key: bytes | None = None,
    expected_bucket_owner: str | None = None,
    upload_checksums: bool = True,
    sign_payloads: bool = False,
    requests_max: int = 1024,
    transport: TransportConfig | None = None,
    retry: RetryConfig | None = None,
    hedge: HedgeConfig | None = None,
    fetch: FetchConfig | None = None,
    cache: CacheConfig | str | os.PathLike[str] | None = None,
) -> Store:
    """Return a store for the objects below `url`; no request is sent yet.

    Args:
        url: ``s3://bucket[/prefix/]``, ``s3://ARN[/prefix/]`` of an access point or an Object Lambda access point,
            ``file:///dir`` or a plain path, ``http(s)://host/base/`` (read only), ``memory://name[/prefix/]``, or any scheme
            that fsspec knows. Keys are relative to it. Aliases of access points are used like names of buckets.
        endpoint_url: URL of an S3-compatible store. The default is ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``, the config
            file, or else Amazon.
        region: Region of the bucket. The default is ``AWS_REGION``, the config file, or else us-east-1; if it is wrong, the
            store's answer corrects it.
        profile: Section of ``~/.aws/config``. The default is ``AWS_PROFILE``.
        credentials: Fixed access keys. The default is botocore's chain (environment, files, SSO, web identity, container,
            instance).
        anonymous: Whether to send unsigned requests, for public data.
        addressing: ``"virtual"`` is ``bucket.host``, ``"path"`` is ``host/bucket``; ``"auto"`` is virtual on Amazon only.
            An Object Lambda access point ``NAME`` of account ``ID`` is ``NAME-ID.host``, as in boto3; it is ``host/NAME`` with
            ``"path"``, and with ``"auto"`` if `endpoint_url` names an IP address or ``localhost``, which have no subdomains.
        requester_pays: Whether to agree to pay for requests and transfer.
        sse_customer_key: 32 bytes, the key of objects encrypted with SSE-C.
        expected_bucket_owner: ID of the account that must own the bucket.
        upload_checksums: Whether to send a CRC32C with everything that is written.
        sign_payloads: Whether to sign the SHA-256 of everything that is sent. The default signs it for up to 1 MiB, and for
            larger bodies only if neither TLS nor a CRC32C protects them. True costs 0.6 s of CPU per GB.
        requests_max: The most requests of this store in flight at once; at least 1.
        transport: Deadlines, connections, TLS and proxy.
        retry: Attempts and backoff.
        hedge: Second requests for late answers; ``HedgeConfig(ratio_max=0)`` turns them off.
        fetch: Sizes of parts, read-ahead, the gap to read through, and the byte budget of this process: if several calls
            name a ``budget_bytes_max``, the largest one counts.
        cache: Directory of a cache on this node's disk, and its size: ``"/nvme/penstock:200GB"``, or a
            ``CacheConfig``.

    Raises:
        ConfigError: The URL or an argument is not valid, or this system is not Linux.
    """
    if sys.platform != "linux":
        raise ConfigError(
            f"penstock runs only on Linux, and this is {sys.platform}",
            hint="use a container, a virtual machine or WSL; its event loop is built on Linux's epoll and eventfd",
        )
    if anonymous and (credentials is not None or profile is not None):
        raise ConfigError("anonymous=True excludes credentials= and profile=")
    check_configs(transport=transport, retry=retry, hedge=hedge, fetch=fetch)
    if credentials is not None and not hasattr(credentials, "access_key"):
        raise ConfigError(
            f"credentials= must be a Credentials, not {type(credentials).__name__}",
            hint="ps.Credentials(access_key=..., secret_key=...)",
        )
    if not isinstance(url, str | os.PathLike):
        raise ConfigError(f"connect({url!r}) must be given a URL or a path", hint="s3://bucket/prefix/, /data/")
    text = os.fspath(url)
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{url!r} is not a URL", hint="s3://bucket/prefix/, a path, ...")
    scheme, _, rest = text.partition("://")
    if fetch is not None and fetch.budget_bytes_max is not None:
        configure_process_budget(fetch.budget_bytes_max)
    store: Store
    if scheme == "s3" and rest != text:
        from penstock.store.s3_requests import S3Options

        options = S3Options(
            requester_pays=requester_pays,
            sse_customer_key=sse_customer_key,
            expected_bucket_owner=expected_bucket_owner,
            upload_checksums=upload_checksums,
            sign_payloads=sign_payloads,
        )
        core = _s3(
            split_s3(text), endpoint_url, region, profile, credentials, anonymous, addressing, transport, options
        )
        store = _over_network(core, requests_max, retry, hedge)
    elif scheme in ("http", "https"):
        from penstock.store.http import HttpStore

        store = _over_network(HttpStore(text, transport=transport), requests_max, retry, hedge)
    else:
        from penstock.store.traced import Traced

        store = Traced(_local_or_foreign(text))
    if cache is not None:
        from penstock.cache import Cached

        store = Cached(store, cache)
    if fetch is not None:
        _set_fetch(store, fetch)
    return store


def _set_fetch(store: Any, fetch: FetchConfig) -> None:
    while store is not None:
        store.fetch_config = fetch
        store = getattr(store, "inner", None)


def _over_network(core: Store, requests_max: int, retry: RetryConfig | None, hedge: HedgeConfig | None) -> Store:
    from penstock.store.hedged import Hedged
    from penstock.store.limited import Limited
    from penstock.store.retrying import Retrying
    from penstock.store.traced import Traced

    return Traced(Hedged(Retrying(Limited(core, requests_max=requests_max), config=retry), config=hedge))


def list_buckets(
    *,
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    credentials: Credentials | None = None,
    anonymous: bool = False,
    transport: TransportConfig | None = None,
    retry: RetryConfig | None = None,
) -> Iterator[ObjectInfo]:
    """List the buckets that the credentials may list, in the store's order. The arguments are those of ``connect``.

    Returns:
        An iterator of prefixes: ``key`` is the name and a slash, ``last_modified_s`` the time of creation.

    Raises:
        StoreError: While iterating, for example if the credentials may not list buckets.

    Cost: one request per 1 000 buckets.
    """
    from penstock.store.inflight import perform
    from penstock.store.s3_requests import S3Options
    from penstock.types import ListPage

    core = _s3(("", ""), endpoint_url, region, profile, credentials, anonymous, "path", transport, S3Options())
    with _over_network(core, 1, retry, None) as store:
        token = None
        while True:
            page = perform(store, ListPage(token=token)).value
            yield from page.objects
            token = page.next_token
            if token is None:
                return


def endpoint_of(store: Store) -> str:
    """Return the endpoint of an S3 store, which tells two buckets of one name apart; "" for Amazon and for other stores."""
    from penstock.store.base import innermost

    return getattr(getattr(innermost(store), "endpoint", None), "endpoint_url", None) or ""


def _s3(
    bucket_and_prefix: tuple[str, str],
    endpoint_url: str | None,
    region: str | None,
    profile: str | None,
    credentials: Credentials | None,
    anonymous: bool,
    addressing: str,
    transport: TransportConfig | None,
    options: Any,
) -> Store:
    from penstock.store import credentials as aws
    from penstock.store.s3 import S3Store
    from penstock.store.s3_endpoint import S3Endpoint

    bucket, prefix = bucket_and_prefix
    endpoint = S3Endpoint(
        bucket=bucket,
        prefix=prefix if not prefix or prefix.endswith("/") else prefix + "/",
        endpoint_url=endpoint_url or aws.setting_endpoint_url(profile),
        region=region or aws.setting_region(profile) or "us-east-1",
        addressing=addressing if addressing != "auto" else aws.setting_addressing(profile) or "auto",
    )
    provider = None if anonymous else aws.provider(credentials, profile)
    return S3Store(endpoint, provider=provider, transport=transport, options=options)


def _local_or_foreign(url: str) -> Store:
    scheme = url.partition("://")[0] if "://" in url else ""
    if scheme == "memory":
        from penstock.store.memory import MemoryStore

        name, _, prefix = url.partition("://")[2].partition("/")
        return MemoryStore(name=name, prefix=prefix)
    if scheme in ("", "file"):
        from penstock.store.local import LocalStore

        return LocalStore(local_path(url))
    from penstock.store.fsspec import FsspecStore

    return FsspecStore(url)


def local_path(url: str) -> Path:
    """Return the absolute path of a ``file://`` URL or of a plain path.

    Raises:
        ConfigError: A ``file://`` URL names another host, or another URL lacks a slash.
    """
    if url.startswith(("s3:", "http:", "https:")):
        scheme, _, rest = url.partition(":")
        hint = f"{scheme}://{rest.lstrip('/')} has two slashes; write a path of this name with ./ before it"
        raise ConfigError(f"{url!r} is a path that begins like a URL", hint=hint)
    if not url.startswith("file:"):
        return Path(url).expanduser().absolute()
    parts = url_parts(url)
    if parts is None or parts.netloc not in ("", "localhost"):
        raise ConfigError(f"{url!r} names a host", hint="file:///absolute/path has three slashes")
    return Path(unquote(parts.path)).absolute()


def check_connect_options(what: str, options: Iterable[str]) -> None:
    """Check that ``connect`` has these options, for callers that pass them on later.

    Args:
        what: Name of the function that takes the options, for the message.
        options: Names of the options.

    Raises:
        ConfigError: An option does not exist; the message suggests the closest one that does.
    """
    check_names(what, options, [name for name in inspect.signature(connect).parameters if name != "url"])


def split_s3(url: str) -> tuple[str, str]:
    """Return the bucket (or access point ARN) and the key of an ``s3://`` URL.

    Raises:
        ConfigError: The URL has no bucket, or holds credentials.
    """
    rest = url.removeprefix("s3://")
    if rest.startswith(_ARN):
        head, _, tail = rest.partition("accesspoint")
        name, _, key = tail[1:].partition("/")
        return f"{head}accesspoint{tail[:1]}{name}", key
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise ConfigError(f"{url!r} has no bucket", hint="s3://bucket/key")
    if "@" in bucket or ":" in bucket:  # the part before a slash may be half of a secret key
        raise ConfigError(f"{url!r}: the URL must not hold credentials", hint="pass credentials=")
    return bucket, key


def split(url: str | os.PathLike[str]) -> tuple[str, str]:
    """Split the URL of an object or prefix into the URL of a store and the key in it.

    ``s3://b/a/x.tar`` becomes ``("s3://b", "a/x.tar")``. The store of a path is its directory: ``/data/x.tar`` becomes
    ``("/data", "x.tar")``, and ``/data/`` becomes ``("/data", "")``. The key of an ``http(s)://`` URL is its last segment
    with percent-encoding undone; if the URL has a query, which may sign exactly these characters, the key stays encoded.
    """
    text = os.fspath(url)
    scheme = text.partition("://")[0] if "://" in text else ""
    if scheme == "s3":
        bucket, key = split_s3(text)
        return f"s3://{bucket}", key
    if scheme in ("", "file"):
        path = local_path(text)
        if text.endswith("/") or path.is_dir():
            return str(path), ""
        return str(path.parent), path.name
    root, _, key = text.partition("://")[2].partition("/")
    if scheme in ("http", "https"):
        name, _, query = key.partition("?")
        directory, slash, name = name.rpartition("/")
        return f"{scheme}://{root}/{directory}{slash}", f"{name}?{query}" if query else unquote(name)
    return f"{scheme}://{root}", key


def key_below(root: str, url: str) -> str:
    """Return the key that `url` has in the store of `root`.

    Percent-encoding is undone in ``file:`` URLs, and in ``http(s)://`` URLs without a query, as ``split`` does.

    Args:
        root: A URL or path that ends with a slash, with which `url` begins.
        url: The URL of an object.
    """
    key = url[len(root) :]
    is_encoded = root.startswith("file:") or (root.startswith(("http://", "https://")) and "?" not in key)
    return unquote(key) if is_encoded else key


def folder_of(url: str) -> str:
    """Return the URL of the folder that an object lies in, with a slash at its end; slashes in a query do not count."""
    return split(url)[0] if url.startswith(("http://", "https://")) else url[: url.rfind("/") + 1]


def reach_of(url: str) -> tuple[str, ...]:
    """Return the prefixes with which URLs in a file may begin, given the URL of the file.

    Everybody who can write to a store can write a manifest there. It must not have this process read files of this machine,
    or send requests to other hosts. So a file in a store may name objects of the same scheme, which for ``s3://`` is the
    endpoint of the connection, and for ``http(s)://`` of the same host. A file of this machine was given by the user, as the
    arguments of a command are, and may name anything.

    Returns:
        Beginnings of URLs, for ``str.startswith``.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme == "file":
        return ("",)
    if scheme not in ("http", "https"):
        return (f"{scheme}://",)
    host = rest.partition("/")[0].partition("?")[0]
    return f"{scheme}://{host}/", f"{scheme}://{host.rpartition('@')[2]}/"


def check_reach(url: str, *, named_by: str) -> None:
    """Refuse a URL that a file must not name; see ``reach_of``.

    Args:
        url: The URL.
        named_by: URL of the file.

    Raises:
        DataError: The URL is of another scheme or host, or fsspec would read it by way of another file system.
    """
    reach = reach_of(named_by)
    is_chain = "::" in url and reach != ("",) and not url.startswith(_PLAIN_SCHEMES)
    if not url.startswith(reach) or is_chain:
        raise DataError(
            f"it names {public_url(url)}, and a file in a store may name only what begins with {public_url(reach[-1])}",
            shard=named_by,
            hint="copy it to this machine, where a file may name any URL, if you trust whoever wrote it",
        )


@overload
def open(url: str | os.PathLike[str], mode: Literal["rb"] = "rb", **options: Any) -> ObjectReader: ...  # noqa: A001
@overload
def open(url: str | os.PathLike[str], mode: Literal["wb", "xb"], **options: Any) -> Writer: ...  # noqa: A001
@boundary
def open(url: str | os.PathLike[str], mode: str = "rb", **options: Any) -> io.IOBase:  # noqa: A001 - ps.open is its name
    """Open one object as a file.

    Args:
        url: URL of the object, in any scheme that ``connect`` takes.
        mode: ``"rb"`` (seekable, read ahead in sequence, one version), ``"wb"`` (visible on a clean close) or ``"xb"``
            (the same, but it never replaces an object).
        **options: Options of ``connect``.

    Raises:
        ConfigError: The mode or an option is not valid.
        ObjectMissingError: The mode is ``"rb"``, and there is no such object.
        ObjectExistsError: The mode is ``"xb"``, and there is an object by the time of ``close()``.
    """
    if not isinstance(url, str) and not isinstance(url, os.PathLike):
        raise ConfigError(f"open({url!r}) must be given a URL or a path", hint="s3://bucket/key, /data/file")
    if mode not in ("rb", "wb", "xb"):
        raise ConfigError(f"mode {mode!r} must be 'rb', 'wb' or 'xb'", hint="wrap it in io.TextIOWrapper for text")
    root, key = split(url)
    if not key:
        raise ConfigError(f"{os.fspath(url)!r} does not name an object")
    from penstock.store.file import open_file

    store = connect(root, **options)
    return open_file(store, key, mode)


_NOT_ONLY_S3 = ("transport", "retry", "hedge", "fetch", "cache", "requests_max")
"""Options of ``connect`` that mean something for every store."""


class StoreTable:
    """Stores by URL, for callers that get paths in any of them: each store is connected to when it is first used.

    Args:
        options: Arguments of ``connect``.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self._stores: dict[str, Store] = {}
        self._lock = threading.Lock()
        forks.register(self)

    def after_fork_in_child(self) -> None:
        """Replace the lock; the stores themselves can be used in a forked child."""
        self._lock = threading.Lock()

    def get(self, url: str) -> Store:
        """Return the store of a URL."""
        store = self._stores.get(url)
        if store is None:
            with self._lock:
                store = self._stores.get(url)
                if store is None:
                    store = self._stores[url] = connect(url, **self._options_for(url))
        return store

    def _options_for(self, url: str) -> dict[str, Any]:
        if url.startswith("s3://"):
            return self._options
        return {name: value for name, value in self._options.items() if name in _NOT_ONLY_S3}

    def close(self) -> None:
        """Close all stores; ``get`` connects again. Idempotent."""
        with self._lock:
            stores, self._stores = self._stores, {}
        for store in stores.values():
            store.close()
