"""``penstock sync``: make a folder what another one is."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.cp import Plan, Report
from penstock.cli.options import (
    Anonymous,
    AsJson,
    Cache,
    Connection,
    EndpointUrl,
    Profile,
    Region,
    SourceAnonymous,
    SourceEndpointUrl,
    SourceProfile,
)
from penstock.cli.rm import removable, remove
from penstock.cli.saying import tell
from penstock.cli.selection import Exclude, Include, Selection
from penstock.errors import ConfigError


def sync(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A prefix or directory, or a pattern.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="A prefix or directory.")],
    *,
    delete: Annotated[bool, typer.Option("--delete", help="Remove from DST what SRC does not have.")] = False,
    allow_empty: Annotated[
        bool, typer.Option("--allow-empty", help="Go on if SRC has no objects; with --delete this empties DST.")
    ] = False,
    include: Include = None,
    exclude: Exclude = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")] = False,
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
    """Copy from SRC what DST lacks, as cp does; with --delete, also remove from DST what SRC does not have.

    Objects are removed last, and only if SRC was listed to its end, is not empty, and everything was copied. What
    --include and --exclude leave out is neither copied nor removed.

    For example:

        penstock sync s3://bucket/train/ /data/train/
        penstock sync --delete --dry-run /data/train/ s3://bucket/train/
        penstock sync --delete --exclude "*.tmp" /data/train/ s3://bucket/train/
    """
    there = Connection(endpoint_url=endpoint_url, region=region, profile=profile, anonymous=anonymous, cache=cache)
    here = there.of_source(endpoint_url=source_endpoint_url, profile=source_profile, anonymous=source_anonymous)
    report = Report(as_json=as_json, dry_run=dry_run, deletes=delete)
    with here, there, report:
        selection = Selection(here, source, include=include, exclude=exclude)
        if selection.only is not None:
            raise ConfigError(f"{selection.place.url} is one object", hint="penstock cp copies it")
        plan = Plan(selection, there.place(target), report, deletes=delete)
        plan.run(dry_run=dry_run)
        if selection.count or not allow_empty:
            selection.check_found()
        extras = removable(plan.target, plan.extras)
        if dry_run:
            for key in extras:
                report.deleted(key)
        elif not report.failed_count:
            remove(plan.target.store, extras, report.deleted)
    report.end()
    if report.failed_count:
        if plan.extras:
            tell(f"penstock: {len(plan.extras)} objects that SRC lacks were not deleted, because others failed")
        raise typer.Exit(1)
