"""``penstock cp`` and ``penstock sync``: copy files, folders and prefixes, from anywhere to anywhere."""

from __future__ import annotations

import threading
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from penstock.cli.options import (
    AS_JSON,
    CACHE,
    ConnectionGroup,
    SourceConnectionGroup,
    StoreLocation,
    Stores,
    argument,
    expand_groups,
    flag,
)
from penstock.cli.output import ProgressReport, counted, one_line, print_message, print_result
from penstock.cli.rm import removable, remove
from penstock.cli.selection import FilterGroup, Selection
from penstock.errors import ConfigError, DirectoryMissingError, ObjectMissingError, PenstockError, StoreError
from penstock.store.local import LocalStore
from penstock.store.records import RECORDS_FOLDER, FileRecords
from penstock.text.sizes import format_bytes
from penstock.transfer.download import FileReceiver, is_downloaded
from penstock.transfer.moving import TransferItem, copy_between, copy_inside, stream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from penstock.store.base import Store
    from penstock.types import Key, ObjectInfo

QUIET = flag("Show neither progress nor the summary, only failures.", names=("--quiet", "-q"))


@expand_groups
def cp(
    source: str = argument("SRC", "An object or file, a prefix or directory with everything below it, or a pattern."),
    target: str = argument("DST", "Target; a folder if it ends with a slash."),
    *,
    recursive: bool = flag(
        "Accepted for compatibility: folders are always copied with everything below them.", names=("--recursive", "-r")
    ),
    filters: FilterGroup,
    overwrite: bool = flag("Copy objects even if the target has them already."),
    dry_run: bool = flag("Print what would be copied, and copy nothing."),
    quiet: bool = QUIET,
    cache: str | None = CACHE,
    as_json: bool = AS_JSON,
    connection: ConnectionGroup,
    source_connection: SourceConnectionGroup,
) -> None:
    """Copy a file or everything below a folder. Run it again to finish an interrupted copy.

    Objects that the target has already are skipped, as with aws s3 sync: on disk, a file with the object's size,
    modification time and (if the file system stores attributes) ETag; in a store, an object of the same size that is not
    older. Other objects of the same name are replaced. Nothing is deleted. Within one store, the store itself copies.

    SRC may be a pattern with the rules of penstock.shards; quote it, so that the shell does not expand it. A key is copied
    if it matches an --include (or there is none) and no --exclude. The command fails if there is nothing to copy.

    Sizes are compared, and checksums are verified if the store has them. Files appear completely or not at all, also after
    Ctrl-C. If an object fails, the others are still copied, and the exit code is 1. Keys that are not safe file names
    (such as ..) are refused.

    For example:

        penstock cp s3://bucket/train/ /data/train/
        penstock cp model.pt s3://bucket/models/
        penstock cp "s3://bucket/train/*-0000{0..3}.tar" /data/train/
        penstock cp --exclude "*.tmp" /data/out/ s3://bucket/out/
        penstock cp --dry-run s3://bucket/a/ s3://other/b/
        penstock cp --source-anonymous s3://public/set/ s3://mine/set/
    """
    target_stores = Stores(connection, cache=cache)
    source_stores = target_stores.for_source(source_connection)
    report = CopyReport(as_json=as_json, dry_run=dry_run, is_quiet=quiet)
    with source_stores, target_stores, report:
        selection = Selection(source_stores, source, filters)
        CopyPlan(selection, target_stores.locate(target), report, overwrite=overwrite).run(dry_run=dry_run)
    report.end()
    selection.check_found()
    if report.failed_count:
        raise typer.Exit(1)


