"""``tf.data.TFRecordDataset("s3://bucket/key")`` reads transformed objects through the gateway, by tensorflow-io.

tensorflow-io 0.37.1, the last one, loads with the TensorFlow for which it was built: 2.16, with NumPy 1, on Python 3.9 to 3.12.
Beside a later TensorFlow it installs, but does not load (undefined symbol). ``S3_ENDPOINT`` must begin with ``http://``: for
``127.0.0.1:9000`` its file system uses TLS, whatever ``S3_USE_HTTPS`` says. ``penstock.tensorflow`` needs none of this.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from gateways import RunningGateway
from penstock.gateway.transforms.builtin.shards import tar_to_tfrecord

BUCKET = "training"
SHARDS = {"large.tar": (40, 500_000), "small.tar": (5, 1_000)}
"""Samples and their sizes; the larger object takes several of the file system's reads."""


def tar_of(count: int, size_bytes: int) -> bytes:
    """Return a WebDataset tar."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number in range(count):
            image = bytes((number * 7 + at) % 251 for at in range(251)) * (size_bytes // 251)
            for name, data in (("jpg", image), ("cls", b"[%d]" % number)):
                member = tarfile.TarInfo(f"{number:06d}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def records_of(stream: bytes) -> list[str]:
    """Return the digests of the records in a TFRecord file."""
    found, at = [], 0
    while at < len(stream):
        end = at + 12 + int.from_bytes(stream[at : at + 8], "little")
        found.append(hashlib.sha256(stream[at + 12 : end]).hexdigest())
        at = end + 4
    return found


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """Return a directory with the tars."""
    folder = tmp_path / BUCKET
    folder.mkdir()
    for name, shape in SHARDS.items():
        (folder / name).write_bytes(tar_of(*shape))
    return folder


@pytest.fixture
def gateway(tmp_path: Path, upstream: Path) -> Any:
    """Return a gateway that makes TFRecords of the tars."""
    running = RunningGateway(tmp_path, "--upstream", str(upstream), "--name", BUCKET, "--transform", "tar2tfrecord")
    yield running
    running.close()


def test_the_file_system_reads_transformed_objects(gateway: RunningGateway, upstream: Path) -> None:
    """Listing, sizes, records and ranges are those of the TFRecords, and each tar is transformed once."""
    settings = {"S3_ENDPOINT": gateway.url, "TF_CPP_MIN_LOG_LEVEL": "3"}
    program = Path(__file__).parent / "reading.py"
    done = subprocess.run(
        [sys.executable, str(program), BUCKET], env=gateway.environment | settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert list(found) == sorted(SHARDS)
    for name, read in found.items():
        wanted = b"".join(map(bytes, tar_to_tfrecord([(upstream / name).read_bytes()], source=name)))
        assert len(read["records"]) == SHARDS[name][0]
        assert read["records"] == records_of(wanted)
        assert (read["size_bytes"], read["half"]) == (len(wanted), True)
        assert read["sha256"] == hashlib.sha256(wanted).hexdigest()
    assert gateway.transforms_count() == len(SHARDS)
