"""``penstock bench``: measures what each way to read a data set delivers, and what limits it."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli.options import AS_JSON, ConnectionGroup, argument, expand_groups, flag, option
from penstock.cli.output import ProgressReport, print_message, print_record, print_result
from penstock.errors import ConfigError
from penstock.redaction import public_url
from penstock.text.sizes import parse_bytes
from penstock.version import install_hint

if TYPE_CHECKING:
    from penstock.bench.parts import RunPart
    from penstock.bench.record import BenchRecord
    from penstock.bench.running import BenchOptions
    from penstock.bench.scenarios import Scenario

SECONDS = 120.0
TTFB_MS, RATE_BYTES_PER_S = 30.0, 90_000_000
"""The store that serves a scenario from this machine, as the repository's benchmarks have it."""

bench = typer.Typer(
    name="bench", help="Measure what each way to read a data set delivers, and what limits it.", no_args_is_help=True
)


class _BenchProgress(ProgressReport):
    """The client that runs now, and the turns that are done."""

    shown = ("Bar", "MofNComplete", "TimeElapsed")

    def show(self, name: str, done: int, total: int) -> None:
        self.update(description=name, completed=done, total=total)


def _scenario_names() -> list[str]:
    from penstock.bench.scenarios import scenario_names

    return scenario_names()


def _scenario(name: str) -> Scenario:
    _check_extra()
    from penstock.bench.scenarios import read_scenario

    return read_scenario(name)


