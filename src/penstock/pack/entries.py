"""Plan entries: a source as a list of samples, with the objects that each consists of, their sizes and versions.

Only listings, manifests and tables are read here. A plan is cut from the list, so the order of the list depends only on the
source: listings are in key order, tables and manifests in their own order.
"""

from __future__ import annotations

import csv
import hashlib
import io
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.errors import ConfigError, DataError, ObjectMissingError
from penstock.formats import ObjectGroup, format_of_name, group_objects
from penstock.formats.sample import NO_EXTENSION, check_key, likeness, split_name
from penstock.index import resolve
from penstock.pack.fields import FieldSpec, cast_value
from penstock.redaction import public_url
from penstock.text.json_text import parse_json
from penstock.text.patterns import common_folder
from penstock.version import install_hint

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from penstock.pack.options import PackOptions
    from penstock.sources.shards import Shard
    from penstock.store import Store
    from penstock.types import Buffer

_FILE_COLUMNS = ("file", "path", "url", "uri", "filename", "file_name", "image", "image_path")
_SHARDS = {"tar", "tfrecord", "recordio", "mds"}


class PlanMember(NamedTuple):
    """One object that is a field of a sample.

    Attributes:
        field: Name of the field.
        root: Number of the object's store in ``SourceListing.roots``.
        key: Key of the object in that store.
        size_bytes: Size of the object in bytes.
        etag: ETag of the object; None if it has none.
    """

    field: str
    root: int
    key: str
    size_bytes: int
    etag: str | None


class PlanEntry(NamedTuple):
    """One sample of the source; in a conversion, one source shard or a piece of it.

    Attributes:
        key: Key of the sample; in a conversion, URL of the source shard.
        members: Objects that the sample consists of.
        values: Fields whose values are known without reading; in a conversion, the bounds of the piece.
    """

    key: str
    members: tuple[PlanMember, ...]
    values: dict[str, Any]

    @property
    def size_bytes(self) -> int:
        """Size of all its objects in bytes."""
        return sum(member.size_bytes for member in self.members)

    def sizes(self) -> dict[str, int]:
        """Return the approximate size of each stored field in bytes, by name."""
        sizes = {member.field: member.size_bytes for member in self.members}
        for name, value in self.values.items():
            sizes[name] = len(value) if isinstance(value, bytes) else len(str(value).encode())
        return sizes


class Roots:
    """The stores of members, numbered in the order in which they come.

    Attributes:
        stores: The stores.
    """

    def __init__(self) -> None:
        self.stores: list[Store] = []
        self._numbers: dict[int, int] = {}

    def member(self, field: str, shard: Shard) -> PlanMember:
        """Return an object as a member, whose sizes ``resolve_sizes`` has set."""
        number = self._numbers.setdefault(id(shard.store), len(self.stores))
        if number == len(self.stores):
            self.stores.append(shard.store)
        return PlanMember(field, number, shard.key, shard.size_bytes or 0, shard.etag)


class SourceListing(NamedTuple):
    """The contents of a source.

    Attributes:
        roots: Stores of the members.
        entries: Samples in the source's order.
        passed_over: Number of files that belong to no sample and are left out.
        classes: Labels as words, in the order of their numbers; None if labels are numbers or there are none.
        are_keys_counted: Whether the keys are only the numbers of the samples, so that losing them loses nothing.
    """

    roots: list[Store]
    entries: list[PlanEntry]
    passed_over: int
    classes: list[str] | None
    are_keys_counted: bool = False


