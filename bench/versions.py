"""Is this working tree as fast as another commit? Ten rows of the other benchmarks, both versions in turns.

The other commit is checked out into a temporary folder, and its driver runs with that folder's ``src`` on PYTHONPATH.
Each row is a ratio, this tree to the other one, taken turn by turn: samples or objects per second where more is better,
seconds or processor time where less is. A ratio that is 5% worse, beyond the spread of the run, is a regression.

    python bench/versions.py --base v0.1.0
    python bench/versions.py --base HEAD~10 --rows tar,objects --repetitions 9
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clients import HERE, Client, Function
from epochs import METRICS, STORE, Loads, Samples, bucket, build_index, keys_in, mixed_counts
from harness import arguments, keys_of, objects, verified
from import_time import started

from penstock.bench.origin.server import Origin
from penstock.bench.samples import photographs, thumbnails
from penstock.bench.turns import Row, Run

ROOT = HERE.parent
THIS, BASE = "this tree", "base"
SLOWER_MAX = 0.95


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Check out `commit` into a temporary worktree, which is removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "base"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--detach", "--quiet", tree, commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)


WITH_CLIENTS = """
import runpy, sys
import penstock
penstock.__path__.append(sys.argv.pop(1))
runpy.run_module("penstock.bench.clients", run_name="__main__", alter_sys=True)
"""
"""The program of a client, with the ``bench`` of this tree in the package of another one."""


def of_tree(client: Client, tree: Path, clients: Path) -> Client:
    """Have a penstock client import the package from `tree`, and the programs of clients from the folder `clients`."""
    client.environment = {"PYTHONPATH": str(tree / "src")}
    if isinstance(client, Loads):
        client.program = ["-c", WITH_CLIENTS, str(clients), client.driver]
    return client


def both(tree: Path, make: Callable[[str], Client]) -> list[Any]:
    """Create the same client for both versions."""
    clients = tree / "clients"  # in the temporary checkout
    if not clients.exists():
        clients.mkdir()
        (clients / "bench").symlink_to(ROOT / "src/penstock/bench")
    return [of_tree(make(BASE), tree, clients), of_tree(make(THIS), ROOT, clients)]


def ratio(run: Run, text: str, metric: str, *, less: bool = False) -> Row:
    """Return the ratio of this tree to the other one, inverted if less is better: more than 1 is always better."""
    names = (BASE, THIS) if less else (THIS, BASE)
    return Row(text, run.ratios(metric, *names), SLOWER_MAX, 1.0)


# ── rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_objects(tree: Path, options: Any, name: str, count: int, size_bytes: int, **settings: Any) -> list[Row]:
    """Read `count` objects in order with ``read_many``."""
    metrics = {
        "objects/s": lambda answer: answer["objects"] / answer["seconds"],
        "CPU s": lambda answer: answer["cpu_s"],
    }
    with objects({"data": (count, size_bytes)}) as root, Origin(root, **settings) as origin:
        run = Run(name, origin, both(tree, lambda side: Client(side, "penstock")), metrics, options.turns(7, 2))
        command = {"do": "read", "keys": keys_of("data", count), "size_bytes": size_bytes, "in_order": True}
        with run:
            run.turns(
                lambda client: verified(client, client.ask(command), root, command["keys"]),
                warm=lambda client: client.ask(command),
            )
        made = [ratio(run, f"{name}, objects/s", "objects/s"), ratio(run, f"{name}, CPU", "CPU s", less=True)]
        run.report(made, **settings)
    return made


def load(
    tree: Path, options: Any, name: str, samples: Samples, root: Path, job: dict[str, Any], **same: Any
) -> list[Row]:
    """Load one epoch with the Loader, or samples by number."""
    loader = {key: same.pop(key) for key in ("mode", "processes") if key in same}
    clients = both(tree, lambda side: Loads(side, "penstock", same=same, **loader))
    with Origin(root, **STORE) as origin:
        if "index" in job:
            build_index(origin, Path(job["index"]))
        job = {"keys": samples.keys, **job, "folder": str(root / "bench"), "scratch": str(root / "scratch")}
        run = Run(name, origin, clients, METRICS, options.turns(5, 2))
        with run:
            run.turns(lambda client: client.measured(samples, job), warm=lambda client: client.checked(samples, job))
        made = [
            ratio(run, f"{name}, samples/s", "samples/s"),
            ratio(run, f"{name}, CPU", "CPU s/1000", less=True),
        ]
        run.report(made)
    return made


def _small(tree: Path, options: Any) -> list[Row]:
    return read_objects(tree, options, "objects of 100 KB", 8000, 100_000)


def _delayed(tree: Path, options: Any) -> list[Row]:
    return read_objects(tree, options, "objects of 100 KB, 30 ms", 8000, 100_000, ttfb_ms=30)


def _tls(tree: Path, options: Any) -> list[Row]:
    return read_objects(tree, options, "objects of 100 KB, TLS", 8000, 100_000, tls=True)


def _large(tree: Path, options: Any) -> list[Row]:
    return read_objects(tree, options, "objects of 100 MiB", 8, 100 << 20)


def _tar(tree: Path, options: Any) -> list[Row]:
    with bucket() as (root, folder):
        samples = Samples(photographs(40))
        samples.write_tars(folder / "tar", mixed_counts(6000, samples.image_bytes, 64 << 20), "jpg")
        return load(tree, options, "tars of JPEGs, undecoded", samples, root, {"prefix": "tar"})


def _decode(tree: Path, options: Any) -> list[Row]:
    with bucket() as (root, folder):
        samples = Samples(photographs(40))
        samples.write_tars(folder / "tar", mixed_counts(2000, samples.image_bytes, 64 << 20), "jpg")
        job = {"prefix": "tar", "decode": True, "shuffle": 1024}
        rows = load(tree, options, "tars of JPEGs, decoded", samples, root, job)
        return rows + load(tree, options, "the same by a worker process", samples, root, job, processes=1)


def _objects(tree: Path, options: Any) -> list[Row]:
    with bucket() as (root, folder):
        samples = Samples(photographs(40))
        samples.write_objects(folder / "objects", 5000)
        job = {"prefix": "objects", "objects": True, "shuffle": 16384, "keys": keys_in(root, "objects")}
        return load(tree, options, "single JPEGs in random order", samples, root, job)


def _number(tree: Path, options: Any) -> list[Row]:
    with bucket() as (root, folder):
        samples = Samples(photographs(40))
        samples.write_tars(folder / "tar", [1000] * 4, "jpg")
        job = {"prefix": "tar", "index": str(root / "index")}
        rows = load(tree, options, "tars by number, stream", samples, root, job, mode="stream")
        return rows + load(tree, options, "tars by number, batches", samples, root, job, mode="batches")


def _png(tree: Path, options: Any) -> list[Row]:
    with bucket() as (root, folder):
        samples = Samples(thumbnails(1000))
        samples.write_tars(folder / "tar", [6250] * 16, "png")
        records = Samples(samples.images, samples.write_tfrecords(folder / "tfrecord", 6250), list(samples.labels))
        rows = load(tree, options, "PNGs of 3 KB in tars", samples, root, {"prefix": "tar", "image": "png"})
        job = {"prefix": "tfrecord", "image": "image", "label": "label"}
        return rows + load(tree, options, "the same in TFRecords", records, root, job)


def _import(tree: Path, options: Any) -> list[Row]:
    def timed(source: Path) -> dict[str, Any]:
        code = f"import sys; sys.path.insert(0, {str(source / 'src')!r}); from penstock import Loader"
        return started(sys.executable, code)

    clients = [Function(BASE, timed, tree), Function(THIS, timed, ROOT)]
    run = Run("import", None, clients, {"s": lambda answer: answer["seconds"]}, options.turns(15, 5))
    with run:
        run.turns(lambda client: client.measure(), warm=lambda client: client.measure())
    made = [ratio(run, "from penstock import Loader, with the interpreter's start", "s", less=True)]
    run.report(made)
    return made


ROWS: dict[str, Callable[[Path, Any], list[Row]]] = {
    "small": _small,
    "delayed": _delayed,
    "tls": _tls,
    "large": _large,
    "tar": _tar,
    "decode": _decode,
    "objects": _objects,
    "number": _number,
    "png": _png,
    "import": _import,
}


def main(options: Any) -> None:
    chosen = options.rows.split(",") if options.rows else list(ROWS)
    if unknown := [name for name in chosen if name not in ROWS]:
        raise SystemExit(f"--rows {unknown[0]!r} is not one of {', '.join(ROWS)}")
    found: list[Row] = []
    with checked_out(options.base) as tree:
        for name in chosen:
            found += ROWS[name](tree, options)
    print(f"\nthis tree : {options.base}  (median, min..max; more than 1 is better)")
    for row in found:
        record = row.record()
        print(f"{row.text:58} {record['value']:6.2f}  ({record['min']:.2f}..{record['max']:.2f})")


if __name__ == "__main__":
    main(
        arguments(
            __doc__,
            base={"default": "HEAD", "help": "the commit to compare with"},
            rows={"default": "", "help": f"comma-separated, of {', '.join(ROWS)}; all by default"},
        )
    )
