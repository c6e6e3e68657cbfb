"""Shows literal blocks of docstrings (``::`` and an indented text) as code, and the options of ``Loader`` in its signature."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

from penstock.loader.options import LoaderOptions


class LiteralBlocks(griffe.Extension):
    """Takes the second colon away, and a line of two colons altogether; Markdown's indented block is code already."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Mend the docstring of an object that was collected."""
        if obj.docstring:
            text = re.sub(r"^::\n", "", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """State the options of ``Loader`` where it takes all of them by ``**options``."""
        if func.path == "penstock.loader.loader.Loader.__init__":
            options = inspect.signature(LoaderOptions).parameters.values()
            func.parameters = griffe.Parameters(
                *[each for each in func.parameters if each.name != "options"],
                *(
                    griffe.Parameter(
                        each.name,
                        annotation=each.annotation,
                        kind=griffe.ParameterKind.keyword_only,
                        default=repr(each.default),
                    )
                    for each in options
                ),
            )
