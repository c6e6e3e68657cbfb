"""``penstock bench``: measures what each way to read a data set delivers, and what limits it."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli.options import AS_JSON, ConnectionGroup, argument, expand_groups, flag, option
from penstock.cli.output import ProgressReport, print_message, print_result
from penstock.errors import ConfigError
from penstock.text.sizes import parse_bytes
from penstock.version import install_hint

if TYPE_CHECKING:
    from penstock.bench.record import BenchRecord

bench = typer.Typer(
    name="bench", help="Measure what each way to read a data set delivers, and what limits it.", no_args_is_help=True
)


class _BenchProgress(ProgressReport):
    """The client that runs now, and the turns that are done."""

    shown = ("Bar", "MofNComplete", "TimeElapsed")

    def show(self, name: str, done: int, total: int) -> None:
        self.update(description=name, completed=done, total=total)


@bench.command()
@expand_groups
def run(
    url: str = argument("URL", "Shards or objects on S3: a prefix, a pattern, or one shard."),
    *,
    clients: str | None = option("A,B", "Beginnings of clients' names; default: all that are installed."),
    batch: int = option("N", "Samples of a batch.", default=128, min=1),
    decode: bool = flag("Decode pictures, to 224 x 224."),
    step: str = option(
        "NAME", "Training step: none, gpu (emulated), python (20 ms), vit, or module:function.", default="none"
    ),
    sweep: list[str] = option("NAME=A,B", "Values of a setting, e.g. workers=1,2,4; may be repeated.", default=()),
    seconds: float = option("SECONDS", "Time for everything.", default=120.0, min=1),
    out: str | None = option("DIR", "Folder of the record and the page; default: bench-DATE.", names=("--out", "-o")),
    as_json: bool = AS_JSON,
    connection: ConnectionGroup,
) -> None:
    """Read URL by each way of penstock and by each library that is installed, in turns, and say what limits them.

    The record in --out keeps every measurement. If the command is stopped, the same command goes on where it stopped.

    For example:

        penstock bench run s3://bucket/train/
        penstock bench run s3://bucket/train/ --step gpu --decode
        penstock bench run s3://bucket/train/ --clients penstock,webdataset --sweep workers=1,2,4
    """
    _check_extra()
    from penstock.bench.data import look_at
    from penstock.bench.page import PAGE, write_page
    from penstock.bench.record import FILE, BenchRecord
    from penstock.bench.running import BenchOptions, run_benchmark

    folder = Path(out or time.strftime("bench-%Y%m%d-%H%M%S"))
    options = BenchOptions(
        clients=tuple(filter(None, (clients or "").split(","))), batch=batch, decode=decode, step=step, seconds=seconds,
        sweep=dict(_swept(text) for text in sweep),
    )  # fmt: skip
    is_continued = (folder / FILE).exists()
    record = BenchRecord.load(folder, is_continued=True) if is_continued else BenchRecord(folder / FILE)
    data = look_at(url, connection.options())
    with _BenchProgress(as_json=as_json) as progress:
        try:
            run_benchmark(data, options, record, progress.show, url=data.url)
        except KeyboardInterrupt:
            progress.end_bar()
            print_message(f"stopped; the same command with --out {folder} goes on")
            if record.turns:
                show(record, as_json=as_json)
                write_page([record], folder / PAGE)
                print_message(f"the page so far: {folder / PAGE}")
            raise
    show(record, as_json=as_json)
    write_page([record], folder / PAGE)
    print_message(f"the page: {folder / PAGE}")


@bench.command()
@expand_groups
def report(
    folders: list[str] = argument("DIR...", "Folders of --out of bench run."),
    *,
    output: str | None = option(
        "FILE", "The page; default: report.html in DIR, for several runs in this folder.", names=("--output", "-o")
    ),
) -> None:
    """Write the HTML page of a run, or of several runs side by side, and print its path.

    The page opens without a network. Several runs have a column each, with ratios to the first.

    For example:

        penstock bench report bench-20260102-030405
        penstock bench report before after --output compared.html
    """
    _check_extra()
    from penstock.bench.page import PAGE, write_page
    from penstock.bench.record import BenchRecord

    paths = list({Path(folder).resolve(): Path(folder) for folder in folders}.values())
    place = Path(output) if output else paths[0] / PAGE if len(paths) == 1 else Path(PAGE)
    records = [BenchRecord.load(path) for path in paths]
    write_page(records, place)
    print_result(str(place))


@bench.command()
@expand_groups
def origin(
    folder: Path = argument("DIR", "Folder whose subfolders are the buckets."),
    *,
    ttfb_ms: float = option("MS", "Milliseconds before an answer begins.", default=30.0, min=0),
    ttfb_sigma: float = option("X", "Sigma of the logarithm of this delay.", default=0.0, min=0),
    rate: str = option("SIZE", "Bytes per second of each connection; 0: no limit.", default="90MB"),
    total_rate: str = option("SIZE", "Bytes per second of all connections; 0: no limit.", default="0"),
    error_503: float = option("SHARE", "Share of requests answered by 503 SlowDown.", default=0.0, min=0),
    log: Path | None = option("FILE", "File of all answers, for bench run --origin-log."),
) -> None:
    """Serve the folders in DIR as buckets, with the delay and the bandwidth of a distant store, until Ctrl-C.

    This needs nginx with its Lua module, and a C compiler. It checks no signatures, listens on loopback only, and drops what
    is written.

    For example:

        penstock bench origin data/ --ttfb-ms 30 --rate 90MB
    """
    from penstock.bench.origin.server import Origin

    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a directory")
    server = Origin(
        folder.resolve(), ttfb_ms=ttfb_ms, ttfb_sigma=ttfb_sigma, rate_bytes_per_s=parse_bytes(rate, option="--rate"),
        total_bytes_per_s=parse_bytes(total_rate, option="--total-rate"), error_503=error_503,
        log=log.resolve() if log else None,
    )  # fmt: skip
    with server:
        print_message(
            f"serving {folder} at {server.url}; with AWS_ENDPOINT_URL={server.url} and any keys; Ctrl-C ends it"
        )
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


def show(record: BenchRecord, *, as_json: bool) -> None:
    """Print the summaries and the verdict."""
    from penstock.bench.results import COLUMNS_COUNT_SHORT, summarise, table, verdict
    from penstock.bench.turns import print_table

    found, said = summarise(record), verdict(record)
    if as_json:
        for each in found:
            print_result(json.dumps(asdict(each)))
        print_result(json.dumps({"not_run": record.not_run, **asdict(said)}))
        return
    lines = [line[:COLUMNS_COUNT_SHORT] for line in table(found)]
    empty = [""] * (len(lines[0]) - 2)
    lines += [[name, f"not run: {reason}", *empty] for name, reason in record.not_run.items()]
    print_table(record.run["url"], lines)
    print_result(f"\n{said.sentence} {said.evidence}\n{said.advice}")


def _swept(text: str) -> tuple[str, list[Any]]:
    name, _, values = text.partition("=")
    if not name or not values:
        raise ConfigError(f"--sweep {text!r} must be NAME=A,B, e.g. workers=1,2,4")
    return name, [int(value) if value.isdigit() else value for value in values.split(",")]


def _check_extra() -> None:
    from penstock.text.pages import check_pages

    try:
        import psutil  # noqa: F401
    except ImportError as error:
        raise ConfigError("penstock bench needs psutil", hint=install_hint("bench")) from error
    check_pages()
