"""How fast does TensorFlow read tars of CIFAR-like PNGs through the gateway, and how fast without it?

The tars lie in a bucket: PNGs of 32x32 pixels and labels stored as the text ``[6]``, in shards of 8 MB and of 192 MB.
TensorFlow reads them four ways in turns. "direct" is what people write: ``tarfile`` and Pillow in a py_function. "cold"
reads TFRecords with decoded pixels that the gateway makes of tars which it has not seen, "warm" reads the same once more, and
"stored" reads TFRecords from the bucket that the same transform wrote; these three share ``penstock.tensorflow.dataset`` and
``tf.io.parse_example``, and read the shards in the order in which they are named, without an index. Every sample of all four
ways is compared once; in the turns, numbers and lengths are.

"decoding alone" decodes the same PNGs from memory with OpenCV, in a process for each core but one. The other ways have all
cores, for TensorFlow, the bucket's server, and the gateway as it comes, which decodes in a process for each core.

The last part reads one TFRecord of 1 GB that the gateway makes of a tar, and watches the gateway's memory.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clients import BUCKET, HERE, Function
from epochs import Loads, Samples, bucket, keys_in
from gateway import gateway
from gateway_transforms import cv2_pixels, decoded
from harness import arguments

from penstock.bench.clients.loop import tree_cpu_s
from penstock.bench.measuring import Monitor
from penstock.bench.origin.server import Origin
from penstock.bench.samples import thumbnails
from penstock.bench.turns import Row, Run

if TYPE_CHECKING:
    from collections.abc import Iterator

RECORDS = {"image": "image", "label": "label"}
MAPPING = "image=png:pixels,label=cls:int"
PROCESSES = max(1, (os.cpu_count() or 1) - 1)
SHARDS = {"8 MB": (16, 8_000_000), "192 MB": (2, 192_000_000)}
LARGE_BYTES, LARGE_SAMPLE_BYTES = 1_000_000_000, 100_000
MEMORY_MB_MAX = 1500.0
METRICS = {
    "samples/s": lambda answer: answer["samples"] / answer["seconds"],
    "CPU us/sample": lambda answer: answer["cpu_s"] / answer["samples"] * 1e6,
    "gateway CPU us/sample": lambda answer: answer["gateway_s"] / answer["samples"] * 1e6,
}


class TensorFlowReader(Loads):
    """TensorFlow in the environment that ``make .venvs/tensorflow/.ready`` makes, with this tree's penstock."""

    @property
    def python(self) -> Path:
        return HERE.parent / ".venvs" / "tensorflow" / "bin" / "python"


