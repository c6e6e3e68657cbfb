"""From a URL to a store: the scheme's core, and the default stack of wrappers around it.

``Traced(Hedged(Retrying(Limited(S3Store))))``: a request that backs off holds no permit, a hedge is retried like any
other request, and what is traced is what the caller saw. Local files, memory and fsspec get ``Traced`` alone: their
failures do not pass by waiting. With ``cache=``, ``Cached`` is around all of it: a block that is here is no request.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload
from urllib.parse import unquote

from penstock.config import check_configs
from penstock.errors import ConfigError
from penstock.fetch import configure_process_budget
from penstock.redaction import url_parts
from penstock.tracebacks import boundary

if TYPE_CHECKING:
    import io
    from collections.abc import Iterator

    from penstock.cache import CacheConfig
    from penstock.config import FetchConfig, HedgeConfig, RetryConfig, TransportConfig
    from penstock.store.base import Store
    from penstock.store.credentials import Credentials
    from penstock.store.file import ObjectReader
    from penstock.store.writing import Writer
    from penstock.types import ObjectInfo

_ARN = "arn:aws"


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
    requests_max: int = 1024,
    transport: TransportConfig | None = None,
    retry: RetryConfig | None = None,
    hedge: HedgeConfig | None = None,
    fetch: FetchConfig | None = None,
    cache: CacheConfig | str | os.PathLike[str] | None = None,
) -> Store:
    """A store for the objects below `url`; nothing is asked of the network yet.

    Args:
        url: ``s3://bucket[/prefix/]``, ``s3://ARN[/prefix/]`` of an access point, ``file:///dir`` or a plain path,
            ``http(s)://host/base/`` (read only), ``memory://name``, or any scheme that fsspec knows. Keys are relative to it.
        endpoint_url: Of an S3-compatible store. Default: ``AWS_ENDPOINT_URL_S3``, ``AWS_ENDPOINT_URL``, the config
            file, else Amazon.
        region: Default: ``AWS_REGION``, the config file, else us-east-1; a wrong one heals itself.
        profile: Section of ``~/.aws/config``. Default: ``AWS_PROFILE``.
        credentials: Fixed keys. Default: botocore's chain (environment, files, SSO, web identity, container, instance).
        anonymous: Sign nothing, for public data.
        addressing: ``"virtual"`` is ``bucket.host``, ``"path"`` is ``host/bucket``; ``"auto"`` is virtual on Amazon only.
        requester_pays: Agree to pay for requests and transfer.
        sse_customer_key: 32 bytes: the key of objects encrypted with SSE-C.
        expected_bucket_owner: Account that must own the bucket.
        upload_checksums: Send a CRC32C with what is written.
        requests_max: Requests of this store in flight at once.
        transport: Deadlines, connections, TLS, proxy.
        retry: Attempts and backoff.
        hedge: Second requests for late answers; ``HedgeConfig(ratio_max=0)`` turns them off.
        fetch: Parts, read-ahead, gap, and the process's byte budget.
        cache: Keep what is read on this node's disk: ``"/nvme/penstock:200GB"``, or a ``CacheConfig``.

    Raises:
        ConfigError: The URL or an argument is not valid, or this system is not Linux.
    """
    if sys.platform != "linux":
        raise ConfigError(
            f"penstock runs on Linux, and this is {sys.platform}",
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
    """The buckets that the keys may list, in the store's order; arguments as of ``connect``.

    Returns:
        An iterator of prefixes: ``key`` is the name and a slash, ``last_modified_s`` the time of creation.

    Raises:
        StoreError: by iterating; for example the keys may not list buckets.

    Cost: one request per 1 000 buckets.
    """
    from penstock.store.s3_requests import S3Options
    from penstock.store.waiting import perform
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
    """The endpoint of an S3 store, which tells two buckets of one name apart; "" for Amazon's, and for other stores."""
    inner: Any = store
    while (further := getattr(inner, "inner", None)) is not None:
        inner = further
    return getattr(getattr(inner, "endpoint", None), "endpoint_url", None) or ""


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

        return MemoryStore(name=url.partition("://")[2])
    if scheme in ("", "file"):
        from penstock.store.local import LocalStore

        return LocalStore(local_path(url))
    from penstock.store.fsspec import FsspecStore

    return FsspecStore(url)


