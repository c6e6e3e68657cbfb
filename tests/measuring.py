"""Records of ``penstock bench`` with rates that a test chooses, as if they had been measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.bench.clients import RAW
from penstock.bench.record import FILE, BenchRecord

SAMPLE_BYTES = 1000
BATCH = 10


def turn(
    name: str,
    samples_per_s: float,
    *,
    number: int = 0,
    is_ours: bool = True,
    stall_ratio: float = 1.0,
    seconds: float = 5.0,
    first_s: float = 0.5,
    batches: int | None = None,
    sample_bytes: int = SAMPLE_BYTES,
    host_cores: float = 1.0,
    gpu: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """The line of a client that delivers batches at an even rate; of raw reading, a sample is a part of `sample_bytes`."""
    batch = 1 if name == RAW.name else BATCH
    count = batches or max(2, round(seconds * samples_per_s / batch))
    times_s = [first_s + place * batch / samples_per_s for place in range(count)]
    looping_s = times_s[-1] - first_s
    counts = [batch * (place + 1) for place in range(count)]
    rows = round((first_s + looping_s) / 0.25)
    monitor = [[0.25 * row, 0.5, host_cores, 50_000_000 + row, 1_000_000 * row, gpu] for row in range(1, rows + 1)]
    return {
        "name": name, "round": number, "settings": {}, "is_ours": is_ours, "versions": {"numpy": "2.4"},
        "pss_bytes": 200_000_000, "monitor": monitor, "seconds": first_s + looping_s, "first_s": first_s, "cpu_s": 1.0,
        "step_s": (1 - stall_ratio) * looping_s, "stall_s": stall_ratio * looping_s, "samples": counts[-1],
        "bytes": counts[-1] * sample_bytes, "batches": count, "times_s": times_s, "counts": counts,
        "sizes": [each * sample_bytes for each in counts], **more,
    }  # fmt: skip


def made_record(
    folder: Path,
    *turns: dict[str, Any],
    not_run: dict[str, str] | None = None,
    is_complete: bool = True,
    url: str = "s3://bucket/train/",
    settings: dict[str, Any] | None = None,
    **data: Any,
) -> BenchRecord:
    """A record in `folder`; `settings` and `data` replace what its run has."""
    facts = {
        "url": url, "endpoint_url": "http://127.0.0.1:9000", "region": "us-east-1", "bucket": "bucket", "prefix": "train",
        "keys": 4, "objects_count": 4, "total_bytes": 4_000_000, "format": "tar", "image": "jpg", "label": "cls",
        "is_picture": True, "sample_bytes": SAMPLE_BYTES, "stored_bytes": SAMPLE_BYTES, "first_byte_s": 0.03,
    }  # fmt: skip
    about = {
        "batch": BATCH,
        "decode": False,
        "step": "none",
        "shuffle": 0,
        "clients": [],
        "seconds": 120.0,
        "sweep": {},
    }
    machine = {"cpu": "a processor", "cores": 2, "memory_gib": 8, "kernel": "6.1", "load_1min": 0.5}
    record = BenchRecord(folder / FILE)
    record.add(
        "run", command=["penstock", "bench", "run", url], url=url,
        settings=about | (settings or {}), data=facts | data, started=1.7e9, commit="abc123",
        machine=machine, python="3.11.7",
    )  # fmt: skip
    for name, reason in (not_run or {}).items():
        record.add("not run", name=name, reason=reason)
    for each in turns:
        record.add("turn", **each)
    if is_complete:
        record.add("end", ended=1.7e9 + 100)
    return record
