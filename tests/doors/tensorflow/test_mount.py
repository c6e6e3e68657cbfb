"""TensorFlow's own reader on a mounted bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tensorflow as tf

import penstock as ps
from connecting import connection_to
from mounting import needs_fuse
from penstock.testing.ministack import Ministack

pytestmark = [
    pytest.mark.timeout(100, method="thread"),
    needs_fuse,
]

SHARDS = 8
RECORDS = 300


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of TFRecords in two directories."""
    folder = tmp_path_factory.mktemp("local")
    for shard in range(SHARDS):
        path = folder / "train" / f"part-{shard % 2}" / f"{shard:03d}.tfrecord"
        path.parent.mkdir(parents=True, exist_ok=True)
        with tf.io.TFRecordWriter(str(path)) as writer:
            for number in range(RECORDS):
                writer.write(b"%d-%d " % (shard, number) * (1 + number % 50))
    return folder


@pytest.fixture(scope="module")
def mounted(local: Path, ministack: Ministack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The same shards in a bucket that is mounted."""
    bucket = ministack.create_bucket()
    client = ministack.client()
    for path in local.rglob("*.tfrecord"):
        client.put_object(Bucket=bucket, Key=str(path.relative_to(local)), Body=path.read_bytes())
    client.close()
    directory = tmp_path_factory.mktemp("mounted")
    with ps.mount(f"s3://{bucket}/", directory, **connection_to(ministack)) as mount:
        yield directory
        mount.check()


def records(data: tf.data.Dataset) -> list[bytes]:
    return [record.numpy() for record in data]


@pytest.mark.parametrize("pattern", ["train/*/*", "train/part-?/00[1-5].tfrecord", "train/part-1/*.tfrecord"])
def test_list_files_finds_the_same(mounted: Path, local: Path, pattern: str) -> None:
    """``list_files`` matches patterns of files and directories on the mount as on local files."""
    found = [
        [
            name.numpy().decode().removeprefix(str(root))
            for name in tf.data.Dataset.list_files(f"{root}/{pattern}", shuffle=False)
        ]
        for root in (mounted, local)
    ]
    assert len(found[0]) >= SHARDS // 2
    assert found[0] == found[1]


@pytest.mark.parametrize("buffer_bytes", [0, 100, 256 << 10, 8 << 20])
def test_tfrecord_dataset_reads_the_same(mounted: Path, local: Path, buffer_bytes: int) -> None:
    """``TFRecordDataset`` of the files of ``list_files`` gives every record in order, whatever its buffer."""
    ours, theirs = (
        tf.data.TFRecordDataset(
            tf.data.Dataset.list_files(f"{root}/train/*/*", shuffle=False), buffer_size=buffer_bytes
        )
        for root in (mounted, local)
    )
    expected = records(theirs)
    assert len(expected) == SHARDS * RECORDS
    assert records(ours) == expected


def test_interleaved_and_shuffled(mounted: Path, local: Path) -> None:
    """A training job's pipeline, with shuffled files that are read in parallel, gives every record once in each epoch."""
    files = tf.data.Dataset.list_files(f"{mounted}/train/*/*", shuffle=True, seed=1)
    data = (
        files.interleave(tf.data.TFRecordDataset, cycle_length=4, num_parallel_calls=4).shuffle(100, seed=1).prefetch(2)
    )
    expected = sorted(records(tf.data.TFRecordDataset(sorted(map(str, local.rglob("*.tfrecord"))))))
    for _ in range(2):
        assert sorted(records(data)) == expected