@bench.command()
@expand_groups
def run(
    url: str | None = argument("URL", "Shards or objects on S3: a prefix, a pattern, or one shard.", default=None),
    *,
    scenario: str | None = option(
        "NAME", "A published comparison, see bench scenarios; URL is where its data lies.", values=_scenario_names
    ),
    scale: float = option("SHARE", "Share of the scenario's data.", default=1.0),
    clients: str | None = option("A,B", "Names of clients, or their beginnings; default: all that are installed."),
    batch: int = option("N", "Samples of a batch.", default=128, min=1),
    decode: bool = flag("Decode pictures, to 224 x 224."),
    step: str = option(
        "NAME", "Training step: none, gpu (emulated), python (20 ms), vit, or module:function.", default="none"
    ),
    pipeline: str | None = option(
        "MODULE:NAME", "Your pipeline, or a function that returns it, in place of raw fields."
    ),
    sweep: list[str] = option(
        "NAME=A,B",
        "Values of workers, batch, shuffle, processes, prefetch, cache or shard_bytes; may be repeated.",
        default=(),
    ),
    scratch: str | None = option("URL", "Folder for copies with other sizes of shards, which are deleted afterwards."),
    origin_log: str | None = option("FILE", "Log of penstock bench origin, in which requests are counted."),
    seconds: float | None = option("SECONDS", "Time for everything; default: 120, or the scenario's.", min=1),
    out: str | None = option("DIR", "Folder of the record and the page; default: bench-DATE.", names=("--out", "-o")),
    as_json: bool = AS_JSON,
    connection: ConnectionGroup,
) -> None:
    """Read URL by each way of penstock and by each library that is installed, in turns, and say what limits them.

    The record in --out keeps every measurement. If the command is stopped, the same command goes on where it stopped. A
    scenario writes the data that is missing at URL. Without URL, its data is written to --out, and nginx serves it with 30 ms
    to the first byte and 90 MB/s for each connection.

    For example:

        penstock bench run s3://bucket/train/
        penstock bench run s3://bucket/train/ --step gpu --decode
        penstock bench run s3://bucket/train/ --clients penstock,webdataset --sweep workers=1,2,4
        penstock bench run --scenario best-practices s3://bucket/bench/ --scale 0.01
    """
    _check_extra()
    from penstock.bench.page import PAGE, write_page
    from penstock.bench.parts import RunPart, published_ratios, repacked
    from penstock.bench.results import best_settings, summarise
    from penstock.bench.running import BenchOptions, names_of
    from penstock.bench.turns import print_table

    _share(connection)
    folder = Path(out or time.strftime("bench-%Y%m%d-%H%M%S"))
    swept = dict(_swept(text) for text in sweep)
    sizes = [str(size) for size in swept.pop("shard_bytes", [])]
    options = BenchOptions(
        clients=names_of(clients or ""), batch=batch, decode=decode, step=step, seconds=seconds or SECONDS, sweep=swept,
        pipeline=pipeline, origin_log=origin_log,
    )  # fmt: skip
    found: Scenario | None = None
    own = {"batch": batch, "decode": decode, "step": step, "pipeline": pipeline, "sweep": sweep, "scratch": scratch}
    given = {"scenario": scenario, "scale": scale} if scenario else own
    common = {"clients": clients, "seconds": seconds, "origin_log": origin_log, **asdict(connection)}
    about = {"scenario": scenario, "command": _command(url, given | common)}
    with ExitStack() as stack:
        if scenario is not None:
            if (batch, decode, step, pipeline, swept, sizes) != (128, False, "none", None, {}, []):
                raise ConfigError(
                    "a scenario has its own settings", hint="only --clients, --scale and --seconds change it"
                )
            found = _scenario(scenario).scaled(scale)
            parts, connection = _prepared(stack, found, url, folder, connection, options, seconds)
        elif url is None:
            raise ConfigError("bench run needs a URL or --scenario", hint="penstock bench run s3://bucket/train/")
        elif sizes:
            parts = stack.enter_context(repacked(url, sizes, scratch, options, connection.options()))
        else:
            parts = [RunPart("", url, options)]
        records = [part.record(folder) for part in parts]
        for part, record in zip(parts, records, strict=True):
            with _BenchProgress(as_json=as_json) as report:
                try:
                    part.run(record, connection.options(), report.show, **about)
                except KeyboardInterrupt:
                    report.end_bar()
                    print_message(f"stopped; the same command with --out {folder} goes on")
                    if record.turns:
                        show(record, as_json=as_json)
                        write_page([each for each in records if each.turns], folder / PAGE)
                        print_message(f"the page so far: {folder / PAGE}")
                    raise
            if len(records) > 1:
                write_page([record], record.path.parent / PAGE)
            show(record, as_json=as_json)
    write_page(records, folder / PAGE)
    print_message(f"the page: {folder / PAGE}")
    if (ratios := published_ratios(records)) and not as_json:
        print_table("", ratios)
    if not any(best_settings(summarise(record)) for record in records):
        raise typer.Exit(1)  # each client is listed with the reason why it did not run


def _command(url: str | None, given: dict[str, Any]) -> list[str]:
    """Return the words of the command with these options, without secrets."""
    words = ["penstock", "bench", "run", *([public_url(url)] if url else [])]
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is True:
                words.append(option)
            elif each is not None and each is not False:
                text = f"{each:g}" if isinstance(each, float) else str(each)
                words += [option, public_url(text) if "://" in text else text]
    return words


def _prepared(
    stack: ExitStack,
    scenario: Scenario,
    url: str | None,
    folder: Path,
    connection: ConnectionGroup,
    options: BenchOptions,
    seconds: float | None,
) -> tuple[list[RunPart], ConnectionGroup]:
    """Return the parts of a scenario whose data is there now, and the connection to it."""
    from penstock.bench.origin.server import Origin
    from penstock.bench.parts import parts_of

    changes: dict[str, Any] = {"clients": options.clients} if options.clients else {}
    changes |= {"seconds": seconds, "origin_log": options.origin_log}
    if url is not None:
        _write(scenario, url, connection, as_json=False)
        return parts_of(scenario, url, **changes), connection
    root, log = (folder / "data").resolve(), (folder / "origin.log").resolve()
    _write(scenario, f"file://{root}/bench/", connection, as_json=False)
    server = stack.enter_context(Origin(root, ttfb_ms=TTFB_MS, rate_bytes_per_s=RATE_BYTES_PER_S, log=log))
    os.environ |= server.environment
    changes["origin_log"] = str(log)
    return parts_of(scenario, "s3://bench/", **changes), replace(connection, endpoint_url=server.url)


