"""What tells one job from another: digests of its source and of all that decides which bytes are written.

Identity and display are apart: the digest covers whole URLs, but for signatures; what is written down at the
destination is the digest, never the URL.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from penstock import compose
from penstock.pack.contents import digest_of, value_digest
from penstock.pipeline import Objects, Shards

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DIGESTS = ("source", "transform", "labels")
"""Parts of a job that are digests: URLs may hold secrets, and code says nothing in a line."""

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
"""Query parameters, in small letters, that belong to a signature of S3, Google, CloudFront or Azure, by its own name."""


def unsigned_url(url: str) -> str:
    """`url` without a user's name and password, and without the parameters of a signature; a path as an absolute one.

    A URL that was signed again names the same object, so it is the same source; every other parameter counts.
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
    """32 hexadecimal digits that two sources share only if they are one.

    Of URLs all of them count, with the endpoint that they are asked at, and the options that say what is read below
    them; see ``unsigned_url``. What they hold is the plan's to say. Of lists and tuples everything counts, as far as
    ``value_digest`` can tell; of data sets by number the type, the length and the first sample; of other iterables the
    type alone, because they are replayed and held against what was written.

    Args:
        source: As for ``pack`` and ``convert``.
        connection: To it.
    """
    described = getattr(source, "source", source)
    if isinstance(source, str | os.PathLike):
        parts: list[object] = ["url", *_located([os.fspath(source)], connection)]
    elif isinstance(described, Shards | Objects):
        names = ("is_list", "format", "on_corrupt", "group_by")
        options = [(name, getattr(described, name, None)) for name in names]
        urls = described.urls if described.manifest is None else ("manifest", described.manifest)
        parts = [type(described).__name__, options, *_located(urls, connection)]
    else:
        parts = ["python", f"{type(source).__module__}.{type(source).__qualname__}"]
        if isinstance(source, list | tuple):
            parts += [len(source), value_digest(source)]
        elif hasattr(source, "__getitem__") and hasattr(source, "__len__"):
            parts += [len(source), value_digest(source[0]) if len(source) else None]
    return digest_of(*(repr(part).encode("utf-8", "surrogatepass") for part in parts)).hex()


def _located(urls: Iterable[str], connection: Mapping[str, Any]) -> list[str]:
    """URLs without signatures, and the endpoint at which those of S3 are asked for."""
    located = [unsigned_url(url) for url in urls]
    if any(url.startswith("s3://") for url in located):
        from penstock.store.credentials import setting_endpoint_url

        located.append(str(connection.get("endpoint_url") or setting_endpoint_url(connection.get("profile"))))
    return located


def job_identity(job: Mapping[str, Any]) -> str:
    """Sixteen hexadecimal digits that two jobs share only if they do the same with the same source."""
    return hashlib.blake2b(json.dumps(job, sort_keys=True).encode(), digest_size=8).hexdigest()


def differences(job: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """In what two jobs differ, for people: values where they say something, else the name alone."""
    found = []
    for name in sorted(job.keys() | other.keys()):
        here, there = job.get(name), other.get(name)
        if here != there:
            is_digest = name in DIGESTS or isinstance(here, list) or isinstance(there, list)
            found.append(f"another {name}" if is_digest else f"{name}={there!r} instead of {here!r}")
    return found
