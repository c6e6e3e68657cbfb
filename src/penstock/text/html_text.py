"""HTML for notebooks: tables, lists and figures. All text is escaped, because names and values come from data."""

from __future__ import annotations

import html
from base64 import b64encode
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

TILE_PIXELS = 160
"""Width of a picture in a grid."""


def table(rows: Iterable[tuple[object, object]]) -> str:
    """Return a table of two columns: names and values."""
    cells = (f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in rows)
    return f'<table style="text-align:left">{"".join(cells)}</table>'


def code_lines(lines: Iterable[object]) -> str:
    """Return lines of code, one below the other."""
    return f"<pre>{'<br>'.join(_text(line) for line in lines)}</pre>"


def figure(pictures: Iterable[tuple[str, bytes]], caption: str) -> str:
    """Return one sample of a grid.

    Args:
        pictures: Kind, such as ``"jpeg"``, and bytes of each picture.
        caption: Lines of text below them.
    """
    images = "".join(
        f'<img style="width:100%" src="data:image/{html.escape(kind)};base64,{b64encode(data).decode()}">'
        for kind, data in pictures
    )
    text = _text(caption).replace("\n", "<br>")
    words = f'<figcaption style="overflow-wrap:anywhere">{text}</figcaption>'
    return f'<figure style="margin:0;width:{TILE_PIXELS}px">{images}{words}</figure>'


def grid(figures: Iterable[str]) -> str:
    """Return figures side by side."""
    return f'<div style="display:flex;flex-wrap:wrap;gap:12px">{"".join(figures)}</div>'


def _text(value: object) -> str:
    return html.escape(str(value))
