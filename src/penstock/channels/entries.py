"""The entries of a channel on this host: its objects, or the records of an augmented manifest, in the order of its source.

An entry is the unit of shuffling and of sharing among hosts: an object, or a line of an augmented manifest, whose attributes
stay together. Entries are found while they are used, so the first bytes of an ordinary prefix need one page of the listing.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from array import array
from collections import Counter
from itertools import islice
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from penstock import compose
from penstock.channels.inside import is_path
from penstock.errors import ClosedStoreError, ConfigError, DataError, ObjectMissingError
from penstock.index import FOLDER, is_sagemaker_manifest, iter_manifest
from penstock.order.permutation import key_of, permutation
from penstock.store.base import MultiStore
from penstock.text.json_text import parse_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from penstock.channels.inputs import InputChannel
    from penstock.store import Store
    from penstock.types import Key


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

_UNKNOWN = -1
_ERRORS = "surrogatepass"  # files of this machine may have names that are no text


class EntryTable:
    """Entries by their number. One thread may append while others read.

    An object's texts are bytes in one buffer, and its numbers lie in arrays. As Python objects, they would take five times the
    memory. Entries of several pieces, and objects whose name is not the end of their key, are kept as they are.

    Cost: for an object, 36 bytes and its key and ETag, which for most is about 100; 1 µs to append it, and 1 µs to get it.
    """

    __slots__ = ("_key_ends", "_modified_s", "_name_lengths", "_others", "_sizes", "_text_ends", "_texts")

    def __init__(self) -> None:
        self._texts = bytearray()
        self._key_ends = array("Q")  # for each entry, where the bytes of its key end
        self._text_ends = array("Q")  # for each entry, where those of its ETag end
        self._name_lengths = array("I")
        self._sizes = array("q")
        self._modified_s = array("d")
        self._others: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._text_ends)

    def is_same(self, other: EntryTable) -> bool:
        """Whether both have equal entries, with equal ETags, sizes and times. Cost: 1 ms for 100 000 objects."""
        return (
            self._texts == other._texts
            and self._key_ends == other._key_ends
            and self._text_ends == other._text_ends
            and self._name_lengths == other._name_lengths
            and self._sizes == other._sizes
            and self._modified_s.tobytes() == other._modified_s.tobytes()  # an unknown time is no number
            and self._others == other._others
        )

    def append(self, entry: Entry) -> None:
        """Add an entry."""
        piece = entry[0] if len(entry) == 1 else b""
        if isinstance(piece, ChannelObject) and piece.key.endswith(piece.name):
            key, name, size_bytes, etag, modified_s = piece
            self._texts += key.encode(errors=_ERRORS)
            self._key_ends.append(len(self._texts))
            if etag is not None:
                self._texts += etag.encode()
            self._name_lengths.append(len(name))
            self._sizes.append(_UNKNOWN if size_bytes is None else size_bytes)
            self._modified_s.append(math.nan if modified_s is None else modified_s)
        else:
            self._others[len(self)] = entry
            self._key_ends.append(len(self._texts))
            self._name_lengths.append(0)
            self._sizes.append(_UNKNOWN)
            self._modified_s.append(math.nan)
        self._text_ends.append(len(self._texts))  # the last, as it says that the entry is there

    def __getitem__(self, number: int) -> Entry:
        """Return an entry.

        Raises:
            IndexError: There are not so many.
        """
        end = self._text_ends[number]
        if number in self._others:
            return self._others[number]
        start = self._text_ends[number - 1] if number else 0
        key_end = self._key_ends[number]
        key = self._texts[start:key_end].decode(errors=_ERRORS)
        size_bytes, modified_s = self._sizes[number], self._modified_s[number]
        found = ChannelObject(
            key,
            key[len(key) - self._name_lengths[number] :],
            None if size_bytes == _UNKNOWN else size_bytes,
            self._texts[key_end:end].decode() if end > key_end else None,
            None if math.isnan(modified_s) else modified_s,
        )
        return (found,)


MANIFEST_BYTES_MAX = 1 << 30
"""Largest manifest; it is held in memory."""

REFERENCE_SUFFIX = "-ref"

FOUND_AT_ONCE = 1000
"""Entries that are found in one turn of the lock, if all are wanted: a page of a listing."""


Connect: TypeAlias = "Callable[[str], Store]"
"""Opens the store at a URL; a run's stores are closed with the run."""


