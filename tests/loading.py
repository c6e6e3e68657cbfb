"""Small data sets for tests of the loader and its doors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.formats import TarWriter


def shard(samples: Iterable[Mapping[str, Any]]) -> bytes:
    """A tar shard as our own writer makes it."""
    out = bytearray()
    tar = TarWriter(out.extend)
    for sample in samples:
        tar.add(sample)
    tar.finish()
    return bytes(out)


def counted(numbers: Iterable[int]) -> list[dict[str, str]]:
    """Samples that hold their number twice: as a class and as text."""
    return [{"__key__": f"s{number:05d}", "cls": str(number), "txt": f"sample {number}"} for number in numbers]


def write_counted(folder: Path, sizes: Iterable[int]) -> int:
    """Shards ``s-000.tar``, ... of the given sizes, their samples numbered through; returns how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    for index, size in enumerate(sizes):
        (folder / f"s-{index:03d}.tar").write_bytes(shard(counted(range(total, total + size))))
        total += size
    return total


def numbers(batches: Iterable[Mapping[str, Any]]) -> list[int]:
    """The samples' numbers, in the order in which they came."""
    return [int(number) for batch in batches for number in batch["cls"]]


def pipeline(folder: Path, *, window: int | None = 64, seed: int = 0, batch: int = 8, drop_last: bool = False) -> Any:
    """The usual pipeline over counted samples; `window` None: not shuffled."""
    made = ps.shards(f"{folder}/")
    if window is not None:
        made = made.shuffle(window=window, seed=seed)
    return made.decode(ps.Integer("cls"), ps.Text("txt")).batch(batch, drop_last=drop_last)


def index(made: Any, folder: Path) -> Path:
    """Build the index of a pipeline's shards in `folder`, and give it back, for ``Loader(index_dir=)``."""
    from penstock.index import build, in_directory
    from penstock.loader.shards import ShardFinder

    for leaf in made.flat().leaves:
        finder = ShardFinder(leaf.source, fetch=None)
        shards = finder.find()
        assert not build(shards, in_directory(shards, folder)).failed
        finder.close()
    return folder


FORMATS_WRITTEN = ("tar", "tar.gz", "tfrecord", "tfrecord.gz", "jsonl", "jsonl.gz", "recordio")


def write_formatted(folder: Path, format_name: str, sizes: Iterable[int]) -> int:
    """Shards of any streamed format, whose samples are numbered through in the field ``n`` (``record`` in RecordIO)."""
    import gzip

    from penstock.formats import JsonLinesWriter, RecordIOWriter, TFRecordWriter

    writers: dict[str, Any] = {
        "tar": TarWriter,
        "tfrecord": TFRecordWriter,
        "jsonl": JsonLinesWriter,
        "recordio": RecordIOWriter,
    }
    inner, _, compression = format_name.partition(".")
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    for index, size in enumerate(sizes):
        out = bytearray()
        writer = writers[inner](out.extend)
        for number in range(total, total + size):
            if inner == "jsonl":
                writer.add({"n": number})
            elif inner == "recordio":
                writer.add({"record": str(number).encode()})
            else:
                writer.add({"__key__": f"s{number:05d}", "n": str(number).encode()})
        writer.finish()
        data = gzip.compress(bytes(out), mtime=0) if compression else bytes(out)
        (folder / f"s-{index:03d}.{format_name}").write_bytes(data)
        total += size
    return total


def number_of(sample: Mapping[str, Any]) -> dict[str, int]:
    """The number of a sample of ``write_formatted``, for ``map``."""
    import json

    if "json" in sample:
        return {"cls": json.loads(sample["json"])["n"]}
    return {"cls": int(bytes(sample.get("n", sample.get("record"))))}
