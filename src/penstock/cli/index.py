"""``penstock index``: stores where each sample of a data set lies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import AsJson, ConnectionGroup, expand_groups
from penstock.cli.output import print_message
from penstock.cli.progress import ProgressReport
from penstock.text.sizes import format_bytes

if TYPE_CHECKING:
    from penstock.errors import PenstockError
    from penstock.index import Built, ShardRow


@expand_groups
def index(
    url: Annotated[str, typer.Argument(metavar="URL", help="Shards: s3://bucket/prefix/, a pattern, or a directory.")],
    *,
    beside: Annotated[
        bool,
        typer.Option("--beside", help="Store the index beside the shards under .penstock/, even if there is none yet."),
    ] = False,
    index_dir: Annotated[
        str | None,
        typer.Option(
            "--index-dir",
            metavar="DIR",
            help="Store the index here; default: beside the shards if there is one, otherwise in the user's cache.",
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Read every shard, even if it is indexed already.")] = False,
    ignore_idx: Annotated[bool, typer.Option("--ignore-idx", help="Do not use the .idx files of other tools.")] = False,
    skip_corrupt: Annotated[
        bool,
        typer.Option(
            "--skip-corrupt", help="Index the good samples of corrupt shards, for jobs that skip corrupt samples."
        ),
    ] = False,
    as_json: AsJson = False,
    connection: ConnectionGroup,
) -> None:
    """Index the shards at URL: samples, offsets and checksums, for the version that the shards' ETags name.

    An indexed data set has a length and random access, and resumes with another number of ranks. Run it again after
    shards were added or replaced, or after an interruption: shards whose present version is indexed are not read again.
    If a shard fails, the others are still indexed, and the exit code is 1.

    If there is an index beside the shards, it is updated, unless --index-dir names another place.

    For example:

        penstock index s3://bucket/train/
        penstock index --beside "s3://bucket/train/part-{000..099}.tar"
    """
    from penstock.pipeline import shards
    from penstock.sources.indexing import build_index

    source = shards(url, on_corrupt="skip_sample" if skip_corrupt else "raise", **connection.options())
    with IndexReport(as_json=as_json) as report:
        built = build_index(
            source,
            beside=beside or None,
            index_dir=index_dir,
            again=again,
            foreign_indexes=not ignore_idx,
            listener=report,
        )
    report.end(built)
    if built.failed:
        raise typer.Exit(1)


class IndexReport(ProgressReport):
    """The report of ``index``; a ``penstock.index.BuildListener``."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__(as_json=as_json)
        self._counts = dict.fromkeys(("known", "footer", "idx", "read"), 0)
        self._read_bytes = 0

    def columns(self) -> list[Any]:
        """Return a bar, the bytes, the rate and the elapsed time."""
        from rich.progress import BarColumn, DownloadColumn, TimeElapsedColumn, TransferSpeedColumn

        return [BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeElapsedColumn()]

    def planned(self, shards_count: int, size_bytes: int) -> None:
        """Set the number of shards and bytes to read."""
        self.update(description=f"{shards_count} shards", total=size_bytes)

    def progressed(self, size_bytes: int) -> None:
        """Count bytes that were read."""
        self._read_bytes += size_bytes
        self.update(advance=size_bytes)

    def indexed(self, row: ShardRow, how: str) -> None:
        """A shard was indexed, or was in the index already."""
        self._counts[how] += 1
        if how in ("footer", "idx"):
            self.update(advance=row.size_bytes)
        self.print_json(action="indexed", how=how, **row._asdict())

    def failed(self, url: str, error: PenstockError) -> None:
        """A shard could not be indexed."""
        if self.as_json:
            self.print_json(action="failed", shard=url, error=type(error).__name__, message=str(error))
        else:
            self.print_message(f"penstock: {url}: {error}")

    def end(self, built: Built) -> None:
        """Print the summary."""
        seconds = self.seconds
        if self.as_json:
            self.print_json(
                action="summary",
                index=built.url,
                shards=len(built.dataset),
                samples=built.dataset.samples_count,
                **self._counts,
                failed=len(built.failed),
                skipped_samples=sum(count for _, count in built.skipped),
                read_bytes=self._read_bytes,
                seconds=round(seconds, 3),
            )
            return
        how = [f"{count} {_WORDS[how]}" for how, count in self._counts.items() if count]
        text = f"{built.dataset.samples_count} samples in {len(built.dataset)} shards ({', '.join(how)})"
        rate = f", {format_bytes(self._read_bytes / max(seconds, 1e-9))}/s" if self._read_bytes else ""
        failed = f", {len(built.failed)} failed" if built.failed else ""
        if built.skipped:
            skipped = sum(count for _, count in built.skipped)
            failed += f", {skipped} corrupt samples in {len(built.skipped)} shards left out"
        print_message(f"{text}{failed}, {seconds:.1f} s{rate}: {built.url}")


_WORDS = {"known": "known already", "footer": "by their footers", "idx": "by their .idx", "read": "read"}
