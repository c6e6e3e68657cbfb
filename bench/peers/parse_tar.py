"""Parses a tar from memory with one library: ``parse_tar.py <penstock|penstock_columns|tarfile|webdataset> <file> <seconds>``.

Prints {"seconds", "cpu_s", "samples", "bytes"}. Each library makes samples of named fields, as its users get them;
`tarfile`, which knows no samples, only gives each member's name and bytes.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path


def parse_penstock(data: memoryview) -> tuple[int, int]:
    from penstock.formats import TarParser

    parser = TarParser("bench.tar")
    count = total = 0
    chunk_bytes = 8 << 20  # as the store delivers a shard
    for start in range(0, len(data), chunk_bytes):
        for sample in parser.feed(data[start : start + chunk_bytes]):
            count += 1
            for value in sample.fields.values():
                total += len(value)
    for sample in parser.finish():
        count += 1
        total += sum(map(len, sample.fields.values()))
    return count, total


def parse_penstock_columns(data: memoryview) -> tuple[int, int]:
    """As a loader reads what nobody decodes: values copied out, in columns."""
    from penstock.formats import TarParser, as_columns, feed_in_columns

    parser = TarParser("bench.tar")
    count = total = 0
    chunk_bytes = 8 << 20
    for start in range(0, len(data), chunk_bytes):
        for samples in feed_in_columns(parser, data[start : start + chunk_bytes]):
            columns = as_columns(samples) if samples else None
            if columns is not None:
                count += len(columns)
                total += sum(sum(map(len, columns.array(name))) for name in columns.names)
    for sample in parser.finish():
        count += 1
        total += sum(map(len, sample.fields.values()))
    return count, total


def parse_tarfile(data: memoryview) -> tuple[int, int]:
    members = total = 0
    with tarfile.open(fileobj=io.BytesIO(data), mode="r|") as archive:
        for member in archive:
            members += 1
            total += len(archive.extractfile(member).read())
    return members // 2, total


def parse_webdataset(data: memoryview) -> tuple[int, int]:
    from webdataset.tariterators import group_by_keys, tar_file_expander

    count = total = 0
    source = [{"url": "bench.tar", "stream": io.BytesIO(data)}]
    for sample in group_by_keys(tar_file_expander(source)):
        count += 1
        total += sum(len(value) for name, value in sample.items() if not name.startswith("__"))
    return count, total


def main() -> None:
    parse: Callable[[memoryview], tuple[int, int]] = globals()[f"parse_{sys.argv[1]}"]
    data, seconds_min = memoryview(Path(sys.argv[2]).read_bytes()), float(sys.argv[3])
    count = total = 0
    start_s, cpu_s = time.perf_counter(), time.process_time()
    while time.perf_counter() - start_s < seconds_min:
        more, size = parse(data)
        count, total = count + more, total + size
    answer = {"seconds": time.perf_counter() - start_s, "cpu_s": time.process_time() - cpu_s}
    print(json.dumps({**answer, "samples": count, "bytes": total}))


if __name__ == "__main__":
    main()
