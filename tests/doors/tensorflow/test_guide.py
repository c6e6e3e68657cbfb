from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pages import code_of, write_pictures
from penstock.formats import TFRecordWriter

PAGES = ["docs/guides/tensorflow.md", "docs/coming-from/tf-data.md"]


def write_records(folder: Path) -> None:
    """A TFRecord shard as our own writer makes it."""
    folder.mkdir()
    out = bytearray()
    writer = TFRecordWriter(out.extend)
    for number in range(40):
        writer.add({"x": [float(number), 0.5, -1.0], "label": number})
    writer.finish()
    (folder / "part-000.tfrecord").write_bytes(out)


@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs(tmp_path: Path, page: str) -> None:
    """What the page shows as runnable runs, in order, on shards of pictures."""
    write_pictures(tmp_path / "train", samples=64, shards=4, size=(30, 40), kind="jpg")
    write_records(tmp_path / "records")
    code = code_of(page, "tensorflow").replace("s3://bucket/train/", f"{tmp_path}/train/")
    code = code.replace("s3://my-bucket/records/", f"{tmp_path}/records/")
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
