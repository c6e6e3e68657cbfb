"""``Numpy`` and ``Audio``: fields whose values are arrays."""

from __future__ import annotations

import io
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from penstock.config import check_number
from penstock.errors import ConfigError
from penstock.memory.buffers import is_typed
from penstock.pipeline.fields import DeclaredField, Field, Spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from penstock.images import Box, Picture, Size


_NPY = b"\x93NUMPY"
_ZIP = b"PK\x03\x04"
_ARRAY_BYTES_MAX = 4 * 1024**3  # a header that announces more is damaged or malicious


@dataclass(frozen=True, slots=True, repr=False)
class Numpy(DeclaredField):
    """An array that ``numpy.save`` or ``numpy.savez`` wrote, or that the format itself stores; the content decides.

    Attributes:
        member: Name of the array in an ``npz`` file; None: the file holds a single array.
        dtype: Name of the numpy dtype of every value, given together with `shape`; None: the first sample determines both.
        shape: Shape of every value.
        allow_pickle: Whether to load arrays of objects, which are pickles: loading one may run any code of its writer.
    """

    member: str | None = field(default=None, kw_only=True)
    allow_pickle: bool = field(default=False, kw_only=True)

    def decode(self, data: memoryview) -> NDArray[Any]:
        """Return a writable array that owns its memory."""
        array = self.array(data)
        return array if array.flags.owndata else array.copy()

    def decode_column(self, values: list[bytes] | NDArray[Any]) -> NDArray[Any] | None:
        """Return numbers as the table stores them."""
        return None if isinstance(values, list) else values

    def array(self, data: memoryview) -> NDArray[Any]:
        """Return the array; it shares the memory of `data` unless it holds objects."""
        if is_typed(data):
            import numpy as np

            return np.asarray(data)
        if data[:6].tobytes() == _NPY:
            return _read_npy(data, allow_pickle=self.allow_pickle)
        if data[:4].tobytes() == _ZIP:
            return self._from_npz(data)
        raise ValueError(f"neither an npy nor an npz file: it begins with {data[:6].tobytes()!r}")

    def _from_npz(self, data: memoryview) -> NDArray[Any]:
        import zipfile

        with zipfile.ZipFile(io.BytesIO(data)) as file:
            names = [info.filename.removesuffix(".npy") for info in file.infolist()]
            name = self.member or (names[0] if len(names) == 1 else None)
            if name is None or name not in names:
                raise ValueError(f"the npz has the arrays {names}; choose one: Numpy({self.name!r}, member=...)")
            info = file.infolist()[names.index(name)]
            if info.file_size > _ARRAY_BYTES_MAX:
                raise ValueError(f"array {name!r} has {info.file_size} bytes, more than {_ARRAY_BYTES_MAX}")
            return _read_npy(memoryview(file.read(info)), allow_pickle=self.allow_pickle)


def _read_npy(data: memoryview, *, allow_pickle: bool) -> NDArray[Any]:
    """Return the array in `data`; it shares the memory of `data` unless it holds objects."""
    import numpy as np
    from numpy.lib import format as npy

    file = io.BytesIO(data)
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):  # 3.0: field names beyond Latin-1
        return np.asarray(npy.read_array(io.BytesIO(data), allow_pickle=allow_pickle))
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran_order, dtype = read_header(file)
    if dtype.hasobject:
        if not allow_pickle:
            raise ValueError("an array of objects is a pickle; if you trust its writer, load it with allow_pickle=True")
        return np.asarray(npy.read_array(io.BytesIO(data), allow_pickle=True))
    count = 1
    for side in shape:
        count *= side
    if count * dtype.itemsize > len(data) - file.tell():
        raise ValueError(
            f"{dtype}{list(shape)} needs {count * dtype.itemsize} bytes, but only {len(data) - file.tell()} follow"
        )
    array: NDArray[Any] = np.frombuffer(data, dtype, count, file.tell())
    return array.reshape(shape, order="F" if fortran_order else "C")


