"""Carries out a plan by threads of this process. ``penstock.pack.cluster`` does it by tasks on a cluster.

A shard is written sequentially, so parallel work is divided by shards: while one waits for its last parts to be stored,
others read. Each thread reads ahead and writes in order. If a thread fails, or on Ctrl-C, the others stop at their next
sample, and the shards that they had open are dropped.
"""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, NamedTuple

from penstock.config import FetchConfig, check_whole, default_budget_bytes
from penstock.errors import ClosedError, ConfigError
from penstock.fetch import set_process_budget
from penstock.pack.recipes import WriteContext
from penstock.pack.verification import check_shard
from penstock.pack.written_formats import FORMATS_WRITTEN
from penstock.version import install_hint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.index import ShardRow
    from penstock.pack.recipes import PackListener, Recipe, ShardGroup
    from penstock.pack.shard_file import ShardFolder
    from penstock.store import Store

JOBS = 4
"""Default number of shards at a time: enough that one reads while others wait for their last parts; each holds 40 MiB."""


class StoppedError(ClosedError):
    """Another shard failed, or the user interrupted the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOptions:
    """The settings with which a plan is carried out.

    Attributes:
        executor: ``threads`` uses threads of this process; ``ray`` runs one task per shard on a cluster.
        address: Address of the Ray cluster; None uses the one that Ray finds, or starts one on this machine.
        jobs: Number of shards at a time. None means 4, or the number of cores if there is a transform; on Ray, as many
            as the cluster has CPUs.
        memory_bytes_max: Bytes that reading and writing may hold together in each process. None means the process's
            budget for reading, and 40 MiB for each shard that is being written (136 MiB for Parquet).
        verify: Whether each shard is read back when it is finished.

    Raises:
        ConfigError: An option is out of bounds.
    """

    executor: Literal["threads", "ray"] = "threads"
    address: str | None = None
    jobs: int | None = None
    memory_bytes_max: int | None = None
    verify: bool = False

    def __post_init__(self) -> None:
        if self.executor not in ("threads", "ray"):
            raise ConfigError(f"executor={self.executor!r} must be 'threads' or 'ray'")
        if self.executor == "ray" and find_spec("ray") is None:
            raise ConfigError("executor='ray' needs Ray", hint=install_hint("ray"))
        if self.address is not None and self.executor != "ray":
            raise ConfigError(f"address={self.address!r} needs executor='ray'", hint="executor='ray'")
        if self.jobs is not None:
            check_whole("jobs", self.jobs, 1)
        if self.memory_bytes_max is not None:
            check_whole("memory_bytes_max", self.memory_bytes_max, 1)
        memory_shares(self.memory_bytes_max, 1, "tar")


class MemoryShares(NamedTuple):
    """The division of memory.

    Attributes:
        reading_bytes: Bytes that reading may hold.
        jobs: Number of shards that may be written at a time.
    """

    reading_bytes: int
    jobs: int


def memory_shares(memory_bytes_max: int | None, jobs: int, format_name: str) -> MemoryShares:
    """Divide memory between reading and up to `jobs` shards that are written in a format.

    Raises:
        ConfigError: The memory is too small for one shard.
    """
    if memory_bytes_max is None:
        return MemoryShares(default_budget_bytes(), jobs)
    held_bytes = FORMATS_WRITTEN[format_name].held_bytes
    if memory_bytes_max < 2 * held_bytes:
        raise ConfigError(
            f"memory_bytes_max={memory_bytes_max!r} must be at least {2 * held_bytes} to write {format_name}",
            hint="raise --memory-bytes-max (memory_bytes_max=)",
        )
    jobs = max(1, min(jobs, memory_bytes_max // 2 // held_bytes))
    return MemoryShares(memory_bytes_max - jobs * held_bytes, jobs)


def write_in_threads(
    groups: list[ShardGroup],
    folder: ShardFolder,
    stores: Sequence[Store],
    recipe: Recipe,
    *,
    options: ExecutionOptions,
    listener: PackListener,
) -> dict[str, ShardRow]:
    """Write all shards of `groups`, several at a time; return their rows by name.

    Args:
        groups: Shards in groups that are written one after the other.
        folder: Folder of the shards.
        stores: Stores of the plan's roots, in their order.
        recipe: Format and options of the shards.
        options: Number of shards at a time, memory limit, and whether shards are verified.
        listener: Receives progress.

    Raises:
        PenstockError: The first error of any shard; the others are given up.
        KeyboardInterrupt: The user interrupted; all shards that are not finished are given up.
    """
    stop, lock = threading.Event(), threading.Lock()

    def raise_if_stopped() -> None:
        if stop.is_set():
            raise StoppedError("the packing was stopped")

    def report_progress(samples_count: int, size_bytes: int) -> None:
        with lock:
            listener.progressed(samples_count, size_bytes)

    def write_group(group: ShardGroup) -> list[ShardRow]:
        rows = []
        try:
            raise_if_stopped()
            for row in recipe.write(WriteContext(folder, stores, raise_if_stopped, report_progress), group):
                with lock:
                    listener.finished(row, known=False)
                if options.verify:
                    check_shard(folder.store, folder.place, row, raise_if_stopped=raise_if_stopped)
                    with lock:
                        listener.verified(row)
                rows.append(row)
        except BaseException:
            stop.set()
            raise
        return rows

    reading_bytes, jobs = memory_shares(options.memory_bytes_max, options.jobs or JOBS, recipe.format)
    if options.memory_bytes_max is not None:
        set_process_budget(reading_bytes)
    jobs = min(jobs, len(groups))
    for store in stores:  # all readers together send as many requests as a single reader would
        config = store.fetch_config or FetchConfig()
        requests_max = max(config.requests_min, config.requests_max // jobs)
        store.fetch_config = dataclasses.replace(config, requests_max=requests_max)
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="penstock-pack")
    try:
        futures = [pool.submit(write_group, group) for group in groups]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for error in [future.exception() for future in done]:
            if error is not None and not isinstance(error, StoppedError):
                raise error
        return {row.key: row for future in futures for row in future.result()}
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
