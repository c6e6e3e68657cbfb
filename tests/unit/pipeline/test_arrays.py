from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.pipeline import Audio, Numpy


def npy(array: Any, **options: Any) -> memoryview:
    out = io.BytesIO()
    np.save(out, array, **options)
    return memoryview(out.getvalue())


def npz(**arrays: Any) -> memoryview:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)
    return memoryview(out.getvalue())


class Bomb:
    """What it does when it is unpickled, nobody should find out."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was loaded",)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(5),
        np.zeros((0, 3), np.float32),
        np.array(["a", "bc"]),
        np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", ">f8")]),
    ],
    ids=str,
)
def test_arrays_come_back_equal(array: Any) -> None:
    """npy and npz, any dtype and layout, by content: writable, and independent of the bytes."""
    for data in (npy(array), npz(x=array)):
        buffer = bytearray(data)
        value = Numpy("x").decode(memoryview(buffer))
        buffer[:] = bytes(len(buffer))
        np.testing.assert_array_equal(value, array)
        assert value.dtype == array.dtype
        assert value.flags.writeable


@pytest.mark.filterwarnings("ignore:Stored array in format 3.0")
def test_the_newest_npy_version_is_read() -> None:
    """Field names beyond Latin-1 need version 3 of the format."""
    array = np.array([(1,)], dtype=[("\u03b1", "<i4")])
    np.testing.assert_array_equal(Numpy("x").decode(npy(array)), array)


def test_numpy_goes_into_memory_that_is_there() -> None:
    """What was said of dtype and shape is held."""
    field = Numpy("x", dtype="float32", shape=(2,))
    assert field.specs == (("float32", (2,)),)
    out = np.zeros(2, np.float32)
    field.decode_into(npy(np.array([1, 2], np.float32)), out)
    assert out.tolist() == [1, 2]
    for array in (np.zeros(3, np.float32), np.zeros(2)):
        with pytest.raises(ValueError, match="not the declared"):
            field.decode_into(npy(array), out)
    with pytest.raises(ConfigError, match="both"):
        Numpy("x", dtype="float32")


def test_pickles_are_never_loaded_unless_it_is_said() -> None:
    """An array of objects is refused, in npy and npz; with allow_pickle=True it is what it was."""
    array = np.array([Bomb()], dtype=object)
    for data in (npy(array), npz(x=array)):
        with pytest.raises(ValueError, match="allow_pickle=True"):
            Numpy("x").decode(data)
    with pytest.raises(ValueError, match="neither an npy nor an npz file"):
        Numpy("x", allow_pickle=True).decode(memoryview(pickle.dumps(3)))
    harmless = np.array([{"a": 1}], dtype=object)
    assert Numpy("x", allow_pickle=True).decode(npy(harmless))[0] == {"a": 1}


def test_npz_with_several_arrays() -> None:
    """Which one is meant must be said; the error lists them."""
    data = npz(a=np.zeros(1), b=np.ones(2))
    assert Numpy("x", member="b").decode(data).tolist() == [1, 1]
    for field in (Numpy("x"), Numpy("x", member="c")):
        with pytest.raises(ValueError, match=r"\['a', 'b'\]"):
            field.decode(data)


def test_a_header_that_promises_more_than_there_is() -> None:
    """A damaged or hostile header costs no memory: sizes are checked before anything is allocated."""
    data = bytes(npy(np.zeros(4, np.uint8)))
    huge = data.replace(b"(4,), }" + b" " * 12, b"(4000000000000,), }")
    assert huge != data
    for damaged in (huge, data[:-1]):
        with pytest.raises(ValueError, match=r"bytes, but only . follow"):
            Numpy("x").decode(memoryview(damaged))


def sound(array: Any, rate_hz: int = 8000, form: str = "WAV") -> memoryview:
    soundfile = pytest.importorskip("soundfile")
    out = io.BytesIO()
    soundfile.write(out, array, rate_hz, format=form, subtype="PCM_16")
    return memoryview(out.getvalue())


STEREO = (np.sin(np.arange(800)[:, None] / [[7, 11]]) * 0.9).astype(np.float32)


@pytest.mark.parametrize("form", ["WAV", "FLAC"])
def test_audio_goes_by_content(form: str) -> None:
    """Samples come back to a step of 16 bits, one array per recording, as float or as stored."""
    data = sound(STEREO, form=form)
    value = Audio("x").decode(data)
    assert (value.shape, value.dtype) == ((800, 2), np.float32)
    np.testing.assert_allclose(value, STEREO, atol=1 / 32768)
    whole = Audio("x", dtype="int16").decode(data)
    np.testing.assert_array_equal(whole, np.round(value * 32768).astype(np.int16))
    assert Audio("x").decode(sound(STEREO[:, 0], form=form)).shape == (800,)


def test_audio_of_a_fixed_length() -> None:
    """Mono averages the channels, frames cut or fill with silence, and then the shape is known beforehand."""
    field = Audio("x", channels="mono", frames=1000, rate_hz=8000)
    assert field.specs == (("float32", (1000,)),)
    out = np.ones(1000, np.float32)
    field.decode_into(sound(STEREO), out)
    np.testing.assert_allclose(out[:800], STEREO.mean(axis=1), atol=1 / 16384)
    assert not out[800:].any()
    assert Audio("x", frames=5).decode(sound(STEREO)).shape == (5, 2)


@pytest.mark.parametrize("stored_hz", [8000, 11025, 16000, 44100, 48000])
@pytest.mark.parametrize("frames", [None, 2000])
def test_audio_of_any_rate_is_resampled(stored_hz: int, frames: int | None) -> None:
    """A tone stays the tone that it is, at its place, whatever the rate; a cut one is the beginning of the whole."""
    seconds = np.arange(stored_hz // 2) / stored_hz
    tone = 0.5 * np.sin(2 * np.pi * 440 * seconds)
    value = Audio("x", rate_hz=16000, channels=1, frames=frames).decode(sound(np.stack([tone, tone], 1), stored_hz))
    assert abs(len(value) - (frames or 8000)) <= 1
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(len(value)) / 16000)
    np.testing.assert_allclose(value[500:-500], expected[500:-500], atol=2e-3)
    if frames:
        whole = Audio("x", rate_hz=16000, channels="mono").decode(sound(tone, stored_hz))
        np.testing.assert_allclose(value, whole[:frames], atol=1e-4)


def test_audio_has_the_channels_that_users_name() -> None:
    """By number or by word: averaged to one, one repeated, and any other number refused."""
    mono, stereo = sound(STEREO[:, 0]), sound(STEREO)
    for one in (1, "mono"):
        np.testing.assert_allclose(Audio("x", channels=one).decode(stereo), STEREO.mean(axis=1), atol=1 / 16384)
        assert Audio("x", channels=one).decode(mono).shape == (800,)
    for two in (2, "stereo"):
        np.testing.assert_allclose(Audio("x", channels=two).decode(mono)[:, 1], STEREO[:, 0], atol=1 / 16384)
        assert Audio("x", channels=two).decode(stereo).shape == (800, 2)
    assert Audio("x", channels=2, frames=9).specs == (("float32", (9, 2)),)
    with pytest.raises(ValueError, match="2 channels, not 6"):
        Audio("x", channels=6).decode(stereo)


def test_audio_refuses() -> None:
    """What is no recording, and bad options."""
    with pytest.raises(Exception, match=r".+"):
        Audio("x").decode(memoryview(b"no sound"))
    for options in ({"frames": 0}, {"rate_hz": 1.5}, {"channels": "left"}, {"channels": 0}, {"dtype": "int8"},
                    {"channels": "mono", "dtype": "int16"}):  # fmt: skip
        with pytest.raises(ConfigError):
            Audio("x", **options)
