"""How many JPEGs a second come out of single objects of 115 KB in random order: undecoded, and decoded and resized to 224?

A store with 30 ms to the first byte and 90 MB/s a connection; batches of 128. The connector's map dataset is read by a
DataLoader that shuffles.
"""

from __future__ import annotations

from typing import Any

from epochs import Loads, Samples, bucket, compare, keys_in, mixed_counts
from harness import arguments

from penstock.bench.samples import photographs
from penstock.bench.turns import Row

ALONE = "decoding alone"
CONNECTORS = ("connector 8", "connector best")
MORE = {"workers": 24, "throughput_target_gbps": 10, "prefetch": 2}  # more in flight: each waits for its objects


def clients(case: str, tars: dict[str, Any]) -> list[Any]:
    found = [
        Loads("penstock", "penstock"),
        Loads("connector 8", "s3torchconnector"),
        Loads("connector best", "s3torchconnector", **MORE),
    ]
    if case == "decode":
        found.append(Loads("connector, our decoder", "s3torchconnector", decoder="penstock", **MORE))
        found.append(Loads(ALONE, "penstock", mode="decode", same=tars))
    return found


def rows(case: str, run: Any) -> list[Row]:
    def share(*names: str) -> list[float]:
        return run.ratios("samples/s", "penstock", run.best("samples/s", *names))

    if case == "read":
        return [
            Row("samples/s : connector's map dataset, 8 workers", share("connector 8"), 15, 25),
            Row("samples/s : the same at its best", share(*CONNECTORS), 15, 25),
        ]
    return [
        Row("samples/s : connector's map dataset, 8 workers", share("connector 8"), 3.5, 4),
        Row("samples/s : the same at its best", share(*CONNECTORS), 3.5, 4),
        Row("share of decoding alone (one of these two)", share(ALONE), 0.85, 0.92),
    ]


def measure(options: Any, case: str) -> None:
    written = 600 if options.quick else {"read": 6000, "decode": 2000}[case]
    total = written if options.quick or case == "decode" else 10_000  # two seconds of ours, at least
    with bucket() as (root, folder):
        pictures = photographs(40 if options.quick else 200)
        samples, packed = Samples(pictures), Samples(pictures)
        samples.write_objects(folder / "objects", written)
        for label in range(written, total):  # the same again under more names: a longer epoch at no memory
            path = folder / "objects" / f"{label:08d}.jpg"
            path.hardlink_to(folder / "objects" / f"{label % written:08d}.jpg")
            samples.keys.append(f"objects/{path.name}")
            samples.labels.append(label)
        if case == "decode":
            packed.write_tars(folder / "tar", mixed_counts(total, samples.image_bytes, 32 << 20), "jpg")
        tars = {"pictures": str(folder / "tar"), "samples": total, "keys": packed.keys}
        job = {"prefix": "objects", "objects": True, "shuffle": 16384, "decode": case == "decode"}
        job["keys"] = keys_in(root, "objects")
        question = f"{total} JPEGs of {samples.image_bytes // 1000} KB as single objects in random order, {case}"
        run = compare(question, root, options.select(clients(case, tars)), samples, job, options.turns(3, 1))
        run.report(rows(case, run), case=case)


if __name__ == "__main__":
    chosen = arguments(__doc__, case={"choices": ["read", "decode", "all"], "default": "all"})
    for one in ("read", "decode"):
        if chosen.case in (one, "all"):
            measure(chosen, one)
