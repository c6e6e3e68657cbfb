"""From what is to be packed to a list of samples: which objects each is made of, and their sizes and versions.

Nothing is read here but listings, manifests and tables. The list is what a plan is cut from, so its order follows from
the source alone: listings in key order, tables and manifests as they are written.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError, DataError, ObjectMissingError
from penstock.formats import format_of_name, group_objects
from penstock.formats.grouping import NO_EXTENSION, likeness
from penstock.formats.sample import check_key, split_name
from penstock.index import resolve
from penstock.pack import tables
from penstock.pack.fields import cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.pack.fields import Spec
    from penstock.pack.options import PackOptions
    from penstock.sources.shards import Shard
    from penstock.store import Store

_SHARDS = {"tar", "tfrecord", "recordio", "mds"}


class Member(NamedTuple):
    """One object that is a field of a sample: its root is a number in ``Listing.roots``."""

    field: str
    root: int
    key: str
    size_bytes: int
    etag: str | None


class Entry(NamedTuple):
    """One sample: its key, the objects it is made of, and values that need no reading."""

    key: str
    members: tuple[Member, ...]
    values: dict[str, Any]

    @property
    def size_bytes(self) -> int:
        """Of its objects."""
        return sum(member.size_bytes for member in self.members)

    def sizes(self) -> dict[str, int]:
        """Bytes of each field, as they will be about."""
        sizes = {member.field: member.size_bytes for member in self.members}
        for name, value in self.values.items():
            sizes[name] = len(value) if isinstance(value, bytes) else len(str(value).encode())
        return sizes


class Listing(NamedTuple):
    """What a source holds.

    Attributes:
        roots: Stores that the members lie in.
        entries: Samples, in the source's order.
        passed_over: Files that are no part of any sample, left out.
        classes: Of labels that are words: the words, in the order of their numbers.
        are_keys_counted: Whether the samples' keys are their numbers, and say nothing else.
    """

    roots: list[Store]
    entries: list[Entry]
    passed_over: int
    classes: list[str] | None
    are_keys_counted: bool = False


# ── objects ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def entries_of_objects(shards: list[Shard], options: PackOptions, *, relative: bool) -> Listing:
    """Samples of listed objects, grouped, renamed and labelled as `options` say; labels of tables come later.

    Args:
        shards: The objects, as a ``ShardFinder`` gives them.
        options: Of the packing.
        relative: Their keys are relative to one folder that was listed; else they are made relative to the folder that
            holds them all.

    Raises:
        DataError: a name that is no sample key, two files for one field, a label or a field missing.
        ConfigError: the files are shards already.

    Cost: one request per object whose size the listing did not say.
    """
    _refuse_shards(shards)
    names = [shard.key for shard in shards] if relative else relative_names([shard.url for shard in shards])
    by_name: dict[str, Shard] = {}
    wanted, passed_over = [], 0
    for name, shard in zip(names, shards, strict=True):
        if not _is_named(name, shard, options):
            passed_over += 1
            continue
        if name in by_name:
            raise DataError(f"{name!r} is listed twice", shard=shard.url)
        by_name[name] = shard
        wanted.append(name)
    resolve_sizes(by_name.values())
    roots: dict[int, tuple[int, Store]] = {}
    for shard in by_name.values():
        roots.setdefault(id(shard.store), (len(roots), shard.store))
    entries = []
    for group in _grouped(wanted, options):
        members = []
        for field, name in _chosen(group.key, group.members, options.specs).items():
            shard = by_name[name]
            members.append(Member(field, roots[id(shard.store)][0], shard.key, shard.size_bytes or 0, shard.etag))
        entries.append(Entry(_checked(group.key), tuple(members), {}))
    if not entries:
        raise ObjectMissingError(f"there is no file to pack ({passed_over} passed over)", operation="LIST")
    return Listing([store for _, store in roots.values()], entries, passed_over, None)


class _Group(NamedTuple):
    key: str
    members: dict[str, str]


def _grouped(names: list[str], options: PackOptions) -> Iterable[_Group]:
    if options.group_by == "stem":
        return [_Group(group.key, group.members) for group in group_objects(names, group_by="stem")]
    groups: dict[str, _Group] = {}
    for name in names:
        folder, slash, base = name.rpartition("/")
        stem, dot, extension = base.rpartition(".")
        key = folder + slash + (stem if dot else base).replace(".", "_")
        if key in groups:
            first = next(iter(groups[key].members.values()))
            raise DataError(f"files {first!r} and {name!r} are both sample {key!r}", hint="group_by='stem' joins them")
        groups[key] = _Group(key, {(extension if dot else NO_EXTENSION).lower(): name})
    return groups.values()


def _is_named(name: str, shard: Shard, options: PackOptions) -> bool:
    """Whether the file belongs to a sample; hidden ones never do.

    Raises:
        DataError: its name has no extension, so that it is no field of any sample.
    """
    base = name.rpartition("/")[2]
    if base.startswith(".") or not base:
        return False
    if options.group_by == "file" or split_name(name) is not None:
        return True
    if options.skip_unnamed:
        return False
    raise DataError(
        f"the name {name!r} is no sample key and extension, as in 000017.jpg",
        hint="--skip-unnamed passes such files over, --group-by file takes each as a sample",
        shard=shard.url,
    )


def _refuse_shards(shards: Sequence[Shard]) -> None:
    kinds = {format_of_name(shard.key) for shard in shards}
    if kinds and kinds <= _SHARDS:
        raise ConfigError(
            f"all {len(shards)} files are {', '.join(sorted(map(str, kinds)))} shards already",
            hint="penstock convert SRC DST --to FORMAT rewrites shards",
        )


def _checked(key: str) -> str:
    try:
        return check_key(key)
    except ConfigError as error:
        raise DataError(f"a file's name gives no sample key: {error.what}", hint=error.hint, sample_key=key) from error


def _chosen(key: str, members: dict[str, str], specs: tuple[Spec, ...] | None) -> dict[str, str]:
    if specs is None:
        return members
    chosen = {}
    for spec in specs:
        if spec.type not in (None, "file", "bytes"):
            raise ConfigError(f"a file is taken as it is: {spec.source}={spec.field}:{spec.type} cannot be")
        if spec.source not in members:
            raise DataError(
                f"there is no file {spec.source!r}, only {sorted(members)}", sample_key=key, field=spec.source
            )
        chosen[spec.field] = members[spec.source]
    return chosen


def relative_names(urls: list[str]) -> list[str]:
    """`urls` below the folder that holds them all."""
    low, high = min(urls, default=""), max(urls, default="")
    equal = 0
    while equal < min(len(low), len(high)) and low[equal] == high[equal]:
        equal += 1
    start = low.rfind("/", 0, equal) + 1
    return [url[start:] for url in urls]


def resolve_sizes(shards: Iterable[Shard]) -> None:
    """Ask for the sizes and versions that no listing said."""
    unknown = [shard for shard in shards if shard.size_bytes is None or shard.etag is None]
    for found, shard in zip(resolve(unknown, ""), unknown, strict=True):
        shard.size_bytes = found.size_bytes
        shard.etag = found.if_match


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Row(NamedTuple):
    """One row of a table: its key, the files that it names, by field, and its values."""

    key: str
    files: dict[str, str]
    values: dict[str, Any]


def rows_of_table(rows: list[dict[str, Any]], specs: tuple[Spec, ...] | None, *, url: str) -> list[Row]:
    """The samples that a table's rows are; their keys are their numbers, nine digits, or the column ``__key__``.

    Raises:
        DataError: no rows, a column missing, a value that is not of its type, two rows with one key.
    """
    if not rows:
        raise DataError("the table has no rows", shard=url)
    if specs is None:
        specs = tables.guessed(rows[0], url=url)
    found, keys = [], set()
    for number, row in enumerate(rows):
        key = _checked(str(row.get("__key__") or f"{number:09d}"))
        if key in keys:
            raise DataError(f"row {number} has the key of another row", sample_key=key, shard=url)
        keys.add(key)
        files, values = {}, {}
        for spec in specs:
            value = row.get(spec.source)
            if value is None or value == "":
                raise DataError(f"row {number} has nothing in column {spec.source!r}", sample_key=key, shard=url)
            if spec.type == "file":
                files[spec.field] = str(value)
            else:
                values[spec.field] = cast(value, spec, key)
        found.append(Row(key, files, values))
    return found


def entries_of_rows(rows: list[Row], shards: list[Shard]) -> Listing:
    """Samples of a table's rows, and the objects of their files in the order in which they are named."""
    resolve_sizes(shards)
    roots: dict[int, tuple[int, Store]] = {}
    for shard in shards:
        roots.setdefault(id(shard.store), (len(roots), shard.store))
    waiting = iter(shards)
    entries = []
    for row in rows:
        members = []
        for field in row.files:
            shard = next(waiting)
            members.append(Member(field, roots[id(shard.store)][0], shard.key, shard.size_bytes or 0, shard.etag))
        entries.append(Entry(row.key, tuple(members), row.values))
    return Listing([store for _, store in roots.values()], entries, 0, None)


