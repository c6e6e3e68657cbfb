"""``penstock checkpoint``: lists, verifies and removes the checkpoints of a training run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli import EXIT_UNCHECKED
from penstock.cli.options import AS_JSON, ConnectionGroup, argument, expand_groups, flag, option
from penstock.cli.output import ProgressReport, print_message, print_record, print_result, time_text
from penstock.errors import CheckpointError, ConfigError
from penstock.text.sizes import format_bytes

if TYPE_CHECKING:
    from penstock.checkpoints import CheckpointInfo, Checkpoints, Verification

checkpoint = typer.Typer(
    name="checkpoint",
    help="List, verify and remove the checkpoints of a training run.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

RUN_URL = argument("URL", "URL of the training run, s3://bucket/run/, or a directory.")


@checkpoint.command(no_args_is_help=True)
@expand_groups
def ls(url: str = RUN_URL, *, as_json: bool = AS_JSON, connection: ConnectionGroup) -> None:
    """List the checkpoints below URL by step: status, size, number of ranks, and time in UTC.

    The status is *whole* if all files are there with their sizes, *damaged* if one is not, *unfinished* if the save has
    not ended or was killed, and *unchecked* if another program wrote it without a manifest. The exit code is 1 if there is
    no checkpoint that could be restored.

    For example:

        penstock checkpoint ls s3://bucket/run/
        penstock checkpoint ls --json s3://bucket/run/ | jq 'select(.status == "whole") | .step'
    """
    from penstock.checkpoints import Checkpoints

    with Checkpoints(url, **connection.options()) as checkpoints:
        infos = checkpoints.all()
        for info in infos:
            print_record(_as_json(checkpoints, info), _as_text(info), as_json=as_json)
            if info.problem is not None and not as_json:
                print_message(f"penstock: {info.name or url}: {info.problem}")
        if not any(info.usable for info in infos):
            raise _nothing(checkpoints)


@checkpoint.command(no_args_is_help=True)
@expand_groups
def verify(
    url: str = RUN_URL,
    *,
    steps: list[int] | None = option("N", "Step to verify; repeatable. Default: the newest.", names=("--step",)),
    every: bool = flag("Verify every checkpoint.", names=("--all",)),
    sizes_only: bool = flag("Compare names and sizes of files, and do not read them."),
    as_json: bool = AS_JSON,
    connection: ConnectionGroup,
) -> None:
    """Read the newest checkpoint below URL, and compare every file with the checksums of its manifest.

    The exit code is 1 if a file is missing, damaged or mixed with those of another save. It is 3 if nothing is wrong, but
    the checkpoint was written by another program and has no checksums.

    For example:

        penstock checkpoint verify s3://bucket/run/
        penstock checkpoint verify --step 1000 --step 2000 s3://bucket/run/
        penstock checkpoint verify --all --sizes-only s3://bucket/run/
    """
    from penstock.checkpoints import Checkpoints

    if every and steps:
        raise ConfigError("--all and --step exclude each other")
    with Checkpoints(url, **connection.options()) as checkpoints:
        chosen = _chosen(checkpoints, steps, every=every)
        found = []
        with VerifyReport(as_json=as_json) as report:
            for step in chosen:
                report.begin(step)
                found.append(checkpoints.verify(step, checksums=not sizes_only, progress=report.read))
                report.end_one(checkpoints, found[-1])
    if any(each.problems for each in found):
        raise typer.Exit(1)
    if any(each.info.status == "unchecked" for each in found):
        raise typer.Exit(EXIT_UNCHECKED)


@checkpoint.command(no_args_is_help=True)
@expand_groups
def rm(
    url: str = RUN_URL,
    *,
    steps: list[int] | None = option("N", "Step to remove; repeatable.", names=("--step",)),
    after: int | None = option("N", "Remove all steps after N, to continue from an earlier checkpoint."),
    keep_last: int | None = option("N", "Remove all but the N newest whole checkpoints."),
    keep_every: int | None = option("N", "With --keep-last: also keep multiples of N."),
    debris: bool = flag("Remove files that killed and replaced saves left behind."),
    yes: bool = flag("Do not ask for confirmation.", names=("--yes", "-y")),
    as_json: bool = AS_JSON,
    connection: ConnectionGroup,
) -> None:
    """Remove checkpoints below URL: given steps, those after a step, all but the newest, or files of killed saves.

    The file that commits a checkpoint is removed first, so a checkpoint that is partly removed is never taken for a whole
    one. --keep-last never removes the newest whole checkpoint. On a terminal, the command asks first; elsewhere, --yes is
    needed.

    For example:

        penstock checkpoint rm --step 1000 s3://bucket/run/
        penstock checkpoint rm --keep-last 3 --keep-every 10000 --yes s3://bucket/run/
        penstock checkpoint rm --after 5000 s3://bucket/run/
        penstock checkpoint rm --debris --yes s3://bucket/run/
    """
    from penstock.checkpoints import Checkpoints

    if keep_every is not None and keep_last is None:
        raise ConfigError("--keep-every needs --keep-last", hint="--keep-last 3 --keep-every 10000")
    ways = [steps, after is not None, keep_last is not None, debris]
    if sum(map(bool, ways)) != 1:
        raise ConfigError(
            "name what to remove by exactly one of --step, --after, --keep-last and --debris",
            hint="--keep-last 3 removes all but the three newest",
        )
    with Checkpoints(url, **connection.options()) as checkpoints:
        if debris:
            _confirm(f"Remove the files of killed saves below {url}?", yes=yes)
            _report_removed([str(each.save_id) for each in checkpoints.remove_debris()], "save_id", as_json=as_json)
            return
        if keep_last is not None:
            _confirm(f"Remove all but the {keep_last} newest checkpoints below {url}?", yes=yes)
            removed = checkpoints.retain(keep_last=keep_last, keep_every=keep_every)
            _report_removed(removed, "step", as_json=as_json)
            return
        there = checkpoints.steps()
        wanted = list(dict.fromkeys(steps)) if steps else [each for each in there if after is not None and each > after]
        if missing := sorted(set(wanted) - set(there)):
            raise _missing(checkpoints, missing)
        if not wanted:
            raise CheckpointError(f"there is no checkpoint after step {after}", url=checkpoints.store.describe(""))
        _confirm(f"Remove {_described(checkpoints, wanted)} below {url}?", yes=yes)
        for step in sorted(wanted, reverse=True):  # an interrupted removal leaves older checkpoints, not newer ones
            checkpoints.remove(step)
            _report_removed([step], "step", as_json=as_json)


def _chosen(checkpoints: Checkpoints, steps: list[int] | None, *, every: bool) -> list[int]:
    """Return the steps to verify.

    Raises:
        CheckpointError: There is no such checkpoint.
    """
    there = checkpoints.steps()
    if steps:
        if missing := sorted(set(steps) - set(there)):
            raise _missing(checkpoints, missing)
        return list(dict.fromkeys(steps))
    committed = [step for step in there if every and checkpoints.inspect(step).status != "unfinished"]
    if not every and (newest := checkpoints.newest()) is not None and newest.step is not None:
        committed = [newest.step]
    if not committed:
        raise _nothing(checkpoints)
    return committed


def _nothing(checkpoints: Checkpoints) -> CheckpointError:
    return CheckpointError("there is no checkpoint that is whole", url=checkpoints.store.describe(""))


def _missing(checkpoints: Checkpoints, steps: list[int]) -> CheckpointError:
    named = ", ".join(map(str, steps[:3]))
    return CheckpointError(
        f"there is no checkpoint of step {named}",
        url=checkpoints.store.describe(""),
        hint="`penstock checkpoint ls` lists the steps",
    )


def _described(checkpoints: Checkpoints, steps: list[int]) -> str:
    newest = checkpoints.newest()
    named = "the checkpoint of step " + str(steps[0]) if len(steps) == 1 else f"{len(steps)} checkpoints"
    if newest is None or newest.step not in steps:
        return named
    return f"{named}, {'' if len(steps) == 1 else 'with '}the newest that is whole,"


def _confirm(question: str, *, yes: bool) -> None:
    """Ask on a terminal; the exit code is 1 if the answer is no.

    Raises:
        ConfigError: There is no terminal.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal on which to ask for confirmation", hint="pass --yes")
    try:
        confirmed = typer.confirm(question, err=True)
    except typer.Abort:  # the end of the input
        confirmed = False
    if not confirmed:
        print_message("penstock: nothing was removed")
        raise typer.Exit(1)