@expand_groups
def mv(
    source: str = argument("SRC", "An object or file, a prefix or directory with everything below it, or a pattern."),
    target: str = argument("DST", "Target; a folder if it ends with a slash."),
    *,
    filters: FilterGroup,
    dry_run: bool = flag("Print what would be moved, and move nothing."),
    quiet: bool = QUIET,
    as_json: bool = AS_JSON,
    connection: ConnectionGroup,
    source_connection: SourceConnectionGroup,
) -> None:
    """Copy SRC to DST as cp --overwrite does, and then remove it from SRC.

    Objects are removed last, and only if everything was copied. If a copy fails or the command is interrupted, SRC still
    has all objects; run it again. In a directory, links to other directories and the files behind them are not removed.

    For example:

        penstock mv s3://bucket/new/model.pt s3://bucket/models/
        penstock mv --dry-run --include "*.tar" /data/out/ s3://bucket/train/
    """
    target_stores = Stores(connection)
    source_stores = target_stores.for_source(source_connection)
    report = CopyReport(as_json=as_json, dry_run=dry_run, deletes=True, is_quiet=quiet)
    with source_stores, target_stores, report:
        selection = Selection(source_stores, source, filters)
        plan = CopyPlan(selection, target_stores.locate(target), report, overwrite=True, moves=True)
        plan.run(dry_run=dry_run)
        selection.check_found()
        if not dry_run and not report.failed_count:
            place = selection.location
            remove(place.store, removable(place, report.moved_keys), lambda key: report.deleted(key, of=place.store))
    report.end()
    if report.failed_count:
        raise typer.Exit(1)


