"""One HTML page that opens without a network: the tables, and a plot of cost against epochs."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

from penstock.cost.comparison import by_epochs
from penstock.text import pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from penstock.cost.prices import Prices
    from penstock.cost.tables import Table
    from penstock.cost.workload import Workload

EPOCHS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100)
"""Epochs of the plot: about evenly apart on its logarithmic axis."""


def page(title: str, summary: str, *, tables: Sequence[Table], workload: Workload, prices: Prices) -> str:
    """Return the page; ``penstock.text.pages.check_pages`` says whether it can be made.

    Args:
        title: Title of the page.
        summary: One line about the data and the run.
        tables: Tables of the page; the plot follows the first.
        workload: The run whose cost the plot shows, one of its `readings`.
        prices: Prices.
    """
    found = by_epochs(workload, prices, EPOCHS)

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import LogFormatter

        axes = figure.add_subplot(xscale="log", yscale="log", xlabel="epochs", ylabel="US dollars without GPU hosts")
        styles = zip(found[1], cycle(pages.COLOURS), pages.MARKERS, cycle(pages.LINES), strict=False)
        for name, colour, marker, line in styles:
            dollars = [each[name] for each in found.values()]
            axes.plot(list(found), dollars, label=name, color=colour, marker=marker, linestyle=line)
        axes.grid(alpha=0.25)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_major_formatter("${x:g}")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(
                LogFormatter()
            )  # the default writes powers as formulas, which a page's plots have not
        figure.legend(loc="outside right center", frameon=False)

    plot = pages.svg(draw, label="US dollars of each option against epochs", height=5.0)
    return pages.page("cost/page.html.j2", title=title, summary=summary, tables=tables, plot=plot)
