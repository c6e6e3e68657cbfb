"""How long until the first batch, from 1 000 shards, shuffled?

The time runs from the construction of the data set, in a process that has imported its library but never used it, until the
training loop has a batch of 128. The store answers after 30 ms and sends 90 MB/s on each connection. Shards have three sizes:
200 KB (64 PNGs of 3 KB), 64 MiB of JPEGs of 115 KB, which is the default size of LitData and MosaicML, and 256 MiB, which is
ours. The large ones are one shard under 1 000 names, in each library's format.

The peers' own formats come with an index, and so do the shards of "penstock by index", as packing writes them; those of plain
"penstock" and of webdataset are tars without an index. penstock shuffles within a window of 16 384 samples. Each peer has the
settings that give its first batch soonest: LitData shuffles within a chunk and does not read a second one ahead, MosaicML
shuffles within a shard instead of over 2^18 samples, and webdataset does not shuffle. In every batch each label must come with
the bytes of its picture.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from epochs import BATCH, METRICS, STORE, Fresh, Samples, bucket, build_index, pack
from harness import arguments

from penstock.bench.origin.server import Origin
from penstock.bench.samples import photographs, thumbnails
from penstock.bench.turns import Row, Run

ROUND_TRIP_S = 0.03
WINDOW = 16384


class Size(NamedTuple):
    """Shards of one size, with `each` samples; tar and MDS add `head_bytes` to each sample."""

    name: str
    samples: Samples
    image: str
    each: int
    shards: int
    is_one: bool

    @property
    def folder(self) -> str:
        return self.name.replace(" ", "")

    @property
    def packed(self) -> dict[str, str]:
        """Return the folder of a library's own format; its driver reads the size of a shard from the name."""
        shard_bytes = (self.samples.image_bytes + 40) * self.each * (2 if self.is_one else 1)
        return {
            "litdata": f"{self.folder}-litdata-of-{self.each}",
            "mosaicml": f"{self.folder}-mosaicml-of-{shard_bytes}",
        }

    def client(self, name: str, driver: str, *, prefix: str = "", shuffle: int = WINDOW, **options: Any) -> Fresh:
        prefix = prefix or self.folder
        keys = [f"{prefix}/{number:06d}.tar" for number in range(self.shards)]
        job = {"prefix": prefix, "image": self.image, "keys": keys, "shuffle": shuffle, **self.packed}
        return Fresh(f"{self.name}: {name}", driver, same=job, **options)

    def clients(self) -> list[Fresh]:
        within = {"shuffle_algo": "py1s", "num_canonical_nodes": 1, "predownload": BATCH}
        workers = (
            (0, 2) if self.is_one else (0,)
        )  # with more workers it loses samples of small shards and ends with an IndexError
        mosaic = [self.client(f"mosaicml {number}", "mosaicml", workers=number, **within) for number in workers]
        return [
            self.client("penstock", "penstock", index="stream"),
            self.client("penstock by index", "penstock", prefix=f"{self.folder}-packed", index="require"),
            self.client("litdata 0", "litdata", workers=0, max_pre_download=1),
            *mosaic,
            self.client("webdataset unshuffled", "webdataset", shuffle=0, workers=0),
            self.client("penstock unshuffled", "penstock", shuffle=0, index="stream"),
        ]


# ── shards ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def made(root: Path, folder: Path, size: Size, drivers: set[str]) -> None:
    """Write the shards of a size in all formats."""
    tars = folder / size.folder
    size.samples.write_tars(tars, [size.each] * (1 if size.is_one else size.shards), size.image)
    for driver, name in size.packed.items():
        if driver in drivers:
            pack(root, driver, tars, folder / name)
            _split(folder / name, 1 if size.is_one else size.shards)
            if size.is_one:
                _RENAMED[driver](folder / name, size.shards)
    target = folder / f"{size.folder}-packed"
    shutil.copytree(tars, target, copy_function=os.link)
    with Origin(root) as origin:
        build_index(origin, root / f"{size.folder}-index", prefix=target.name)
    (place,) = (root / f"{size.folder}-index").iterdir()
    place.rename(target / ".penstock")
    if size.is_one:
        _rename_index(target, size.shards)
        for each in (tars, target):
            _link(each / "000000.tar", [f"{number:06d}.tar" for number in range(1, size.shards)])


