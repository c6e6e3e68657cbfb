"""``Image``: decodes, crops, resizes and flips a picture, and its masks with the same geometry."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from penstock.config import check_number
from penstock.errors import ConfigError
from penstock.pipeline.fields import Field, Spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.images import Box, Picture, Size

_SIDE_MAX = 65_535


def _is_interval(value: object) -> bool:
    """Whether `value` is a pair of numbers (low, high) with 0 < low <= high."""
    if (
        not isinstance(value, tuple | list)
        or len(value) != 2
        or not all(isinstance(each, int | float) for each in value)
    ):
        return False
    return bool(0 < value[0] <= value[1])


@dataclass(frozen=True, slots=True, repr=False)
class Image(Field):
    """A picture in JPEG, PNG, WebP or another format that Pillow reads. Needs the extra ``penstock-data[image]``.

    Its value is ``uint8[H, W, 3]``, or ``uint8[H, W]`` with ``mode="L"``. With `height` and `width`, every picture is
    resized to them. Without, all pictures must have the size of the first one, or be padded or ragged in the batch.
    Decoding, cropping, resizing and flipping are one step that writes into the memory of the batch. An orientation in EXIF
    is ignored, as in most training.

    Attributes:
        height: Height of the result in pixels; None: as stored.
        width: Width of the result in pixels; None: as stored.
        mode: ``"RGB"``, or ``"L"`` for grey.
        crop: The region that is resized. None: the whole picture; its aspect ratio is not kept. ``"center"``: the largest
            centred region with the aspect ratio of `height` and `width`. ``"random"``: a region of random area, shape and
            position.
        crop_fraction: With ``"center"``: factor for the sides of the region, in (0, 1]; 224/256 is usual for evaluation.
        scale: With ``"random"``: bounds of the region's area as a share of the picture's, in (0, 1].
        aspect: With ``"random"``: bounds of the region's width divided by its height.
        flip: Whether to mirror half of the pictures, at random, left to right.
        antialias: Whether every result pixel is the average of all pixels that it covers. Otherwise pixels are
            interpolated linearly after the JPEG decoder's own scaling, and averaged from a ratio of 2 on: twice as fast, and
            what most training does.
        masks: Members with masks; see ``with_mask``.
    """

    MODULES: ClassVar[tuple[str, ...]] = ("PIL", "cv2", "simplejpeg")
    EXTRA: ClassVar[str] = "image"
    height: int | None = field(default=None, kw_only=True)
    width: int | None = field(default=None, kw_only=True)
    mode: Literal["RGB", "L"] = field(default="RGB", kw_only=True)
    crop: Literal["center", "random"] | None = field(default=None, kw_only=True)
    crop_fraction: float = field(default=1.0, kw_only=True)
    scale: tuple[float, float] = field(default=(0.08, 1.0), kw_only=True)
    aspect: tuple[float, float] = field(default=(3 / 4, 4 / 3), kw_only=True)
    flip: bool = field(default=False, kw_only=True)
    antialias: bool = field(default=False, kw_only=True)
    masks: tuple[str, ...] = field(default=(), kw_only=True, repr=False)

    def __post_init__(self) -> None:
        Field.__post_init__(self)
        if (self.height is None) != (self.width is None):
            raise ConfigError(f"height={self.height!r} and width={self.width!r}: give both or neither")
        for name in ("height", "width"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or not 1 <= value <= _SIDE_MAX):
                raise ConfigError(f"{name}={value!r} must be a whole number of pixels in [1, {_SIDE_MAX}]")
        if self.mode not in ("RGB", "L"):
            raise ConfigError(f"mode={self.mode!r} must be 'RGB' or 'L'")
        if self.crop not in (None, "center", "random"):
            raise ConfigError(f"crop={self.crop!r} must be None, 'center' or 'random'")
        if self.crop is not None and self.height is None:
            raise ConfigError(f"crop={self.crop!r} needs a height and a width", hint="e.g. height=224, width=224")
        check_number("crop_fraction", self.crop_fraction, 0, 1, opened=True)
        if not _is_interval(self.scale) or self.scale[1] > 1:
            raise ConfigError(f"scale={self.scale!r} must be two shares with 0 < low <= high <= 1")
        if not _is_interval(self.aspect):
            raise ConfigError(f"aspect={self.aspect!r} must be two ratios with 0 < low <= high")

    def with_mask(self, *names: str) -> Image:
        """Also decode masks from other members, which are cropped, resized and flipped as the picture is.

        The value of a mask is ``uint8[H, W]``: the nearest stored value, or the index of a palette, never an average. As
        stored, a mask must have the size of its picture.

        Args:
            *names: Names of the members, e.g. ``"seg.png"``.

        Raises:
            ConfigError: No name, a bad name, or a name that occurs twice.
        """
        for name in names:
            Field.__post_init__(Image(name))
        masks = (*self.masks, *names)
        if not names or len({self.name, *masks}) <= len(masks):
            raise ConfigError(f"{self!r}.with_mask{names!r} must name other members, each once")
        return replace(self, masks=masks)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the picture and its masks."""
        return (self.name, *self.masks)

    @property
    def specs(self) -> tuple[Spec | None, ...]:
        """Dtype and shape of the picture and its masks; None unless `height` and `width` are given."""
        if self.height is None or self.width is None:
            return (None,) * len(self.names)
        size = (self.height, self.width)
        return (Spec("uint8", (*size, 3) if self.mode == "RGB" else size), *(Spec("uint8", size),) * len(self.masks))

    @property
    def takes_rng(self) -> bool:
        """Whether the region or the flip is random."""
        return self.crop == "random" or self.flip

    def decode(self, data: memoryview) -> NDArray[np.uint8]:
        """Return a writable uint8[H, W, 3] or uint8[H, W]. Only for fields without random geometry."""
        value: NDArray[np.uint8] = self.decode_members([data], None)[0]
        return value

    def decode_into(self, data: memoryview, out: Any, rng: np.random.Generator | None = None) -> None:
        """Decode straight into `out`: uint8[H, W, 3] or uint8[H, W], C-contiguous."""
        self.write_members([data], [out], rng)

    def decode_members(self, members: Sequence[memoryview], rng: np.random.Generator | None) -> Sequence[Any]:
        """Return the picture, and the masks whose bytes `members` has, as new arrays."""
        import numpy as np

        from penstock.images import open_picture

        picture = open_picture(members[0])
        height, width = self.height or picture.size.height, self.width or picture.size.width
        outs = [np.empty((height, width, 3) if self.mode == "RGB" else (height, width), np.uint8)]
        outs += [np.empty((height, width), np.uint8) for _ in members[1:]]
        self._write(picture, members, outs, rng)
        return outs

    def write_members(
        self, members: Sequence[memoryview], outs: Sequence[Any], rng: np.random.Generator | None
    ) -> None:
        """Decode the picture and its masks into the arrays `outs`."""
        from penstock.images import open_picture

        self._write(open_picture(members[0]), members, outs, rng)

    def _write(
        self,
        picture: Picture,
        members: Sequence[memoryview],
        outs: Sequence[Any],
        rng: np.random.Generator | None,
    ) -> None:
        from penstock.images import write_mask, write_region

        box, flip = self._geometry(picture.size, rng)
        write_region(picture, box, outs[0], mode=self.mode, flip=flip, antialias=self.antialias)
        for name, mask, out in zip(self.masks, members[1:], outs[1:], strict=False):
            try:
                write_mask(mask, picture.size, box, out, flip=flip)
            except (ValueError, OSError) as error:
                raise ValueError(f"mask {name!r}: {error}") from error

    def _geometry(self, size: Size, rng: np.random.Generator | None) -> tuple[Box, bool]:
        from penstock.images import Box, Size, centre_box, random_box

        if self.takes_rng and rng is None:
            raise ConfigError(f"{self!r} has random geometry, and needs an rng", hint="decode_into(data, out, rng)")
        box = Box(0, 0, *size)
        if self.crop is not None:
            target = Size(self.height or size.height, self.width or size.width)
            if self.crop == "center":
                box = centre_box(size, target, fraction=self.crop_fraction)
            else:
                assert rng is not None
                box = random_box(size, rng, scale=self.scale, aspect=self.aspect)
        return box, bool(self.flip and rng is not None and rng.random() < 0.5)

    def __repr__(self) -> str:
        masks = f".with_mask({', '.join(map(repr, self.masks))})" if self.masks else ""
        return Field.__repr__(self) + masks
