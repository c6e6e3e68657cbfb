"""Identities of results: everything on which their bytes depend, the ETag that follows from it, and how they are produced.

Nothing here touches a file. Two independent gateways compute the same ETag for the same source, transform and arguments.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache.entry import RESULT, EntryName, digest_of, entry_name, identity_of, origin_of
from penstock.config import GIB

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from penstock.gateway.objects import ResultWriter
    from penstock.store.base import Store

_ENDPOINT = "results"
"""Stands for the endpoint in the identities of entries, so that ``penstock cache info`` shows results by upstream."""

_ETAG_BYTES = 20
"""40 hexadecimal digits. Clients take an ETag of 32 digits for the MD5 of the body, and refuse a body that has another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultIdentity:
    """Everything on which the bytes of a result depend.

    Attributes:
        scope: The upstream, as ``scope_of`` names it.
        key: Key of the source in the upstream.
        source_etag: ETag of the source.
        transform: ``Transform.identity``.
        version: ``AccessPoint.version``.
        arguments: The arguments, sorted by name.
        nonce: Distinguishes the runs of a transform that is not deterministic; empty if it is.
    """

    scope: str
    key: str
    source_etag: str
    transform: str
    version: str = ""
    arguments: tuple[tuple[str, str], ...] = ()
    nonce: str = ""

    @property
    def name(self) -> ResultName:
        """The way in which the result is found."""
        return ResultName(self.scope, self.key, self.etag)

    def with_new_nonce(self) -> ResultIdentity:
        """Return the identity of one more result of a transform that is not deterministic."""
        return replace(self, nonce=secrets.token_hex(10))

    @property
    def etag(self) -> str:
        """The ETag of the result, with its quotes. Cost: 3 µs."""
        fields = (self.scope, self.key, self.source_etag, self.transform, self.version, self.nonce)
        arguments = [text for pair in self.arguments for text in pair]
        digest = blake2b(digest_size=_ETAG_BYTES)
        for text in (*fields, *arguments):  # with their lengths, because an argument may contain any character
            raw = text.encode(errors="surrogateescape")
            digest.update(len(raw).to_bytes(8, "little"))
            digest.update(raw)
        return f'"{digest.hexdigest()}-{self.nonce}"' if self.nonce else f'"{digest.hexdigest()}"'

    def with_nonce_of(self, etag: str) -> ResultIdentity | None:
        """Return the identity that has this ETag, if it differs in nothing but the nonce; else None."""
        found = replace(self, nonce=etag.strip('"').partition("-")[2])
        return found if found.nonce and found.etag == etag else None


class ResultName(NamedTuple):
    """The way in which a result is found: by a request that computed its ETag, or that sent the ETag in ``If-Match``.

    Attributes:
        scope: The upstream, as ``scope_of`` names it.
        key: Key of the source in the upstream.
        etag: ETag of the result, with its quotes.
    """

    scope: str
    key: str
    etag: str

    def record_identity(self, namespace: str) -> bytes:
        """Return the identity of the entry that holds the result's record."""
        return identity_of(namespace, _ENDPOINT, self.scope, self.key, self.etag, "record")

    def blocks_identity(self, namespace: str, run: str, block_bytes: int) -> bytes:
        """Return the identity of the blocks that one run of the transform produced."""
        return identity_of(namespace, _ENDPOINT, self.scope, self.key, f"{self.etag} {run}", str(block_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultPlan:
    """A result, and how it is produced.

    Attributes:
        name: Name by which the result is found.
        produce: Writes the result; see ``Transform.run``. Cancelling its task ends it. None if the result can only be read as
            long as it is kept.
        transform: Name of the transform, for logs and messages.
        access_point: Name of the access point, for metrics.
        waits_for_results: Whether the result is made of other results. Then it takes no turn from the transforms of these.
        arguments: Arguments of the transform, shown by ``penstock gateway ls``.
        is_deterministic: Whether producing it again gives the same bytes.
        size_bytes: Size of the result in bytes if it is known beforehand; a result of another size is an error.
        last_modified_s: Time of the last change of the source, in seconds since 1970.
        time_s_max: Longest time for producing it, in seconds.
        output_bytes_max: Largest size of the result in bytes.
    """

    name: ResultName
    produce: Callable[[ResultWriter], Awaitable[None]] | None
    transform: str = ""
    access_point: str = ""
    waits_for_results: bool = False
    arguments: Mapping[str, str] = field(default_factory=dict)
    is_deterministic: bool = True
    size_bytes: int | None = None
    last_modified_s: float = 0.0
    time_s_max: float = 300.0
    output_bytes_max: int = 1024 * GIB


def scope_of(store: Store) -> str:
    """Return the URL of an upstream, and on a second line its endpoint if it is not Amazon's.

    Results are shared only within a scope: the same key and ETag at two endpoints may be two objects.
    """
    url, origin = store.describe(""), origin_of(store)
    return url if origin in ("", "aws") else f"{url}\n{origin}"


def record_entry(identity: bytes) -> tuple[EntryName, str]:
    """Return the name of the entry of a record, and the digest of its identity."""
    return entry_name(RESULT, identity), digest_of(identity)
