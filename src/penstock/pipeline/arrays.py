"""``Numpy`` and ``Audio``: fields whose values are arrays."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from penstock.errors import ConfigError
from penstock.memory.buffers import is_typed
from penstock.pipeline.fields import Field, Spec, check_declared, declared_specs, write_declared

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_NPY = b"\x93NUMPY"
_ZIP = b"PK\x03\x04"
_ARRAY_BYTES_MAX = 4 * 1024**3  # a header that announces more is damaged or malicious


@dataclass(frozen=True, slots=True, repr=False)
class Numpy(Field):
    """An array that ``numpy.save`` or ``numpy.savez`` wrote, or that the format itself stores; the content decides.

    Attributes:
        member: Name of the array in an ``npz`` file; None: the file holds a single array.
        dtype: Name of the numpy dtype that every array must have, given together with `shape`; None: the first sample
            determines both.
        shape: Shape that every array must have.
        allow_pickle: Whether to load arrays of objects, which are pickles: loading one may run any code of its writer.
    """

    TAKES_NUMBERS: ClassVar[bool] = True
    member: str | None = field(default=None, kw_only=True)
    dtype: str | None = field(default=None, kw_only=True)
    shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    allow_pickle: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        Field.__post_init__(self)
        check_declared(self.dtype, self.shape)

    @property
    def specs(self) -> tuple[Spec | None, ...]:
        """The declared dtype and shape, if any."""
        return declared_specs(self.dtype, self.shape)

    def decode(self, data: memoryview) -> NDArray[Any]:
        """Return a writable array that owns its memory."""
        array = self._array(data)
        return array if array.flags.owndata else array.copy()

    def decode_into(self, data: memoryview, out: Any, rng: np.random.Generator | None = None) -> None:
        """Copy the array into `out`.

        Raises:
            ValueError: The array does not have the declared dtype and shape.
        """
        write_declared(self._array(data), out)

    def decode_column(self, values: list[bytes] | NDArray[Any]) -> NDArray[Any] | None:
        """Return numbers as the table stores them."""
        return None if isinstance(values, list) else values

    def _array(self, data: memoryview) -> NDArray[Any]:
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
