"""The plots of performance.md, drawn from plots.json: ``python docs/tools/plots.py`` writes them.

The numbers come from docs/development/measurements.md. The colours are readable on light and on dark pages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TARGET = FOLDER.parent / "performance.svg"
WIDTH, COLUMNS, GUTTER = 860, 2, 40  # px
LABEL, BAR, STEP, HEAD, BOTTOM = 150, 16, 24, 50, 26  # px
INK, OURS, THEIRS = "#78818a", "#2f81c7", "#9aa4ae"
STYLE = (
    f"text{{font:12px system-ui,sans-serif;fill:{INK}}}.title{{font-weight:600;font-size:13px}}.end{{text-anchor:end}}"
)


def number(value: float) -> str:
    """A value as people write it: thousands apart, small ones with two digits."""
    return f"{value:,.0f}".replace(",", " ") if value >= 100 else f"{value:g}"


def panel(plot: dict[str, Any], left: int, top: int, width: int) -> list[str]:
    """The bars of one plot, as SVG elements."""
    largest = max(plot["bars"].values())
    parts = [
        f'<text x="{left}" y="{top + 16}" class="title">{plot["title"]}</text>',
        f'<text x="{left}" y="{top + 33}">{plot["unit"]}</text>',
    ]
    for row, (name, value) in enumerate(plot["bars"].items()):
        y = top + HEAD + row * STEP
        length = max(2, round((width - LABEL - 60) * value / largest))
        colour = OURS if name.startswith("penstock") else THEIRS
        parts += [
            f'<text x="{left + LABEL - 8}" y="{y + 12}" class="end">{name}</text>',
            f'<rect x="{left + LABEL}" y="{y}" width="{length}" height="{BAR}" rx="2" fill="{colour}"/>',
            f'<text x="{left + LABEL + length + 6}" y="{y + 12}">{number(value)}</text>',
        ]
    return parts


def performance() -> str:
    """All plots of plots.json in two columns, as one SVG."""
    plots = json.loads((FOLDER / "plots.json").read_text())
    width = (WIDTH - GUTTER * (COLUMNS - 1)) // COLUMNS
    parts: list[str] = []
    top = 0
    for first in range(0, len(plots), COLUMNS):
        row = plots[first : first + COLUMNS]
        for column, plot in enumerate(row):
            parts += panel(plot, column * (width + GUTTER), top, width)
        top += HEAD + STEP * max(len(plot["bars"]) for plot in row) + BOTTOM
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}" role="img">'
    names = "; ".join(plot["title"] for plot in plots)
    return "\n".join([head, f"<title>{names}</title>", f"<style>{STYLE}</style>", *parts, "</svg>\n"])


if __name__ == "__main__":
    TARGET.write_text(performance())
