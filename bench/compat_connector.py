"""How many objects a second does a program for the S3 Connector for PyTorch read, as it is and after its import was changed?

8 000 objects of 100 KB, below one prefix, through ``S3IterableDataset.from_prefix(enable_sharding=True)`` in a DataLoader with
workers, and through ``S3MapDataset`` in random order; each turn lists the prefix. The store answers after 30 ms and sends 90
MB/s on each connection, or without delay (``--case``). Both run the same driver, ``penstock.bench.clients.s3torchconnector``.
"""

from __future__ import annotations

import random
from typing import Any

from epochs import STORE, Loads, Samples, bucket, compare
from harness import arguments

from penstock.bench.turns import Row

OBJECT_BYTES = 100_000
WORKERS = 4
CASES = {"iterable": {"stream": True}, "map": {"objects": True, "shuffle": 8000}}
LIMITS = {("iterable", False): (3, 5), ("iterable", True): (1, 1.5), ("map", False): (3, 5), ("map", True): (1, 1.5)}


def clients() -> list[Any]:
    return [
        Loads("import changed", "penstock_connector", workers=WORKERS),
        Loads("connector", "s3torchconnector", workers=WORKERS),
        Loads("connector, 16 workers", "s3torchconnector", workers=16),
    ]


def measure(options: Any, case: str, *, without_delay: bool) -> None:
    distinct, total = (100, 400) if options.quick else (2000, 8000)
    with bucket() as (root, folder):
        content = random.Random(0)
        samples = Samples([content.randbytes(OBJECT_BYTES) for _ in range(distinct)])
        samples.write_objects(folder / "objects", distinct)
        for label in range(distinct, total):  # the same bytes under more names: a longer epoch at no memory
            path = folder / "objects" / f"{label:08d}.jpg"
            path.hardlink_to(folder / "objects" / f"{label % distinct:08d}.jpg")
            samples.keys.append(f"objects/{path.name}")
            samples.labels.append(label)
        job = {"prefix": "objects", "keys": samples.keys, "decode": False, **CASES[case]}
        where = "without delay" if without_delay else "behind 30 ms"
        question = f"{total} objects of {OBJECT_BYTES // 1000} KB, {case} data set, {where}"
        store = {} if without_delay else STORE
        run = compare(question, root, options.select(clients()), samples, job, options.turns(3, 1), store=store)
        limit, target = LIMITS[case, without_delay]
        ratios = run.ratios("samples/s", "import changed", "connector")
        rows = [Row(f"objects/s : connector, {WORKERS} workers", ratios, limit, target)]
        run.report(rows, case=f"{case}, {where}")


if __name__ == "__main__":
    chosen = arguments(
        __doc__,
        case={"choices": [*CASES, "all"], "default": "all"},
        without_delay={"action": "store_true", "help": "a store on loopback as it is"},
    )
    for one in CASES:
        if chosen.case in (one, "all"):
            measure(chosen, one, without_delay=chosen.without_delay)
