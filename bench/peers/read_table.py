"""Reads all rows of a folder of Parquet files in one way, twice, and says how long the second time took: WAY FOLDER."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

BATCH = 1024
NAMES = [f"{kind}{at}" for kind in "if" for at in range(4)]


def penstock(way: str, folder: str) -> Iterator[Any]:
    import penstock as ps

    pipeline = ps.shards(f"{folder}/")
    if way == "shuffled":
        pipeline = pipeline.shuffle(65_536)
    fields = [*(ps.Integer(name) for name in NAMES[:4]), *(ps.Float(name) for name in NAMES[4:])]
    pipeline = pipeline.decode(*fields)
    if way == "rows":
        pipeline = pipeline.map(dict)
    with ps.Loader(pipeline.batch(BATCH), index="stream", rank=0, world_size=1) as loader:
        for batch in loader:
            yield [batch[name] for name in NAMES]


def pyarrow(_: str, folder: str) -> Iterator[Any]:
    from pyarrow import dataset

    for batch in dataset.dataset(folder, format="parquet").to_batches(columns=NAMES, batch_size=BATCH):
        yield [column.to_numpy() for column in batch.columns]


def datasets(way: str, folder: str) -> Iterator[Any]:
    from datasets import load_dataset

    found = load_dataset("parquet", data_files=f"{folder}/*.parquet", split="train", streaming=True)
    for batch in found.with_format(way.split()[1]).iter(batch_size=BATCH):
        yield [batch[name] if way.endswith("numpy") else batch[name].to_numpy() for name in NAMES]


def main(way: str, folder: str) -> None:
    reader = {"pyarrow.dataset": pyarrow, "datasets numpy": datasets, "datasets arrow": datasets}.get(way, penstock)
    answer: dict[str, Any] = {}
    for _ in range(2):  # the first time warms up
        start_s, cpu_s, rows, total = time.perf_counter(), time.process_time(), 0, 0.0
        for columns in reader(way, folder):
            rows += len(columns[0])
            total += sum(float(column.sum()) for column in columns)
        answer = {"rows": rows, "total": total, "seconds": time.perf_counter() - start_s}
        answer["cpu_s"] = time.process_time() - cpu_s
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
