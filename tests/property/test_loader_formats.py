"""Every format through the loader, against a naive reference: values of all sizes, parts cut anywhere, every way to read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from loading import FORMATS_WRITTEN, formatted, index
from penstock.loader.lanes import segments
from penstock.order import IndexedOrder

KIB = 1024
LENGTHS = (9, 0, 17, 1, 23)
WINDOW, LANES, BATCH = 24, 4, 5
RECORDIO_MAGIC = (0xCED7230A).to_bytes(4, "little")

Pair = tuple[str, bytes]


def values(count: int, rng: random.Random) -> list[bytes]:
    """Some empty, some of a few bytes, some that span parts, some that look like a frame of RecordIO."""
    made = []
    for _ in range(count):
        size = rng.choice([0, 1, rng.randrange(2, 600), rng.randrange(600, 9_000), rng.randrange(30_000, 90_000)])
        value = rng.randbytes(size)
        made.append(value if rng.random() < 0.8 else value[: size // 2] + RECORDIO_MAGIC * rng.randrange(1, 4) + value)
    return made


def write(folder: Path, name: str, rng: random.Random) -> list[list[bytes]]:
    """Shards of a format; the values in each."""
    folder.mkdir()
    shards = []
    for number, length in enumerate(LENGTHS):
        stored = values(length, rng)
        keys = [f"é{number}/ключ {at:03d}" for at in range(length)]
        if name.startswith("jsonl"):
            lines = [{"key": key, "v": value.hex()} for key, value in zip(keys, stored, strict=True)]
            data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
            data = compressed(name, data)
        else:
            samples = [{"__key__": key, "n": value} for key, value in zip(keys, stored, strict=True)]
            data = formatted(name, samples, rows_per_group=rng.randrange(1, 7))
        (folder / f"s{number}.{name}").write_bytes(data)
        shards.append(stored)
    return shards


def compressed(name: str, data: bytes) -> bytes:
    """As `name`'s suffix says."""
    if name.endswith(".gz"):
        import gzip

        return gzip.compress(data)
    if name.endswith(".zst"):
        import zstandard

        return zstandard.compress(data)
    return data


def value_of(sample: dict[str, Any]) -> dict[str, Any]:
    """The value, whatever the format calls it."""
    if "json" in sample:
        return {"v": bytes.fromhex(json.loads(sample["json"])["v"])}
    return {"v": bytes(sample.get("n", sample.get("record")))}


def read(loader: ps.Loader) -> list[Pair]:
    """Key and value of all that comes."""
    return [pair for batch in loader for pair in pairs(batch)]


def pairs(batch: Any) -> list[Pair]:
    """Those of a batch that are valid."""
    valid = batch.get("__valid__", np.ones(len(batch["__key__"]), bool)).tolist()
    return [pair for pair, good in zip(zip(batch["__key__"], batch["v"], strict=True), valid, strict=True) if good]


@pytest.mark.parametrize(
    ("name", "gap_bytes"),
    [
        *((name, 0) for name in FORMATS_WRITTEN),
        ("zip", 4 * KIB),
        ("zip", 1 << 20),
        ("parquet", 4 * KIB),
        ("parquet", 1 << 20),
    ],
)
def test_every_format_every_way(tmp_path: Path, name: str, gap_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an index the order's own sequence, on one rank, on two, and resumed; without one each sample once, resumed."""
    monkeypatch.setattr(segments, "PART_BYTES_MIN", 64 * KIB)
    monkeypatch.setattr(segments, "READ_AHEAD_BYTES_MAX", 64 * KIB)
    rng = random.Random(f"{name} {gap_bytes}")
    shards = write(tmp_path / "data", name, rng)
    made = ps.shards(f"{tmp_path}/data/").shuffle(window=WINDOW, seed=3).map(value_of).batch(BATCH)
    place = index(made, tmp_path / "index")
    order = IndexedOrder(samples=LENGTHS, window=WINDOW, shuffled=True, seed=3, epoch=0, lanes=LANES)
    places = [order.locate(position) for position in range(order.samples_count)]
    want = [shards[place.shard][place.sample] for place in places]
    options: dict[str, Any] = {
        "lanes": LANES, "threads": 1, "index_dir": place, "fetch": ps.FetchConfig(gap_bytes_max=gap_bytes),
    }  # fmt: skip
    for how in ("require", "stream"):
        with ps.Loader(made, index=how, **options) as loader:
            batches = [next(iter(loader)) for _ in range(rng.randrange(1, 8))]
            state = json.loads(json.dumps(loader.state_dict()))
            first = [pair for batch in batches for pair in pairs(batch)]
            whole = first + read(loader)
        assert sorted(value for _, value in whole) == sorted(value for stored in shards for value in stored)
        if how == "require":
            assert [value for _, value in whole] == want
        with ps.Loader(made, index=how, **options) as loader:
            loader.load_state_dict(state)
            assert first + read(loader) == whole
    ranks = []
    for rank in range(2):
        with ps.Loader(made, index="require", rank=rank, world_size=2, **options) as loader:
            ranks.append([pairs(batch) for batch in loader])
    together = [value for batch in zip(*ranks, strict=True) for rows in batch for _, value in rows]
    assert sorted(together) == sorted(want)
    if name in ("tar", "tar.gz", "tar.zst", "jsonl", "jsonl.gz", "jsonl.zst", "zip", "parquet"):
        assert {key for key, _ in whole} == {
            f"é{n}/ключ {at:03d}" for n, size in enumerate(LENGTHS) for at in range(size)
        }
