"""One HTML page that opens without a network: the tables, and a plot of cost against epochs."""

from __future__ import annotations

from importlib.resources import files
from io import StringIO
from itertools import cycle
from typing import TYPE_CHECKING, Any

from penstock.cost.comparison import by_epochs
from penstock.errors import ConfigError
from penstock.version import install_hint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.cost.prices import Prices
    from penstock.cost.tables import Table
    from penstock.cost.workload import Workload

EPOCHS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100)
"""Epochs of the plot: about evenly apart on its logarithmic axis."""

_INK = "#010203"
"""Colour of the plot's texts and axes in matplotlib, which becomes that of the page's text."""
# Each has a contrast of 3 to white and to the dark page. Marker and line style tell the series apart without colour.
_COLOURS = ("#2f81c7", "#c8720a", "#0a8f6b", "#c2569b", "#7d838c", "#d5502a")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
_STYLES = ("-", "--", "-.", ":")


def check_page() -> None:
    """Check that what the page needs is installed.

    Raises:
        ConfigError: It is not; the message says what to install.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib as mpl  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("an HTML page needs Jinja2 and matplotlib", hint=install_hint("bench")) from error


def page(title: str, summary: str, *, tables: Sequence[Table], workload: Workload, prices: Prices) -> str:
    """Return the page; `check_page` says whether it can be made.

    Args:
        title: Title of the page.
        summary: One line about the data and the run.
        tables: Tables of the page; the plot follows the first.
        workload: The run whose cost the plot shows, one of its `readings`.
        prices: Prices.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(files(__package__).joinpath("page.html").read_text())
    return template.render(title=title, summary=summary, tables=tables, plot=Markup(_plot(workload, prices)))


def _plot(workload: Workload, prices: Prices) -> str:
    """The US dollars of each option against epochs, as SVG."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    found = by_epochs(workload, prices, EPOCHS)
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "penstock", "font.family": "sans-serif"}
    settings |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK)
    with mpl.rc_context(settings):
        figure = Figure(figsize=(10, 5), layout="constrained")
        axes = figure.add_subplot(xscale="log", yscale="log", xlabel="epochs", ylabel="US dollars without GPU hosts")
        for name, colour, marker, style in zip(found[1], cycle(_COLOURS), _MARKERS, cycle(_STYLES), strict=False):
            dollars = [each[name] for each in found.values()]
            axes.plot(list(found), dollars, label=name, color=colour, marker=marker, linestyle=style)
        axes.grid(alpha=0.25)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.yaxis.set_major_formatter("${x:g}")
        figure.legend(loc="outside right center", frameon=False)
        file = StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return file.getvalue()[file.getvalue().index("<svg") :].replace(_INK, "currentColor")
