"""What a channel consists of on this host: its objects, and the records of an augmented manifest, in the order of its source.

An entry is what is shuffled and shared out as one: an object, or a line of an augmented manifest, whose attributes stay
together. Entries are found while they are used, so that the first bytes of an ordinary prefix need one page of the listing.
"""

from __future__ import annotations

import json
import threading
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from penstock import compose
from penstock.errors import ConfigError, DataError, ObjectMissingError
from penstock.index import FOLDER, read_manifest
from penstock.order.permutation import key_of, permutation
from penstock.store.multi import MultiStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from penstock.channels.inputs import InputChannel
    from penstock.store import Store
    from penstock.types import Key

MANIFEST_BYTES_MAX = 1 << 30
"""Largest manifest; it is held in memory."""

REFERENCE_SUFFIX = "-ref"


class ChannelObject(NamedTuple):
    """One object of a channel.

    Attributes:
        key: Key in the channel's store.
        name: Path below the directory of the channel.
        size_bytes: Size in bytes; None if it is not known.
        etag: ETag of the version to read; None if it is not known.
        modified_s: Seconds since the epoch of its last change; None if it is not known.
    """

    key: Key
    name: str
    size_bytes: int | None = None
    etag: str | None = None
    modified_s: float | None = None


Entry: TypeAlias = "tuple[ChannelObject | bytes, ...]"
"""What stays together: an object, or the attributes of one line, each an object or its text."""


class EntrySource(Protocol):
    """Finds the entries of a channel."""

    store: Store
    """The store that the keys of all objects are of."""

    def entries(self) -> Iterator[Entry]:
        """Find all entries, in order."""


class Connect(Protocol):
    """Opens a store; a run's stores are closed with the run."""

    def __call__(self, root_url: str) -> Store:
        """Return the store at a URL."""


def open_source(channel: InputChannel, connect: Connect) -> EntrySource:
    """Return the source of a channel's entries.

    Raises:
        ConfigError: The URL is not valid.
        StoreError: The manifest cannot be read.
    """
    if channel.data_type == "S3Prefix":
        return _PrefixSource(channel, connect)
    root, key = compose.split(channel.url)
    if not key:
        raise ConfigError(f"channel {channel.name!r}: {channel.url!r} is a prefix, not a manifest")
    store = connect(root)
    info = store.stat(key)
    if info.size_bytes > MANIFEST_BYTES_MAX:
        raise ConfigError(
            f"channel {channel.name!r}: a manifest of {info.size_bytes} bytes is more than {MANIFEST_BYTES_MAX}"
        )
    with store.open(key) as file:
        text = file.read()
    if channel.data_type == "ManifestFile":
        return _ManifestSource(channel, text, connect)
    return _AugmentedSource(channel, text, connect)


class _PrefixSource:
    """All objects whose keys begin with a prefix; those of a directory of this machine.

    Pipes leave out the index beside the shards: in a stream, no program could tell it from them.
    """

    def __init__(self, channel: InputChannel, connect: Connect) -> None:
        root, self._prefix = compose.split(channel.url)
        self._channel = channel
        self._has_indexes = channel.mode != "Pipe"
        self.store = connect(root)

    def entries(self) -> Iterator[Entry]:
        """List the prefix.

        Raises:
            ObjectMissingError: There is no object.
        """
        count = 0
        for info in self.store.list(self._prefix):
            if info.key.endswith("/") and not info.size_bytes:
                continue  # what consoles make for a folder
            name = name_below(self._prefix, info.key)
            if not self._has_indexes and f"/{FOLDER}" in f"/{name}":
                continue
            count += 1
            yield (ChannelObject(info.key, name, info.size_bytes, info.etag, info.last_modified_s),)
        if not count:
            raise ObjectMissingError(
                f"channel {self._channel.name!r} has no object",
                operation="LIST",
                url=self.store.describe(self._prefix),
                hint="check the prefix: penstock ls lists a shorter one",
            )


def name_below(prefix: Key, key: Key) -> str:
    """Return the path of an object below a channel's directory.

    It is relative to the prefix if that is a folder, and relative to the prefix's own folder otherwise.
    """
    if prefix and not prefix.endswith("/"):
        prefix = prefix + "/" if key.startswith(prefix + "/") else prefix[: prefix.rfind("/") + 1]
    return key[len(prefix) :]


class _ManifestSource:
    """The objects that a manifest names: SageMaker's, or one of the kinds that ``penstock.shards(manifest=)`` reads."""

    def __init__(self, channel: InputChannel, text: bytes, connect: Connect) -> None:
        self._stores = _SeveralStores(connect)
        url = channel.url
        found = read_manifest(text, url=url)
        if not found:
            raise DataError("the manifest names no object", shard=url)
        base = _prefix_of(text)
        if base is None:
            base = _common_folder([entry.url for entry in found])
        self._objects = [
            ChannelObject(self._stores.key_of(entry.url), entry.url[len(base) :], entry.size_bytes, entry.etag)
            for entry in found
        ]
        self.store: Store = self._stores.joined()

    def entries(self) -> Iterator[Entry]:
        """Yield the objects in the manifest's order."""
        return ((each,) for each in self._objects)


def _prefix_of(text: bytes) -> str | None:
    """Return the prefix of a manifest of SageMaker's kind, or None if it is of another kind."""
    if not text.lstrip().startswith(b"["):
        return None
    first = json.loads(text)[0]
    prefix = str(first["prefix"])
    return prefix if prefix.endswith("/") else prefix[: prefix.rfind("/") + 1]


