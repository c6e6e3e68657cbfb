"""Views with a type and a shape of bytes that hold numbers. They are not copied, and ``np.asarray`` takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

ITEM_BYTES = {"B": 1, "b": 1, "H": 2, "h": 2, "e": 2, "I": 4, "i": 4, "f": 4, "Q": 8, "q": 8, "d": 8}
"""Size of each type that occurs, by its letter in ``struct``. Native order is little endian, as in all formats."""


def typed(value: memoryview, form: str, shape: Sequence[int] | None = None) -> memoryview:
    """Return `value`, uint8[length], as a view of items of type `form` with `shape`; None is one dimension of any length.

    Raises:
        ValueError: The length does not match.
    """
    item_bytes = ITEM_BYTES[form]
    if shape is None:
        shape = (len(value) // item_bytes,)
    size_bytes = item_bytes
    for extent in shape:
        size_bytes *= extent
    if size_bytes != len(value):
        raise ValueError(f"{len(value)} bytes are not items of {item_bytes} bytes in shape {tuple(shape)}")
    if form == "e" or not size_bytes or not shape:  # ``cast`` cannot create this shape
        import numpy as np

        return view_of_array(np.frombuffer(value, np.dtype(form)).reshape(shape))
    view: Any = value
    return cast("memoryview", view.cast(form, list(shape)) if form != "B" or len(shape) > 1 else view)


def view_of_array(array: Any) -> memoryview:
    """Return a view of a NumPy array with its type and shape."""
    return memoryview(array)