# ── labels, splits ──────────────────────────────────────────────────────────────────────────────────────────────────


def labelled_by_folders(listing: Listing, field: str) -> Listing:
    """Each sample with the number of its topmost folder among all of them, in the order of their names.

    Raises:
        DataError: a sample lies in no folder.
    """
    labels = {}
    for entry in listing.entries:
        folder, slash, _ = entry.key.partition("/")
        if not slash:
            raise DataError("it lies in no folder that could be its label", sample_key=entry.key, field=field)
        labels[entry.key] = folder
    return _labelled(listing, field, labels)


def labelled_by_table(listing: Listing, field: str, rows: list[dict[str, Any]], *, url: str) -> Listing:
    """Each sample with what a table says: its first column names the sample or its file, its second one the label.

    Raises:
        DataError: the table has one column, or says nothing of a sample.
    """
    labels: dict[str, Any] = {}
    for row in rows:
        name, *rest = row.values()
        if not rest:
            raise DataError("a table of labels has two columns: a name, and its label", shard=url)
        split = split_name(str(name))
        labels[split[0] if split is not None else str(name)] = rest[0]
    for entry in listing.entries:
        if labels.get(entry.key) in (None, ""):
            raise DataError(
                f"the table {url} has no label for it; {likeness(entry.key, labels)}", sample_key=entry.key, field=field
            )
    return _labelled(listing, field, labels)


def _labelled(listing: Listing, field: str, labels: dict[str, Any]) -> Listing:
    used = [labels[entry.key] for entry in listing.entries]
    try:
        numbers = {label: int(label) for label in used}
        classes = None
    except (ValueError, TypeError):
        classes = sorted({str(label) for label in used})
        numbers = {label: classes.index(str(label)) for label in set(used)}
    entries = []
    for entry in listing.entries:
        if any(member.field == field for member in entry.members) or field in entry.values:
            raise DataError(
                f"it has a field {field!r} of its own", hint="--label-field", sample_key=entry.key, field=field
            )
        entries.append(entry._replace(values={**entry.values, field: numbers[labels[entry.key]]}))
    return listing._replace(entries=entries, classes=classes)


def split_of(key: str, shares: dict[str, float], seed: int) -> str:
    """Of which split the sample called `key` is: its key decides, whatever else is packed."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8, salt=seed.to_bytes(8, "little"))
    point = int.from_bytes(digest.digest(), "little") / 2**64
    for name, share in shares.items():
        if point < share:
            return name
        point -= share
    return list(shares)[-1]
