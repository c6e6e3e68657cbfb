"""``penstock cost``: what a training run costs with each way to feed its GPUs."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Any, cast

from penstock.cli.options import AS_JSON, ConnectionGroup, Stores, argument, expand_groups, flag, option
from penstock.cli.output import ProgressReport, counted, print_message, print_result
from penstock.cli.selection import FilterGroup, Selection
from penstock.errors import AccessDeniedError, ConfigError
from penstock.redaction import public_url
from penstock.text.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from penstock.cost import Prices
    from penstock.cost.comparison import Estimate
    from penstock.cost.tables import Table
    from penstock.loader.inspection import Listing

PLAIN_COLUMNS = 140
"""Width of tables that do not go to a terminal."""


def size(help: str, **settings: Any) -> Any:  # noqa: A002 - typer's word
    """Declare an option that takes a size, see ``option``."""
    return option("SIZE", help, parser=parse_bytes, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadGroup:
    """The options that describe a training run: the fields of a ``penstock.cost.Workload`` of these names."""

    epochs: int = option("N", "How often the run reads the data.", default=1, min=1)
    hosts: int = option("N", "GPU hosts.", default=1, min=1)
    host_dollars_per_hour: float = option(
        "DOLLARS", "Price of one GPU host per hour.", names=("--price-per-hour",), default=0.0, min=0
    )
    hours: float | None = option("HOURS", "Length of the run.", min=0)
    hours_are: str | None = option(
        "SENSE",
        "measured: --hours is the time while data is the bottleneck; full-speed: the time without it. Default: both.",
        values=lambda: ("measured", "full-speed"),
    )
    busy: float | None = option("SHARE", "Share of the measured time in which the GPUs compute, e.g. 0.25.")
    step_samples_per_s: float | None = option(
        "SAMPLES/S", "Samples that the step of one host takes per second without waiting.", names=("--step-rate",)
    )
    sample_bytes: int | None = size(
        "Bytes of a sample; default: those of --bench; 115KB, or an object if that is smaller."
    )
    returned_bytes: int | None = size("Bytes of all objects after a transform; default: as before it.")
    function_s: float | None = option(
        "S", "Time to transform one object; default: 5 s for 100 MB.", names=("--function-seconds",), min=0
    )
    function_bytes: int = size("Memory of a function that transforms.", names=("--function-memory",), default="1GB")
    months: float = option("N", "Months for which copies of the data are kept.", default=1.0, min=0)
    shard_bytes: int = size("Size of the objects of a converted copy.", default="256MB")
    cluster_hosts: int | None = option("N", "CPU hosts that preprocess for the whole run; default: as they are needed.")
    download_bytes_per_s: int = size("Rate at which a host downloads.", names=("--download-rate",), default="1GB")
    crosses_regions: bool = flag("The store is in another region than the GPUs.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PricesGroup:
    """The options that replace prices."""

    prices: Path | None = option("FILE", "TOML file of prices that replace those of penstock.")
    price: list[str] | None = option("NAME=DOLLARS", "Replace one price, e.g. store_get=0.0005; may be repeated.")
    on_premises: bool = flag("The store's own prices are zero.")

    def read(self) -> Prices:
        """Return the prices, of which those that options name replace the others."""
        from penstock.cost import Prices

        prices = Prices.load(self.prices)
        if self.on_premises:
            prices = prices.on_premises()
        values = {}
        for text in self.price or ():
            name, _, value = text.partition("=")
            try:
                values[name] = float(value)
            except ValueError:
                raise ConfigError(f"--price {text!r}", hint="--price NAME=DOLLARS, e.g. store_get=0.0005") from None
        return prices.replacing(values)


@expand_groups
def cost(
    url: str | None = argument("URL", "Data set, which is listed: a prefix, a pattern or a directory.", default=None),
    *,
    objects: int | None = option("N", "Number of objects, instead of URL.", min=1),
    size_bytes: int | None = size("Bytes of all objects, e.g. 100TB, instead of URL.", names=("--bytes",)),
    run: WorkloadGroup,
    bench: Path | None = option(
        "DIR", "Record of penstock bench run: takes its fastest rate, and its bytes of a sample."
    ),
    pricing: PricesGroup,
    filters: FilterGroup,
    listed_max: int = option(
        "N", "Objects of URL to list; of more, number and size are estimated from a sample.", default=100_000, min=1
    ),
    explain: bool = flag("Also print the formula of each option, and all prices with source and date."),
    as_json: bool = AS_JSON,
    html: Path | None = option("FILE", "Also write one HTML page with tables and a plot, which opens offline."),
    connection: ConnectionGroup,
) -> None:
    """Compare what a training run costs with each way to feed its GPUs, in US dollars.

    Total = hours x hosts x price + option. The options are: direct reads, single objects, a cache on each host, a converted
    copy, S3 Object Lambda, penstock's gateway, a CPU cluster, downloading before the start, a mirroring file system, and
    GPUs that wait. Prices are Amazon's list prices in us-east-1; --explain shows source and date of each, and how each
    option is computed. Listing URL costs one request per 1 000 objects, and of very many objects a sample is listed.

    For example:

        penstock cost s3://bucket/train/ --epochs 10 --hosts 4 --price-per-hour 28 --hours 20 --busy 0.25
        penstock cost --objects 1000000 --bytes 100TB --epochs 1 --explain
        penstock cost s3://bucket/train/ --step-rate 138 --bench runs/today --html cost.html
        penstock cost --objects 1000000 --bytes 100TB --on-premises --price cpu_host=0 --json
    """
    from penstock.cost import Workload, estimate
    from penstock.cost.options import number
    from penstock.cost.page import page
    from penstock.cost.tables import formulas_table, further_tables, options_table, prices_table
    from penstock.text.pages import check_pages

    if html is not None:
        check_pages()
    prices = pricing.read()
    listing = None
    if url is not None and objects is None and size_bytes is None:
        listing = _listed(url, filters, connection, listed_max, as_json=as_json)
        objects, size_bytes = listing.objects_count, listing.size_bytes
    elif url is not None or objects is None or size_bytes is None:
        raise ConfigError("name either a URL, or both --objects and --bytes", hint="--objects 1000000 --bytes 100TB")
    facts = {**asdict(run), **({} if bench is None else _measured(bench, run))}
    workload = Workload(objects_count=objects, size_bytes=size_bytes, **cast("Any", facts))
    estimates = [estimate(reading, prices) for reading in workload.readings()]
    if as_json:
        _print_json(estimates, prices, listing)
    tables = [options_table(estimates), *further_tables(estimates[0], prices)]
    details = [formulas_table(estimates[0]), prices_table(prices)]
    about = "about " if listing is not None and listing.is_estimated else ""
    size_text = f"{number(workload.object_bytes / 10**6)} MB each, {number(size_bytes / 10**9)} GB in all"
    summary = f"objects: {about}{number(objects)}, {size_text}; epochs: {run.epochs}; GPU hosts: {run.hosts}"
    summary += f"; {listing.sampled_text}" if listing is not None and listing.is_estimated else ""
    if not as_json:
        print_result(summary)
        for table in [*tables, *(details if explain else ())]:
            _print_table(table)
    if len(estimates) > 1:
        print_message(
            f"Is {workload.hours:g} h the time with the bottleneck? Then say --hours-are measured; if it is the time at full "
            "speed, say --hours-are full-speed. The tables after the first take it as measured."
        )
    if html is not None:
        title = f"penstock cost {public_url(url or '')}".strip()
        text = page(title, summary, tables=[*tables, *details], workload=estimates[0].workload, prices=prices)
        html.write_text(text)


def _listed(url: str, filters: FilterGroup, connection: ConnectionGroup, objects_max: int, *, as_json: bool) -> Listing:
    """Return the objects of URL, and say how many they are, and what."""
    from penstock.loader.inspection import look_through

    try:
        with Stores(connection) as stores, ProgressReport(as_json=as_json) as report:
            selection = Selection(stores, url, filters)
            listing = look_through(
                selection.location.store,
                selection,
                prefix=selection.listed_prefix,
                takes=lambda info: selection.takes(info.key.removeprefix(selection.prefix)),
                objects_max=objects_max,
                progress=lambda count, size: report.update(
                    description=f"listing: {count} objects, {format_bytes(size)}"
                ),
            )
            if not listing.is_estimated:
                selection.check_found()
    except AccessDeniedError as error:
        error.hint = f"{error.hint}; or say how much data it is by --objects and --bytes"
        raise
    formats = ", ".join(f"{count} {name}" for name, count in sorted(listing.formats.items(), key=lambda each: -each[1]))
    found = f"{counted(listing.objects_count, 'object')}, {format_bytes(listing.size_bytes)} ({formats})"
    if not listing.is_estimated:
        print_message(f"counted {found}")
    else:
        print_message(f"about {found}: {listing.sampled_text}; --listed-max lists more")
    return listing


def _print_table(table: Table) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_COLUMNS
    print_result("")
    shown = RichTable(title=table.title, title_justify="left", box=None, pad_edge=False)
    for head, cell in zip(table.columns, table.rows[0], strict=True):
        shown.add_column(head, justify="right" if cell.startswith("$") else "left", overflow="fold")
    for row in table.rows:
        shown.add_row(*map(Text, row))
    console.print(shown)
    if table.note:
        console.print(Text(table.note))


def _print_json(estimates: list[Estimate], prices: Prices, listing: Listing | None) -> None:
    """Print the workloads, the options, what they depend on, the prices, and the data of a URL, one object per line."""
    from penstock.cost import break_even, by_epochs, by_object_bytes

    lines: list[dict[str, Any]] = []
    for each in estimates:
        workload, found = each.workload, []
        found.append({"kind": "workload", **asdict(workload), "hosts_dollars": each.hosts.dollars})
        for way in each.options:
            charges = [{"what": it.what, "dollars": it.dollars, "formula": it.formula} for it in way.charges]
            dollars = {"option_dollars": way.dollars, "total_dollars": each.total_dollars(way)}
            found.append({"kind": "option", "option": way.name, **dollars, "charges": charges})
        for count, row in by_epochs(workload, prices).items():
            found.append({"kind": "by_epochs", "epochs": count, "option_dollars": row})
        for size_bytes, row in by_object_bytes(workload, prices).items():
            found.append({"kind": "by_object_bytes", "object_bytes": size_bytes, "option_dollars": row})
        found += [{"kind": "break_even", **asdict(pair)} for pair in break_even(workload, prices)]
        lines += [line | {"hours_are": workload.hours_are} for line in found]
    lines += [{"kind": "price", "name": name, **asdict(price)} for name, price in prices.items()]
    if listing is not None:
        names = ("objects_count", "size_bytes", "is_estimated", "formats")
        data = {name: getattr(listing, name) for name in names}
        lines.append({"kind": "data", "listed_count": len(listing.infos), **data})
    for line in lines:
        print_result(json.dumps(line))


def _measured(folder: Path, given: WorkloadGroup) -> dict[str, float]:
    """Return the fastest rate of a record of ``penstock bench run``, and the bytes of a sample if none are given."""
    from penstock.bench.clients import WARM
    from penstock.bench.record import BenchRecord
    from penstock.bench.results import summarise

    record = BenchRecord.load(folder)
    found = next((each for each in summarise(record) if not each.is_probe and each.name != WARM), None)
    if found is None:
        raise ConfigError(f"{folder} holds no measurement of a client", hint="run penstock bench run again")
    rate, stored_bytes = found.samples_per_s.median, record.run["data"]["stored_bytes"]
    print_message(f"{found.label} delivered {rate:.4g} samples/s of {format_bytes(stored_bytes)}, the most of {folder}")
    return {"delivered_samples_per_s": rate, "sample_bytes": given.sample_bytes or math.ceil(stored_bytes)}
