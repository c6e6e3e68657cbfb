"""One use of a store that is killed in the middle: ``python patience_scenario.py NAME``, in a folder of its own.

It says "ready" when it is in the middle, and goes on when it is told to, which is when the store is gone. The objects
``data/s-000.tar``, ... hold samples that are numbered through, and ``files/000``, ... hold ``content(0)``, ...
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import penstock as ps
from penstock.config import KIB, MIB, FetchConfig

SAMPLES, SHARDS, FILES = 960, 24, 60
FETCH = FetchConfig(part_bytes=64 * KIB, requests_max=2, requests_min=1, budget_bytes_max=4 * MIB)


def content(number: int) -> bytes:
    """The bytes of a file, or of the payload of a sample; different for each number."""
    return random.Random(number).randbytes(100_000 if number < FILES else 5_000)


def in_the_middle() -> None:
    """Say so, and wait until the store is gone."""
    print("ready", flush=True)
    sys.stdin.readline()


def pipeline() -> Any:
    return ps.shards("s3://bucket/data/").shuffle(window=16, seed=1).decode(ps.Integer("cls"), ps.Bytes("bin")).batch(8)


def take_all(batches: Iterable[Any], *, before: int = 4) -> None:
    """Take an epoch of batches, with the outage after the first few, and check that it has every sample once, unharmed."""
    found: list[int] = []
    for index, batch in enumerate(batches):
        if index == before:
            in_the_middle()
        for number, data in zip(batch["cls"], batch["bin"], strict=True):
            assert bytes(data) == content(10_000 + int(number))
            found.append(int(number))
    assert sorted(found) == list(range(SAMPLES))


def threads() -> None:
    with ps.Loader(pipeline(), lanes=2, fetch=FETCH, prefetch_batches=1) as loader:
        take_all(loader)
        assert loader.statistics().unreachable_s > 1
        assert loader.bottleneck().seconds["unreachable"] > 1


def processes() -> None:
    with ps.Loader(pipeline(), lanes=2, fetch=FETCH, prefetch_batches=1, processes=2) as loader:
        take_all(loader)
        assert loader.statistics().unreachable_s > 1


def dataloader(context: str = "fork") -> None:
    import torch.utils.data

    made = ps.torch.IterableDataset(pipeline(), lanes=2, fetch=FETCH)
    take_all(torch.utils.data.DataLoader(made, batch_size=None, num_workers=2, multiprocessing_context=context))


def workers() -> None:
    """The store is down when the workers of the second epoch start."""
    import torch.utils.data

    made = ps.torch.IterableDataset(pipeline(), lanes=2, fetch=FETCH)
    loader = torch.utils.data.DataLoader(made, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    take_all(loader, before=-1)
    in_the_middle()
    take_all(loader, before=-1)


def mount() -> None:
    Path("mnt").mkdir()
    with ps.mount("s3://bucket/files/", "mnt"):
        check_files(Path("mnt"))


def check_files(folder: Path, *, before: int = 20) -> None:
    for number in range(FILES):
        if number == before:
            in_the_middle()
        assert (folder / f"{number:03d}").read_bytes() == content(number)


def save() -> None:
    """A file and a checkpoint are saved while the store is down, and an object is written around the outage."""
    import torch
    import torch.distributed.checkpoint as dcp

    from penstock.torch.checkpoint import StorageReader, StorageWriter

    state = {"weights": torch.arange(3_000_000)}
    others = [
        threading.Thread(target=ps.torch.save, args=(state, "s3://bucket/saved.pt")),
        threading.Thread(target=dcp.save, args=(state,), kwargs={"storage_writer": StorageWriter("s3://bucket/dcp/")}),
    ]
    store = ps.connect("s3://bucket/")
    data = random.Random(0).randbytes(30 * MIB)
    with store.writer("written", part_bytes=5 * MIB) as file:
        file.write(data[: 12 * MIB])
        in_the_middle()
        for other in others:
            other.start()
        file.write(data[12 * MIB :])
    for other in others:
        other.join()
    assert bytes(store.read("written").data) == data
    assert torch.equal(ps.torch.load("s3://bucket/saved.pt")["weights"], state["weights"])
    loaded = {"weights": torch.zeros(3_000_000, dtype=torch.int64)}
    dcp.load(loaded, storage_reader=StorageReader("s3://bucket/dcp/"))
    assert torch.equal(loaded["weights"], state["weights"])


def pipe() -> None:
    command = [sys.executable, __file__, "piped"]
    where = ["--channel", "train=s3://bucket/files/,mode=pipe"]
    os.execv(sys.executable, [sys.executable, "-m", "penstock", "run", "--retry-s", "120", *where, "--", *command])


def piped() -> None:
    """The program of ``penstock run`` that reads the pipe."""
    expected = b"".join(map(content, range(FILES)))
    with Path(os.environ["SM_CHANNEL_TRAIN"] + "_0").open("rb") as file:
        begin = file.read(300_000)
        in_the_middle()
        assert begin + file.read() == expected


def cp() -> None:
    copying = subprocess.Popen(
        [sys.executable, "-m", "penstock", "cp", "--retry-s", "120", "s3://bucket/files/", "copied/"]
    )
    while not list(Path().glob("copied/0*")):
        assert copying.poll() is None
        time.sleep(0.001)
    copying.send_signal(signal.SIGSTOP)  # until the store is gone
    in_the_middle()
    copying.send_signal(signal.SIGCONT)
    assert copying.wait() == 0
    check_files(Path("copied"), before=-1)


def client() -> None:
    """A client of a gateway whose upstream goes."""
    store = ps.connect("s3://upstream/files/")
    for number in range(FILES):
        if number == 20:
            in_the_middle()
        assert bytes(store.read(f"{number:03d}").data) == content(number)


def read() -> None:
    """For Ctrl-C, as what follows."""
    store = ps.connect("s3://bucket/files/")
    store.read("000")
    in_the_middle()
    store.read("001")


def epochs() -> None:
    with ps.Loader(pipeline(), lanes=2, fetch=FETCH, prefetch_batches=1) as loader:
        for _ in range(1000):
            take_all(loader)


def command() -> None:
    from penstock.cli.app import run

    ps.connect("s3://bucket/files/").read("000")
    in_the_middle()
    sys.exit(run(["cp", "s3://bucket/files/", "copied/"]))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print("done", flush=True)