class EntrySource(Protocol):
    """Finds the entries of a channel."""

    store: Store
    """The store that the keys of all objects are of."""

    is_listed: bool
    """Whether the entries are listed, so that they may be others in the next epoch; those of a manifest stay."""

    def entries(self) -> Iterator[Entry]:
        """Find all entries, in order."""


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

    Objects that no path can express are left out in all modes, and a warning says so. Pipes leave out the index beside the
    shards, too: in a stream, no program could tell it from them.
    """

    is_listed = True

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
        has_any = has_warned = False
        start = len(self._prefix) if self._prefix.endswith("/") or not self._prefix else None
        for info in self.store.list(self._prefix):
            key = info.key
            if key.endswith("/") and not info.size_bytes:
                continue  # what consoles make for a folder
            name = key[start:] if start is not None else name_below(self._prefix, key)
            if not self._has_indexes and FOLDER in name and f"/{FOLDER}" in f"/{name}":
                continue
            if not is_path(name):
                if not has_warned:
                    what = "Channel %r: %r and others like it are left out, because no file can have such a path."
                    logging.getLogger("penstock").warning(what, self._channel.name, key)
                has_warned = True
                continue
            has_any = True
            yield (ChannelObject(key, name, info.size_bytes, info.etag, info.last_modified_s),)
        if not has_any:
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
    """The objects that a manifest names: SageMaker's, or one of the kinds that ``penstock.shards(manifest=)`` reads.

    The lines of a manifest are read while its entries are used, if the names of the files do not depend on all of them.
    """

    is_listed = False

    def __init__(self, channel: InputChannel, text: bytes, connect: Connect) -> None:
        self._url = channel.url
        self._text = text
        self._stores = _SeveralStores(connect)
        first = next(iter_manifest(text, url=self._url), None)
        if first is None:
            raise DataError("the manifest names no object", shard=self._url)
        self._stores.key_of(first.url)
        self._base = _prefix_of(text)
        if self._base is None and channel.mode != "Pipe":  # there are no files in pipes
            self._base = _common_folder(entry.url for entry in iter_manifest(text, url=self._url))
        self.store: Store = self._stores.joined()

    def entries(self) -> Iterator[Entry]:
        """Yield the objects in the manifest's order.

        Raises:
            DataError: A line of the manifest cannot be read.
        """
        for entry in iter_manifest(self._text, url=self._url):
            start = entry.url.rfind("/") + 1 if self._base is None else len(self._base)
            key = self._stores.key_of(entry.url)
            yield (ChannelObject(key, entry.url[start:], entry.size_bytes, entry.etag),)


def _prefix_of(text: bytes) -> str | None:
    """Return the prefix of a manifest of SageMaker's kind, or None if it is of another kind."""
    if not is_sagemaker_manifest(text):
        return None
    first = parse_json(text)[0]
    prefix = str(first["prefix"])
    return prefix if prefix.endswith("/") else prefix[: prefix.rfind("/") + 1]


def _common_folder(urls: Iterator[str]) -> str:
    common = next(urls)
    for url in urls:
        while not url.startswith(common):
            common = common[: common[:-1].rfind("/") + 1]
    return common[: common.rfind("/") + 1]


class _AugmentedSource:
    """The lines of an augmented manifest; each entry has the chosen attributes in their order.

    An attribute whose name ends with ``-ref`` is a URL, and its object is streamed. Text is streamed as it is, and any other
    value as JSON.
    """

    is_listed = False

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
            row = parse_json(line)
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
            return self._text(value, number)
        if not isinstance(value, str) or "://" not in value:
            raise DataError(f"line {number} of the manifest has no URL in {name!r}", shard=self._url, field=name)
        compose.check_reach(value, named_by=self._url)
        return ChannelObject(self._stores.key_of(value), PurePosixPath(value).name)

    def _text(self, value: Any, number: int) -> bytes:
        try:
            return (value if isinstance(value, str) else json.dumps(value)).encode()
        except (RecursionError, UnicodeEncodeError) as error:  # an escape may stand for half of a character
            raise DataError(
                f"line {number} of the manifest has a value that is no text: {error}", shard=self._url
            ) from error


