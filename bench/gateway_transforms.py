"""How fast does one core turn tars into TFRecords: 100 KB and 3 KB samples as bytes, and CIFAR-like PNGs as pixels?

"by hand" is the loop that people write: ``tarfile``, an Example assembled field by field, and two checksums for each
record. "decode alone" decodes the same PNGs and does nothing else, by the fastest decoder that is installed.
"""

from __future__ import annotations

import io
import struct
import tarfile
import time
from typing import TYPE_CHECKING, Any

from clients import Function
from crc32c import crc32c
from harness import arguments

from penstock.bench.process import BenchError
from penstock.bench.samples import thumbnails
from penstock.bench.turns import Row, Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

METRICS = {
    "GB/s": lambda answer: answer["bytes"] / answer["cpu_s"] / 1e9,
    "us/sample": lambda answer: answer["cpu_s"] / answer["samples"] * 1e6,
}
CHUNK_BYTES = 8 << 20
"""As the worker's reader delivers a source."""

MAPPING = "image=png:pixels,label=cls:int"


def shard(images: list[bytes], suffix: str) -> bytes:
    """A WebDataset shard of images with labels such as ``[6]``, in GNU format."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for index, image in enumerate(images):
            for name, value in ((suffix, image), ("cls", b"[%d]" % (index % 10))):
                member = tarfile.TarInfo(f"{index:08d}.{name}")
                member.size = len(value)
                archive.addfile(member, io.BytesIO(value))
    return file.getvalue()


def penstock(data: bytes, fields: str) -> int:
    from penstock.gateway.transforms.builtin.shards import tar_to_tfrecord

    view = memoryview(data)
    chunks = [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)]
    return sum(map(len, tar_to_tfrecord(chunks, source="bench.tar", fields=fields)))


def by_hand(data: bytes, fields: str) -> int:
    return sum(map(len, records_by_hand(data, decodes=bool(fields))))


def records_by_hand(data: bytes, *, decodes: bool) -> Iterator[bytes]:
    sample: dict[str, bytes] = {}
    last = ""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r|") as archive:
        for member in archive:
            key, _, name = member.name.partition(".")
            if sample and key != last:
                yield record_by_hand(sample, decodes=decodes)
                sample = {}
            last, sample[name] = key, archive.extractfile(member).read()  # type: ignore[union-attr]
    yield record_by_hand(sample, decodes=decodes)


def record_by_hand(sample: dict[str, bytes], *, decodes: bool) -> bytes:
    if decodes:
        pixels = cv2_pixels(sample["png"])
        height, width, channels = pixels.shape
        numbers = {"image/height": height, "image/width": width, "image/channels": channels}
        numbers["label"] = int(sample["cls"].strip(b"[]"))
        features = {name: delimited(3, delimited(1, varint(value))) for name, value in numbers.items()}
        features["image"] = delimited(1, delimited(1, pixels.tobytes()))
    else:
        features = {name: delimited(1, delimited(1, value)) for name, value in sample.items()}
    entries = (delimited(1, delimited(1, name.encode()) + delimited(2, features[name])) for name in sorted(features))
    example = delimited(1, b"".join(entries))
    length = struct.pack("<Q", len(example))
    return length + masked(length) + example + masked(example)


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def delimited(number: int, data: bytes) -> bytes:
    return bytes((number << 3 | 2,)) + varint(len(data)) + data


def masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def cv2_pixels(data: bytes) -> Any:
    import cv2
    import numpy as np

    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)


def pillow_pixels(data: bytes) -> Any:
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)))


def decoded(decode: Callable[[bytes], Any], images: list[bytes]) -> None:
    for image in images:
        decode(image)


def timed(function: Callable[..., Any], *args: Any, samples: int, size_bytes: int, seconds: float) -> dict[str, Any]:
    """Call `function` until the time is over."""
    began_s, times = time.process_time(), 0
    while not times or time.process_time() - began_s < seconds:
        function(*args)
        times += 1
    return {"cpu_s": time.process_time() - began_s, "samples": samples * times, "bytes": size_bytes * times}


def clients(options: Any) -> list[Function]:
    """One client for each library and case."""
    seconds = 0.3 if options.quick else 1.0
    small = thumbnails(500 if options.quick else 2000)
    large = [bytes(range(256)) * 400 + index.to_bytes(4, "little") for index in range(200 if options.quick else 1000)]
    cases = {"100 KB": (shard(large, "jpg"), len(large), ""), "3 KB": (shard(small, "png"), len(small), "")}
    cases["pixels"] = (cases["3 KB"][0], len(small), MAPPING)
    found = []
    for case, (data, count, fields) in cases.items():
        if penstock(data, fields) != by_hand(data, fields):
            raise BenchError(f"{case}: the two outputs differ in length")
        for name, function in (("penstock", penstock), ("by hand", by_hand)):
            about = {"samples": count, "size_bytes": len(data), "seconds": seconds}
            found.append(Function(f"{name}, {case}", lambda f=function, d=data, m=fields, a=about: timed(f, d, m, **a)))
    size_bytes = len(cases["3 KB"][0])
    for name, decode in (("cv2", cv2_pixels), ("Pillow", pillow_pixels)):
        about = {"samples": len(small), "size_bytes": size_bytes, "seconds": seconds}
        found.append(Function(f"decode alone, {name}", lambda d=decode, a=about: timed(decoded, d, small, **a)))
    return found


def main(options: Any) -> None:
    run = Run(
        "tar to TFRecord on one core, from memory", None, options.select(clients(options)), METRICS, options.turns(7, 2)
    )
    with run:
        run.turns(lambda client: client.measure())

    def speed(name: str, base: str) -> list[float]:
        return run.ratios("us/sample", base, name) if {name, base} <= set(run.answers) else []

    decoders = [name for name in run.answers if name.startswith("decode alone")]
    best = run.best("us/sample", *decoders, less=True) if decoders else ""
    rate = run.values("penstock, 100 KB", "GB/s") if "penstock, 100 KB" in run.answers else []
    run.report(
        [
            Row("100 KB, GB/s", rate, 1, 3),
            Row("100 KB, speed : by hand", speed("penstock, 100 KB", "by hand, 100 KB"), 2, 5),
            Row("3 KB, speed : by hand", speed("penstock, 3 KB", "by hand, 3 KB"), 5, 15),
            Row("pixels, speed : decoding alone", speed("penstock, pixels", best), 0.8, 0.9),
            Row("pixels, speed : by hand", speed("penstock, pixels", "by hand, pixels"), 1.5, 2),
        ]
    )


if __name__ == "__main__":
    main(arguments(__doc__))