def local_path(url: str) -> Path:
    """The path of a ``file://`` URL, or of a plain path, made absolute.

    Raises:
        ConfigError: a ``file://`` URL that names another host; a URL that lacks a slash.
    """
    if url.startswith(("s3:", "http:", "https:")):
        scheme, _, rest = url.partition(":")
        hint = f"{scheme}://{rest.lstrip('/')} has two slashes; write a path of this name with ./ before it"
        raise ConfigError(f"{url!r} is a path, and begins like a URL", hint=hint)
    if not url.startswith("file:"):
        return Path(url).expanduser().absolute()
    parts = url_parts(url)
    if parts is None or parts.netloc not in ("", "localhost"):
        raise ConfigError(f"{url!r} names a host", hint="file:///absolute/path has three slashes")
    return Path(unquote(parts.path)).absolute()


def split_s3(url: str) -> tuple[str, str]:
    """Bucket (or access point ARN) and key of an ``s3://`` URL.

    Raises:
        ConfigError: there is no bucket in it.
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
    """The URL of a store, and the key in it, of one object's or prefix's URL.

    ``s3://b/a/x.tar`` is ``("s3://b", "a/x.tar")``; of a path the store is its directory: ``/data/x.tar`` is
    ``("/data", "x.tar")``, and ``/data/`` is ``("/data", "")``. Of an ``http(s)://`` URL the key is the name, its
    percent-encoding undone; with a query, which may be a signature of just these characters, it stays as it is.
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
    """Key of an object in the store of `root`, a URL or path that ends with a slash and that `url` begins with.

    Percent-encoding is undone as by ``split``: in ``file:`` URLs, and in ``http(s)://`` URLs without a query.
    """
    key = url[len(root) :]
    is_encoded = root.startswith("file:") or (root.startswith(("http://", "https://")) and "?" not in key)
    return unquote(key) if is_encoded else key


def folder_of(url: str) -> str:
    """URL of the folder that an object lies in, with a slash at its end; slashes in the query of a signed URL are none."""
    return split(url)[0] if url.startswith(("http://", "https://")) else url[: url.rfind("/") + 1]


@overload
def open(url: str | os.PathLike[str], mode: Literal["rb"] = "rb", **options: Any) -> ObjectReader: ...  # noqa: A001
@overload
def open(url: str | os.PathLike[str], mode: Literal["wb", "xb"], **options: Any) -> Writer: ...  # noqa: A001
@boundary
def open(url: str | os.PathLike[str], mode: str = "rb", **options: Any) -> io.IOBase:  # noqa: A001 - ps.open is its name
    """One object as a file.

    Args:
        url: Of the object, in any scheme that ``connect`` takes.
        mode: ``"rb"`` (seekable, read ahead in sequence, one version), ``"wb"`` (visible on a clean close) or ``"xb"``
            (the same, but it never replaces an object).
        **options: As for ``connect``.

    Raises:
        ConfigError: the mode or an option cannot be.
        ObjectMissingError: ``"rb"``, and there is none.
        ObjectExistsError: ``"xb"``, by ``close()``: there is one by then.
    """
    if not isinstance(url, str) and not isinstance(url, os.PathLike):
        raise ConfigError(f"open({url!r}) must be given a URL or a path", hint="s3://bucket/key, /data/file")
    if mode not in ("rb", "wb", "xb"):
        raise ConfigError(f"mode {mode!r} must be 'rb', 'wb' or 'xb'", hint="wrap it in io.TextIOWrapper for text")
    root, key = split(url)
    if not key:
        raise ConfigError(f"{os.fspath(url)!r} names no object")
    from penstock.store.file import open_file

    store = connect(root, **options)
    return open_file(store, key, mode)