class CopyPlan:
    """What is copied where; ``run`` copies it.

    Args:
        source: Objects to copy.
        target: Object or folder to copy them to.
        report: Receives an event for each object.
        overwrite: Whether to copy objects that the target has already.
        deletes: Whether to collect the target's other objects in ``extras``; the source may then not lie inside it.
        moves: Whether what is copied is removed from the source afterwards; the source may then not lie inside the target,
            either, where a copy could replace an object that is still to be copied.

    Attributes:
        extras: Keys in the target that the source does not have; complete when ``run`` returns.
        left_out: Keys in the target whose names the source has for something that is not copied, such as a broken link.

    Raises:
        ConfigError: The target is the source itself, lies inside it, or is an object while the source is a folder.
    """

    def __init__(
        self,
        source: Selection,
        target: StoreLocation,
        report: CopyReport,
        *,
        overwrite: bool = False,
        deletes: bool = False,
        moves: bool = False,
    ) -> None:
        self.source = source
        self.target = target
        self.report = report
        self.overwrite = overwrite
        self.deletes = deletes
        self.moves = moves
        self.extras: list[Key] = []
        self.left_out: list[Key] = []
        self._refuse_overlap()
        report.plan = self

    def _refuse_overlap(self) -> None:
        if not self._overlaps():
            return
        source, target = self.source.location.url, self.target.url
        if self.source.only is not None:
            raise ConfigError(f"{source} and {target} are the same object", hint="name another DST, or a folder")
        if self.deletes or self.moves:
            raise ConfigError(
                f"{source} and {target} overlap: one of them lies inside the other", hint="name separate folders"
            )
        raise ConfigError(f"{target} lies inside {source}", hint="name a DST outside of SRC")

    def _overlaps(self) -> bool:
        """Return whether the copy would write to what it reads."""
        source, target, is_apart = self.source.location, self.target, self.deletes or self.moves
        if source.path is not None and target.path is not None:  # a directory has many names: links, .., its parent
            if self.source.only is None:
                inner, outer = target.path.resolve(), source.path.resolve()
                return inner.is_relative_to(outer) or (is_apart and outer.is_relative_to(inner))
            into = target.path / source.name if target.is_folder else target.path
            return into.resolve() == source.path.resolve()
        if not source.is_in_store_of(target):
            return False
        if self.source.only is not None:
            return self.target_key(source.key) == source.key
        if is_apart and self.source.prefix.startswith(self.target_prefix):
            return True
        return not self.source.is_pattern and self.target_prefix.startswith(self.source.prefix)

    @property
    def target_prefix(self) -> Key:
        """Prefix of the target's keys, if it is a folder."""
        key = self.target.key
        return key if not key or key.endswith("/") else key + "/"

    def target_key(self, key: Key) -> Key:
        """Return the key in the target store to which `key` is copied."""
        if self.source.only is None:
            return self.target_prefix + key[len(self.source.prefix) :]
        return self.target.key + self.source.location.name if self.target.is_folder else self.target.key

    def run(self, *, dry_run: bool) -> None:
        """Copy the objects, or only report them if `dry_run`."""
        items = self._items()
        if self.report.has_bar:
            threading.Thread(target=self._count, daemon=True).start()
        source, target = self.source.location.store, self.target.store
        if dry_run:
            for item in items:
                self.report.would_move(item)
        elif self.target.path is not None:
            records = FileRecords(self.target.root_path / RECORDS_FOLDER)
            stream(source, items, FileReceiver(self.report, records=records), self.report)
        elif source is target:
            copy_inside(target, items, self.report)
        else:
            copy_between(source, target, items, self.report)

    def _count(self) -> None:
        """Tell the report how many bytes SRC has, by a listing of its own: that of the copy is only read as it goes on."""
        with suppress(PenstockError, OSError):  # the copy meets it, too, and says so
            self.report.total_bytes = sum(info.size_bytes for info in copy(self.source))

    def _items(self) -> Iterator[TransferItem]:
        """Yield what must be moved, in key order; report what the target has already, and names that are not safe."""
        existing, prefix = self._existing(), self.source.prefix
        reads_target = self.source.is_pattern and self.source.location.is_in_store_of(self.target)
        for info in self.source:
            item = TransferItem(info, self.target_key(info.key), None)
            if reads_target and item.key.startswith(prefix) and self.source.takes(item.key[len(prefix) :]):
                raise ConfigError(
                    f"the copy {self.target.store.describe(item.key)} would match {self.source.url} itself"
                )
            known = existing.has(item)
            try:
                item = self._with_path(item)
            except ConfigError as error:
                self.report.failed(item, error)
                continue
            if not self.overwrite and (is_downloaded(item.path, info) if item.path else known):
                self.report.skipped(item)
            else:
                yield item
        existing.end()

    def _with_path(self, item: TransferItem) -> TransferItem:
        """Return `item` with its target file, if the target is on this machine; the name must lie below the target.

        Raises:
            ConfigError: The key is not a safe file name.
        """
        if self.target.path is None:
            return item
        store = LocalStore(self.target.root_url)
        is_marker = item.info.key.endswith("/") and not item.info.size_bytes
        return replace(item, path=store.path(item.key.removesuffix("/") if is_marker else item.key))

    def _existing(self) -> TargetListing:
        if not self.deletes and (self.overwrite or self.target.path is not None):
            return TargetListing(iter(()))
        if self.source.only is not None:
            try:
                return TargetListing(iter([self.target.store.stat(self.target_key(self.source.only.key))]))
            except ObjectMissingError:
                return TargetListing(iter(()))
        return TargetListing(self._list_target(), on_extra=self._note_extra)

    def _list_target(self) -> Iterator[ObjectInfo]:
        try:
            yield from self.target.store.list(self.target_prefix)
        except DirectoryMissingError:
            return  # the copy makes it

    def _note_extra(self, key: Key) -> None:
        name = key[len(self.target_prefix) :]
        if self.deletes and self.source.takes(name):
            (self.left_out if self.source.leaves_out(name) else self.extras).append(key)


class TargetListing:
    """What the target has: a listing that is walked in parallel with the source's, as both are in key order.

    Args:
        listing: Objects of the target, in key order.
        on_extra: Called with each key that the source does not have.
    """

    def __init__(self, listing: Iterator[ObjectInfo], *, on_extra: Callable[[Key], None] = lambda _: None) -> None:
        self._listing = listing
        self._on_extra = on_extra
        self._next = next(listing, None)

    def has(self, item: TransferItem) -> bool:
        """Return whether the target has `item`, judging by size and time; items must come in key order."""
        while self._next is not None and self._next.key < item.key:
            self._pass_over()
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
        """Treat the rest of the listing as extra: there are no more items."""
        while self._next is not None:
            self._pass_over()

    def _pass_over(self) -> None:
        assert self._next is not None
        self._on_extra(self._next.key)
        self._next = next(self._listing, None)