class _SeveralStores:
    """The stores that the URLs of a manifest name, as one. Each is opened when the first of its URLs is met."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._numbers: dict[str, int] = {}
        self._joined: MultiStore | None = None
        self._latest = ""  # the URL of the latest store, with a slash
        self._latest_number = 0

    def key_of(self, url: str) -> Key:
        """Return the key that an object has in the joined store."""
        if self._latest and url.startswith(self._latest) and len(url) > len(self._latest):
            return f"{self._latest_number}/{url[len(self._latest) :]}"
        root, key = compose.split(url)
        if not key:
            raise DataError(f"{url!r} does not name an object")
        if root not in self._numbers:
            self._open(root)
        number = self._numbers[root]
        if url == f"{root}/{key}" and root.startswith(
            "s3://"
        ):  # the key of other URLs may differ from the text after the root
            self._latest, self._latest_number = f"{root}/", number
        return f"{number}/{key}"

    def joined(self) -> MultiStore:
        """Return all stores as one; without any URL, a store without objects."""
        if self._joined is None:
            self._joined = MultiStore([self._connect("memory://nothing")])
        return self._joined

    def _open(self, root: str) -> None:
        store = self._connect(root)
        if self._joined is None:
            self._joined = MultiStore([store])
        else:
            self._joined.add(store)
        self._numbers[root] = len(self._numbers)


class Entries:
    """The entries of one channel, listed once and shared by all its pipes. Safe for several threads.

    Args:
        source: Finds the entries, when they are first needed.

    Cost: that of an ``EntryTable``.
    """

    def __init__(self, source: EntrySource) -> None:
        self.store = source.store
        self._source = source
        self._iterator: Iterator[Entry] | None = source.entries()
        self._found = EntryTable()
        self._failure: Exception | None = None
        self._lock = threading.Lock()

    def get(self, number: int) -> Entry | None:
        """Return an entry, or None if there are not so many.

        Raises:
            StoreError: The listing failed.
        """
        while number >= len(self._found):
            if not self._find(1) and number >= len(self._found):
                return None
        return self._found[number]

    def count(self) -> int:
        """Return the number of all entries; this waits for the end of the listing."""
        while self._find(FOUND_AT_ONCE):
            pass
        return len(self._found)

    def again(self) -> Entries:
        """Return the entries as they are now: a new listing; of a manifest, the same."""
        return Entries(self._source) if self._source.is_listed else self

    def is_same(self, other: Entries) -> bool:
        """Whether both have found the same entries, in the same versions."""
        return self._found.is_same(other._found)

    def give_up(self) -> None:
        """End a listing with an error, soon; any thread may call it."""
        self._failure = ClosedStoreError("the run has ended")

    def _find(self, count: int) -> bool:
        """Find at most `count` further entries; returns whether there was one."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._iterator is None:
                return False
            before = len(self._found)
            try:
                for entry in islice(self._iterator, count):
                    self._found.append(entry)
            except Exception as error:
                self._failure = error
                raise
            if len(self._found) - before < count:
                self._iterator = None
            return len(self._found) > before


class EpochEntries:
    """The entries of each epoch, listed again when the first of its readers begins it. Safe for several threads.

    Args:
        first: The entries of the first epoch.
        readers_count: Number of readers; entries that none of them reads any more are dropped.

    Attributes:
        latest: The entries of the latest epoch that has begun, which are those of the next one unless something changes.

    Cost: one listing for each epoch but the first; entries that have changed, for as long as a reader is behind.
    """

    def __init__(self, first: Entries, *, readers_count: int) -> None:
        self.latest = first
        self._by_epoch = {0: first}
        self._left = Counter[int]()
        self._readers_count = readers_count
        self._lock = threading.Lock()
        self._listing = first

    def begin(self, epoch: int) -> Entries:
        """Return the entries of an epoch that a reader begins.

        Raises:
            StoreError: The listing failed.
        """
        with self._lock:
            if epoch not in self._by_epoch:
                self._listing = self.latest.again()
                if self._listing is not self.latest:
                    self._listing.count()
                    if not self._listing.is_same(self.latest):
                        self.latest = self._listing
                self._by_epoch[epoch] = self.latest
            return self._by_epoch[epoch]

    def leave(self, epoch: int) -> None:
        """Note that a reader has ended an epoch."""
        with self._lock:
            self._left[epoch] += 1
            if self._left[epoch] == self._readers_count:
                del self._left[epoch], self._by_epoch[epoch]

    def close(self) -> None:
        """End a listing that goes on, with an error; idempotent."""
        self._listing.give_up()


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
