"""The page of a run, and that of several runs side by side: HTML that opens without a network."""

from __future__ import annotations

import os
import shlex
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING

from penstock.bench.parts import published_ratios
from penstock.bench.plots import bars, plots_of_run
from penstock.bench.results import COLUMNS_COUNT_SHORT, is_decoded, spread_text, summarise, table, verdict
from penstock.errors import ConfigError
from penstock.redaction import public_text
from penstock.text.pages import page
from penstock.text.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from penstock.bench.record import BenchRecord
    from penstock.bench.results import ClientSummary

PAGE = "report.html"


def write_page(records: Sequence[BenchRecord], path: Path) -> None:
    """Write the page of a record, or of several side by side.

    Raises:
        ConfigError: Nothing was measured.
    """
    for record in records:
        if not record.turns and not record.not_run:
            raise ConfigError(f"{record.path} holds no measurement yet", hint="penstock bench run URL --out DIR")
    path.write_text(_page(records, path))


def _facts(record: BenchRecord) -> dict[str, str]:
    """What was measured, on which data, and where."""
    run, data, machine = record.run, record.run["data"], record.run["machine"]
    settings = run["settings"]
    versions = dict(chain.from_iterable(turn["versions"].items() for turn in record.turns))
    place = data["endpoint_url"] or f"Amazon S3, {data['region']}"
    decoded = "decoded to 224 x 224, " if is_decoded(record) else ""
    return {
        "URL": run["url"],
        "Data": f"{record.amount}, {data['format']}",
        "Sample": f"field {data['image']} of {format_bytes(data['sample_bytes'])}, label {data['label'] or 'none'}",
        "Endpoint": f"{place}; first byte after {data['first_byte_s'] * 1e3:.1f} ms",
        "Settings": f"batch {settings['batch']}, {decoded}step {settings['step']}, shuffle {settings['shuffle'] or 'none'}, "
        f"{settings['seconds']:g} s for everything, {_rounds(record)}",
        "Machine": f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux {machine['kernel']}, "
        f"load {machine['load_1min']:g} at the start",
        "Versions": ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        + f", Python {run['python']}, commit {run['commit']}",
        "Date": datetime.fromtimestamp(run["started"], UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _commands(records: Sequence[BenchRecord]) -> list[str]:
    """The commands that make the runs again; parts of one run have the same one."""
    return list(dict.fromkeys(shlex.join(record.run["command"]) for record in records if "command" in record.run))


def _rounds(record: BenchRecord) -> str:
    rounds = len({turn["round"] for turn in record.turns})
    return f"{rounds} {'round' if rounds == 1 else 'rounds'}{'' if record.is_complete else ', stopped before the end'}"


def _page(records: Sequence[BenchRecord], path: Path) -> str:
    names = _names(records)
    facts = [_facts(record) for record in records]
    is_one = len(records) == 1
    clients = {
        name: [each for each in summarise(record) if not each.is_probe]
        for name, record in zip(names, records, strict=True)
    }
    return page(
        "bench/page.html.j2",
        title=f"penstock bench: {records[0].run['url'] if is_one else f'{len(records)} runs'}",
        facts={name: [each[name] for each in facts] for name in facts[0]},
        names=[] if is_one else names,
        verdicts=[verdict(record) for record in records],
        table=table(summarise(records[0])) if is_one else _compared(clients, records),
        not_run={name: public_text(reason) for name, reason in records[0].not_run.items()} if is_one else {},
        plots=plots_of_run(records[0]) if is_one else [bars(clients)],
        published=published_ratios(records),
        commands=_commands(records),
        links=[
            {"href": os.path.relpath(place, path.parent), "name": f"{place.parent.name}/{place.name}"}
            for record in records
            for place in (record.path.with_name(PAGE), record.path)
            if place.exists() and place.resolve() != path.resolve()
        ],
    )


def markdown(records: Sequence[BenchRecord]) -> str:
    """Return the tables of records for a document, each with what limits it, and the commands that make them again."""
    parts = []
    for record in records:
        said, facts = verdict(record), _facts(record)
        rows = [line[:COLUMNS_COUNT_SHORT] for line in table(summarise(record))]
        title = record.run["part"] or record.run["url"]
        parts += [f"### {title[0].upper()}{title[1:]}", f"{facts['Data']}; {facts['Settings']}.", _markdown_table(rows)]
        parts += [f"{said.sentence} {said.evidence}"]
    if ratios := published_ratios(records):
        parts.append(_markdown_table(ratios))
    commands = "\n".join(_commands(records))
    return "\n\n".join(
        [*parts, f"{facts['Machine']}; {facts['Date']}; {facts['Versions']}.", f"```sh\n{commands}\n```"]
    )


def _markdown_table(rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])


def _names(records: Sequence[BenchRecord]) -> list[str]:
    """The names of the records' folders; their paths, if two have the same name."""
    names = [record.path.parent.resolve().name for record in records]
    return names if len(set(names)) == len(names) else [str(record.path.parent) for record in records]


def _compared(clients: Mapping[str, Sequence[ClientSummary]], records: Sequence[BenchRecord]) -> list[list[str]]:
    """A head and a row for each client: samples per second in each run, with the ratio to the first run that has the client."""
    rates = [{each.label: each.samples_per_s for each in found} for found in clients.values()]
    rows = [["client", *(f"{name}, samples/s" for name in clients)]]
    for label in dict.fromkeys([*chain(*rates), *chain(*(record.not_run for record in records))]):
        first = next((found[label].median for found in rates if label in found), 0.0)
        rows.append([label])
        for found, record in zip(rates, records, strict=True):
            if label in found:
                rows[-1].append(f"{spread_text(found[label])}, x {found[label].median / first:.2f}")
            else:
                rows[-1].append(f"not run: {public_text(record.not_run.get(label, 'not asked for'))}")
    return rows
