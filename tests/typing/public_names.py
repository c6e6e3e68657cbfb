"""What a type checker says of programs that use penstock; mypy reads this file with ``make lint``, nothing runs it.

A line that must be refused carries a ``type: ignore`` with the reason; mypy's ``warn_unused_ignores`` complains as soon as
it is accepted.
"""

from __future__ import annotations

from typing import assert_type

import penstock as ps
from penstock.pack import Packed, SequenceWriter, verify

pipeline: ps.Pipeline = ps.shards("s3://bucket/train/").shuffle(window=1024, seed=0).batch(32)
assert_type(ps.pack("images/", "s3://bucket/train/"), Packed)
verify("s3://bucket/train/")
ps.pack.verify("s3://bucket/train/")
with ps.pack.writer("s3://bucket/train/") as written:
    assert_type(written, SequenceWriter)
options = ps.pack.PackOptions(format="tfrecord")

with ps.Loader(pipeline) as loader:
    statistics: ps.LoaderStatistics = loader.statistics()
    for batch in loader:
        print(batch)
with pipeline.open() as dataset:
    samples: ps.Dataset = dataset
    print(len(samples))
with ps.connect("s3://bucket") as store:
    assert_type(store.read("key"), ps.Blob)
try:
    ps.open("s3://bucket/key")
except ps.ObjectMissingError as error:
    print(error.url, error.hint)

ps.shardz("s3://bucket/train/")  # type: ignore[attr-defined]
ps.pack.verfy("s3://bucket/train/")  # type: ignore[attr-defined]
ps.pack("images/", "s3://bucket/train/", shard_bytes="100 MB")  # type: ignore[call-arg]
ps.Loader(pipeline, process=2)  # type: ignore[call-arg]
ps.connect("s3://bucket").read(1)  # type: ignore[arg-type]
