"""How many samples of 100 KB a second come out in a true permutation: single objects, tars by range, LitData's ds[i]?

A store with 30 ms to the first byte and 90 MB/s a connection; batches of 128, undecoded. Single objects are read by a
shuffling Loader and by number, and tars by the ranges in an index that was built before. LitData reads a range of a chunk
for each ``dataset[i]``, for a DataLoader that shuffles, with 8 workers and with 32. It reads fewer samples, because each takes
it some milliseconds of processor time.
"""

from __future__ import annotations

from typing import Any

from epochs import METRICS, STORE, Loads, Samples, bucket, build_index, pack
from harness import arguments

from penstock.bench.origin.server import Origin
from penstock.bench.turns import Row, Run

SAMPLE_BYTES = 100_000
OBJECTS = ("objects, Loader", "objects, stream")
LITDATA = ("litdata 8", "litdata 32")


def blocks(count: int) -> list[bytes]:
    """Make incompressible samples."""
    import random

    source = random.Random(0)
    return [source.randbytes(SAMPLE_BYTES) for _ in range(count)]


def clients() -> list[Any]:
    objects = {"objects": True, "prefix": "objects"}
    return [
        Loads("objects, Loader", "penstock", same={**objects, "shuffle": 16384}),
        Loads("objects, stream", "penstock", mode="stream", same=objects),
        Loads("tars, stream", "penstock", mode="stream"),
        Loads("objects, batches", "penstock", mode="batches", same=objects),
        Loads("tars, batches", "penstock", mode="batches"),
        *(Loads(name, "litdata", workers=int(name.split()[1]), by_number=True) for name in LITDATA),
    ]


def is_peer(client: Any) -> bool:
    return client.driver != "penstock"


def rows(run: Any) -> list[Row]:
    def share(name: str, *others: str) -> list[float]:
        return run.ratios("samples/s", name, run.best("samples/s", *others))

    return [
        Row("samples/s, tars by range : single objects, faster way", share("tars, stream", *OBJECTS), 0.8, 0.95),
        Row("the same, batches of 128 one by one", share("tars, batches", "objects, batches"), 0.8, 0.95),
        Row("samples/s, tars by range : LitData's ds[i] at its best", share("tars, stream", *LITDATA), 1, 3),
        Row("the same, batches of 128 one by one", share("tars, batches", *LITDATA), 1, 2),
    ]


def main(options: Any) -> None:
    total, few_count = (600, 256) if options.quick else (4000, 1024)
    with bucket() as (root, folder):
        samples, packed, few = (Samples(blocks(50)) for _ in range(3))
        samples.write_objects(folder / "objects", total)
        packed.write_tars(folder / "tar", [total // 4] * 4, "jpg")
        chosen = options.select(clients())
        if any(is_peer(client) for client in chosen):
            few.write_tars(folder / "few", [few_count], "jpg")
            pack(root, "litdata", folder / "few", folder / "litdata")
        job = {
            "prefix": "tar", "index": str(root / "index"), "litdata": "litdata", "keys": samples.keys,
            "scratch": str(root / "scratch"),
        }  # fmt: skip
        question = f"{total} samples of {SAMPLE_BYTES // 1000} KB in a true permutation"
        turns = options.turns(5, 2)
        with Origin(root, **STORE) as origin, Run(question, origin, chosen, METRICS, turns, tolerates=is_peer) as run:
            build_index(origin, root / "index")
            run.turns(
                lambda client: client.measured(few if is_peer(client) else samples, job),
                warm=lambda client: client.checked(few if is_peer(client) else samples, job),
            )
        run.report(rows(run), store=STORE)


if __name__ == "__main__":
    main(arguments(__doc__))
