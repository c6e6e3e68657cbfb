"""HTML pages that open without a network: jinja2's templates on a common frame, and matplotlib's plots as SVG inside them."""

from __future__ import annotations

import re
import warnings
from io import StringIO
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.version import install_hint

if TYPE_CHECKING:
    from collections.abc import Callable

    from markupsafe import Markup
    from matplotlib.figure import Figure

INK = "#010203"
"""Colour of a plot's texts and axes in matplotlib, which becomes that of the page's text."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", INK)
"""Those of Okabe and Ito (2008), which colour-blind readers tell apart, with a contrast of 3 to a light and to a dark page."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
LINES = ("-", "--", "-.", ":")
"""Markers and lines tell series apart without colour."""

_SETTINGS: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "penstock", "font.family": "sans-serif", "text.parse_math": False,
    "axes.spines.top": False, "axes.spines.right": False, "hatch.color": INK,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}  # fmt: skip
_IDENTIFIER = re.compile(r' id="[\w.]+_\d+"')


def check_pages() -> None:
    """Check that what pages need is installed.

    Raises:
        ConfigError: It is not; the message says what to install.
    """
    try:
        import jinja2  # noqa: F401
        import matplotlib as mpl  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("an HTML page needs Jinja2 and matplotlib", hint=install_hint("bench")) from error


def page(template: str, **values: Any) -> str:
    """Return a page: a template, by its path in this package, with values. All text in them is escaped."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("penstock", "."), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template(template).render(**values)


def svg(draw: Callable[[Figure], object], *, label: str, height: float = 4.0, width: float = 10.0) -> Markup:
    """Return a plot for a page, the same for the same data.

    Args:
        draw: Draws on an empty figure.
        label: Words that say what the plot shows, for those who do not see it.
        height: Height of the figure in inches at 72 pixels.
        width: Width in inches.
    """
    import matplotlib as mpl
    from markupsafe import Markup, escape
    from matplotlib.figure import Figure

    with mpl.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has its own fonts
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure)
        file = StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    drawn = file.getvalue()
    drawn = _IDENTIFIER.sub("", drawn[drawn.index("<svg") :])  # each plot has the same ones
    return Markup(
        drawn.replace(INK, "currentColor").replace("<svg", f'<svg role="img" aria-label="{escape(label)}"', 1)
    )
