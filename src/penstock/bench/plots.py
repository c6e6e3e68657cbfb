"""The plots of a page: what each client delivers, what each part allows, the course of each turn, windows, and sweeps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any

from penstock.bench.clients import RAW, STEP_ALONE, UNDECODED
from penstock.bench.results import WINDOW_BATCHES, allowed_by_parts, grouped_turns, summarise, windows_s
from penstock.text.pages import COLOURS, INK, LINES, MARKERS, svg

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from markupsafe import Markup

    from penstock.bench.record import BenchRecord
    from penstock.bench.results import ClientSummary

BAR_INCHES = 0.32
SERIES_INCHES = 1.25
SERIES_S_MIN = 0.25
SERIES_POINTS_MAX = 120
HATCHES = ("", "///", "...", "xx", "\\\\\\")
_PARTS = {
    RAW.name: "store: raw reading, divided by the bytes of a sample",
    UNDECODED.name: "and samples made of it, not decoded",
    STEP_ALONE.name: "step alone, on one cached batch",
}


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot of a page, with a title and the sentences below it."""

    title: str
    caption: str
    svg: Markup


def plots_of_run(record: BenchRecord) -> list[Plot]:
    """Return the plots for which a record has figures."""
    clients = [each for each in summarise(record) if not each.is_probe]
    if not clients:
        return []
    found = [bars({"": clients}), _ladder(record, clients), *_sweeps(clients), _windows(record), _series(record)]
    return [plot for plot in found if plot is not None]


def bars(runs: Mapping[str, Sequence[ClientSummary]]) -> Plot:
    """Return bars of samples per second of the clients of one run, or of several side by side."""
    labels = list(dict.fromkeys(each.label for clients in runs.values() for each in clients))
    rates = {name: {each.label: each for each in clients} for name, clients in runs.items()}
    ours = {each.label for clients in runs.values() for each in clients if each.is_ours}
    thickness = 0.8 / len(runs)

    def draw(figure: Any) -> None:
        axes = figure.add_subplot(xlabel="samples/s")
        kinds = [("penstock", True), ("other libraries", False)] if len(runs) == 1 else [(name, True) for name in runs]
        for number, (kind, is_ours) in enumerate(kinds):
            found = rates[""] if len(runs) == 1 else rates[kind]
            rows = [
                (row, found[label].samples_per_s)
                for row, label in enumerate(labels)
                if label in found and (len(runs) > 1 or (label in ours) == is_ours)
            ]
            if not rows:
                continue
            shift = (number - (len(runs) - 1) / 2) * thickness if len(runs) > 1 else 0.0
            errors = [[rate.median - rate.low for _, rate in rows], [rate.high - rate.median for _, rate in rows]]
            axes.barh(
                [row + shift for row, _ in rows], [rate.median for _, rate in rows], height=thickness, label=kind,
                color=COLOURS[number % 4], hatch=HATCHES[number % len(HATCHES)], alpha=0.85,
                xerr=errors, error_kw={"ecolor": INK, "capsize": 3},
            )  # fmt: skip
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        figure.legend(loc="outside upper left", ncols=3, frameon=False)

    return Plot(
        "Samples per second",
        "A bar is the median of the rounds, and its line goes from the slowest round to the fastest. Figures are in the table.",
        svg(
            draw,
            label="Bars of samples per second of each client: " + "; ".join(labels),
            height=1.1 + BAR_INCHES * len(labels) * max(1, len(runs) * 0.6),
        ),
    )


def _ladder(record: BenchRecord, clients: Sequence[ClientSummary]) -> Plot | None:
    """What each part allows, and what is delivered by all of them together."""
    allowed = allowed_by_parts(record, summarise(record))
    best = next((each for each in clients if each.is_ours), None)
    if best is None or not allowed:
        return None
    settings = record.run["settings"]
    done = ["read", *["decoded"] * settings["decode"], *["with the step"] * (settings["step"] != "none")]
    steps = {_PARTS[name]: allowed[name] for name in (RAW.name, UNDECODED.name) if name in allowed}
    steps[f"{best.label}: {', '.join(done)}"] = best.samples_per_s.median
    if STEP_ALONE.name in allowed:
        steps[_PARTS[STEP_ALONE.name]] = allowed[STEP_ALONE.name]

    def draw(figure: Any) -> None:
        axes = figure.add_subplot(xlabel="samples/s", xscale="log")
        colours = [COLOURS[0] if name.startswith(best.label) else COLOURS[2] for name in steps]
        shown = axes.barh(list(steps), list(steps.values()), color=colours, height=0.6)
        axes.bar_label(shown, [f"{value:,.0f}" for value in steps.values()], padding=4)
        axes.set_xlim(min(steps.values()) / 3, max(steps.values()) * 2)
        axes.invert_yaxis()

    said = "; ".join(f"{name}: {value:,.0f} samples/s" for name, value in steps.items())
    return Plot(
        "What each part allows",
        f"{said}. The lowest part is the limit. The axis is logarithmic.",
        svg(draw, label=f"Bars of what each part allows: {said}", height=0.9 + BAR_INCHES * 1.3 * len(steps)),
    )


