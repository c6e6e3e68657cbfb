"""``penstock rm``: removes objects."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from penstock.cli.options import AS_JSON, ConnectionGroup, StoreLocation, Stores, argument, expand_groups, flag
from penstock.cli.output import ProgressReport, counted, print_message, print_result
from penstock.cli.selection import FilterGroup, Selection
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from penstock.store.base import Store
    from penstock.types import Key

KEYS_AT_ONCE = 8000
"""Keys per call of ``Store.delete``, after which they are reported: 8 requests of 1 000 keys."""


@expand_groups
def rm(
    url: str = argument("URL", "An object or a pattern; with --recursive, a folder."),
    *,
    recursive: bool = flag("Remove everything below the folder.", names=("--recursive", "-r")),
    filters: FilterGroup,
    dry_run: bool = flag("Print what would be removed, and remove nothing."),
    whole_bucket: bool = flag("Allow URL to be a whole bucket, which is refused otherwise."),
    as_json: bool = AS_JSON,
    connection: ConnectionGroup,
) -> None:
    """Remove an object, the objects that a pattern names, or with --recursive everything below a folder.

    There is no confirmation, so try --dry-run first. Removed objects cannot be restored unless the bucket keeps versions.
    The exit code is 1 if there is nothing to remove. After Ctrl-C or an error, some of the objects may be removed; run it
    again to remove the others. In a directory, links to other directories and the files behind them are not removed.

    For example:

        penstock rm s3://bucket/old/model.pt
        penstock rm --dry-run "s3://bucket/train/*-0000{0..3}.tar"
        penstock rm -r --exclude "*.pt" s3://bucket/runs/17/
    """
    with Stores(connection) as stores, RemoveReport(as_json=as_json, dry_run=dry_run) as report:
        selection = Selection(stores, url, filters)
        _check(selection, recursive=recursive, whole_bucket=whole_bucket)
        store = selection.location.store
        keys = removable(selection.location, (info.key for info in selection))
        if dry_run:
            for key in keys:
                report.removed(store.describe(key))
        else:
            remove(store, keys, lambda key: report.removed(store.describe(key)))
    report.end()
    selection.check_found()


def _check(selection: Selection, *, recursive: bool, whole_bucket: bool) -> None:
    """Refuse a folder without ``--recursive``, and a whole bucket without ``--whole-bucket``.

    Raises:
        ConfigError: The option is missing.
    """
    location = selection.location
    if selection.only is not None or selection.is_pattern:
        return
    if not recursive:
        raise ConfigError(f"{location.url} is a folder", hint="--recursive removes everything below it")
    path = location.path
    is_whole = not selection.prefix if path is None else path.resolve() == path.resolve().parent
    if is_whole and not whole_bucket:
        raise ConfigError(f"{location.url} is a whole bucket or file system", hint="--whole-bucket confirms this")


def removable(location: StoreLocation, keys: Iterable[Key]) -> Iterator[Key]:
    """Yield `keys` without the files of this machine that lie behind a link to a directory: they belong elsewhere."""
    if location.path is None:
        yield from keys
        return
    root = location.root_path
    is_linked = {root: False}

    def lies_behind_link(folder: Path) -> bool:
        if folder not in is_linked:
            is_linked[folder] = folder.is_symlink() or lies_behind_link(folder.parent)
        return is_linked[folder]

    left_count = 0
    for key in keys:
        if lies_behind_link((root / key).parent):
            left_count += 1
        else:
            yield key
    if left_count:
        print_message(f"penstock: {counted(left_count, 'file')} behind links to directories: not removed")


def remove(store: Store, keys: Iterable[Key], removed: Callable[[Key], None]) -> None:
    """Remove `keys`, and call `removed` with each one afterwards.

    Raises:
        StoreError: The store refused, or could not be reached; keys that were not reported may be removed as well.
    """
    rest = iter(keys)
    while batch := list(islice(rest, KEYS_AT_ONCE)):
        store.delete(batch)
        for key in batch:
            removed(key)


class RemoveReport(ProgressReport):
    """The report of ``rm``."""

    def __init__(self, *, as_json: bool, dry_run: bool) -> None:
        super().__init__(as_json=as_json, has_bar=not dry_run)
        self._dry_run = dry_run
        self._count = 0

    def removed(self, url: str) -> None:
        """`url` was removed, or would be."""
        self._count += 1
        self.update(description=f"{self._count} removed")
        self.print_json(action="would remove" if self._dry_run else "removed", url=url)
        if self._dry_run and not self.as_json:
            print_result(url)

    def end(self) -> None:
        """Print the summary."""
        if self.as_json:
            self.print_summary(dry_run=self._dry_run, removed=self._count)
        else:
            print_message(f"{self._count} {'would be removed' if self._dry_run else 'removed'}, {self.seconds:.1f} s")
