"""``penstock rm``: remove objects."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import Anonymous, AsJson, Connection, EndpointUrl, Place, Profile, Region
from penstock.cli.progress import Report
from penstock.cli.saying import show, tell
from penstock.cli.selection import Exclude, Include, Selection
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from penstock.store.base import Store
    from penstock.types import Key

KEYS_AT_ONCE = 8000
"""Keys that are given to ``Store.delete`` at a time: its 8 requests of 1 000 keys, after which they are reported."""


def rm(
    url: Annotated[str, typer.Argument(metavar="URL", help="An object, a pattern; with --recursive a folder.")],
    *,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Remove everything below the folder.")] = False,
    include: Include = None,
    exclude: Exclude = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
    whole_bucket: Annotated[
        bool, typer.Option("--whole-bucket", help="Agree that URL is a whole bucket; it is refused without this.")
    ] = False,
    as_json: AsJson = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    anonymous: Anonymous = False,
) -> None:
    """Remove an object, the objects that a pattern names, or with --recursive everything below a folder.

    Nothing is asked: try --dry-run first. What was removed is gone, unless the bucket keeps versions. Exits with 1 if
    there is nothing to remove. After Ctrl-C, or an error, some of the objects may be gone; run it again. In a directory,
    links to other directories, and the files behind them, stay.

    For example:

        penstock rm s3://bucket/old/model.pt
        penstock rm --dry-run "s3://bucket/train/*-0000{0..3}.tar"
        penstock rm -r --exclude "*.pt" s3://bucket/runs/17/
    """
    connection = Connection(endpoint_url=endpoint_url, region=region, profile=profile, anonymous=anonymous)
    with connection, RemoveReport(as_json=as_json, dry_run=dry_run) as report:
        selection = Selection(connection, url, include=include, exclude=exclude)
        _check(selection, recursive=recursive, whole_bucket=whole_bucket)
        store = selection.place.store
        keys = removable(selection.place, (info.key for info in selection))
        if dry_run:
            for key in keys:
                report.removed(store.describe(key))
        else:
            remove(store, keys, lambda key: report.removed(store.describe(key)))
    report.end()
    selection.check_found()


def _check(selection: Selection, *, recursive: bool, whole_bucket: bool) -> None:
    """Refuse a folder, and a whole bucket, that nobody said is meant.

    Raises:
        ConfigError: it is one.
    """
    place = selection.place
    if selection.only is not None or selection.is_pattern:
        return
    if not recursive:
        raise ConfigError(f"{place.url} is a folder", hint="--recursive removes everything below it")
    path = place.path
    is_whole = not selection.prefix if path is None else path.resolve() == path.resolve().parent
    if is_whole and not whole_bucket:
        raise ConfigError(f"{place.url} is everything that there is", hint="--whole-bucket says that this is meant")


def removable(place: Place, keys: Iterable[Key]) -> Iterator[Key]:
    """`keys` but for files of this machine that lie behind a link to a directory: those are somebody else's."""
    from penstock.compose import local_path

    if place.path is None:
        yield from keys
        return
    root = local_path(place.root_url)
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
        tell(f"penstock: {left_count} files that lie behind links to directories are not removed")


def remove(store: Store, keys: Iterable[Key], removed: Callable[[Key], None]) -> None:
    """Remove `keys`, and tell of each once it is gone.

    Raises:
        StoreError: the store refused, or could not be asked; what was not told of may be gone as well.
    """
    rest = iter(keys)
    while batch := list(islice(rest, KEYS_AT_ONCE)):
        store.delete(batch)
        for key in batch:
            removed(key)


class RemoveReport(Report):
    """What ``rm`` says."""

    def __init__(self, *, as_json: bool, dry_run: bool) -> None:
        super().__init__(as_json=as_json, has_bar=not dry_run)
        self._dry_run = dry_run
        self._count = 0

    def columns(self) -> list[Any]:
        """How long."""
        from rich.progress import TimeElapsedColumn

        return [TimeElapsedColumn()]

    def removed(self, url: str) -> None:
        """It is gone, or would be."""
        self._count += 1
        self.update(description=f"{self._count} removed")
        self.say("would remove" if self._dry_run else "removed", url=url)
        if self._dry_run and not self.as_json:
            show(url)

    def end(self) -> None:
        """The last line."""
        if self.as_json:
            self.say("summary", dry_run=self._dry_run, removed=self._count, seconds=round(self.seconds, 3))
        else:
            tell(f"{self._count} {'would be removed' if self._dry_run else 'removed'}, {self.seconds:.1f} s")
