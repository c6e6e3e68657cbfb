"""``penstock sync``: makes a folder equal to another one."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.cp import CopyPlan, CopyReport
from penstock.cli.options import AsJson, Cache, ConnectionGroup, SourceConnectionGroup, Stores, expand_groups
from penstock.cli.output import print_message
from penstock.cli.rm import removable, remove
from penstock.cli.selection import FilterGroup, Selection
from penstock.errors import ConfigError


@expand_groups
def sync(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A prefix, a directory, or a pattern.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="A prefix or a directory.")],
    *,
    delete: Annotated[bool, typer.Option("--delete", help="Remove from DST what SRC does not have.")] = False,
    allow_empty: Annotated[
        bool, typer.Option("--allow-empty", help="Continue if SRC has no objects; with --delete this empties DST.")
    ] = False,
    filters: FilterGroup,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and do nothing.")] = False,
    cache: Cache = None,
    as_json: AsJson = False,
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
    report = CopyReport(as_json=as_json, dry_run=dry_run, deletes=delete)
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
                f"penstock: {len(plan.extras)} objects that SRC lacks were not deleted, because others failed"
            )
        raise typer.Exit(1)
