"""The plots of a page: what each client delivers, what each part allows, the course of each turn, windows, and sweeps."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.bench.clients import DECODING, RAW, STEP_ALONE, UNDECODED
from penstock.bench.results import (
    WINDOW_BATCHES,
    allowed_by_parts,
    best_settings,
    grouped_turns,
    is_decoded,
    summarise,
    windows_s,
)
from penstock.text.pages import COLOURS, INK, LINES, MARKERS, svg

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
    DECODING.name: "decoding alone, of a local copy",
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
    found = summarise(record)
    clients = best_settings(found)
    if not clients:
        return []
    turns = {(group[0]["name"], str(group[0]["settings"])): group for group in grouped_turns(record)}
    shown = clients if len(clients) > 1 else [each for each in found if not each.is_probe]
    lines = {each.label: turns[each.name, str(each.settings)] for each in shown}
    ours, others = ([each for each in clients if each.is_ours == is_ours] for is_ours in (True, False))
    both = bars({"penstock": ours, "other libraries": others})
    return [both, *_ladder(record, found), *_sweeps(found), *_windows(lines), _series(lines)]


def bars(groups: Mapping[str, Sequence[ClientSummary]]) -> Plot:
    """Return bars of samples per second of groups of clients: ours and others, or those of several runs side by side."""
    found = sorted(chain(*groups.values()), key=lambda each: -each.samples_per_s.median)
    labels = list(dict.fromkeys(each.label for each in found))
    thickness = 0.8 if len(labels) == len(found) else 0.8 / len(groups)

    def draw(figure: Any) -> None:
        axes = figure.add_subplot(xlabel="samples/s")
        for number, (name, clients) in enumerate(groups.items()):
            shift = (number - (len(groups) - 1) / 2) * thickness if thickness < 0.8 else 0.0
            places = [labels.index(each.label) + shift for each in clients]
            medians, lows, highs = np.array([each.samples_per_s for each in clients]).reshape(-1, 3).T
            axes.barh(
                places, medians, xerr=[medians - lows, highs - medians], error_kw={"ecolor": INK, "capsize": 3}, label=name,
                height=thickness, color=COLOURS[number % 4], hatch=HATCHES[number % len(HATCHES)], alpha=0.85,
            )  # fmt: skip
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        figure.legend(loc="outside upper left", ncols=3, frameon=False)

    return Plot(
        "Samples per second",
        "A bar is the median of the rounds, and its line goes from the slowest to the fastest. The table has the figures"
        + (", also those of other settings." if any(each.settings for each in found) else "."),
        svg(
            draw,
            label=f"Bars of samples per second: {'; '.join(labels)}",
            height=1.1 + BAR_INCHES / thickness * 0.8 * len(labels),
        ),
    )


def _ladder(record: BenchRecord, found: Sequence[ClientSummary]) -> Iterator[Plot]:
    """What each part allows, and what is delivered by all of them together."""
    allowed = allowed_by_parts(record, found)
    best = next((each for each in best_settings(found) if each.is_ours), None)
    if best is None or not allowed:
        return
    done = ["read", *["decoded"] * is_decoded(record), *["with the step"] * (record.run["settings"]["step"] != "none")]
    steps = {_PARTS[name]: allowed[name] for name in (RAW.name, UNDECODED.name, DECODING.name) if name in allowed}
    steps[f"{best.label}: {', '.join(done)}"] = best.samples_per_s.median
    if STEP_ALONE.name in allowed:
        steps[_PARTS[STEP_ALONE.name]] = allowed[STEP_ALONE.name]

    def draw(figure: Any) -> None:
        axes = figure.add_subplot(xlabel="samples/s")
        colours = [COLOURS[0] if name.startswith(best.label) else COLOURS[2] for name in steps]
        shown = axes.barh(list(steps), list(steps.values()), color=colours, height=0.6)
        axes.bar_label(shown, [f"{value:,.0f}" for value in steps.values()], padding=4)
        axes.set_xlim(0, max(steps.values()) * 1.15)
        axes.invert_yaxis()

    said = "; ".join(f"{name}: {value:,.0f} samples/s" for name, value in steps.items())
    yield Plot(
        "What each part allows",
        f"{said}. All parts together are no faster than the slowest of them.",
        svg(draw, label=f"Bars of what each part allows: {said}", height=0.9 + BAR_INCHES * 1.3 * len(steps)),
    )


def _sweeps(found: Sequence[ClientSummary]) -> Iterator[Plot]:
    """A plot for each setting that was swept, of the best of all values of the others."""
    for name in dict.fromkeys(name for each in found for name in each.settings):
        clients = [each for each in found if not each.is_probe and name in each.settings]
        values = sorted({each.settings[name] for each in clients}, key=lambda value: (isinstance(value, str), value))
        lines: dict[str, dict[int, float]] = {each.name: {} for each in clients}
        for each in reversed(clients):  # the fastest last
            lines[each.name][values.index(each.settings[name])] = each.samples_per_s.median
        if len(values) > 1:
            caption = f"Median samples per second by {name}; of other settings that were swept, the best value counts."
            yield _lines(f"By {name}", caption, lines, name, "samples/s", [str(value) for value in values])


def _windows(turns: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Plot]:
    lines = {
        f"{label}, round {turn['round'] + 1}": dict(enumerate(windows_s(turn), start=2))
        for label, group in turns.items()
        for turn in group
        if len(windows_s(turn)) > 1
    }
    if lines:
        caption = "Each point is a complete window. The first window of each round is left out."
        yield _lines(
            f"Seconds per {WINDOW_BATCHES} batches", caption, lines, f"window of {WINDOW_BATCHES} batches", "seconds"
        )


def _lines(
    title: str, caption: str, lines: Mapping[str, Mapping[int, float]], x: str, y: str, ticks: Sequence[str] = ()
) -> Plot:
    """Return a plot with a line for each name, from its values by their places; `ticks` are the names of all places."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot(xlabel=x, ylabel=y)
        for (label, values), colour, marker, line in zip(
            lines.items(), *map(cycle, (COLOURS, MARKERS, LINES)), strict=False
        ):
            places = sorted(values)
            every = max(1, len(places) // 15)
            heights = [values[place] for place in places]
            axes.plot(places, heights, label=label, color=colour, marker=marker, linestyle=line, markevery=every)
        axes.xaxis.get_major_locator().set_params(integer=True)
        if ticks:
            axes.set_xticks(range(len(ticks)), ticks)
        axes.set_ylim(0, 1.1 * axes.dataLim.y1)
        axes.grid(alpha=0.25)
        figure.legend(loc="outside right center", frameon=False)

    return Plot(title, caption, svg(draw, label=f"Lines of {y} by {x}: {', '.join(lines)}"))


def _series(turns: Mapping[str, Sequence[Mapping[str, Any]]]) -> Plot:
    """Small multiples: a row for each client, a column for each measure, a line for each round."""
    measured = {label: [_measures(turn) for turn in group] for label, group in turns.items()}
    heads = list(dict.fromkeys(chain.from_iterable(chain.from_iterable(measured.values()))))

    def draw(figure: Any) -> None:
        grid = figure.subplots(len(measured), len(heads), sharex=True, sharey="col", squeeze=False)
        for axes, head in zip(grid[0], heads, strict=True):
            axes.set_title(head, fontsize=9, pad=16)
        for row, (label, group) in zip(grid, measured.items(), strict=True):
            row[0].annotate(label, (0, 1.03), xycoords="axes fraction", fontsize=8, fontweight="bold")
            for series, colour, line in zip(group, cycle(COLOURS), cycle(LINES), strict=False):
                for axes, head in zip(row, heads, strict=True):
                    axes.plot(*series.get(head, ([], [])), color=colour, linestyle=line, linewidth=1.2)
        for column in grid.T:
            column[0].set_ylim(0, 1.1 * max(1e-9, *(axes.dataLim.y1 for axes in column)))
            column[-1].set_xlabel("seconds", fontsize=8)
        for axes in grid.flat:
            axes.tick_params(labelsize=7)
            axes.grid(alpha=0.25)

    return Plot(
        "Over time",
        "A row is a client, and a line a round: the first one is solid, the second one dashed. CPU and memory are those of the "
        "client with its processes, and the network is that of the machine. The time before the first batch is shown, too.",
        svg(
            draw,
            label=f"Small lines of {', '.join(heads)} over time for {'; '.join(measured)}",
            height=1.0 + SERIES_INCHES * len(measured),
        ),
    )


def _measures(turn: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return times in seconds and values of each column of the small multiples."""
    width_s = max(SERIES_S_MIN, turn["seconds"] / SERIES_POINTS_MAX)
    edges = np.arange(0, turn["seconds"] + width_s, width_s)
    samples, _ = np.histogram(turn["times_s"], bins=edges, weights=np.diff(turn["counts"], prepend=0))
    found = {"samples/s": (edges[:-1] + width_s / 2, samples / width_s)}
    if turn["monitor"]:
        times_s, cores, _, pss_bytes, received, gpu, *more = np.array(turn["monitor"], float).T  # None becomes NaN
        found["CPU cores"] = times_s, cores
        found["memory MiB"] = times_s, pss_bytes / (1 << 20)
        found["received MB/s"] = times_s, np.diff(received, prepend=0) / np.diff(times_s, prepend=0) / 1e6
        if not np.isnan(gpu).all():
            found["GPU busy %"] = times_s, 100 * gpu
        if more and not np.isnan(more[0]).all():
            found["requests/s"] = times_s, np.diff(more[0], prepend=0) / np.diff(times_s, prepend=0)
    return found