@dataclass(frozen=True, slots=True, repr=False)
class Audio(Field):
    """A recording in WAV, FLAC, Ogg, MP3 or another format that soundfile reads. Needs the extra ``penstock-data[audio]``.

    Its value is ``float32[frames]`` in [-1, 1] for one channel and ``float32[frames, channels]`` for more. Recordings of
    unequal length need ``frames=``, or ``pad=`` or ``ragged=`` in the batch.

    Attributes:
        rate_hz: Sample rate of the value: recordings with another one are resampled by soxr, in its high quality; None
            keeps the rate of each recording.
        channels: 1 or ``"mono"`` averages the channels; any other number, or ``"stereo"`` for 2, repeats the channel of a
            recording that has one, and must be the number of channels of all others; None keeps them.
        frames: Number of frames to cut every recording to, or to fill it up to with silence; None: as stored.
        dtype: ``"float32"``, or ``"int16"``, as most files store it.
    """

    MODULES: ClassVar[tuple[str, ...]] = ("soundfile", "soxr")
    EXTRA: ClassVar[str] = "audio"
    rate_hz: int | None = field(default=None, kw_only=True)
    channels: int | Literal["mono", "stereo"] | None = field(default=None, kw_only=True)
    frames: int | None = field(default=None, kw_only=True)
    dtype: Literal["float32", "int16"] = field(default="float32", kw_only=True)

    def __post_init__(self) -> None:
        Field.__post_init__(self)
        for name in ("rate_hz", "frames"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
        if self.channels is not None and self._channels_count < 1:
            raise ConfigError(f"channels={self.channels!r} must be a number of channels, 'mono', 'stereo' or None")
        if self.dtype not in ("float32", "int16"):
            raise ConfigError(f"dtype={self.dtype!r} must be 'float32' or 'int16'")
        if self._channels_count == 1 and self.dtype != "float32":
            raise ConfigError(f"channels={self.channels!r} averages the channels, which needs dtype='float32'")

    @property
    def specs(self) -> tuple[Spec | None, ...]:
        """Dtype and shape; None unless `frames` and `channels` are given."""
        if self.frames is None or self.channels is None:
            return (None,)
        count = self._channels_count
        return (Spec(self.dtype, (self.frames,) if count == 1 else (self.frames, count)),)

    def decode(self, data: memoryview) -> NDArray[Any]:
        """Return a writable dtype[frames] or dtype[frames, channels]."""
        import numpy as np
        import soundfile  # type: ignore[import-untyped]

        with soundfile.SoundFile(io.BytesIO(data)) as file:
            stored_hz = file.samplerate
            rate_hz = self.rate_hz or stored_hz
            wanted = -1 if self.frames is None else self.frames
            if wanted > 0 and rate_hz != stored_hz:  # and a tenth of a second, so that the filter sees what follows
                wanted = -(-wanted * stored_hz // rate_hz) + stored_hz // 10
            sound: NDArray[Any] = file.read(frames=wanted, dtype=self.dtype)
        sound = self._with_channels(sound)
        if rate_hz != stored_hz:
            import soxr

            sound = soxr.resample(sound, stored_hz, rate_hz)[: self.frames]
        if self.frames is not None and len(sound) < self.frames:
            sound = np.concatenate([sound, np.zeros((self.frames - len(sound), *sound.shape[1:]), sound.dtype)])
        return sound

    @property
    def _channels_count(self) -> int:
        """Number of channels of the value; 0 if `channels` is none or no number."""
        count = {"mono": 1, "stereo": 2}.get(str(self.channels), self.channels)
        return count if isinstance(count, int) and not isinstance(count, bool) else 0

    def _with_channels(self, sound: NDArray[Any]) -> NDArray[Any]:
        count, stored_count = self._channels_count, 1 if sound.ndim == 1 else sound.shape[1]
        if count in (0, stored_count):
            return sound
        if count == 1:
            averaged: NDArray[Any] = sound.mean(axis=1, dtype=sound.dtype)
            return averaged
        if stored_count > 1:
            raise ValueError(f"the recording has {stored_count} channels, not {count}")
        return sound[:, None].repeat(count, axis=1)


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


@dataclass(frozen=True, slots=True, repr=False, init=False)
class Image(Field):
    """A picture in JPEG, PNG, WebP or another format that Pillow reads. Needs the extra ``penstock-data[image]``.

    Its value is ``uint8[H, W, 3]``, or ``uint8[H, W]`` with ``mode="L"``. With `height` and `width`, every picture is
    resized to them. Without, all pictures must have the size of the first one, or be padded or ragged in the batch.
    Decoding, cropping, resizing and flipping are one step that writes into the memory of the batch. An orientation in EXIF
    is ignored, as in most training.

    ``Image("jpg", "jpeg", "png")`` is ``Image("jpg;jpeg;png")``: one value, ``"jpg"``, of whichever member a sample has.

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
    SEVERAL_NAMES: ClassVar[bool] = True
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

    def __init__(
        self,
        name: str,
        *alternatives: str,
        default: Any = ...,
        valid: str | None = None,
        height: int | None = None,
        width: int | None = None,
        mode: Literal["RGB", "L"] = "RGB",
        crop: Literal["center", "random"] | None = None,
        crop_fraction: float = 1.0,
        scale: tuple[float, float] = (0.08, 1.0),
        aspect: tuple[float, float] = (3 / 4, 4 / 3),
        flip: bool = False,
        antialias: bool = False,
        masks: tuple[str, ...] = (),
    ) -> None:
        given = locals()  # the attributes, by name
        if alternatives:
            given["name"] = ";".join(map(str, (name, *alternatives)))
        for each in fields(self):
            object.__setattr__(self, each.name, given[each.name])
        self.__post_init__()

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
        if not names or len({*self.names[:1], *self.alternatives, *masks}) <= len(masks) + len(self.alternatives):
            raise ConfigError(f"{self!r}.with_mask{names!r} must name other members, each once")
        return replace(self, masks=masks)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the picture and its masks."""
        return (self.name.partition(";")[0], *self.masks)

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