def _split(folder: Path, shards: int) -> None:
    """Check that the peer's writer made about as many shards as there are tars."""
    found = len(list(folder.iterdir())) - 1
    if not 0.9 * shards <= found <= 1.1 * shards:
        raise RuntimeError(f"{folder.name}: {found} shards instead of {shards}")


def _link(first: Path, names: list[str]) -> None:
    for name in names:
        first.with_name(name).hardlink_to(first)


def _rename_litdata(folder: Path, shards: int) -> None:
    index = json.loads((folder / "index.json").read_text())
    (chunk,) = index["chunks"]
    names = [f"chunk-1-{number}.bin" for number in range(shards)]
    _link(folder / chunk["filename"], names)
    index["chunks"] = [{**chunk, "filename": name} for name in names]
    (folder / "index.json").write_text(json.dumps(index))


def _rename_mosaicml(folder: Path, shards: int) -> None:
    index = json.loads((folder / "index.json").read_text())
    (shard,) = index["shards"]
    data = shard["raw_data"]
    names = [f"shard.1{number:05d}.mds" for number in range(shards)]
    _link(folder / data["basename"], names)
    index["shards"] = [{**shard, "raw_data": {**data, "basename": name}} for name in names]
    (folder / "index.json").write_text(json.dumps(index))


_RENAMED = {"litdata": _rename_litdata, "mosaicml": _rename_mosaicml}


def _rename_index(folder: Path, shards: int) -> None:
    """Extend the index of one shard to all shards with the same bytes."""
    from penstock.index import IndexPlace, ShardIndex
    from penstock.store import LocalStore

    store = LocalStore(folder / ".penstock")
    place = IndexPlace(store, "", base="")
    index = place.load_saved()
    place.base_url = index.base_url
    (row,) = index.rows.values()
    of = place.load_shard(row)
    for number in range(shards):
        named = row._replace(key=f"{number:06d}.tar")
        index.add(named)
        columns = {"offsets": of.offsets, "crc32c": of.crc32c, "keys": of.keys, "members": of.members}
        place.save_shard(ShardIndex(named, **columns))
    place.save(index)
    store.close()


# ── the question ─────────────────────────────────────────────────────────────────────────────────────────────────────


def main(options: Any) -> None:
    count = 100 if options.quick else 1000
    jpegs = photographs(40)
    each = {
        name: (mib << 20) // (sum(map(len, jpegs)) // len(jpegs)) for name, mib in (("64 MiB", 64), ("256 MiB", 256))
    }
    sizes = [Size("200 KB", Samples(thumbnails(500)), "png", 64, count, is_one=False)]
    sizes += [Size(name, Samples(jpegs), "jpg", number, count, is_one=True) for name, number in each.items()]
    with bucket() as (root, folder):
        of = {client.name: (size, client) for size in sizes for client in size.clients()}
        chosen = options.select([client for _, client in of.values()])
        used = {of[client.name][0].name for client in chosen}
        for size in sizes:
            if size.name in used:
                made(root, folder, size, {client.driver for client in chosen})
        question = f"first batch of {count} shards, cold"
        metrics = {"first batch s": METRICS["first batch s"]}
        job = {"batches_max": 1, "scratch": str(root / "scratch")}
        with Origin(root, **STORE) as origin, Run(question, origin, chosen, metrics, options.turns(3, 1)) as run:
            run.tolerates = lambda client: client.driver != "penstock"
            run.turns(lambda client: client.measured(of[client.name][0].samples, job))
        report(run, [size.name for size in sizes if size.name in used])


def report(run: Run, sizes: list[str]) -> None:
    rows, bound_s = [], 1 + 3 * ROUND_TRIP_S
    for size in sizes:
        ours = f"{size}: penstock by index"
        for name in (f"{size}: penstock", ours):
            if name in run.answers:
                rows.append(Row(f"{name}, seconds", run.values(name, "first batch s"), bound_s, bound_s, less=True))
        for peer, driver in {"MosaicML": "mosaicml", "LitData": "litdata"}.items():
            names = [client.name for client in run.clients if client.driver == driver and client.name.startswith(size)]
            best = run.best("first batch s", *names, less=True)
            rows.append(Row(f"{size}: {peer} at its best : ours", run.ratios("first batch s", best, ours), 10, 10))
    run.report(rows)


if __name__ == "__main__":
    main(arguments(__doc__))
