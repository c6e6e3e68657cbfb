"""What lies at a URL: ``list_url`` lists it once, or samples very many keys; ``look_into`` reads the first samples."""

from __future__ import annotations

import math
import os
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack, cast

from penstock import compose, pipeline
from penstock.errors import AccessDeniedError, ObjectMissingError, PenstockError, UnsupportedFormatError
from penstock.formats import FORMATS, detect, format_of_name, group_objects
from penstock.formats.tar_header import BLOCK_BYTES
from penstock.index import FOLDER
from penstock.loader.preview import peek, picture_kind
from penstock.store.inflight import perform
from penstock.text.patterns import is_pattern, matcher, split_glob
from penstock.types import ByteRange, ListPage, ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from penstock.store import Store
    from penstock.types import Key, Page

OBJECTS_MAX = 100_000
"""Objects that are listed, in 100 requests; of more, number and size are estimated."""

PEEKED_COUNT = 8
PROBES_COUNT = 32
"""Parts of the key space, of equal weight, whose objects are counted."""

PART_PAGES = 4
"""Pages of a part of the key space that is counted rather than divided."""

CONNECTIONS = 16
KEYS_PER_PAGE = 1000
_LAST = "\U0010ffff"
_HEAD_BYTES = 1024
_FRAME_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The objects at a URL.

    Attributes:
        store: The store that they lie in, which `close` closes.
        infos: The objects in key order, or the first of very many.
        objects_count: Number of all objects.
        size_bytes: Size of all objects.
        is_estimated: Whether these two are estimated, because there are more objects than `infos`.
        listed_per_s: Objects listed per second.
        root_url: URL of the store.
        options: Options with which it was connected.
    """

    store: Store
    infos: list[ObjectInfo]
    objects_count: int
    size_bytes: int
    is_estimated: bool = False
    listed_per_s: float | None = None
    root_url: str = ""
    options: Mapping[str, Any] | None = None

    @property
    def formats(self) -> dict[str, int]:
        """Number of objects in `infos` by format, or by suffix if the names show no format."""
        return dict(Counter(_format(info.key) for info in self.infos))

    @property
    def sampled_text(self) -> str:
        """What was looked at, if that is not all."""
        if not self.is_estimated:
            return ""
        return f"there are more than the {len(self.infos)} objects that were looked at: number and size are estimates"


def look_through(
    store: Store,
    found: Iterable[ObjectInfo],
    *,
    prefix: Key,
    takes: Callable[[ObjectInfo], bool],
    objects_max: int = OBJECTS_MAX,
    seconds_max: float = math.inf,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> Listing:
    """Return the objects of a listing, as far as they are listed; the number and size of more are estimated.

    Args:
        store: The store.
        found: The listing below `prefix`, which is taken from until there is enough.
        prefix: Prefix of all keys.
        takes: Whether an object belongs to the data.
        objects_max: Objects that are listed at most. A local directory, which is listed at once, is listed to its end.
        seconds_max: Seconds that listing takes at most, once an object was found.
        progress: Called with the number of objects and their bytes after each 1 000.

    Raises:
        StoreError: The store cannot be listed.

    Cost: a request per 1 000 objects, then some hundred requests if there are more than `objects_max`.
    """
    start_s, infos, size_bytes, listed_count, is_estimated = time.monotonic(), list[ObjectInfo](), 0, 0, False
    for info in found:
        if infos and store.pages_anywhere and (len(infos) >= objects_max or time.monotonic() > start_s + seconds_max):
            is_estimated = True
            break
        listed_count += 1
        if takes(info):
            infos.append(info)
            size_bytes += info.size_bytes
            if len(infos) % KEYS_PER_PAGE == 0:
                progress(len(infos), size_bytes)
    rate, count = listed_count / max(time.monotonic() - start_s, 1e-6), len(infos)
    if is_estimated:
        count, size_bytes = _estimated(store, prefix, takes)
    return Listing(
        store=store,
        infos=infos,
        objects_count=max(count, len(infos)),
        size_bytes=size_bytes,
        is_estimated=is_estimated,
        listed_per_s=rate,
    )


def list_url(
    url: str,
    *,
    objects_max: int = OBJECTS_MAX,
    seconds_max: float = math.inf,
    **connection: Unpack[pipeline.ConnectionOptions],
) -> Listing:
    """Return the objects that a URL names: one, those below a folder, or those of a pattern; not empty ones, nor indexes.

    Args:
        url: The URL.
        objects_max: As for ``look_through``.
        seconds_max: As for ``look_through``.
        **connection: Options of the connection.

    Raises:
        ObjectMissingError: There is none.
        StoreError: The store cannot be listed.
    """
    folder, pattern = split_glob(url) if is_pattern(url) else (url, "**")
    root_url, key = compose.split(folder)
    matches = matcher(pattern)
    options: Any = connection if root_url.startswith("s3://") else {}
    store = compose.connect(root_url, **options)

    def takes(info: ObjectInfo) -> bool:
        name = info.key.removeprefix(key)
        return bool(info.size_bytes) and f"/{FOLDER}" not in f"/{name}" and matches(name)

    try:
        listing = None
        if key and not key.endswith("/"):
            with suppress(ObjectMissingError):
                info = store.stat(key)
                listing = Listing(store=store, infos=[info], objects_count=1, size_bytes=info.size_bytes)
            key += "/"
        if listing is None:
            found = store.list(key)
            listing = look_through(
                store, found, prefix=key, takes=takes, objects_max=objects_max, seconds_max=seconds_max
            )
        if not listing.infos:
            raise no_object(url)
        return replace(listing, root_url=root_url, options=options)
    except BaseException as error:
        store.close()
        if isinstance(error, AccessDeniedError):
            error.hint = f"{error.hint}; the URL of a single object needs no right to list"
        raise


def no_object(url: str) -> ObjectMissingError:
    """Return the error for a prefix below which there is no object."""
    hint = "name an object, or a prefix that has one"
    return ObjectMissingError("no object to measure", operation="LIST", url=url, hint=hint)


def _estimated(store: Store, prefix: Key, takes: Callable[[ObjectInfo], bool]) -> tuple[int, int]:
    """Estimate the number and the bytes of the objects below a prefix, without bias, from parts of the key space.

    Each character that can follow a prefix begins a part. The probes are divided evenly among the parts; where there are fewer
    probes than parts, parts are chosen by chance, and each stands for as many as were not chosen. So the error is small if the
    parts are alike, as those of numbers and of digests are, and all levels of folders count.
    """
    chance = random.Random(0)
    count = size_bytes = 0.0
    waiting = [(prefix, PROBES_COUNT, 1.0)]
    with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="penstock-listing") as pool:
        while waiting:
            divided = pool.map(lambda each: _divided(store, each[0]), waiting)
            further = []
            for (_, probes, weight), (infos, parts) in zip(waiting, divided, strict=True):
                taken = [info.size_bytes for info in infos if takes(info)]
                count, size_bytes = count + weight * len(taken), size_bytes + weight * sum(taken)
                chosen = parts if len(parts) <= probes else chance.sample(parts, probes)
                further += [(part, probes // len(chosen), weight * len(parts) / len(chosen)) for part in chosen]
            waiting = further
    return round(count), round(size_bytes)


def _divided(store: Store, prefix: Key) -> tuple[list[ObjectInfo], list[Key]]:
    """Return all objects below a prefix if they are few; otherwise the longer prefixes of all but the one of this very name."""

    def page(**settings: Any) -> Page:
        return cast("Page", perform(store, ListPage(prefix, keys_max=KEYS_PER_PAGE)._replace(**settings)).value)

    found = page()
    infos = found.objects
    for _ in range(PART_PAGES - 1):
        if found.next_token is not None:
            found = page(token=found.next_token)
            infos = infos + found.objects
    if found.next_token is None:
        return infos, []
    shared = os.path.commonprefix([info.key for info in infos])  # noqa: RUF071 - a prefix of keys, not of paths
    length = len(shared if not page(start_after=shared + _LAST, keys_max=1).objects else prefix) + 1
    parts = list(dict.fromkeys(info.key[:length] for info in infos if len(info.key) >= length))
    while following := page(start_after=parts[-1] + _LAST, keys_max=1).objects:
        parts.append(following[0].key[:length])
    return [info for info in infos if len(info.key) < length], parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What the objects of a listing hold.

    Attributes:
        infos: The objects in the format that has the most bytes, of those that were listed.
        urls: Their URLs.
        objects_count: Number of objects in this format, estimated if that of the listing is.
        size_bytes: Their size, too.
        source: A source of their samples: shards, or objects.
        format: ``objects`` if objects are samples, otherwise the format of the shards, e.g. ``tar``.
        samples: The first samples.
        left_out: A note on objects in other formats; empty if there are none.
    """

    infos: list[ObjectInfo]
    urls: list[str]
    objects_count: int
    size_bytes: int
    source: pipeline.Shards | pipeline.Objects
    format: str
    samples: list[dict[str, Any]]
    left_out: str = ""

    @property
    def member_bytes(self) -> dict[str, float]:
        """Mean size of each member of the first samples, as stored."""
        sizes: Counter[str] = Counter()
        for sample in self.samples:
            for name, value in _members(sample).items():
                sizes[name] += _length(value)
        return {name: size / len(self.samples) for name, size in sizes.items()}

    @property
    def pictures(self) -> list[str]:
        """Names of the members of the first sample that are pictures, which can be decoded."""
        first = _members(self.samples[0]) if self.samples else {}
        stored = {name: value for name, value in first.items() if isinstance(value, bytes)}
        return [name for name, value in stored.items() if picture_kind(value) not in (None, "gif")]

    @property
    def samples_per_object(self) -> float:
        """Mean number of samples in a shard, by the size of the first ones; 1 for objects, less if several are a sample."""
        if isinstance(self.source, pipeline.Shards):
            return self.size_bytes / self.objects_count / max(1.0, self.stored_bytes)
        keys = [info.key for info in self.infos]
        return len(group_objects(keys, group_by=self.source.group_by)) / len(keys)

    @property
    def stored_bytes(self) -> float:
        """Mean bytes that the first samples take with all their members, headers and padding; about, if it is not a tar."""
        lengths = [_length(value) for sample in self.samples for value in _members(sample).values()]
        if self.format.startswith("tar"):
            lengths = [BLOCK_BYTES * (1 + math.ceil(length / BLOCK_BYTES)) for length in lengths]
        elif self.format != "objects":
            lengths = [length + _FRAME_BYTES for length in lengths]
        return sum(lengths) / max(1, len(self.samples))


