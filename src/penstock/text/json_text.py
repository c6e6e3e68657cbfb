"""JSON that somebody else wrote: every defect in it is a ``ValueError``.

``json.loads`` raises ``RecursionError`` for text of many brackets, which a caller that expects ``ValueError`` would not catch.
A number of more digits than Python converts is a ``ValueError`` already.
"""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes | bytearray | memoryview, **hooks: Any) -> Any:
    """Return the value of a JSON text.

    Args:
        text: The text, in UTF-8, UTF-16 or UTF-32 if it is bytes.
        **hooks: Arguments of ``json.loads``.

    Raises:
        ValueError: The text is not JSON, is nested too deeply, or has a number of too many digits. Callers make it the error
            that names the file and the line.
    """
    try:
        return json.loads(bytes(text) if isinstance(text, memoryview) else text, **hooks)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
