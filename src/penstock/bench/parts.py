"""Runs of several parts, each with its own data and record: the parts of a scenario, or copies of data in other shards."""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.bench.data import look_at
from penstock.bench.record import FILE, BenchRecord
from penstock.bench.results import summarise
from penstock.bench.running import Progress, check_same, run_benchmark
from penstock.bench.scenarios import read_scenario
from penstock.bench.writing import DataWriter
from penstock.compose import connect
from penstock.errors import ConfigError, ObjectMissingError
from penstock.pack import convert
from penstock.redaction import public_url
from penstock.text.sizes import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from penstock.bench.running import BenchOptions
    from penstock.bench.scenarios import Scenario
    from penstock.pipeline.factories import ConnectionOptions


@dataclass(frozen=True, slots=True)
class RunPart:
    """One data set and how it is read.

    Attributes:
        title: Title in the record and in tables; empty if there are no other parts.
        url: URL of the data.
        options: Clients and settings.
    """

    title: str
    url: str
    options: BenchOptions

    def record(self, folder: Path) -> BenchRecord:
        """Return the record of this part below the folder of a run, with what was measured before."""
        place = folder / re.sub(r"\W+", "-", self.title) if self.title else folder
        is_continued = (place / FILE).exists()
        return BenchRecord.load(place, is_continued=True) if is_continued else BenchRecord(place / FILE)

    def run(self, record: BenchRecord, connection: ConnectionOptions, progress: Progress, **about: Any) -> None:
        """Measure what is not in the record yet, as ``run_benchmark`` does; nothing if it is complete."""
        check_same(record, self.options)
        if record.run and record.run["url"] != public_url(self.url):
            raise ConfigError(f"{record.path} holds a run of {record.run['url']}", hint="another --out")
        if not record.is_complete:
            data = look_at(self.url, connection)
            run_benchmark(data, self.options, record, progress, url=data.url, part=self.title, **about)


def write_scenario(scenario: Scenario, url: str, connection: ConnectionOptions, progress: Progress) -> int:
    """Write the data of a scenario below a URL; what is there is not written again. Returns the number of objects written.

    Raises:
        StoreError: An object cannot be written, or the store cannot be listed. The same call continues.
    """
    count = 0
    with connect(f"{url.rstrip('/')}/", **connection) as store:
        for data in scenario.data:
            writer = DataWriter(data, store)
            writer.write(progress)
            count += len(writer.missing)
    return count


def parts_of(scenario: Scenario, url: str, **changes: Any) -> list[RunPart]:
    """Return the parts of a scenario whose data is below a URL, with some options changed.

    Args:
        scenario: The scenario, already scaled.
        url: URL below which its data was written.
        **changes: Options in place of those of the scenario; ``seconds`` is the time of all parts together.
    """
    total_s = sum(part.options.seconds for part in scenario.parts)
    seconds = changes.pop("seconds", None) or total_s
    return [
        RunPart(
            part.title,
            f"{url.rstrip('/')}/{part.data.folder}/",
            replace(part.options, seconds=seconds * part.options.seconds / total_s, **changes),
        )
        for part in scenario.parts
    ]


@contextmanager
def repacked(
    url: str, sizes: Sequence[str], scratch: str | None, options: BenchOptions, connection: ConnectionOptions
) -> Iterator[list[RunPart]]:
    """Copy a data set into shards of each size below `scratch`, and delete the copies at the end.

    Raises:
        ConfigError: There is no `scratch`, or the data has no shards.
    """
    if scratch is None:
        raise ConfigError("a sweep of shard_bytes writes copies of the data", hint="--scratch s3://bucket/folder/")
    format_name = look_at(url, connection).format
    if format_name == "objects":
        raise ConfigError(f"{url} has no shards whose size could change", hint="penstock pack")
    parts = [
        RunPart(f"shard_bytes={size}", f"{scratch.rstrip('/')}/shards-of-{size}/", replace(options, seconds=seconds))
        for size in sizes
        for seconds in [options.seconds / len(sizes)]
    ]
    try:
        for part, size in zip(parts, sizes, strict=True):
            bytes_max = parse_bytes(size, option="--sweep shard_bytes")
            convert(url, part.url, to=format_name, bytes_max=bytes_max, allow_loss=True, overwrite=True, **connection)
            _delete(f"{part.url}.penstock/", connection)  # an index, which the original may not have
        yield parts
    finally:
        for part in parts:
            _delete(part.url, connection)


def _delete(url: str, connection: ConnectionOptions) -> None:
    with connect(url, **connection) as store, suppress(ObjectMissingError):
        store.delete(info.key for info in store.list())


def published_ratios(records: Sequence[BenchRecord]) -> list[list[str]]:
    """Return the head and a row for each ratio that was published: what it compares, its value, and ours.

    Nothing is returned of records that are not of one scenario, or of one without such ratios.
    """
    names = {record.run.get("scenario") for record in records}
    scenario = read_scenario(name) if len(names) == 1 and (name := names.pop()) else None
    if scenario is None or not scenario.reported:
        return []
    times_s: dict[tuple[str, str], float] = {}
    for record in records:
        for each in summarise(record):
            place = record.run["part"], each.name
            times_s[place] = min(each.window_s, times_s.get(place, each.window_s))
    rows = [["published comparison of s/100 batches", "published", "here"]]
    for ratio in scenario.reported:
        is_known = ratio.slower in times_s and ratio.faster in times_s
        ours = f"{times_s[ratio.slower] / times_s[ratio.faster]:.1f}" if is_known else "not measured"
        rows.append([ratio.text, ratio.value, ours])
    return rows
