"""``penstock cp``: files, folders and prefixes, from anywhere to anywhere."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from penstock.cli.files import is_there, one_line
from penstock.cli.options import (
    Anonymous,
    AsJson,
    Cache,
    Connection,
    EndpointUrl,
    Place,
    Profile,
    Region,
    SourceAnonymous,
    SourceEndpointUrl,
    SourceProfile,
)
from penstock.cli.saying import show, tell
from penstock.cli.selection import Exclude, Include, Selection
from penstock.cli.transfer import Files, Item, Objects, copy_inside, stream
from penstock.errors import ConfigError, DirectoryMissingError, ObjectMissingError, StoreError
from penstock.redaction import printable
from penstock.sizes import format_bytes
from penstock.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.types import Key, ObjectInfo


def cp(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="An object or file; a prefix or directory: all below it; a pattern.")
    ],
    target: Annotated[str, typer.Argument(metavar="DST", help="Where to; one that ends with / is a folder.")],
    *,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Accepted for habit: a folder is always taken whole.")
    ] = False,
    include: Include = None,
    exclude: Exclude = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Copy also what is there already.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be copied, and copy nothing.")] = False,
    cache: Cache = None,
    as_json: AsJson = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    anonymous: Anonymous = False,
    source_endpoint_url: SourceEndpointUrl = None,
    source_profile: SourceProfile = None,
    source_anonymous: SourceAnonymous = False,
) -> None:
    """Copy a file or everything below a folder; run it again to finish what was interrupted.

    What is already there is skipped, as aws s3 sync does: on disk, a file of the object's size, modification time and
    (where the file system keeps attributes) ETag; in a store, an object of the source's size that is not older.
    Anything else of the same name is replaced. Nothing is ever deleted. Inside one store it is the store that copies.

    SRC may be a pattern, with the rules of penstock.shards; quote it, or the shell takes it for its own. A key is copied if
    it matches an --include, or there is none, and no --exclude. Copying nothing, because there is nothing, is an error.

    Sizes are compared, checksums verified wherever the store keeps them. Files appear whole or not at all; after Ctrl-C
    nothing half-done is left. An object that fails does not stop the others; the exit code is then 1. Keys that are no
    safe file names (.. and the like) are refused.

    For example:

        penstock cp s3://bucket/train/ /data/train/
        penstock cp model.pt s3://bucket/models/
        penstock cp "s3://bucket/train/*-0000{0..3}.tar" /data/train/
        penstock cp --exclude "*.tmp" /data/out/ s3://bucket/out/
        penstock cp --dry-run s3://bucket/a/ s3://other/b/
        penstock cp --source-anonymous s3://public/set/ s3://mine/set/
    """
    there = Connection(endpoint_url=endpoint_url, region=region, profile=profile, anonymous=anonymous, cache=cache)
    here = there.of_source(endpoint_url=source_endpoint_url, profile=source_profile, anonymous=source_anonymous)
    report = Report(as_json=as_json, dry_run=dry_run)
    with here, there, report:
        selection = Selection(here, source, include=include, exclude=exclude)
        Plan(selection, there.place(target), report, overwrite=overwrite).run(dry_run=dry_run)
    report.end()
    selection.check_found()
    if report.failed_count:
        raise typer.Exit(1)


class Plan:
    """What goes where; ``run`` does it.

    Args:
        source: What to copy.
        target: Where to.
        report: Hears of each object.
        overwrite: Take also what is there already.
        deletes: Note what the target has beyond the source, for ``extras``; the source may then not lie inside it.

    Attributes:
        extras: Keys at the target that are none of the source's; complete once ``run`` has returned.

    Raises:
        ConfigError: a folder onto itself, into itself, or onto a file.
    """

    def __init__(
        self, source: Selection, target: Place, report: Report, *, overwrite: bool = False, deletes: bool = False
    ) -> None:
        self.source = source
        self.target = target
        self.report = report
        self.overwrite = overwrite
        self.deletes = deletes
        self.extras: list[Key] = []
        self._refuse_overlap()
        report.follow(self)

    def _refuse_overlap(self) -> None:
        if not self._overlaps():
            return
        source, target = self.source.place.url, self.target.url
        if self.deletes:
            raise ConfigError(f"one of {source} and {target} lies inside the other", hint="name folders that do not")
        if self.source.only is not None:
            raise ConfigError(f"{source} and {target} are the same object", hint="name another DST, or a folder")
        raise ConfigError(f"{target} lies inside {source}", hint="name a DST outside of SRC")

    def _overlaps(self) -> bool:
        """Whether what is written would be what is read."""
        source, target = self.source.place, self.target
        if source.path is not None and target.path is not None:  # one directory has many names: links, .., its parent
            if self.source.only is None:
                inner, outer = target.path.resolve(), source.path.resolve()
                return inner.is_relative_to(outer) or (self.deletes and outer.is_relative_to(inner))
            into = target.path / source.name if target.is_folder else target.path
            return into.resolve() == source.path.resolve()
        if not source.is_with(target):
            return False
        if self.source.only is not None:
            return self.target_key(source.key) == source.key
        if self.deletes and self.source.prefix.startswith(self.target_prefix):
            return True
        return not self.source.is_pattern and self.target_prefix.startswith(self.source.prefix)

    @property
    def target_prefix(self) -> Key:
        """What the targets' keys begin with, for a folder."""
        key = self.target.key
        return key if not key or key.endswith("/") else key + "/"

    def target_key(self, key: Key) -> Key:
        """Where in the target's store `key` goes."""
        if self.source.only is None:
            return self.target_prefix + key[len(self.source.prefix) :]
        return self.target.key + self.source.place.name if self.target.is_folder else self.target.key

    def run(self, *, dry_run: bool) -> None:
        """Copy."""
        items = self._items()
        source, target = self.source.place.store, self.target.store
        if dry_run:
            for item in items:
                self.report.would_move(item)
        elif self.target.path is not None:
            stream(source, items, Files(self.report), self.report)
        elif source is target:
            copy_inside(target, items, self.report)
        else:
            objects = Objects(target, self.report)
            try:
                stream(source, items, objects, self.report)
                objects.wait()
            except BaseException:
                objects.cancel()
                raise

    def _items(self) -> Iterator[Item]:
        """What is to be moved, in key order; what is there already, and what has no safe name, is reported."""
        there, prefix = self._there(), self.source.prefix
        reads_target = self.source.is_pattern and self.source.place.is_with(self.target)
        for info in self.source:
            item = Item(info, self.target_key(info.key), None)
            if reads_target and item.key.startswith(prefix) and self.source.takes(item.key[len(prefix) :]):
                raise ConfigError(
                    f"the copy {self.target.store.describe(item.key)} would match {self.source.url} itself"
                )
            known = there.has(item)
            try:
                item = self._with_path(item)
            except ConfigError as error:
                self.report.failed(item, error)
                continue
            if not self.overwrite and (is_there(item.path, info) if item.path else known):
                self.report.skipped(item)
            else:
                yield item
        there.end()

    def _with_path(self, item: Item) -> Item:
        """With the file it goes to, where the target is on this machine; checked to be a name below the target."""
        if self.target.path is None:
            return item
        store = LocalStore(self.target.root_url)
        is_marker = item.info.key.endswith("/") and not item.info.size_bytes
        return replace(item, path=store.path(item.key.removesuffix("/") if is_marker else item.key))

    def _there(self) -> There:
        if not self.deletes and (self.overwrite or self.target.path is not None):
            return There(iter(()))
        if self.source.only is not None:
            try:
                return There(iter([self.target.store.stat(self.target_key(self.source.only.key))]))
            except ObjectMissingError:
                return There(iter(()))
        return There(self._at_target(), on_extra=self._note_extra)

    def _at_target(self) -> Iterator[ObjectInfo]:
        try:
            yield from self.target.store.list(self.target_prefix)
        except DirectoryMissingError:
            return  # it is going to be made

    def _note_extra(self, key: Key) -> None:
        if self.deletes and self.source.takes(key[len(self.target_prefix) :]):
            self.extras.append(key)