# ── objects ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def entries_of_objects(shards: list[Shard], options: PackOptions, *, relative: bool) -> SourceListing:
    """Return the samples of listed objects, grouped and renamed as `options` require. Labels are added later.

    Args:
        shards: Objects, as a ``ShardFinder`` lists them.
        options: Options of the packing.
        relative: Whether the objects' keys are relative to one listed folder; otherwise they are made relative to the
            folder that contains all of them.

    Raises:
        DataError: A name is not a sample key, two files are one field, or a field is missing.
        ConfigError: The files are already shards.

    Cost: one request for each object whose size or ETag the listing did not give.
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
    roots, entries = Roots(), []
    for group in _grouped(wanted, options):
        chosen = _chosen(group.key, group.members, options.specs)
        members = [roots.member(field, by_name[name]) for field, name in chosen.items()]
        entries.append(PlanEntry(checked_key(group.key), tuple(members), {}))
    if not entries:
        raise ObjectMissingError(f"no files to pack ({passed_over} files were passed over)", operation="LIST")
    return SourceListing(roots.stores, entries, passed_over, None)


def _grouped(names: list[str], options: PackOptions) -> Iterable[ObjectGroup]:
    if options.group_by == "stem":
        return group_objects(names, group_by="stem")
    groups: dict[str, ObjectGroup] = {}
    for name in names:
        folder, slash, base = name.rpartition("/")
        stem, dot, extension = base.rpartition(".")
        key = folder + slash + (stem if dot else base).replace(".", "_")
        if key in groups:
            first = next(iter(groups[key].members.values()))
            raise DataError(f"files {first!r} and {name!r} are both sample {key!r}", hint="group_by='stem' joins them")
        groups[key] = ObjectGroup(key, {(extension if dot else NO_EXTENSION).lower(): name})
    return groups.values()


def _is_named(name: str, shard: Shard, options: PackOptions) -> bool:
    """Return whether the file belongs to a sample; hidden files never do.

    Raises:
        DataError: The name has no extension, so the file cannot be a field.
    """
    base = name.rpartition("/")[2]
    if base.startswith(".") or not base:
        return False
    if options.group_by == "file" or split_name(name) is not None:
        return True
    if options.skip_unnamed:
        return False
    raise DataError(
        f"the name {name!r} is not a sample key and an extension, such as 000017.jpg",
        hint="--skip-unnamed passes over such files, --group-by file makes each file a sample",
        shard=shard.url,
    )


def _refuse_shards(shards: Sequence[Shard]) -> None:
    kinds = {format_of_name(shard.key) for shard in shards}
    if kinds and kinds <= _SHARDS:
        raise ConfigError(
            f"all {len(shards)} files are {', '.join(sorted(map(str, kinds)))} shards already",
            hint="penstock convert SRC DST --to FORMAT rewrites shards",
        )


def checked_key(key: Any, what: str = "the name of a file is not a valid sample key") -> str:
    """Return the key of a sample.

    Args:
        key: The key.
        what: Beginning of the error's message.

    Raises:
        DataError: It would not read back equal.
    """
    try:
        return check_key(key)
    except ConfigError as error:
        raise DataError(f"{what}: {error.what}", hint=error.hint, sample_key=str(key)) from error


def _chosen(key: str, members: dict[str, str], specs: tuple[FieldSpec, ...] | None) -> dict[str, str]:
    if specs is None:
        return members
    chosen = {}
    for spec in (spec.found_in(members) for spec in specs):
        if spec.type not in (None, "file", "bytes"):
            raise ConfigError(f"a file cannot be converted: {spec.source}={spec.field}:{spec.type}")
        if spec.source not in members:
            raise DataError(
                f"the sample has no file {spec.source!r}, only {sorted(members)}", sample_key=key, field=spec.source
            )
        chosen[spec.field] = members[spec.source]
    return chosen


def relative_names(urls: list[str]) -> list[str]:
    """Return `urls` relative to the folder that contains all of them."""
    start = len(common_folder(urls))
    return [url[start:] for url in urls]


def resolve_sizes(shards: Iterable[Shard]) -> None:
    """Look up the sizes and ETags that the listing did not give, and set them."""
    unknown = [shard for shard in shards if shard.size_bytes is None or shard.etag is None]
    for found, shard in zip(resolve(unknown, ""), unknown, strict=True):
        shard.learn(etag=found.if_match, size_bytes=found.size_bytes)


# ── tables ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_table(data: Buffer, *, url: str) -> list[dict[str, Any]]:
    """Return the rows of a table in its order; the name's suffix decides how it is read.

    Raises:
        DataError: The data is not such a table; the message names the line if one is at fault.
        ConfigError: The table is Parquet, and pyarrow is not installed.
    """
    name = public_url(url).lower()
    if name.endswith(".parquet"):
        return _parquet(data, url)
    try:
        text = bytes(data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"the table is not UTF-8 ({error})", shard=url) from error
    if name.endswith((".csv", ".tsv")):
        return _csv(text, "\t" if name.endswith(".tsv") else ",", url)
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(f"line {number} of the table is not JSON ({error})", shard=url) from error
        if not isinstance(row, dict):
            raise DataError(f"line {number} of the table is not a JSON object", shard=url)
        rows.append(row)
    return rows


def _csv(text: str, delimiter: str, url: str) -> list[dict[str, Any]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    rows = []
    try:
        for row in reader:
            if None in row or None in row.values():
                raise DataError(
                    f"line {reader.line_num} of the table does not have as many values as the header", shard=url
                )
            rows.append(dict(row))
    except csv.Error as error:
        raise DataError(f"line {reader.line_num} of the table: {error}", shard=url) from error
    return rows


def _parquet(data: Buffer, url: str) -> list[dict[str, Any]]:
    try:
        from penstock.formats.arrow_values import rows_of_table
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow", hint=install_hint("parquet")) from error
    try:
        return rows_of_table(data)
    except ValueError as error:
        raise DataError(f"the table cannot be read as Parquet ({error})", shard=url) from error


class TableRow(NamedTuple):
    """One row of a table.

    Attributes:
        key: Key of the sample.
        files: Paths or URLs of the files that the row names, by field.
        values: All other values, by field.
    """

    key: str
    files: dict[str, str]
    values: dict[str, Any]


def rows_of_table(rows: list[dict[str, Any]], specs: tuple[FieldSpec, ...] | None, *, url: str) -> list[TableRow]:
    """Return the samples that a table describes. The key is the column ``__key__``, or the row's number in nine digits.

    Raises:
        DataError: The table has no rows, a value is missing or not of its type, or two rows have the same key.
    """
    if not rows:
        raise DataError("the table has no rows", shard=url)
    if specs is None:
        specs = _guess_specs(rows[0], url=url)
    found, keys = [], set()
    for number, row in enumerate(rows):
        key = checked_key(str(row.get("__key__") or f"{number:09d}"))
        if key in keys:
            raise DataError(f"row {number} has the same key as another row", sample_key=key, shard=url)
        keys.add(key)
        files, values = {}, {}
        for spec in (spec.found_in(row) for spec in specs):
            value = row.get(spec.source)
            if value is None or value == "":
                raise DataError(f"row {number} has no value in column {spec.source!r}", sample_key=key, shard=url)
            if spec.type == "file":
                files[spec.field] = str(value)
            else:
                values[spec.field] = cast_value(value, spec, key)
        found.append(TableRow(key, files, values))
    return found


def _guess_specs(row: dict[str, Any], *, url: str) -> tuple[FieldSpec, ...]:
    """Return the fields of a table for which none were given: the file from a column with a usual name, and all others.

    Raises:
        ConfigError: No column of the first row, `row`, has a usual name for files.
    """
    column = next((name for name in _FILE_COLUMNS if name in row), None)
    if column is None:
        raise ConfigError(
            f"no column of {url} ({', '.join(map(str, row))}) has a usual name for files",
            hint="name it: --fields path=jpg:file,label=cls:int",
        )
    base = str(row[column]).rpartition("/")[2]
    extension = base.partition(".")[2].lower() or "data"
    others = [FieldSpec(name, name.lower(), None) for name in row if name not in (column, "__key__")]
    return (FieldSpec(column, extension, "file"), *others)


def entries_of_rows(rows: list[TableRow], shards: list[Shard]) -> SourceListing:
    """Return the samples of a table. `shards` are the objects of the rows' files, in the order of the rows."""
    resolve_sizes(shards)
    roots, waiting = Roots(), iter(shards)
    entries = [
        PlanEntry(row.key, tuple(roots.member(field, next(waiting)) for field in row.files), row.values) for row in rows
    ]
    return SourceListing(roots.stores, entries, 0, None)