def _report_removed(removed: list[Any], name: str, *, as_json: bool) -> None:
    for each in removed:
        print_record({"action": "removed", name: each}, f"removed {name} {each}", as_json=as_json)
    if not removed:
        print_message("penstock: there was nothing to remove")


def _as_text(info: CheckpointInfo) -> str:
    step = "" if info.step is None else str(info.step)
    ranks = "" if info.world_size is None else f"{info.world_size} rank{'s' if info.world_size > 1 else ''}"
    size = format_bytes(info.size_bytes)
    return f"{step:>12}  {info.status:10}  {size:>10}  {ranks:>10}  {time_text(info.saved_s) or '':20}  {info.name}".rstrip()


def _as_json(checkpoints: Checkpoints, info: CheckpointInfo) -> dict[str, Any]:
    return {
        "step": info.step,
        "status": info.status,
        "url": checkpoints.store.describe(info.name),
        "size_bytes": info.size_bytes,
        "files": info.files_count,
        "world_size": info.world_size,
        "saved": time_text(info.saved_s),
        "problem": info.problem,
    }


class VerifyReport(ProgressReport):
    """The report of ``checkpoint verify``: a bar of the bytes that were read, and a line for each checkpoint."""

    shown = ("Bar", "Download", "TransferSpeed", "TimeElapsed")

    def begin(self, step: int) -> None:
        """The checkpoint of a step is verified next."""
        self.update(description=f"step {step}", completed=0, total=None)

    def read(self, read_bytes: int, total_bytes: int) -> None:
        """So many of its bytes were read."""
        self.update(completed=read_bytes, total=total_bytes)

    def end_one(self, checkpoints: Checkpoints, found: Verification) -> None:
        """A checkpoint was verified."""
        info = found.info
        action = "failed" if found.problems else "unchecked" if info.status == "unchecked" else "verified"
        problems = [str(problem) for problem in found.problems]
        self.print_json(action=action, **_as_json(checkpoints, info), read_bytes=found.read_bytes, problems=problems)
        for problem in problems:
            self.print_message(f"penstock: {problem}")
        if not self.as_json:
            read = f"{format_bytes(found.read_bytes)} read"
            print_result(f"step {info.step}: {action}, {found.files_count} files, {read}")
