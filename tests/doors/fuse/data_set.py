"""A folder of the kinds of files that training jobs read, and its upload."""

from __future__ import annotations

import io
import random
import subprocess
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import save_file

FIO_BYTES = 24 << 20
FIO_BLOCK_BYTES = 4 << 10
CLASSES = ("ant", "bee", "cat")
PICTURES = 40
SHARDS = 3
SHARD_SAMPLES = 50
PARQUET_ROWS = 60_000


class Folders(NamedTuple):
    """The same files in two places.

    Attributes:
        mounted: The mount of the bucket.
        local: The files from which the bucket was filled.
    """

    mounted: Path
    local: Path


def write_data_set(folder: Path) -> None:
    """Write all files below `folder`; the same bytes each time."""
    for name in ("text", "images", "shards", "arrays", "parquet", "fio"):
        (folder / name).mkdir()
    _write_text(folder / "text")
    _write_images(folder / "images")
    for shard in range(SHARDS):
        _write_shard(folder / "shards" / f"{shard:03d}.tar", shard)
    _write_arrays(folder / "arrays")
    _write_parquet(folder / "parquet")
    _write_fio(folder / "fio" / "verified")


def _write_text(folder: Path) -> None:
    draw = random.Random(1)
    words = ["loss", "step", "epoch", "needle", "läuft", "batch", "\t", "\n"]
    for number in range(200):
        below = folder / f"{number % 7}" / f"{number % 3}"
        below.mkdir(parents=True, exist_ok=True)
        length = draw.choice((0, 1, 5, 300, 4096, 20_000))
        text = " ".join(draw.choices(words, k=length))
        (below / f"{number:03d} {draw.choice(words[:6])}.txt").write_text(text, encoding="utf-8")


def _write_images(folder: Path) -> None:
    draw = np.random.default_rng(2)
    for label in CLASSES:
        (folder / label).mkdir()
        for number in range(PICTURES):
            pixels = draw.integers(0, 255, (32, 48, 3), dtype=np.uint8)
            kind = ("png", "jpg")[number % 2]
            Image.fromarray(pixels).save(folder / label / f"{number:03d}.{kind}")


def _write_shard(path: Path, shard: int) -> None:
    draw = random.Random(shard)
    with tarfile.open(path, "w") as tar:
        for number in range(SHARD_SAMPLES):
            for name, data in (("bin", draw.randbytes(draw.randrange(40_000))), ("cls", b"%d" % (number % 10))):
                member = tarfile.TarInfo(f"{shard:03d}{number:05d}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def _write_arrays(folder: Path) -> None:
    draw = np.random.default_rng(3)
    np.save(folder / "matrix.npy", draw.standard_normal((3000, 500)))
    with h5py.File(folder / "data.h5", "w") as file:
        file.create_dataset("x", data=draw.integers(0, 99, (2000, 64, 8)), chunks=(50, 64, 8), compression="gzip")
        file.create_dataset("y", data=draw.standard_normal(200_000))
        file["x"].attrs["unit"] = "pixel"
    weights = {f"layer{number}": torch.from_numpy(draw.standard_normal((300, 400))) for number in range(6)}
    torch.save(weights, folder / "weights.pt")
    save_file(weights, folder / "weights.safetensors")


def _write_parquet(folder: Path) -> None:
    draw = np.random.default_rng(4)
    for year in (2024, 2025):
        (folder / f"year={year}").mkdir()
        table = pa.table(
            {
                "id": np.arange(PARQUET_ROWS),
                "label": draw.integers(0, 10, PARQUET_ROWS),
                "score": draw.standard_normal(PARQUET_ROWS),
            }
        )
        pq.write_table(table, folder / f"year={year}" / "part.parquet", row_group_size=5000)


def _write_fio(path: Path) -> None:
    """Write a file whose every block carries its offset and checksum, which fio verifies when it reads."""
    subprocess.run(
        [
            *("fio", "--name=layout", f"--filename={path}", f"--size={FIO_BYTES}", f"--bs={FIO_BLOCK_BYTES}"),
            *("--rw=write", "--ioengine=psync", "--verify=crc32c", "--do_verify=0", "--verify_pattern=%o"),
        ],
        check=True,
        capture_output=True,
        timeout=60,
        cwd=path.parent.parent.parent,
    )


def upload(folder: Path, client: Any, bucket: str) -> None:
    """Write all files of `folder` to `bucket`, with their paths as keys."""

    def put(path: Path) -> None:
        client.put_object(Bucket=bucket, Key=str(path.relative_to(folder)), Body=path.read_bytes())

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(put, (path for path in folder.rglob("*") if path.is_file())))