# ── labels, splits ──────────────────────────────────────────────────────────────────────────────────────────────────


def labelled_by_folders(listing: SourceListing, field: str) -> SourceListing:
    """Label each sample with the number of its topmost folder; folders are numbered in the order of their names.

    Raises:
        DataError: A sample lies in no folder.
    """
    labels = {}
    for entry in listing.entries:
        folder, slash, _ = entry.key.partition("/")
        if not slash:
            raise DataError("the sample is not in a folder that could be its label", sample_key=entry.key, field=field)
        labels[entry.key] = folder
    return _labelled(listing, field, labels)


def labelled_by_table(listing: SourceListing, field: str, rows: list[dict[str, Any]], *, url: str) -> SourceListing:
    """Label each sample from a table whose first column names the sample or its file, and whose second is the label.

    Raises:
        DataError: The table has only one column, or no label for a sample.
    """
    labels: dict[str, Any] = {}
    for row in rows:
        name, *rest = row.values()
        if not rest:
            raise DataError("a table of labels needs two columns: a name and a label", shard=url)
        split = split_name(str(name))
        labels[split[0] if split is not None else str(name)] = rest[0]
    for entry in listing.entries:
        if labels.get(entry.key) in (None, ""):
            raise DataError(
                f"the table {url} has no label for the sample; {likeness(entry.key, labels)}",
                sample_key=entry.key,
                field=field,
            )
    return _labelled(listing, field, labels)


def _labelled(listing: SourceListing, field: str, labels: dict[str, Any]) -> SourceListing:
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
                f"the sample already has a field {field!r}", hint="--label-field", sample_key=entry.key, field=field
            )
        entries.append(entry._replace(values={**entry.values, field: numbers[labels[entry.key]]}))
    return listing._replace(entries=entries, classes=classes)


def split_of(key: str, shares: dict[str, float], seed: int) -> str:
    """Return the split of a sample. Only its key decides, not what else is packed."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8, salt=seed.to_bytes(8, "little"))
    point = int.from_bytes(digest.digest(), "little") / 2**64
    for name, share in shares.items():
        if point < share:
            return name
        point -= share
    return list(shares)[-1]
