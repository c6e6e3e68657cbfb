"""Options that every command takes, and URLs taken apart into a store and a key."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Self
from urllib.parse import unquote

import typer

from penstock.errors import ConfigError
from penstock.redaction import public_url

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.store.base import Store
    from penstock.types import Key, ObjectInfo

EndpointUrl = Annotated[
    str | None,
    typer.Option("--endpoint-url", metavar="URL", help="S3 endpoint; default: AWS_ENDPOINT_URL_S3, profile, Amazon."),
]
Region = Annotated[
    str | None, typer.Option("--region", metavar="NAME", help="Region to sign for; default: AWS_REGION, profile.")
]
Profile = Annotated[
    str | None, typer.Option("--profile", metavar="NAME", help="Profile of ~/.aws/config; default: AWS_PROFILE.")
]
Anonymous = Annotated[bool, typer.Option("--anonymous", help="Do not sign: public data.")]
SourceEndpointUrl = Annotated[
    str | None, typer.Option("--source-endpoint-url", metavar="URL", help="Of SRC, where it is another store's.")
]
SourceProfile = Annotated[
    str | None, typer.Option("--source-profile", metavar="NAME", help="Of SRC, where others may read it.")
]
SourceAnonymous = Annotated[bool, typer.Option("--source-anonymous", help="Do not sign what is read: SRC is public.")]
Cache = Annotated[
    str | None,
    typer.Option("--cache", metavar="PATH:SIZE", help="Keep what is read on this node's disk, /nvme/penstock:200GB."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]


@dataclass(frozen=True, slots=True)
class Place:
    """A URL: a store, and a key or prefix in it."""

    url: str
    """For people: without a query, which may be a signature."""
    root_url: str
    key: Key
    store: Store
    path: Path | None
    """The same, where it is on this machine."""

    @property
    def is_folder(self) -> bool:
        """Whether the URL says that it means everything below: it ends with a slash, or is a directory here."""
        return self.key.endswith("/") or not self.key

    def is_with(self, other: Place) -> bool:
        """Whether both are in one store, though they may be asked for with other keys."""
        from penstock.compose import endpoint_of

        return self.root_url == other.root_url and endpoint_of(self.store) == endpoint_of(other.store)

    @property
    def name(self) -> str:
        """What a copy of the object is called, in a folder: of a signed URL, without its signature."""
        if not self.url.startswith(("http://", "https://")):
            return self.key.rpartition("/")[2]
        return unquote(self.store.describe(self.key).rpartition("/")[2])


@dataclass(slots=True, kw_only=True)
class Connection:
    """Where and as whom to ask; one store per root. A context manager that closes them."""

    endpoint_url: str | None
    region: str | None
    profile: str | None
    anonymous: bool
    cache: str | None = None
    _stores: dict[str, Store] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for store in self._stores.values():
            store.close()

    def of_source(self, *, endpoint_url: str | None, profile: str | None, anonymous: bool) -> Connection:
        """This connection, or where an argument says so, another one for what is read."""
        if not (endpoint_url or profile or anonymous):
            return self
        return Connection(
            endpoint_url=endpoint_url or self.endpoint_url,
            region=None if endpoint_url or profile else self.region,
            profile=None if anonymous else profile or self.profile,
            anonymous=anonymous or (self.anonymous and not profile),
            cache=self.cache,
        )

    def store(self, root_url: str) -> Store:
        """The store at `root_url`, the same one each time."""
        from penstock.compose import connect

        if root_url not in self._stores:
            self._stores[root_url] = connect(
                root_url,
                endpoint_url=self.endpoint_url,
                region=self.region,
                profile=self.profile,
                anonymous=self.anonymous,
                cache=self.cache,
            )
        return self._stores[root_url]

    def buckets(self) -> Iterator[ObjectInfo]:
        """The buckets at the endpoint: see ``penstock.compose.list_buckets``."""
        from penstock.compose import list_buckets

        return list_buckets(
            endpoint_url=self.endpoint_url, region=self.region, profile=self.profile, anonymous=self.anonymous
        )

    def place(self, url: str) -> Place:
        """`url` taken apart.

        Raises:
            ConfigError: it is no URL that penstock knows.
        """
        from penstock.compose import local_path, split

        if not url or "\0" in url:
            raise ConfigError(f"{url!r} is neither a URL nor a path", hint="s3://bucket/key, or a path")
        root_url, key = split(url)
        path = local_path(url) if "://" not in url or url.startswith("file:") else None
        return Place(public_url(url), root_url, key, self.store(root_url), path)
