"""The runnable examples of pages that need a framework: blocks after ``<!-- runs -->`` and ``<!-- runs: NAME -->``."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import PIL.Image

from loading import shard
from penstock.formats import TFRecordWriter

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^<!-- runs(?:: (\w+))? -->\n+```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def code_of(page: str, framework: str) -> str:
    """All Python of a page that runs where `framework` is installed, as one program."""
    blocks = _BLOCK.findall((ROOT / page).read_text())
    assert any(name == framework for name, _ in blocks), f"{page} has no block that needs {framework}"
    return "\n".join(body for name, body in blocks if name in ("", framework))


def programs_of(page: Path, *installed: str) -> list[str]:
    """The page's runnable Python as programs: blocks that begin with imports of their own begin another one."""
    programs: list[str] = []
    for name, body in _BLOCK.findall(page.read_text()):
        if name and name not in installed:
            continue
        if programs and "import penstock as ps\n" not in body:
            programs[-1] += body
        else:
            programs.append(body)
    return programs


def run_page(page: str, framework: str, folder: Path) -> None:
    """Run a page's Python in a process of its own, on shards of pictures and of records below `folder`."""
    write_pictures(folder / "train", samples=64, shards=4, size=(30, 40), kind="jpg")
    write_records(folder / "records", samples=40)
    (folder / "run").mkdir()
    code = code_of(page, framework)
    for url, name in (
        ("s3://bucket/train/", "train"),
        ("s3://my-bucket/records/", "records"),
        ("s3://bucket/run/", "run"),
    ):
        code = code.replace(url, f"{folder}/{name}/")
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def write_records(folder: Path, *, samples: int) -> None:
    """A TFRecord shard of ``tf.train.Example``: ``x``, three floats, and ``label``."""
    folder.mkdir(parents=True, exist_ok=True)
    out = bytearray()
    writer = TFRecordWriter(out.extend)
    for number in range(samples):
        writer.add({"x": [float(number), 0.5, -1.0], "label": number})
    writer.finish()
    (folder / "part-000.tfrecord").write_bytes(out)


def write_pictures(
    folder: Path, *, samples: int, shards: int, size: tuple[int, int] = (8, 8), kind: str = "png"
) -> None:
    """Shards of pictures whose bright column is their class: ``NAME.png`` (grey) or ``NAME.jpg`` (colour), and ``NAME.cls``."""
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(shards):
        members = []
        for number in range(index, samples, shards):
            pixels = np.zeros((*size, 3) if kind == "jpg" else size, np.uint8)
            pixels[:, number % 8] = 255
            file = io.BytesIO()
            PIL.Image.fromarray(pixels).save(file, "JPEG" if kind == "jpg" else "PNG")
            members.append({"__key__": f"{number:06d}", kind: file.getvalue(), "cls": str(number % 8)})
        (folder / f"s-{index:03d}.tar").write_bytes(shard(members))