class CopyReport(ProgressReport):
    """The report of ``cp`` and ``sync``; a ``TransferListener``.

    Args:
        as_json: Whether to print JSON lines.
        dry_run: Whether nothing is copied.
        deletes: Whether objects are deleted too.
        is_quiet: Whether only failures are reported.

    Attributes:
        plan: The plan whose events are reported, which sets it.
        total_bytes: Size of everything in SRC, whether it is copied or not; None until it is known.
        moved_keys: Keys in SRC of what was copied, if it is removed there afterwards.
    """

    shown = ("Spinner", "Bar", "TimeElapsed", "TimeRemaining")

    def __init__(self, *, as_json: bool, dry_run: bool, deletes: bool = False, is_quiet: bool = False) -> None:
        super().__init__(as_json=as_json, has_bar=not dry_run and not is_quiet, flushes=False)
        self._is_quiet = is_quiet
        self.total_bytes: int | None = None
        self.moved_keys: list[Key] = []
        self._dry_run = dry_run
        self._deletes = deletes
        self.plan: CopyPlan | None = None
        self.moved_count = self.skipped_count = self.failed_count = self.deleted_count = 0
        self.moved_bytes = self.skipped_bytes = self._arrived_bytes = 0

    # ── penstock.transfer.moving.TransferListener ────────────────────────────────────────────────────────────────────

    def moved(self, item: TransferItem) -> None:
        """`item` was copied."""
        self.moved_count += 1
        self.moved_bytes += item.info.size_bytes
        assert self.plan is not None
        if self.plan.moves:
            self.moved_keys.append(item.info.key)
        self._print("copied", item)

    def failed(self, item: TransferItem, error: Exception) -> None:
        """`item` was not copied."""
        self.failed_count += 1
        self._print("failed", item, error)

    def progressed(self, size_bytes: int) -> None:
        """Count bytes that arrived."""
        self._arrived_bytes += size_bytes
        if self.has_bar:
            text = f"{self.moved_count} copied, {self.skipped_count} there already, {format_bytes(self._arrived_bytes)}"
            wanted_bytes = None if self.total_bytes is None else max(0, self.total_bytes - self.skipped_bytes)
            text += f" of {format_bytes(wanted_bytes)}" if wanted_bytes is not None else ""
            rate = self.rate(self._arrived_bytes)
            self.update(description=f"{text}, {rate}", completed=self._arrived_bytes, total=wanted_bytes)

    # ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def skipped(self, item: TransferItem) -> None:
        """The target has `item` already."""
        self.skipped_count += 1
        self.skipped_bytes += item.info.size_bytes
        self._print("skipped", item)

    def would_move(self, item: TransferItem) -> None:
        """`item` would be copied."""
        self.moved_count += 1
        self.moved_bytes += item.info.size_bytes
        self._print("would copy", item)

    def deleted(self, key: Key, *, of: Store | None = None) -> None:
        """`key` was deleted, or would be: from the target, unless the store is given."""
        assert self.plan is not None
        self.deleted_count += 1
        target = (of or self.plan.target.store).describe(key)
        if self.as_json:
            self.print_json(action="would delete" if self._dry_run else "deleted", target=target)
        elif self._dry_run:
            print_result(f"delete {target}")
        else:
            self.update(description=f"{self.deleted_count} deleted")

    def _print(self, action: str, item: TransferItem, error: Exception | None = None) -> None:
        assert self.plan is not None
        source = self.plan.source.location.store.describe(item.info.key)
        target = self.plan.target.store.describe(item.key)
        if self.as_json:
            failure = {} if error is None else {"error": type(error).__name__, "message": str(error)}
            self.print_json(action=action, source=source, target=target, size_bytes=item.info.size_bytes, **failure)
        elif error is not None:
            is_named = isinstance(error, StoreError) and error.url
            self.print_message(f"penstock: {'' if is_named else f'{source}: '}{one_line(error)}")
        elif action == "would copy":
            print_result(f"{source} -> {target}")

    def end(self) -> None:
        """Print the summary."""
        if self._is_quiet:
            return
        if self.as_json:
            deleted = {"deleted": self.deleted_count} if self._deletes else {}
            self.print_summary(
                dry_run=self._dry_run,
                copied=self.moved_count,
                copied_bytes=self.moved_bytes,
                skipped=self.skipped_count,
                skipped_bytes=self.skipped_bytes,
                **deleted,
                failed=self.failed_count,
            )
            return
        verb = "would be copied" if self._dry_run else "copied"
        text = f"{self.moved_count} {verb} ({format_bytes(self.moved_bytes)}), {self.skipped_count} there already"
        text += f", {self.deleted_count} {'would be ' if self._dry_run else ''}deleted" if self._deletes else ""
        rate = f", {self.rate(self.moved_bytes)}" if not self._dry_run else ""
        failed = f", {self.failed_count} failed" if self.failed_count else ""
        print_message(f"{text}{failed}, {self.seconds:.1f} s{rate}")


