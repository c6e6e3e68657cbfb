"""``penstock index``: where each sample of a data set lies, written down once."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from penstock.cli.ls import human_bytes
from penstock.cli.options import Anonymous, AsJson, EndpointUrl, Profile, Region  # noqa: TC001 - typer reads them

if TYPE_CHECKING:
    from penstock.errors import PenstockError
    from penstock.index import Built, ShardRow


def index(
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://bucket/prefix/, a pattern, a directory of shards.")],
    *,
    beside: Annotated[bool, typer.Option("--beside", help="Keep it beside the shards, under .penstock/.")] = False,
    index_dir: Annotated[
        str | None, typer.Option("--index-dir", metavar="DIR", help="Keep it here; default: the user's cache.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Read every shard, whatever is known.")] = False,
    ignore_idx: Annotated[bool, typer.Option("--ignore-idx", help="Pass over other tools' .idx files.")] = False,
    skip_corrupt: Annotated[
        bool,
        typer.Option("--skip-corrupt", help="Index a corrupt shard's good samples, for jobs that skip the others."),
    ] = False,
    as_json: AsJson = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    anonymous: Anonymous = False,
) -> None:
    """Index the shards at URL: samples, offsets, checksums, tied to the shards' ETags.

    An indexed data set has a length, random access, and resumes at any world size. Run it again after shards were added
    or replaced, or after it was interrupted: what is indexed in its present version is not read again. A shard that
    fails does not stop the others; the exit code is then 1.

    For example:

        penstock index s3://bucket/train/
        penstock index --beside "s3://bucket/train/part-{000..099}.tar"
    """
    from penstock.loader.indexing import build_index
    from penstock.pipeline import shards

    source = shards(
        url,
        endpoint_url=endpoint_url,
        region=region,
        profile=profile,
        anonymous=anonymous,
        on_corrupt="skip_sample" if skip_corrupt else "raise",
    )
    with Report(as_json=as_json) as report:
        built = build_index(
            source,
            beside=beside,
            index_dir=index_dir,
            again=again,
            foreign_indexes=not ignore_idx,
            listener=report,
        )
    report.end(built)
    if built.failed:
        raise typer.Exit(1)


class Report:
    """Counts, prints and shows progress: on a terminal a bar on stderr, else one line at the end."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._start_s = time.monotonic()
        self._progress: Any = None
        self._counts = dict.fromkeys(("known", "footer", "idx", "read"), 0)
        self._read_bytes = 0

    def __enter__(self) -> Self:
        if sys.stderr.isatty() and not self._as_json:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
            from rich.progress import TransferSpeedColumn as Speed

            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                Speed(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._progress.add_task("listing", total=None)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    # ── penstock.index.Listener ─────────────────────────────────────────────────────────────────────────────────────

    def planned(self, shards_count: int, size_bytes: int) -> None:
        """So much is to be read."""
        if self._progress is not None:
            self._progress.update(self._task, description=f"{shards_count} shards", total=size_bytes)

    def progressed(self, size_bytes: int) -> None:
        """Bytes arrived."""
        self._read_bytes += size_bytes
        if self._progress is not None:
            self._progress.update(self._task, advance=size_bytes)

    def indexed(self, row: ShardRow, how: str) -> None:
        """A shard is in the index."""
        self._counts[how] += 1
        if self._progress is not None and how in ("footer", "idx"):
            self._progress.update(self._task, advance=row.size_bytes)
        if self._as_json:
            print(json.dumps({"action": "indexed", "how": how, **row._asdict()}))

    def failed(self, url: str, error: PenstockError) -> None:
        """A shard is not."""
        if self._as_json:
            line = {"action": "failed", "shard": url, "error": type(error).__name__, "message": str(error)}
            print(json.dumps(line))
        elif self._progress is not None:
            self._progress.console.print(f"penstock: {url}: {error}", markup=False, highlight=False)
        else:
            print(f"penstock: {url}: {error}", file=sys.stderr)

    # ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def end(self, built: Built) -> None:
        """The last line."""
        seconds = time.monotonic() - self._start_s
        if self._as_json:
            summary = {
                "action": "summary",
                "index": built.url,
                "shards": len(built.dataset),
                "samples": built.dataset.samples_count,
                **self._counts,
                "failed": len(built.failed),
                "skipped_samples": sum(count for _, count in built.skipped),
                "read_bytes": self._read_bytes,
                "seconds": round(seconds, 3),
            }
            print(json.dumps(summary))
            return
        how = [f"{count} {_WORDS[how]}" for how, count in self._counts.items() if count]
        text = f"{built.dataset.samples_count} samples in {len(built.dataset)} shards ({', '.join(how)})"
        rate = f", {human_bytes(self._read_bytes / max(seconds, 1e-9))}/s" if self._read_bytes else ""
        failed = f", {len(built.failed)} failed" if built.failed else ""
        if built.skipped:
            skipped = sum(count for _, count in built.skipped)
            failed += f", {skipped} corrupt samples in {len(built.skipped)} shards left out"
        print(f"{text}{failed}, {seconds:.1f} s{rate}: {built.url}", file=sys.stderr)


_WORDS = {"known": "known already", "footer": "by their footers", "idx": "by their .idx", "read": "read"}