def _write(scenario: Scenario, url: str, connection: ConnectionGroup, *, as_json: bool) -> int:
    from penstock.bench.parts import write_scenario

    print_message(f"writing the data of {scenario.name} that {public_url(url)} lacks")
    with _BenchProgress(as_json=as_json) as report:
        return write_scenario(scenario, url, connection.options(), report.show)


@bench.command()
@expand_groups
def report(
    folders: list[str] = argument("DIR...", "Folders of --out of bench run."),
    *,
    output: str | None = option(
        "FILE", "The page; default: report.html in DIR, for several runs in this folder.", names=("--output", "-o")
    ),
    as_markdown: bool = flag("Print the tables as Markdown instead.", names=("--markdown",)),
) -> None:
    """Write the HTML page of a run, or of several runs side by side, and print its path.

    The page opens without a network. Several runs, or the parts of a scenario, have a column each, with ratios to the first.

    For example:

        penstock bench report bench-20260102-030405
        penstock bench report before after --output compared.html
        penstock bench report bench-20260102-030405 --markdown
    """
    _check_extra()
    from penstock.bench.page import PAGE, markdown, write_page
    from penstock.bench.record import BenchRecord

    paths = list({Path(folder).resolve(): Path(folder) for folder in folders}.values())
    place = Path(output) if output else paths[0] / PAGE if len(paths) == 1 else Path(PAGE)
    records = [record for path in paths for record in BenchRecord.load_parts(path)]
    if as_markdown:
        print_result(markdown(records))
        return
    write_page(records, place)
    print_result(str(place))


@bench.command()
@expand_groups
def data(
    scenario: str = argument("SCENARIO", "A published comparison, see bench scenarios."),
    url: str = argument("URL", "The folder into which its data comes."),
    *,
    scale: float = option("SHARE", "Share of the data.", default=1.0),
    as_json: bool = AS_JSON,
    connection: ConnectionGroup,
) -> None:
    """Write the data sets of a scenario below URL. What is there is not written again, and all bytes are always the same.

    For example:

        penstock bench data minio s3://bucket/bench/ --scale 0.1
    """
    found = _scenario(scenario).scaled(scale)
    count = _write(found, url, connection, as_json=as_json)
    folders = [f"{url.rstrip('/')}/{each.folder}/" for each in found.data]
    lines = [f"{count} objects were written", *folders]
    print_record({"written": count, "urls": folders}, "\n".join(lines), as_json=as_json)


@bench.command()
@expand_groups
def scenarios(*, as_json: bool = AS_JSON) -> None:
    """List the published comparisons that bench run --scenario repeats, and what each one asks.

    For example:

        penstock bench scenarios
    """
    for name in _scenario_names():
        found = _scenario(name)
        titles = [part.title for part in found.parts]
        lines = [f"{name}: {found.asks}", *(f"    {title}" for title in titles)]
        print_record({"name": name, "asks": found.asks, "parts": titles}, "\n".join(lines), as_json=as_json)


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
            print_result(json.dumps({"part": record.run["part"], **asdict(each)}))
        print_result(json.dumps({"not_run": record.not_run, **asdict(said)}))
        return
    lines = [line[:COLUMNS_COUNT_SHORT] for line in table(found)]
    print_table(record.title, lines)
    reasons: dict[str, list[str]] = {}
    for name, reason in record.not_run.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        print_result(f"not run: {'; '.join(names)}: {reason}")
    print_result(f"\n{said.sentence} {said.evidence}\n{said.advice}")


def _share(connection: ConnectionGroup) -> None:
    """Give the processes of clients the credentials that were chosen, as every library finds them."""
    if connection.profile:
        os.environ["AWS_PROFILE"] = connection.profile
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            os.environ.pop(name, None)  # they would be used in place of the profile's


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