@expand_groups
def sync(
    source: str = argument("SRC", "A prefix, a directory, or a pattern."),
    target: str = argument("DST", "A prefix or a directory."),
    *,
    delete: bool = flag("Remove from DST what SRC does not have."),
    allow_empty: bool = flag("Continue if SRC has no objects; with --delete this empties DST."),
    filters: FilterGroup,
    dry_run: bool = flag("Print what would be done, and do nothing."),
    quiet: bool = QUIET,
    cache: str | None = CACHE,
    as_json: bool = AS_JSON,
    connection: ConnectionGroup,
    source_connection: SourceConnectionGroup,
) -> None:
    """Copy from SRC what DST lacks, as cp does; with --delete, also remove from DST what SRC does not have.

    Objects are removed last, and only if SRC was listed completely, is not empty, and everything was copied. Objects that
    --include and --exclude leave out are neither copied nor removed.

    For example:

        penstock sync s3://bucket/train/ /data/train/
        penstock sync --delete --dry-run /data/train/ s3://bucket/train/
        penstock sync --delete --exclude "*.tmp" /data/train/ s3://bucket/train/
    """
    target_stores = Stores(connection, cache=cache)
    source_stores = target_stores.for_source(source_connection)
    report = CopyReport(as_json=as_json, dry_run=dry_run, deletes=delete, is_quiet=quiet)
    with source_stores, target_stores, report:
        selection = Selection(source_stores, source, filters)
        if selection.only is not None:
            raise ConfigError(f"{selection.location.url} is one object", hint="penstock cp copies it")
        plan = CopyPlan(selection, target_stores.locate(target), report, deletes=delete)
        plan.run(dry_run=dry_run)
        if selection.count or not allow_empty:
            selection.check_found()
        if plan.left_out:
            example = plan.target.store.describe(plan.left_out[0])
            report.print_message(
                f"penstock: {len(plan.left_out)} objects are not deleted, such as {example}, because SRC has something of this "
                "name that is not copied: a link that leads nowhere, a pipe or a device"
            )
        selection.check_absent([key[len(plan.target_prefix) :] for key in plan.extras])
        extras = removable(plan.target, plan.extras)
        if dry_run:
            for key in extras:
                report.deleted(key)
        elif not report.failed_count:
            remove(plan.target.store, extras, report.deleted)
    report.end()
    if report.failed_count:
        if plan.extras:
            print_message(
                f"penstock: not deleted, because others failed: {counted(len(plan.extras), 'object')} that SRC lacks"
            )
        raise typer.Exit(1)
