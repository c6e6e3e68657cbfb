"""``penstock index``, ``manifest`` and ``verify``: say where each sample or object of a data set lies, and check it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, BinaryIO, cast

import typer

from penstock.cli import EXIT_UNCHECKED
from penstock.cli.options import AS_JSON, ConnectionGroup, StoreLocation, Stores, argument, expand_groups, flag, option
from penstock.cli.output import ProgressReport, counted, print_message
from penstock.errors import ConfigError, ObjectMissingError
from penstock.redaction import public_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.errors import PenstockError
    from penstock.index import Built, ShardRow
    from penstock.types import ObjectInfo


@expand_groups
def index(
    url: str = argument("URL", "Shards: s3://bucket/prefix/, a pattern, or a directory."),
    *,
    beside: bool = flag("Store the index beside the shards under .penstock/, even if there is none yet."),
    index_dir: str | None = option(
        "DIR", "Store the index here; default: beside the shards if there is one, otherwise in the user's cache."
    ),
    again: bool = flag("Read every shard, even if it is indexed already."),
    ignore_idx: bool = flag("Do not use the .idx files of other tools."),
    skip_corrupt: bool = flag("Index the good samples of corrupt shards, for jobs that skip corrupt samples."),
    as_json: bool = AS_JSON,
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

    shown = ("Bar", "Download", "TransferSpeed", "TimeElapsed")

    def __init__(self, *, as_json: bool) -> None:
        super().__init__(as_json=as_json)
        self._counts = dict.fromkeys(("known", "footer", "idx", "read"), 0)
        self._read_bytes = 0

    def planned(self, shards_count: int, size_bytes: int) -> None:
        """Set the number of shards and bytes to read."""
        self.update(description=counted(shards_count, "shard"), total=size_bytes)

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
        if self.as_json:
            self.print_summary(
                index=built.url,
                shards=len(built.dataset),
                samples=built.dataset.samples_count,
                **self._counts,
                failed=len(built.failed),
                skipped_samples=sum(count for _, count in built.skipped),
                read_bytes=self._read_bytes,
            )
            return
        how = [f"{count} {_WORDS[how]}" for how, count in self._counts.items() if count]
        text = f"{counted(built.dataset.samples_count, 'sample')} in {counted(len(built.dataset), 'shard')}"
        text += f" ({', '.join(how)})" if how else ""
        rate = f", {self.rate(self._read_bytes)}" if self._read_bytes else ""
        failed = f", {len(built.failed)} failed" if built.failed else ""
        if built.skipped:
            skipped = sum(count for _, count in built.skipped)
            failed += f", {counted(skipped, 'corrupt sample')} in {counted(len(built.skipped), 'shard')} left out"
        print_message(f"{text}{failed}, {self.seconds:.1f} s{rate}: {built.url}")


_WORDS = {"known": "known already", "footer": "by their footers", "idx": "by their .idx", "read": "read"}


@expand_groups
def manifest(
    url: str = argument("URL", "s3://bucket/prefix/ or a directory."),
    *,
    output: str = option(
        "FILE",
        "Path or URL of the manifest; .parquet writes Parquet, - writes to stdout.",
        names=("--output", "-o"),
        required=True,
    ),
    connection: ConnectionGroup,
) -> None:
    """Write the key, size and ETag of each object below URL, in key order, as JSON lines or Parquet.

    A job that gets the manifest instead of the URL needs no listing, and reads the versions that the manifest names.
    Objects under .penstock/ are left out. FILE appears completely or not at all.

    For example:

        penstock manifest s3://bucket/train/ -o train.manifest.jsonl
        penstock manifest s3://bucket/train/ -o s3://bucket/train.manifest.parquet
    """
    from penstock.index.manifest import write_manifest

    with Stores(connection) as stores:
        location = stores.locate(url if url.endswith("/") else url + "/")
        kind = "parquet" if output.lower().endswith(".parquet") else "jsonl"
        base_url = location.store.describe(location.key)
        infos = _infos(location)
        if output == "-":
            write_manifest(infos, sys.stdout.buffer, base_url=base_url, format=kind)
            return
        target = stores.locate(output)
        if target.is_folder:
            raise ConfigError(f"{output!r} is a folder", hint="-o takes the name of a file")
        with target.store.writer(target.key) as writer:
            count = write_manifest(infos, cast("BinaryIO", writer), base_url=base_url, format=kind)
    print_message(f"{counted(count, 'object')}: {public_url(output)}")


def _infos(location: StoreLocation) -> Iterator[ObjectInfo]:
    """Yield the objects below `location`, with keys relative to it.

    Raises:
        ObjectMissingError: No object lies below `location`.
    """
    from penstock.index import FOLDER

    count = 0
    for info in location.store.list(location.key):
        key = info.key[len(location.key) :]
        if not key or f"/{FOLDER}" in f"/{key}":
            continue
        count += 1
        yield info._replace(key=key)
    if not count:
        raise ObjectMissingError("no object lies below this URL", operation="LIST", url=location.url)


@expand_groups
def verify(
    url: str = argument("URL", "Shards: s3://bucket/prefix/, a pattern, or a directory."),
    *,
    index_dir: str | None = option("DIR", "Folder of the index; default: beside the shards, or the user's cache."),
    as_json: bool = AS_JSON,
    connection: ConnectionGroup,
) -> None:
    """Read every shard at URL, and compare the offset, key and CRC32C of each sample with the data set's index.

    Shards that are not in the index, that are in the index but do not exist, and that have changed are failures too. The
    exit code is 1 if there is a failure. It is 3 if nothing is wrong but some shards have no checksums, neither in their
    index nor in themselves, so that only the number and lengths of their samples were checked.

    For example:

        penstock verify s3://bucket/train/
        penstock verify --json ./shards/ | jq 'select(.error)'
    """
    from penstock.errors import UncheckedError
    from penstock.pack.verification import verify as verify_url

    report = ProgressReport(as_json=as_json, has_bar=False)

    def on_shard(shard_url: str, row: ShardRow | None, error: PenstockError | None) -> None:
        action = "unchecked" if isinstance(error, UncheckedError) else "failed" if error else "verified"
        failure = {} if error is None else {"error": type(error).__name__, "message": str(error)}
        report.print_json(action=action, shard=shard_url, samples=row and row.samples_count, **failure)
        if action == "failed" and not as_json:  # unchecked shards are counted in one line
            print_message(f"penstock: {shard_url}: {error}")

    found = verify_url(url, index_dir=index_dir, on_shard=on_shard, **connection.options())
    if as_json:
        report.print_summary(
            index=found.url,
            shards=found.shards_count,
            samples=found.samples_count,
            size_bytes=found.size_bytes,
            failed=len(found.failed),
            unchecked=len(found.unchecked),
        )
    else:
        failed = f", {len(found.failed)} failed" if found.failed else ""
        failed += f", {len(found.unchecked)} not verified" if found.unchecked else ""
        print_message(
            f"{counted(found.samples_count, 'sample')} in {counted(found.shards_count, 'shard')} verified{failed}, "
            f"{report.seconds:.1f} s, {report.rate(found.size_bytes)}: {found.url}",
        )
        if found.unchecked:
            url, error = found.unchecked[0]
            print_message(f"penstock: {counted(len(found.unchecked), 'shard')}, the first {url}: {error.what}")
            print_message(f"penstock: {error.hint}")
    if found.problems:
        raise typer.Exit(1 if found.failed else EXIT_UNCHECKED)
