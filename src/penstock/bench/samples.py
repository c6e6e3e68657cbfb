"""Samples that look like those of published measurements, and the shards that hold them; the same seed gives the same bytes."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Fields = dict[str, Any]
"""The fields of a sample: bytes, and in TFRecords numbers."""

LARGE_SIDE = 1024
MASK_CLASSES = 256


def photographs(count: int = 200, side: tuple[int, int] = (375, 500), *, seed: int = 0) -> list[bytes]:
    """Make JPEGs of about 115 KB from gradients, coarse shapes and the grain that makes photographs large."""
    import numpy as np
    from PIL import Image

    rng, found = np.random.default_rng(seed), []
    height, width = side
    y, x = np.mgrid[0:height, 0:width].astype("f4")
    for _ in range(count):
        turn, tint = rng.uniform(0, 6.28), rng.uniform(40, 215, 3)
        ramp = (np.cos(turn) * x / width + np.sin(turn) * y / height)[..., None] * rng.uniform(-90, 90, 3)
        coarse = Image.fromarray(rng.integers(0, 255, (12, 16, 3), np.uint8)).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        fine = Image.fromarray(rng.integers(0, 255, (height // 3, width // 3, 3), np.uint8)).resize((width, height))
        pixels = tint + ramp + 0.35 * (np.asarray(coarse, "f4") - 128) + 0.2 * (np.asarray(fine, "f4") - 128)
        pixels += rng.normal(0, 12, (height, width, 1))
        found.append(_encoded(pixels, "JPEG", quality=93))
    return found


def thumbnails(count: int = 2000, *, seed: int = 0) -> list[bytes]:
    """Make 32 x 32 PNGs of about 3 KB, like those of CIFAR."""
    return [_encoded(pixels, "PNG") for pixels in _shapes(count, (32, 32), seed)]


def digits(count: int = 2000, *, seed: int = 0) -> list[bytes]:
    """Make 28 x 28 grey PNGs of some hundred bytes, like those of MNIST."""
    return [_encoded((pixels[..., 0] - 160) * 3, "PNG") for pixels in _shapes(count, (28, 28), seed)]


def _shapes(count: int, side: tuple[int, int], seed: int) -> Iterable[Any]:
    """Make pixels of coarse shapes with some grain, float32[height, width, 3]."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(seed)
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).resize(side, Image.Resampling.BICUBIC)
        yield np.asarray(coarse, "f4") + rng.normal(0, 12, (*side, 3))


def _encoded(pixels: Any, format_name: str, **options: Any) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype("u1")).save(file, format_name, **options)
    return file.getvalue()


def _photographs(count: int, seed: int) -> list[Fields]:
    return [{"jpg": data, "cls": b"%d" % (number % 1000)} for number, data in enumerate(photographs(count, seed=seed))]


def _thumbnails(count: int, seed: int) -> list[Fields]:
    return [{"png": data, "cls": b"%d" % (number % 10)} for number, data in enumerate(thumbnails(count, seed=seed))]


def _digits(count: int, seed: int) -> list[Fields]:
    return [{"png": data, "cls": b"%d" % (number % 10)} for number, data in enumerate(digits(count, seed=seed))]


def _pixels(count: int, seed: int) -> list[Fields]:
    shapes = _shapes(count, (32, 32), seed)
    return [
        {"image": pixels.clip(0, 255).astype("u1").tobytes(), "label": number % 10}
        for number, pixels in enumerate(shapes)
    ]


def _records(count: int, seed: int) -> list[Fields]:
    return [{"image": data, "label": number % 1000} for number, data in enumerate(photographs(count, seed=seed))]


def _segments(count: int, seed: int) -> list[Fields]:
    import numpy as np
    from PIL import Image

    rng, found = np.random.default_rng(seed), []
    for pixels in _shapes(count, (LARGE_SIDE, LARGE_SIDE), seed):
        classes = Image.fromarray(rng.integers(0, MASK_CLASSES, (16, 16), np.uint8))
        mask = np.asarray(classes.resize((LARGE_SIDE, LARGE_SIDE), Image.Resampling.NEAREST))
        found.append({"image": _encoded(pixels, "PNG", compress_level=1), "label": _encoded(mask, "PNG")})
    return found


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of sample.

    Attributes:
        make: Returns the fields of so many samples that differ, by a seed.
        distinct_count: Number of samples that differ; after these, they repeat.
        sample_bytes: Approximate bytes of a sample in a shard.
        suffix: Suffix of the name of a sample that is an object.
    """

    make: Callable[[int, int], list[Fields]]
    distinct_count: int
    sample_bytes: int
    suffix: str


KINDS = {
    "photographs": Kind(_photographs, 200, 117_000, "jpg"),
    "thumbnails": Kind(_thumbnails, 2000, 4_900, "png"),
    "digits": Kind(_digits, 2000, 1_900, "png"),
    "pixels": Kind(_pixels, 2000, 3_120, "bin"),
    "records": Kind(_records, 200, 115_000, "bin"),
    "segments": Kind(_segments, 8, 3_000_000, "png"),
}


def write_tar(file: IO[bytes], samples: Iterable[tuple[str, Mapping[str, bytes]]]) -> None:
    """Write a tar of keys and fields, as tarfile and webdataset do: the fields in their order, without an index."""
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.GNU_FORMAT, bufsize=1 << 20) as archive:
        for key, fields in samples:
            for name, value in fields.items():
                member = tarfile.TarInfo(f"{key}.{name}")
                member.size = len(value)
                archive.addfile(member, io.BytesIO(value))


def write_tfrecord(file: IO[bytes], samples: Iterable[Mapping[str, Any]]) -> None:
    """Write a TFRecord shard of ``tf.train.Example``."""
    from penstock.formats import TFRecordWriter

    writer = TFRecordWriter(file.write)
    for sample in samples:
        writer.add(sample)
    writer.finish()
