"""Decoders that peers may use: Pillow as their tutorials do, or the one of penstock, so that only the loading differs."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE = 224


def pillow(data: Any) -> Any:
    """uint8[224, 224, 3]."""
    import numpy as np
    from PIL import Image

    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def penstock(data: Any) -> Any:
    """uint8[224, 224, 3], by what ``penstock.Image`` uses."""
    return _field().decode(memoryview(data))


def _field(name: str = "jpg") -> Any:
    global _image
    if _image is None:
        from penstock.pipeline import Image

        _image = Image(name, height=SIDE, width=SIDE)
    return _image


_image: Any = None
DECODERS: dict[str | None, Callable[[Any], Any]] = {"pillow": pillow, "penstock": penstock}
