"""The pages for people who come from other libraries: our side of each runs, against a real S3 server."""

from __future__ import annotations

import io
import json
import os
import re
import struct
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

import penstock as ps
import warm
from pages import ROOT, programs_of, write_pictures, write_records

PAGES = sorted((ROOT / "docs/coming-from").glob("[!R]*.md"))
PEERS = {
    "webdataset": "wds.WebDataset", "mosaicml": "StreamingDataset(", "litdata": "ld.StreamingRawDataset",
    "s3-connector": "S3MapDataset", "tf-data": "tf.data.TFRecordDataset", "torchdata-pipes": "S3FileLoader",
    "imagefolder": "ImageFolder(", "boto3": "boto3.client", "s3-plugin": "awsio", "minio": "Minio(",
}  # fmt: skip


def mds(count: int) -> bytes:
    """A shard as MosaicML writes it: a column of text, one of numbers."""
    columns = {"column_names": ["label", "text"], "column_encodings": ["int", "str"], "column_sizes": [8, None]}
    head = json.dumps(columns).encode()
    samples = [
        struct.pack("<Iq", len(text), number % 10) + text
        for number, text in ((number, f"text {number}".encode()) for number in range(count))
    ]
    offsets = [8 + 4 * count + len(head)]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample))
    return struct.pack(f"<{count + 2}I", count, *offsets) + head + b"".join(samples)


@pytest.fixture(scope="module")
def environment(ministack: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a user whose ``my-bucket`` holds the same kind of data in the formats that the pages name."""
    ministack.create_bucket("my-bucket")
    keys = ps.Credentials(access_key=ministack.access_key, secret_key=ministack.secret_key)
    folder, records = tmp_path_factory.mktemp("train"), tmp_path_factory.mktemp("records")
    write_records(records, samples=10)
    write_pictures(folder, samples=40, shards=4, kind="jpg")
    with ps.connect("s3://my-bucket/", endpoint_url=ministack.endpoint_url, credentials=keys) as store:
        for number, path in enumerate(sorted(folder.iterdir())):
            store.write(f"train/train-{number:06d}.tar", path.read_bytes())
            store.write(f"mds/shard.{number:05d}.mds", mds(10))
            store.write(f"records/part-{number:05d}.tfrecord", (records / "part-000.tfrecord").read_bytes())
        store.write("mds/index.json", b"{}")
        for number in range(20):
            file = io.BytesIO()
            PIL.Image.new("RGB", (40, 30), (number, 0, 0)).save(file, "JPEG")
            store.write(f"images/{('cat', 'dog')[number % 2]}/{number:04d}.jpg", file.getvalue())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **ministack.environment, "PATH": path}


@pytest.mark.server
@pytest.mark.torch
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_our_side_of_a_page_runs(page: Path, environment: dict[str, str], tmp_path: Path) -> None:
    """What stands for penstock on the page runs as it is, with warnings as errors but for fork's."""
    pytest.importorskip("torch")
    installed = tuple(name for name in ("h5py", "albumentations") if find_spec(name))
    warns = ["error", "ignore::DeprecationWarning"]
    for program in programs_of(page, *installed):
        done = warm.run(program, environment=environment, folder=tmp_path, warns=warns)
        assert done.returncode == 0, f"{program}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_shows_both_sides(page: Path) -> None:
    """Theirs comes first, ours after it, and the index of pages leads there."""
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    assert PEERS[page.stem] in blocks[0]
    assert "import penstock as ps" not in blocks[0]
    assert "import penstock as ps" in "".join(blocks[1:])
    assert f"({page.name})" in (page.parent / "README.md").read_text()


def test_every_peer_has_a_page() -> None:
    """Nobody is left out, and no page is without a test."""
    assert {page.stem for page in PAGES} == set(PEERS)


@pytest.mark.server
@pytest.mark.torch
def test_the_hdf5_example_reads_each_row_once(environment: dict[str, str], tmp_path: Path) -> None:
    """Two workers read an HDF5 file in the bucket through penstock.open, in random order, each row once."""
    pytest.importorskip("torch")
    pytest.importorskip("h5py")
    done = warm.run(ROOT / "examples/hdf5.py", "s3://my-bucket/points.h5", environment=environment, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "4096 rows, each once: True\n"
