"""Shows literal blocks of docstrings (``::`` and an indented text) as code, which is Markdown's indented block already."""

from __future__ import annotations

import re
from typing import Any

import griffe


class LiteralBlocks(griffe.Extension):
    """Takes the second colon away, and a line of two colons altogether."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Mend the docstring of an object that was collected."""
        if obj.docstring:
            text = re.sub(r"^::\n", "", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
