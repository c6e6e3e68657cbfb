"""The limits of results in one process."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsConfig:
    """Limits of one gateway process.

    Attributes:
        recent_bytes_max: Memory in bytes for the blocks that were produced last, for readers that are a little behind.
        reading_bytes_max: Memory in bytes for all pieces that are being read or sent; each reader may use at least 64 KiB.
        runs_max: Largest number of transforms that run at the same time; further ones wait.
        background_runs_max: Largest number of runs that go on although all their readers have left.
        storing_blocks_max: Blocks of one run that may wait for the disk.
        held_blocks_max: Blocks of one run that are held in memory for readers if the disk does not take them.
        lag_s_max: Time in seconds for which the slowest reader of such a run may make no progress before it is left behind.
        hold_s: How long a result of a transform that is not deterministic is held after its last use, in seconds.
        threads_max: Largest number of threads that read and write blocks.
        records_max: Number of records of results that are remembered.
        uploads_max: Largest number of results that wait to be stored in the bucket of results; further ones are not stored.
        upload_drain_s_max: How long closing waits for them, in seconds.
    """

    recent_bytes_max: int = 64 * MIB
    reading_bytes_max: int = 64 * MIB
    runs_max: int = 64
    background_runs_max: int = 16
    storing_blocks_max: int = 8
    held_blocks_max: int = 8
    lag_s_max: float = 10.0
    hold_s: float = 10.0
    threads_max: int = 4
    records_max: int = 16_384
    uploads_max: int = 256
    upload_drain_s_max: float = 20.0