def tar_bytes(image_bytes: int) -> int:
    """Size of a sample in a tar: two headers, the image and the label, each filled up to 512 bytes."""
    return 512 + -(-image_bytes // 512) * 512 + 1024


def decoding(pool: ProcessPoolExecutor, images: list[bytes], count: int) -> dict[str, Any]:
    """Decode `count` images in all processes of the pool together."""
    each = [images[at % len(images)] for at in range(count // PROCESSES)]
    began_s = time.perf_counter()
    list(pool.map(decoded, [cv2_pixels] * PROCESSES, [each] * PROCESSES))
    seconds = time.perf_counter() - began_s
    return {"samples": len(each) * PROCESSES, "seconds": seconds, "cpu_s": seconds * PROCESSES}


def write_stored(folder: Path, tars: Path) -> None:
    """Write the TFRecords that the gateway makes of tars."""
    from penstock.gateway.transforms.builtin.shards import tar_to_tfrecord

    folder.mkdir()
    for tar in sorted(tars.iterdir()):
        with (folder / f"{tar.stem}.tfrecord").open("wb") as file:
            chunks = [tar.read_bytes()]
            file.writelines(tar_to_tfrecord(chunks, source=tar.name, fields=MAPPING))


def again(tars: Path, turns: int) -> Iterator[str]:
    """Give the tars a new name for each turn, so that the gateway has not seen them, and return the prefixes."""
    for turn in range(turns):
        folder = tars.parent / f"turn{turn:02d}"
        folder.mkdir()
        for tar in tars.iterdir():
            (folder / tar.name).hardlink_to(tar)
        yield f"{folder.name}/"


def article(options: Any, about: str, pool: ProcessPoolExecutor) -> None:
    """The four ways and decoding alone, for shards of one size."""
    turns = options.turns(5, 1)
    count, size_bytes = (2, 8_000_000) if options.quick else SHARDS[about]
    images = thumbnails(500 if options.quick else 2000)
    written = Samples(images)
    with bucket() as (root, folder):
        each = size_bytes // (sum(map(tar_bytes, map(len, images))) // len(images))
        written.write_tars(folder / "tar", [each] * count, "png", label_text=b"[%d]")
        write_stored(folder / "stored", folder / "tar")
        samples = Samples([cv2_pixels(image).tobytes() for image in images], labels=written.labels)
        prefixes = list(again(folder / "tar", turns + 1))
        flags = ["--transform", f"tar2tfrecord({MAPPING})"]
        with Origin(root) as origin, gateway(origin.url, *flags) as served:
            turn = iter(prefixes)
            now = [prefixes[0]]

            def job(client: Any) -> dict[str, Any]:
                if client.name == "cold":
                    now[0] = next(turn)
                url = served.url if client.name in ("cold", "warm") else origin.url
                return {"url": url, "keys": keys_in(root, "stored/" if client.name == "stored" else now[0])}

            alone = Function("decoding alone", decoding, pool, images, len(samples) // 2)
            pixels = {"image": "png", "pixels": True}
            clients = [TensorFlowReader("direct", "tensorflow", same=pixels, way="naive")]
            clients += [
                TensorFlowReader(name, "tensorflow", same=RECORDS, way="records") for name in ("cold", "warm", "stored")
            ]
            with Run(f"gateway: TensorFlow, tars of {about}", origin, [*clients, alone], METRICS, turns) as run:

                def measure(client: Any) -> dict[str, Any]:
                    before_s = tree_cpu_s(served.pid)
                    answer = client.measure() if client is alone else client.measured(samples, job(client))
                    return {**answer, "gateway_s": tree_cpu_s(served.pid) - before_s}

                def warm(client: Any) -> None:
                    if client is alone:
                        client.measure()
                    else:
                        client.checked(samples, job(client))

                run.turns(measure, warm=warm)
                rows = [
                    Row("cold : decoding alone", run.ratios("samples/s", "cold", "decoding alone"), 0.8, 0.9),
                    Row("warm : stored TFRecords", run.ratios("samples/s", "warm", "stored"), 0.85, 0.95),
                    Row("cold : direct", run.ratios("samples/s", "cold", "direct"), 1, 3),
                ]
                run.report(rows, bucket=BUCKET, samples=len(samples), shards=count, decoding_processes=PROCESSES)


def large(options: Any) -> None:
    """One TFRecord of 1 GB, once."""
    size_bytes = LARGE_BYTES // (10 if options.quick else 1)
    image = bytes(range(256)) * (LARGE_SAMPLE_BYTES // 256)
    written = Samples([image[at:] + image[:at] for at in range(256)])
    with bucket() as (root, folder):
        written.write_tars(folder / "turn00", [-(-size_bytes // len(image))], "jpg", label_text=b"[%d]")
        flags = ["--transform", "tar2tfrecord(image=jpg,label=cls:int)"]
        with Origin(root) as origin, gateway(origin.url, *flags) as served:
            client = TensorFlowReader("cold, all bytes compared", "tensorflow", same=RECORDS, way="records")

            def measure(client: Any) -> dict[str, Any]:
                with Monitor(served.pid) as monitor:
                    client.checked(written, {"url": served.url, "keys": keys_in(root, "turn00/")})
                return {"gateway_mb": monitor.peak_pss_bytes / 1e6, "client_mb": client.pss_mb}

            metrics = {"gateway MB": lambda a: a["gateway_mb"], "TensorFlow MB": lambda a: a["client_mb"]}
            with Run(
                f"gateway: TensorFlow, a TFRecord of {size_bytes / 1e9:g} GB", origin, [client], metrics, 1
            ) as run:
                run.turns(measure)
                memory = run.values(client.name, "gateway MB")
                run.report([Row("the gateway's memory, MB", memory, MEMORY_MB_MAX, MEMORY_MB_MAX / 2, less=True)])


def main() -> None:
    parts = {"8": "tars of 8 MB", "192": "tars of 192 MB", "large": "a TFRecord of 1 GB"}
    options = arguments(__doc__ or "", part={"choices": parts, "help": "only this part"})
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        for about in SHARDS:
            if options.part in (None, about.split()[0]):
                article(options, about, pool)
    if options.part in (None, "large"):
        large(options)


if __name__ == "__main__":
    main()