def look_into(listing: Listing, given: Any = None, *, has_groups: bool = True) -> Inspection:
    """Return what the objects of a listing hold, by their names and the first samples.

    Args:
        listing: The objects, at least one.
        given: The source of a user's pipeline, whose options apply; None makes one up.
        has_groups: Whether several objects may be one sample, if their names say so.

    Raises:
        DataError, StoreError: The samples cannot be read.

    Cost: the beginning of the first objects.
    """
    infos, name, left_out = _chosen(listing.infos)
    urls = [f"{listing.root_url.rstrip('/')}/{info.key}" for info in infos]
    options: Any = listing.options or {}
    source: Any = pipeline.shards(urls, **options).source
    if given is not None:
        connected = given.connection if given.connection.given() else source.connection
        source = replace(given, urls=tuple(urls), is_list=True, manifest=None, connection=connected)
    try:
        samples = peek(pipeline.Pipeline(source), PEEKED_COUNT)
    except UnsupportedFormatError:
        group_by = _grouping([info.key for info in infos]) if has_groups else None
        source = pipeline.objects(urls, group_by=group_by, **options).source
        samples = peek(pipeline.Pipeline(source), PEEKED_COUNT)
    if not isinstance(source, pipeline.Shards):
        name = "objects"
    elif name not in FORMATS:
        name = detect(infos[0].key, bytes(listing.store.read(infos[0].key, ByteRange(0, _HEAD_BYTES)).data))
    return Inspection(
        infos=infos,
        urls=urls,
        objects_count=round(listing.objects_count * len(infos) / len(listing.infos)),
        size_bytes=round(listing.size_bytes * _bytes_of(infos) / _bytes_of(listing.infos)),
        source=source,
        format=name,
        samples=samples,
        left_out=left_out,
    )


