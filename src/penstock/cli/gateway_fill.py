"""``penstock gateway fill``: makes results ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.gateway import ConfigFile, KeepingGroup, TransformGroup, UpstreamGroup, make_config
from penstock.cli.options import AsJson, expand_groups
from penstock.cli.output import print_message
from penstock.cli.progress import ProgressReport
from penstock.errors import ConfigError
from penstock.text.sizes import format_bytes

if TYPE_CHECKING:
    from penstock.gateway.filling.job import Filled

ERRORS_SHOWN_MAX = 100
DETAIL_LINES_MAX = 8


@expand_groups
def fill(
    points: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Access points; default: all that have a transform."),
    ] = None,
    *,
    config: ConfigFile = None,
    upstream: UpstreamGroup,
    transform: TransformGroup,
    keeping: KeepingGroup,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source",
            metavar="PATTERN",
            help="A key, a prefix ending with a slash, or a pattern such as '**/*.tar'; may be repeated; default: all.",
        ),
    ] = None,
    manifest: Annotated[
        str | None, typer.Option("--manifest", metavar="FILE", help="A manifest of sources, instead of --source.")
    ] = None,
    into: Annotated[
        str | None,
        typer.Option(
            "--into",
            metavar="results|cache|both",
            help="Where to keep them; default: the bucket of --results, or the cache.",
        ),
    ] = None,
    query: Annotated[
        list[str] | None,
        typer.Option("--query", metavar="NAME=VALUE", help="A parameter of the requests, e.g. x-penstock-epoch=3."),
    ] = None,
    caller: Annotated[
        str,
        typer.Option(
            "--caller", metavar="KEY_ID", help="The access key of the requests, if a handler's answer depends on it."
        ),
    ] = "",
    index: Annotated[
        bool, typer.Option("--index", help="Make the index of all results too, for random access by a Loader.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", metavar="N", help="Transform processes, or tasks on Ray; default: one per processor."),
    ] = None,
    executor: Annotated[
        str,
        typer.Option("--executor", metavar="processes|ray", help="Run on this machine, or on a Ray cluster."),
    ] = "processes",
    address: Annotated[
        str | None, typer.Option("--address", metavar="ADDRESS", help="Address of the Ray cluster.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make results ahead, so that gateways find them in the bucket of --results or in the node's cache.

    Configure it as the gateway that will serve the results, by the same file or the same flags. What exists is skipped: after
    Ctrl-C, the same command continues. The exit code is 1 if a result could not be made; the others are made nevertheless.

    For example:

        penstock gateway fill --config gateway.toml train --source "**/*.tar"
        penstock gateway fill --upstream s3://bucket/train/ --transform tar2tfrecord --results s3://bucket/derived/
        penstock gateway fill --config gateway.toml train --index
        penstock gateway fill --config gateway.toml --executor ray --address auto
    """
    from penstock.gateway.filling.job import fill_job
    from penstock.gateway.filling.run import FillOptions
    from penstock.gateway.filling.run import fill as run

    made = make_config(config, upstream, transform=transform, keeping=keeping)
    job = fill_job(made, points or (), into=into, query=dict(_parameter(text) for text in query or ()), caller=caller)
    options = FillOptions(
        patterns=source or (),
        manifest=manifest or "",
        executor=executor,  # type: ignore[arg-type]
        address=address,
        jobs=jobs,
        has_index=index,
    )
    with FillReport(as_json=as_json) as report:
        run(job, options, report)
    report.end()
    if report.errors:
        raise typer.Exit(1)


def _parameter(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"--query {text!r} must be NAME=VALUE", hint="--query x-penstock-epoch=3")
    return name, value


class FillReport(ProgressReport):
    """The report of ``fill``; a ``FillListener``.

    Attributes:
        errors: Results that could not be made.
    """

    def __init__(self, *, as_json: bool) -> None:
        super().__init__(as_json=as_json)
        self.errors: list[Filled] = []
        self._counts = {"made": 0, "copied": 0, "present": 0, "left-out": 0, "failed": 0}
        self._made_bytes = 0

    def columns(self) -> list[Any]:
        """Return a bar, the rate and the time left."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

        return [BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn()]

    def planned(self, results_count: int, source_bytes: int) -> None:
        """So many results are to be made or found."""
        self.update(description="filling", total=results_count)
        self.print_json(action="begin", results=results_count, source_bytes=source_bytes)

    def filled(self, result: Filled) -> None:
        """Something has become of one result."""
        self._counts[result.outcome] += 1
        self._made_bytes += result.size_bytes
        if result.error:
            self.errors.append(result)
        self.update(advance=1, rate=f"{format_bytes(self._made_bytes / max(self.seconds, 1e-9))}/s")
        fields = {"error": result.error} if result.error else {"etag": result.etag, "size_bytes": result.size_bytes}
        self.print_json(action=result.outcome, point=result.source.point, key=result.source.key, **fields)

    def end(self) -> None:
        """Print the summary, and what failed."""
        counts = self._counts
        if self.as_json:
            figures = {name.replace("-", "_"): count for name, count in counts.items()}
            self.print_json(action="summary", **figures, size_bytes=self._made_bytes, seconds=round(self.seconds, 3))
            return
        words = [f"{counts['made'] + counts['copied']} results made, {format_bytes(self._made_bytes)}"]
        names = {
            "copied": "of them copied",
            "present": "there already",
            "left-out": "keys left out",
            "failed": "failed",
        }
        words += [f"{counts[name]} {what}" for name, what in names.items() if counts[name]]
        print_message(f"{', '.join(words)}; {self.seconds:.1f} s")
        for each in self.errors[:ERRORS_SHOWN_MAX]:
            lines = each.error.splitlines()
            shown = lines if len(lines) <= DETAIL_LINES_MAX else [*lines[:2], "...", *lines[3 - DETAIL_LINES_MAX :]]
            print_message(f"failed: {each.source.point}: {each.source.key}: {shown[0]}")
            for line in shown[1:]:
                print_message(f"    {line}")
        if len(self.errors) > ERRORS_SHOWN_MAX:
            print_message(f"and {len(self.errors) - ERRORS_SHOWN_MAX} others; --json prints all of them")
