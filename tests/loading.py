"""Small data sets for tests of the loader and its doors."""

from __future__ import annotations

import gzip
import importlib
import io
import itertools
import json
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.formats import JsonLinesWriter, RecordIOWriter, TarWriter, TFRecordWriter


def shard(samples: Iterable[Mapping[str, Any]], writer_type: Any = TarWriter) -> bytes:
    """A shard as our own writer makes it."""
    out = bytearray()
    writer = writer_type(out.extend)
    for sample in samples:
        writer.add(sample)
    writer.finish()
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
    from penstock.sources.shards import ShardFinder

    for leaf in made.flat().leaves:
        finder = ShardFinder(leaf.source, fetch=None)
        shards = finder.find()
        assert not build(shards, in_directory(shards, folder)).failed
        finder.close()
    return folder


def index_beside(folder: Path) -> None:
    """Build the index of a folder's shards beside them: every loader goes by it."""
    from penstock.index import beside, build
    from penstock.sources.shards import ShardFinder

    finder = ShardFinder(ps.shards(f"{folder}/").source, fetch=None)  # type: ignore[arg-type]
    shards = finder.find()
    assert not build(shards, beside(shards)).failed
    finder.close()


def forget_content(made: Any, folder: Path) -> None:
    """Have an index say of the formats what it said before it knew what records hold."""
    from penstock.formats import without_content
    from penstock.index import IndexBuilder, ShardIndex, in_directory
    from penstock.sources.shards import ShardFinder

    finder = ShardFinder(made.flat().leaves[0].source, fetch=None)
    with IndexBuilder(in_directory(finder.find(), folder)) as builder:
        for row in list(builder.index.rows.values()):
            known = builder.place.load_shard(row)
            plain = row._replace(format=without_content(row.format))
            builder.add(ShardIndex(plain, offsets=known.offsets, crc32c=known.crc32c, keys=known.keys))
    finder.close()


FORMATS_WRITTEN = (
    "tar", "tar.gz", "tar.zst", "tfrecord", "tfrecord.gz", "jsonl", "jsonl.gz", "jsonl.zst", "recordio", "mds", "mds.zst",
    "zip", "parquet",
)  # fmt: skip


def write_formatted(folder: Path, format_name: str, sizes: Iterable[int]) -> int:
    """Shards of any format, whose samples are numbered through in the field ``n`` (``record`` in RecordIO)."""
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    for index, size in enumerate(sizes):
        samples = [{"__key__": f"s{number:05d}", "n": str(number).encode()} for number in range(total, total + size)]
        (folder / f"s-{index:03d}.{format_name}").write_bytes(formatted(format_name, samples))
        total += size
    return total


def formatted(format_name: str, samples: list[dict[str, Any]], *, rows_per_group: int = 4) -> bytes:
    """A shard of any format with these samples: `n`, and whatever other fields the format takes; all have the same."""
    inner, _, compression = format_name.partition(".")
    data = _WRITTEN[inner](samples, rows_per_group)
    if compression == "gz":
        return gzip.compress(data, mtime=0)
    if compression:
        return bytes(importlib.import_module("zstandard").compress(data))
    return data


def _by_writer(writer_of: Any, as_written: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., bytes]:
    def written(samples: list[dict[str, Any]], _: int) -> bytes:
        return shard(map(as_written, samples), writer_of)

    return written


def _zip(samples: list[dict[str, Any]], _: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        for number, sample in enumerate(samples):
            for name, value in sample.items():
                if name != "__key__":
                    method = zipfile.ZIP_DEFLATED if number % 2 else zipfile.ZIP_STORED
                    target.writestr(f"{sample['__key__']}.{name}", value, method)
    return out.getvalue()


def _parquet(samples: list[dict[str, Any]], rows_per_group: int) -> bytes:
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    names = list(samples[0]) if samples else ["__key__", "n"]
    types = {"__key__": arrow.string()}
    columns = {name: arrow.array([each[name] for each in samples], types.get(name, arrow.binary())) for name in names}
    out = io.BytesIO()
    parquet.write_table(
        arrow.table(columns), out, row_group_size=rows_per_group, use_dictionary=False, compression="none"
    )
    return out.getvalue()


def _mds(samples: list[dict[str, Any]], _: int) -> bytes:
    names = [name for name in samples[0] if name != "__key__"] if samples else ["n"]
    description = {
        "column_names": names,
        "column_encodings": ["bytes"] * len(names),
        "column_sizes": [None] * len(names),
    }
    head = json.dumps(description).encode()
    rows = [[sample[name] for name in names] for sample in samples]
    bodies = [struct.pack(f"<{len(row)}I", *map(len, row)) + b"".join(row) for row in rows]
    ends = list(itertools.accumulate(map(len, bodies), initial=8 + 4 * len(rows) + len(head)))
    return struct.pack(f"<{len(rows) + 2}I", len(rows), *ends) + head + b"".join(bodies)


_WRITTEN: dict[str, Callable[[list[dict[str, Any]], int], bytes]] = {
    "tar": _by_writer(TarWriter, lambda sample: sample),
    "tfrecord": _by_writer(TFRecordWriter, lambda sample: sample),
    "jsonl": _by_writer(JsonLinesWriter, lambda sample: {"n": int(sample["n"])}),
    "recordio": _by_writer(RecordIOWriter, lambda sample: {"record": sample["n"]}),
    "zip": _zip,
    "parquet": _parquet,
    "mds": _mds,
}


def number_of(sample: Mapping[str, Any]) -> dict[str, int]:
    """The number of a sample of ``write_formatted``, for ``map``."""
    if "json" in sample:
        return {"cls": json.loads(sample["json"])["n"]}
    return {"cls": int(bytes(sample.get("n", sample.get("record"))))}


Record = tuple[tuple[str, bytes], ...]


def fields_of(sample: Any) -> Record:
    """Names and values of all fields."""
    return tuple((name, bytes(value)) for name, value in sorted(sample.items()) if not name.startswith("__"))


def as_one_field(sample: dict[str, Any]) -> dict[str, bytes]:
    """A field that every sample has, for batches."""
    return {"all": repr(fields_of(sample)).encode()}