def _chosen(infos: list[ObjectInfo]) -> tuple[list[ObjectInfo], str, str]:
    """The objects in the format or with the suffix that has the most bytes, its name, and what is left out."""
    sizes: Counter[str] = Counter()
    for info in infos:
        sizes[_format(info.key)] += info.size_bytes
    (name, _), *_ = sizes.most_common(1)
    if sizes.keys().isdisjoint(FORMATS):
        return infos, name, ""
    chosen = [info for info in infos if _format(info.key) == name]
    if len(chosen) == len(infos):
        return chosen, name, ""
    others = f"{len(infos) - len(chosen)} objects of other formats"
    return chosen, name, f"mixed formats: this looks at {len(chosen)} objects of {name}, and leaves out {others}"


def _bytes_of(infos: list[ObjectInfo]) -> int:
    return sum(info.size_bytes for info in infos)


def _format(key: Key) -> str:
    """The format by a key's name, or its suffix."""
    name = key.rpartition("/")[2]
    return format_of_name(key) or f".{name.rpartition('.')[2].lower() if '.' in name else ''}"


def _grouping(keys: list[Key]) -> Any:
    """``"stem"`` if objects whose names are equal up to the first dot are one sample."""
    with suppress(PenstockError):
        if 0 < len(group_objects(keys, group_by="stem")) <= 0.75 * len(keys):
            return "stem"
    return None


def _members(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if not name.startswith("__")}


def _length(value: Any) -> int:
    return int(value.nbytes) if hasattr(value, "nbytes") else len(value)