def _common_folder(urls: Sequence[str]) -> str:
    common = urls[0]
    for url in urls:
        while not url.startswith(common):
            common = common[: common[:-1].rfind("/") + 1]
    return common[: common.rfind("/") + 1]


class _AugmentedSource:
    """The lines of an augmented manifest; each entry has the chosen attributes in their order.

    An attribute whose name ends with ``-ref`` is a URL, and its object is streamed. Text is streamed as it is, and any other
    value as JSON.
    """

    def __init__(self, channel: InputChannel, text: bytes, connect: Connect) -> None:
        self._stores = _SeveralStores(connect)
        self._names = channel.attribute_names
        self._url = channel.url
        self._entries = [self._entry(line, number) for number, line in enumerate(text.split(b"\n"), 1) if line.strip()]
        if not self._entries:
            raise DataError("the manifest has no line", shard=self._url)
        self.store: Store = self._stores.joined()

    def entries(self) -> Iterator[Entry]:
        """Yield the lines in the manifest's order."""
        return iter(self._entries)

    def _entry(self, line: bytes, number: int) -> Entry:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"line {number} of the manifest is not JSON ({error})", shard=self._url) from error
        if not isinstance(row, dict):
            raise DataError(f"line {number} of the manifest is a {type(row).__name__}, not an object", shard=self._url)
        return tuple(self._piece(row, name, number) for name in self._names)

    def _piece(self, row: Mapping[str, Any], name: str, number: int) -> ChannelObject | bytes:
        if name not in row:
            raise DataError(f"line {number} of the manifest has no attribute {name!r}", shard=self._url, field=name)
        value = row[name]
        if not name.endswith(REFERENCE_SUFFIX):
            return (value if isinstance(value, str) else json.dumps(value)).encode()
        if not isinstance(value, str) or "://" not in value:
            raise DataError(f"line {number} of the manifest has no URL in {name!r}", shard=self._url, field=name)
        return ChannelObject(self._stores.key_of(value), PurePosixPath(value).name)


class _SeveralStores:
    """The stores that the URLs of a manifest name, as one."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._numbers: dict[str, int] = {}

    def key_of(self, url: str) -> Key:
        """Return the key that an object has in the joined store."""
        root, key = compose.split(url)
        if not key:
            raise DataError(f"{url!r} does not name an object")
        return f"{self._numbers.setdefault(root, len(self._numbers))}/{key}"

    def joined(self) -> MultiStore:
        """Return all stores as one; manifests without references connect to none but the first URL's."""
        return MultiStore([self._connect(root) for root in self._numbers] or [self._connect("memory://nothing")])


class Entries:
    """The entries of one channel, listed once and shared by all its pipes. Safe for several threads.

    Args:
        source: Finds the entries, when they are first needed.

    Cost: holds each entry, about 300 bytes.
    """

    def __init__(self, source: EntrySource) -> None:
        self.store = source.store
        self._iterator: Iterator[Entry] | None = source.entries()
        self._found: list[Entry] = []
        self._failure: Exception | None = None
        self._lock = threading.Lock()

    def get(self, number: int) -> Entry | None:
        """Return an entry, or None if there are not so many.

        Raises:
            StoreError: The listing failed.
        """
        while number >= len(self._found):
            with self._lock:
                if number < len(self._found):
                    break
                if self._failure is not None:
                    raise self._failure
                if self._iterator is None:
                    return None
                try:
                    found = next(self._iterator, None)
                except Exception as error:
                    self._failure = error
                    raise
                if found is None:
                    self._iterator = None
                    return None
                self._found.append(found)
        return self._found[number]

    def count(self) -> int:
        """Return the number of all entries; this waits for the end of the listing."""
        number = len(self._found)
        while self.get(number) is not None:
            number += 1
        return number


class EpochOrder:
    """Which entries one reader gets in an epoch, and in which order.

    The readers of all hosts together get each entry once. With a seed, the order of every epoch is another one, and entries
    move from reader to reader.

    Args:
        seed: Seed of the order; None keeps the order of the source.
        part: Number of this reader, from 0.
        parts_count: Number of readers that share the entries.
    """

    def __init__(self, *, seed: int | None = None, part: int = 0, parts_count: int = 1) -> None:
        self.seed = seed
        self._part = part
        self._parts_count = parts_count

    @property
    def has_all(self) -> bool:
        """Whether this reader gets all entries."""
        return self._parts_count == 1

    def numbers(self, count: Callable[[], int], *, epoch: int) -> Iterator[int]:
        """Yield the numbers of this reader's entries; without a seed without end, as nobody knows the count yet.

        Args:
            count: Returns the number of all entries; called if there is a seed.
            epoch: Number of the epoch, from 0.
        """
        if self.seed is None:
            number = self._part
            while True:
                yield number
                number += self._parts_count
        order = permutation(count(), key_of(self.seed, epoch))
        yield from order[self._part :: self._parts_count].tolist()

    def entries(self, entries: Entries, *, epoch: int) -> Iterator[Entry]:
        """Yield this reader's entries of an epoch."""
        for number in self.numbers(entries.count, epoch=epoch):
            found = entries.get(number)
            if found is None:
                return
            yield found


def objects_of(entries: Iterator[Entry]) -> Iterator[ChannelObject]:
    """Yield the objects of entries that are one object each, as those of prefixes and manifests are.

    Raises:
        ConfigError: Two objects have one name.
    """
    keys: dict[str, Key] = {}
    for entry in entries:
        for piece in entry:
            if isinstance(piece, ChannelObject):
                if keys.setdefault(piece.name, piece.key) != piece.key:
                    raise ConfigError(
                        f"the objects {keys[piece.name]!r} and {piece.key!r} would both be {piece.name!r}"
                    )
                yield piece
