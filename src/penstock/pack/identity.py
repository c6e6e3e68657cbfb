"""The identity of a job: digests of its source, and of everything else that decides which bytes are written.

Two runs with the same identity are one job, so the second continues the first. The digest covers whole URLs without
their signatures. Only the digest is written down at the destination, never the URL.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from penstock import compose
from penstock.pack.fingerprint import digest_of, value_digest
from penstock.pipeline import Objects, Pipeline, Shards

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DIGESTS = ("source", "transform", "labels")
"""Parts of a job that are digests, because URLs may hold secrets, and code does not fit into one line."""

_CLOUD = ("algorithm", "credential", "date", "expires", "security-token", "signature", "signedheaders")
_SIGNING = {
    "x-amz-signature": {f"x-amz-{name}" for name in _CLOUD},
    "x-goog-signature": {f"x-goog-{name}" for name in _CLOUD},
    "signature": {"signature", "expires", "policy", "key-pair-id", "awsaccesskeyid", "googleaccessid"},
    "sig": {
        "sig",
        "sv",
        "ss",
        "srt",
        "sp",
        "se",
        "st",
        "spr",
        "sip",
        "sr",
        "skoid",
        "sktid",
        "skt",
        "ske",
        "sks",
        "skv",
    },
}
"""Query parameters, in lower case, that belong to a signature of S3, Google, CloudFront or Azure, by the signature's name."""


def unsigned_url(url: str) -> str:
    """Return `url` without user name, password and the parameters of a signature; a path is made absolute.

    A URL that was signed again names the same object, so it is the same source. All other parameters are kept.
    """
    if "://" not in url or url.startswith("file:"):
        return str(compose.local_path(url))
    if not url.startswith(("http://", "https://")):
        return url
    parts = urlsplit(url)
    given = {pair.partition("=")[0].lower() for pair in parts.query.split("&")}
    signing = set().union(*(names for name, names in _SIGNING.items() if name in given))
    kept = [pair for pair in parts.query.split("&") if pair.partition("=")[0].lower() not in signing]
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "&".join(kept), parts.fragment))


def source_digest(source: object, connection: Mapping[str, Any]) -> str:
    """Return 32 hexadecimal digits that two sources share only if they are the same source.

    For URLs, the digest covers all of them (see ``unsigned_url``), their endpoint, and the options that say what is read
    below them; it does not cover what they hold, which is in the plan. It covers the stages of a pipeline. For lists and
    tuples it covers all items, as far as ``value_digest`` can compare them. For data sets with ``len`` and ``[]`` it covers
    the type, the length and the first sample. For other iterables it covers only the type, because they are replayed and
    compared with what was written.

    Args:
        source: A source that ``pack`` or ``convert`` takes.
        connection: Connection options of the source.
    """
    described = getattr(source, "source", source)
    if isinstance(source, str | os.PathLike):
        parts: list[object] = ["url", *_located([os.fspath(source)], connection)]
    elif isinstance(described, Shards | Objects):
        names = ("is_list", "format", "on_corrupt", "group_by")
        options = [(name, getattr(described, name, None)) for name in names]
        urls = described.urls if described.manifest is None else ("manifest", described.manifest)
        parts = [type(described).__name__, options, *_located(urls, connection)]
        if isinstance(source, Pipeline) and source.stages:
            parts.append(value_digest(source.stages))
    else:
        parts = ["python", f"{type(source).__module__}.{type(source).__qualname__}"]
        if isinstance(source, list | tuple):
            parts += [len(source), value_digest(source)]
        elif hasattr(source, "__getitem__") and hasattr(source, "__len__"):
            parts += [len(source), value_digest(source[0]) if len(source) else None]
    return digest_of(*(repr(part).encode("utf-8", "surrogatepass") for part in parts)).hex()


def _located(urls: Iterable[str], connection: Mapping[str, Any]) -> list[str]:
    """Return the URLs without signatures, and the endpoint of those that are on S3."""
    located = [unsigned_url(url) for url in urls]
    if any(url.startswith("s3://") for url in located):
        from penstock.store.credentials import setting_endpoint_url

        located.append(str(connection.get("endpoint_url") or setting_endpoint_url(connection.get("profile"))))
    return located


def job_identity(job: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits that two jobs share only if they do the same with the same source."""
    return hashlib.blake2b(json.dumps(job, sort_keys=True).encode(), digest_size=8).hexdigest()


def differences(job: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Describe how two jobs differ, for people: with values if they are readable, otherwise by name."""
    found = []
    for name in sorted(job.keys() | other.keys()):
        here, there = job.get(name), other.get(name)
        if here != there:
            is_digest = name in DIGESTS or isinstance(here, list) or isinstance(there, list)
            found.append(f"another {name}" if is_digest else f"{name}={there!r} instead of {here!r}")
    return found