def _sweeps(clients: Sequence[ClientSummary]) -> list[Plot]:
    """A plot for each setting that was swept, of the best of all values of the others."""
    plots = []
    for name in clients[0].settings:
        values = list(dict.fromkeys(each.settings[name] for each in clients))
        values.sort(key=lambda value: (isinstance(value, str), value))
        lines: dict[str, dict[Any, float]] = {}
        for each in clients:
            best = lines.setdefault(each.name, {})
            best[each.settings[name]] = max(best.get(each.settings[name], 0.0), each.samples_per_s.median)
        if len(values) > 1:
            plots.append(_sweep(name, values, lines, is_only=len(clients[0].settings) == 1))
    return plots


def _sweep(name: str, values: Sequence[Any], lines: Mapping[str, Mapping[Any, float]], *, is_only: bool) -> Plot:
    def draw(figure: Any) -> None:
        axes = figure.add_subplot(xlabel=name, ylabel="samples/s")
        for (client, rates), (colour, marker, line) in zip(lines.items(), _styles(), strict=False):
            places = [place for place, value in enumerate(values) if value in rates]
            heights = [rates[values[place]] for place in places]
            axes.plot(places, heights, label=client, color=colour, marker=marker, linestyle=line)
        axes.set_xticks(range(len(values)), [str(value) for value in values])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        figure.legend(loc="outside right center", frameon=False)

    caption = f"Median samples per second by {name}." + (
        "" if is_only else " Of the other settings, the best value counts."
    )
    return Plot(f"By {name}", caption, svg(draw, label=f"Lines of samples per second by {name}: {', '.join(lines)}"))


def _styles() -> Any:
    return zip(cycle(COLOURS), cycle(MARKERS), cycle(LINES), strict=False)


def _of_clients(record: BenchRecord) -> dict[str, list[dict[str, Any]]]:
    """Return the turns of each client by its label, in the order of the table."""
    turns = {(group[0]["name"], str(group[0]["settings"])): group for group in grouped_turns(record)}
    return {each.label: turns[each.name, str(each.settings)] for each in summarise(record) if not each.is_probe}


def _windows(record: BenchRecord) -> Plot | None:
    lines = {
        f"{label}, round {turn['round'] + 1}": windows_s(turn)
        for label, turns in _of_clients(record).items()
        for turn in turns
        if len(windows_s(turn)) > 1
    }
    if not lines:
        return None

    def draw(figure: Any) -> None:
        axes = figure.add_subplot(xlabel=f"window of {WINDOW_BATCHES} batches", ylabel="seconds")
        for (label, seconds), (colour, marker, line) in zip(lines.items(), _styles(), strict=False):
            every = max(1, len(seconds) // 15)
            numbers = range(2, 2 + len(seconds))
            axes.plot(numbers, seconds, label=label, color=colour, marker=marker, linestyle=line, markevery=every)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
        figure.legend(loc="outside right center", frameon=False)

    return Plot(
        f"Seconds per {WINDOW_BATCHES} batches",
        "Each point is a complete window. The first window of each round is left out.",
        svg(draw, label=f"Lines of seconds for each window of {WINDOW_BATCHES} batches: {', '.join(lines)}"),
    )


def _series(record: BenchRecord) -> Plot:
    """Small multiples: a row for each client, a column for each measure, a line for each round."""
    clients = _of_clients(record)
    heads = ("samples/s", "CPU cores", "memory MiB", "received MB/s")

    def draw(figure: Any) -> None:
        grid = figure.subplots(len(clients), len(heads), sharex=True, sharey="col", squeeze=False)
        for axes, head in zip(grid[0], heads, strict=True):
            axes.set_title(head, fontsize=9)
        for row, (label, turns) in zip(grid, clients.items(), strict=True):
            row[0].annotate(label, (0, 1.02), xycoords="axes fraction", fontsize=8, fontweight="bold")
            for turn, colour, line in zip(turns, cycle(COLOURS), cycle(LINES), strict=False):
                for axes, (times_s, values) in zip(row, _measures(turn), strict=True):
                    axes.plot(times_s, values, color=colour, linestyle=line, linewidth=1.2)
        for axes in grid.flat:
            axes.set_ylim(bottom=0)
            axes.tick_params(labelsize=7)
            axes.grid(alpha=0.25)
        for axes in grid[-1]:
            axes.set_xlabel("seconds", fontsize=8)

    return Plot(
        "Over time",
        "A row is a client, and a line a round: the first one is solid, the second one dashed. CPU and memory are those of the "
        "client with its processes, and the network is that of the machine. The time before the first batch is shown, too.",
        svg(
            draw,
            label=f"Small lines of {', '.join(heads)} over time for {'; '.join(clients)}",
            height=1.0 + SERIES_INCHES * len(clients),
        ),
    )


def _measures(turn: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return times and values of each column of the small multiples."""
    import numpy as np

    counts = np.diff(turn["counts"], prepend=0)
    width_s = max(SERIES_S_MIN, turn["seconds"] / SERIES_POINTS_MAX)
    edges = np.arange(0, turn["seconds"] + width_s, width_s)
    samples, _ = np.histogram(turn["times_s"], bins=edges, weights=counts)
    rows = np.array([row[:5] for row in turn["monitor"]], float).reshape(-1, 5)
    times_s, received = rows[:, 0], rows[:, 4]
    rate = np.diff(received, prepend=0) / np.diff(times_s, prepend=0) if len(rows) else received
    return [
        (edges[:-1] + width_s / 2, samples / width_s),
        (times_s, rows[:, 1]),
        (times_s, rows[:, 3] / (1 << 20)),
        (times_s, rate / 1e6),
    ]