class There:
    """What the target has, by a listing that is walked beside the source's: both are in key order."""

    def __init__(self, listing: Iterator[ObjectInfo], *, on_extra: Callable[[Key], None] = lambda _: None) -> None:
        self._listing = listing
        self._on_extra = on_extra
        self._next = next(listing, None)

    def has(self, item: Item) -> bool:
        """Whether the target holds `item`, as far as size and time tell; items come in key order."""
        while self._next is not None and self._next.key < item.key:
            self._pass()
        found = self._next
        if found is None or found.key != item.key:
            return False
        self._next = next(self._listing, None)
        if found.size_bytes != item.info.size_bytes:
            return False
        if found.last_modified_s is None or item.info.last_modified_s is None:
            return False
        return found.last_modified_s >= item.info.last_modified_s

    def end(self) -> None:
        """There are no more items: the rest of the listing is extra."""
        while self._next is not None:
            self._pass()

    def _pass(self) -> None:
        assert self._next is not None
        self._on_extra(self._next.key)
        self._next = next(self._listing, None)


class Report:
    """Counts, prints and shows progress. On a terminal a line that moves, on stderr; else one line at the end."""

    def __init__(self, *, as_json: bool, dry_run: bool, deletes: bool = False) -> None:
        self._as_json = as_json
        self._dry_run = dry_run
        self._deletes = deletes
        self._start_s = time.monotonic()
        self._plan: Plan | None = None
        self._progress: Any = None
        self.moved_count = self.skipped_count = self.failed_count = self.deleted_count = 0
        self.moved_bytes = self.skipped_bytes = self._arrived_bytes = 0

    def follow(self, plan: Plan) -> None:
        """Of which plan to report."""
        self._plan = plan

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and not self._as_json and not self._dry_run:
            from rich.console import Console
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._progress.add_task("listing")
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    # ── penstock.cli.transfer.Listener ──────────────────────────────────────────────────────────────────────────────

    def moved(self, item: Item) -> None:
        """`item` was copied."""
        self.moved_count += 1
        self.moved_bytes += item.info.size_bytes
        self._print("copied", item)

    def failed(self, item: Item, error: Exception) -> None:
        """`item` was not copied."""
        self.failed_count += 1
        self._print("failed", item, error)

    def progressed(self, size_bytes: int) -> None:
        """Bytes arrived."""
        self._arrived_bytes += size_bytes
        if self._progress is not None:
            rate = self._arrived_bytes / max(1e-9, time.monotonic() - self._start_s)
            text = f"{self.moved_count} copied, {self.skipped_count} there already, {format_bytes(self._arrived_bytes)}"
            self._progress.update(self._task, description=f"{text}, {format_bytes(rate)}/s")

    # ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def skipped(self, item: Item) -> None:
        """`item` was there."""
        self.skipped_count += 1
        self.skipped_bytes += item.info.size_bytes
        self._print("skipped", item)

    def would_move(self, item: Item) -> None:
        """`item` would be copied."""
        self.moved_count += 1
        self.moved_bytes += item.info.size_bytes
        self._print("would copy", item)

    def deleted(self, key: Key) -> None:
        """`key` is gone from the target, or would be."""
        assert self._plan is not None
        self.deleted_count += 1
        target = self._plan.target.store.describe(key)
        if self._as_json:
            print(json.dumps({"action": "would delete" if self._dry_run else "deleted", "target": target}))
        elif self._dry_run:
            show(f"delete {target}")
        elif self._progress is not None:
            self._progress.update(self._task, description=f"{self.deleted_count} deleted")

    def _print(self, action: str, item: Item, error: Exception | None = None) -> None:
        assert self._plan is not None
        source = self._plan.source.place.store.describe(item.info.key)
        target = self._plan.target.store.describe(item.key)
        if self._as_json:
            line: dict[str, Any] = {"action": action, "source": source, "target": target}
            line["size_bytes"] = item.info.size_bytes
            if error is not None:
                line |= {"error": type(error).__name__, "message": str(error)}
            print(json.dumps(line))
        elif error is not None:
            named = isinstance(error, StoreError) and error.url
            self._say(f"penstock: {'' if named else f'{source}: '}{one_line(error)}")
        elif action == "would copy":
            show(f"{source} -> {target}")

    def _say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(printable(text), markup=False, highlight=False)
        else:
            tell(text)

    def end(self) -> None:
        """The last line."""
        seconds = time.monotonic() - self._start_s
        if self._as_json:
            summary = {
                "action": "summary",
                "dry_run": self._dry_run,
                "copied": self.moved_count,
                "copied_bytes": self.moved_bytes,
                "skipped": self.skipped_count,
                "skipped_bytes": self.skipped_bytes,
                **({"deleted": self.deleted_count} if self._deletes else {}),
                "failed": self.failed_count,
                "seconds": round(seconds, 3),
            }
            print(json.dumps(summary))
            return
        verb = "would be copied" if self._dry_run else "copied"
        text = f"{self.moved_count} {verb} ({format_bytes(self.moved_bytes)}), {self.skipped_count} there already"
        text += f", {self.deleted_count} {'would be ' if self._dry_run else ''}deleted" if self._deletes else ""
        rate = f", {format_bytes(self.moved_bytes / max(seconds, 1e-9))}/s" if not self._dry_run else ""
        self._say(text + (f", {self.failed_count} failed" if self.failed_count else "") + f", {seconds:.1f} s{rate}")
