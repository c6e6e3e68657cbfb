"""``penstock bench``: measures what each way to read a data set delivers, and what limits it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli.options import AS_JSON, ConnectionGroup, argument, expand_groups, flag, option
from penstock.cli.output import ProgressReport, print_message, print_result
from penstock.errors import ConfigError
from penstock.text.sizes import format_bytes
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
    from penstock.bench.record import BenchRecord
    from penstock.bench.running import BenchOptions, run_benchmark

    folder = Path(out or time.strftime("bench-%Y%m%d-%H%M%S"))
    options = BenchOptions(
        clients=tuple(filter(None, (clients or "").split(","))), batch=batch, decode=decode, step=step, seconds=seconds,
        sweep=dict(_swept(text) for text in sweep),
    )  # fmt: skip
    record = BenchRecord.load(folder) if (folder / "record.jsonl").exists() else BenchRecord(folder / "record.jsonl")
    data = look_at(url, connection.options())
    with _BenchProgress(as_json=as_json) as report:
        try:
            run_benchmark(data, options, record, report.show, url=data.url)
        except KeyboardInterrupt:
            report.end_bar()
            print_message(f"stopped; the same command with --out {folder} goes on")
            if record.turns:
                show(record, as_json=as_json)
            raise
    show(record, as_json=as_json)


def show(record: BenchRecord, *, as_json: bool) -> None:
    """Print the summaries and the verdict."""
    from penstock.bench.results import summarise, verdict
    from penstock.bench.turns import print_table

    found, said = summarise(record), verdict(record)
    if as_json:
        for each in found:
            print_result(json.dumps(asdict(each)))
        print_result(json.dumps({"not_run": record.not_run, **asdict(said)}))
        return
    lines = [["client", "samples/s", "MB/s", "first batch s", "s/100 batches", "stalled", "CPU cores", "memory"]]
    lines += [
        [
            each.label, _spread(each.samples_per_s), _spread(each.bytes_per_s, 1e6), f"{each.first_batch_s.median:.2f}",
            f"{each.window_s:.2f}", f"{each.stall_ratio.median:.0%}", f"{each.cpu_cores.median:.2f}",
            format_bytes(each.peak_bytes),
        ]
        for each in found
    ]  # fmt: skip
    lines += [[name, f"not run: {reason}", "", "", "", "", "", ""] for name, reason in record.not_run.items()]
    print_table(record.run["url"], lines)
    print_result(f"\nThe limit: {said.limit}. {said.evidence}\n{said.advice}")


def _spread(values: Any, unit: float = 1.0) -> str:
    return f"{values.median / unit:,.0f} ({values.low / unit:,.0f}..{values.high / unit:,.0f})"


def _swept(text: str) -> tuple[str, list[Any]]:
    name, _, values = text.partition("=")
    if not name or not values:
        raise ConfigError(f"--sweep {text!r} must be NAME=A,B, e.g. workers=1,2,4")
    return name, [int(value) if value.isdigit() else value for value in values.split(",")]


def _check_extra() -> None:
    try:
        import psutil  # noqa: F401
    except ImportError as error:
        raise ConfigError("penstock bench needs psutil, matplotlib and Jinja2", hint=install_hint("bench")) from error
