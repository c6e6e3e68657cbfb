"""What a member of a sample is, and how its bytes become a value. Content decides, never the extension."""

from __future__ import annotations

import io
import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from penstock.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_RESERVED = "__"  # __key__, __shard__, __position__, __valid__ are the loader's own
_INTEGER = re.compile(rb"\s*(?:([+-]?\d+)|\[\s*([+-]?\d+)\s*\])\s*")
_INT64_MAX = 2**63 - 1
_WIDE_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")  # Pillow would clip these to 8 bits without a word


@dataclass(frozen=True, slots=True)
class Field(ABC):
    """A member of every sample, by name: ``"jpg"`` is what follows the first dot in ``0001.jpg``.

    Raises:
        ConfigError: the name is empty or begins with ``__``.
    """

    MODULE: ClassVar[str] = ""
    EXTRA: ClassVar[str] = ""
    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or self.name.startswith(_RESERVED):
            raise ConfigError(
                f"a field is named by a non-empty string that does not begin with '__', not {self.name!r}",
                hint="the name is the member's extension, e.g. Image('jpg')",
            )

    def require(self) -> None:
        """Look whether what this field decodes with is installed.

        Raises:
            ConfigError: it is not; the hint says how to get it.
        """
        if self.MODULE and find_spec(self.MODULE) is None:
            raise ConfigError(
                f"{self!r} decodes with the module {self.MODULE!r}, which is not installed",
                hint=f"pip install 'penstock[{self.EXTRA}]'",
            )

    @abstractmethod
    def decode(self, data: memoryview) -> Any:
        """The value of a member with bytes `data`, which it does not keep. ``ValueError`` for what it cannot be."""

    def __repr__(self) -> str:
        parts = [repr(self.name)]
        for name, entry in type(self).__dataclass_fields__.items():
            value = getattr(self, name)
            if name != "name" and value != entry.default:
                parts.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(parts)})"


@dataclass(frozen=True, slots=True, repr=False)
class Image(Field):
    """A picture: JPEG, PNG, WebP, ... Needs the extra ``penstock[image]``.

    Gives ``uint8[H, W, 3]``, or ``uint8[H, W]`` with ``mode="L"``. With `height` and `width` every picture is resized
    to them (bilinear, the aspect ratio is not kept); without, all pictures must have the first one's size.

    Attributes:
        height: Pixels.
        width: Pixels.
        mode: ``"RGB"``, or ``"L"`` for grey.
    """

    MODULE: ClassVar[str] = "PIL"
    EXTRA: ClassVar[str] = "image"
    height: int | None = field(default=None, kw_only=True)
    width: int | None = field(default=None, kw_only=True)
    mode: Literal["RGB", "L"] = field(default="RGB", kw_only=True)

    def __post_init__(self) -> None:
        Field.__post_init__(self)
        if (self.height is None) != (self.width is None):
            raise ConfigError(f"height={self.height!r} and width={self.width!r}: give both, or none")
        for name in ("height", "width"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or not 1 <= value <= 65_535):
                raise ConfigError(f"{name}={value!r} must be a whole number of pixels in [1, 65535]")
        if self.mode not in ("RGB", "L"):
            raise ConfigError(f"mode={self.mode!r} must be 'RGB' or 'L'")

    def decode(self, data: memoryview) -> NDArray[np.uint8]:
        """uint8[H, W, 3] or uint8[H, W], writable."""
        import numpy as np
        from PIL import Image as Pillow

        with Pillow.open(io.BytesIO(data)) as picture:
            if picture.mode in _WIDE_MODES:
                raise ValueError(f"a picture of mode {picture.mode!r} has more than 8 bits per channel")
            if self.height is None or self.width is None:
                return np.array(picture.convert(self.mode), dtype=np.uint8)
            picture.draft(self.mode, (self.width, self.height))  # JPEG: scaled in the DCT, never below this size
            sized = picture.convert(self.mode).resize((self.width, self.height), Pillow.Resampling.BILINEAR)
            return np.array(sized, dtype=np.uint8)


@dataclass(frozen=True, slots=True, repr=False)
class Integer(Field):
    r"""A whole number as WebDataset writers leave it: ``7``, ``7\n`` or ``[7]``. Gives int64."""

    def decode(self, data: memoryview) -> int:
        """A Python int that fits into int64."""
        text = bytes(data)
        match = _INTEGER.fullmatch(text)
        if match is None:
            raise ValueError(f"not a whole number: {text[:40]!r}")
        number = int(match[1] or match[2])
        if not -_INT64_MAX - 1 <= number <= _INT64_MAX:
            raise ValueError(f"{number} does not fit into int64")
        return number


@dataclass(frozen=True, slots=True, repr=False)
class Text(Field):
    """UTF-8 text. Gives a list of ``str`` per batch."""

    def decode(self, data: memoryview) -> str:
        """The text, unchanged: a trailing newline stays."""
        return str(data, "utf-8")


@dataclass(frozen=True, slots=True, repr=False)
class Json(Field):
    """A JSON document. Gives a list of objects per batch."""

    def decode(self, data: memoryview) -> Any:
        """dict, list, str, int, float, bool or None."""
        return json.loads(bytes(data))


@dataclass(frozen=True, slots=True, repr=False)
class Bytes(Field):
    """The member as it is. Gives a list of ``bytes`` per batch."""

    def decode(self, data: memoryview) -> bytes:
        """A copy of `data`."""
        return bytes(data)
