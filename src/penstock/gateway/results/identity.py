"""Identities of results: everything on which their bytes depend, and the ETag that follows from it.

Nothing here touches a file. Two gateways that have never heard of each other compute the same ETag for the same source,
transform and arguments.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from penstock.cache.entry import RESULT, EntryName, digest_of, entry_name, identity_of, origin_of

if TYPE_CHECKING:
    from collections.abc import Mapping

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

    @classmethod
    def of(
        cls, arguments: Mapping[str, str], *, scope: str, key: str, source_etag: str, transform: str, version: str
    ) -> ResultIdentity:
        """Return the identity of a result of a deterministic transform."""
        return cls(
            scope=scope,
            key=key,
            source_etag=source_etag,
            transform=transform,
            version=version,
            arguments=tuple(sorted(arguments.items())),
        )

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
    """How a result is found: by a request that computed its ETag, or that sent the ETag in ``If-Match``.

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


def scope_of(store: Store) -> str:
    """Return the URL of an upstream, and on a second line its endpoint if it is not Amazon's.

    Results are shared only within a scope: the same key and ETag at two endpoints may be two objects.
    """
    url, origin = store.describe(""), origin_of(store)
    return url if origin in ("", "aws") else f"{url}\n{origin}"


def record_entry(identity: bytes) -> tuple[EntryName, str]:
    """Return the name of the entry of a record, and the digest of its identity."""
    return entry_name(RESULT, identity), digest_of(identity)
