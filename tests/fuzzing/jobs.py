"""Runs a case as a user's job would run, and compares what every rank gets with the model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from fuzzing.case import EPOCHS, KEPT, Case
from fuzzing.model import Batch, Kept, batches_count, rest_of_job, weight, whole_job
from loading import formatted, index, number_of
from penstock.errors import ConfigError
from penstock.loader.lanes import first_batch
from penstock.pipeline import mix, objects
from resuming import children, together

Got = list[tuple[Batch, int]]  # batches, and how many rows each has of which nothing is said


def check(case: Case) -> None:
    """Run a job.

    Raises:
        AssertionError: a rank got something else than the model says.
    """
    with tempfile.TemporaryDirectory() as name, _leading(case.leads):
        folder = Path(name)
        made = _written(case, folder)
        try:
            expected = whole_job(case)
        except ConfigError:  # no order takes it
            with pytest.raises(ConfigError):
                _run(case, made, folder, turn=0)
            return
        if case.stride > 1:
            _check_divided(case, made, folder, expected)
            return
        stop = min(case.stopped, len(expected[0])) if not case.carries or case.agrees else case.stopped
        stops = 0 < stop < min(map(len, expected))
        first, states = _run(case, made, folder, turn=0, stop=case.stopped if stops else None)
        if not stops:
            _compare(case, first, expected)
            return
        _compare(case, first, [batches[: case.stopped] for batches in expected], is_part=True)
        left = rest_of_job(case, expected)
        rest, _ = _run(case, made, folder, turn=1, states=states)
        if case.is_ordered:
            _compare(case, rest, left)
        else:
            _compare(case, [[*one, *two] for one, two in zip(first, rest, strict=True)], expected)


def _check_divided(case: Case, made: Any, folder: Path, expected: list[list[Batch]]) -> None:
    """Each of several loaders gives every n-th batch, as the workers of a DataLoader do."""
    for number in range(case.stride):
        found, _ = _run(case, made, folder, turn=0, stride=(number, case.stride))
        _compare(case, found, [[batch for batch in expected[0] if batch.number % case.stride == number]])


def _compare(case: Case, found: list[list[Batch]], expected: list[list[Batch]], *, is_part: bool = False) -> None:
    assert len(found) == len(expected)
    for rank, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        wanted = [_seen_as(case, batch) for batch in wanted]
        assert len(got) == len(wanted), f"rank {rank}: {len(got)} batches, not {len(wanted)}"
        if case.is_ordered:
            for number, (left, right) in enumerate(zip(got, wanted, strict=True)):
                assert left == right, f"rank {rank}, batch {number}: {left}, not {right}"
        elif not is_part:
            assert sorted(got) == sorted(wanted), f"rank {rank}: {got}, not {wanted} in any order"


def _seen_as(case: Case, batch: Batch) -> Batch:
    """What can be seen of a batch."""
    kept = batch.kept if case.entry != "plain" else tuple(each._replace(drawn=0) for each in batch.kept)
    return batch._replace(number=0, end=0, kept=kept)


# ── running ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _run(
    case: Case,
    made: Any,
    folder: Path,
    *,
    turn: int,
    stop: int | None = None,
    states: list[Any] | None = None,
    stride: tuple[int, int] = (0, 1),
) -> tuple[list[list[Batch]], list[Any]]:
    """By rank, the batches of a job, and its state behind them; `turn` 1 is behind the stop."""
    world_size = case.worlds[turn]

    def train(rank: int, agree: Callable[[int], int]) -> tuple[list[Batch], Any]:
        options: dict[str, Any] = {"agree": agree if case.agrees else None, "stride": stride} if world_size > 1 else {}
        loader = ps.Loader(
            made, rank=rank, world_size=world_size, lanes=case.lanes, threads=case.threads, processes=case.processes[turn],
            restart_workers=True, in_order=case.in_order, index="require" if case.is_indexed else "stream",
            index_dir=folder / "index", fetch=ps.FetchConfig(gap_bytes_max=case.gap_bytes), **{"stride": stride, **options},
        )  # fmt: skip
        found: list[Batch] = []
        with loader:
            if states is not None:
                loader.load_state_dict(states[rank % len(states)])
            if case.is_indexed and not case.carries and states is None:
                assert len(loader) == len(range(stride[0], batches_count(case), stride[1]))
            if case.reweighted == 0 and not turn:
                loader.set_weights([share for _, _, share in case.sources[::-1]], from_batch=0)
            for epoch in loader.epochs(EPOCHS):
                for batch in loader:
                    found.append(_seen(case, batch, epoch))
                    if case.reweighted == len(found) and not turn:
                        handed_out_count = loader.state_dict()["batches"]
                        loader.set_weights([share for _, _, share in case.sources[::-1]], from_batch=handed_out_count)
                    if case.killed == len(found) and not rank and not turn:
                        _kill_one()
                    if len(found) == stop:
                        return found, json.loads(json.dumps(loader.state_dict()))
                    if len(found) == case.paused:
                        break
            return found, None

    ranks = together(train, world_size)
    return [found for found, _ in ranks], [state for _, state in ranks]


def _seen(case: Case, batch: dict[str, Any], epoch: int) -> Batch:
    field = next(name for name in ("cls", "n", "record", "json") if name in batch)
    rows = len(batch["__key__"])
    assert all(len(column) == rows for column in batch.values()), {name: len(each) for name, each in batch.items()}
    numbers = [number_of({field: value})["cls"] if isinstance(value, bytes) else int(value) for value in batch[field]]
    drawn = batch["drawn"].tolist() if "drawn" in batch else [0] * rows
    valid = batch.get("__valid__", np.ones(rows, bool)).tolist()
    every = zip(numbers, batch["__position__"].tolist(), drawn, strict=True)
    kept = tuple(Kept(*each) for each, counts in zip(every, valid, strict=True) if counts)
    return Batch(epoch, rows, "__valid__" in batch, kept, 0, 0)


def _kill_one() -> None:
    """Kill a worker process of this one, if there is any."""
    for child in children():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            if b"penstock.loader.workers.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(child, signal.SIGKILL)
                return


@contextmanager
def _leading(always: bool) -> Iterator[None]:
    before, first_batch.RUNS_BYTES_MIN = first_batch.RUNS_BYTES_MIN, 0 if always else first_batch.RUNS_BYTES_MIN
    try:
        yield
    finally:
        first_batch.RUNS_BYTES_MIN = before


# ── the data, and the pipeline ─────────────────────────────────────────────────────────────────────────────────────────


def _written(case: Case, folder: Path) -> Any:
    """Write a case's data, index and damage; its pipeline."""
    sources, first = [], 0
    for number, (name, sizes, _) in enumerate(case.sources):
        place = folder / f"data{number}"
        place.mkdir()
        sources.append(_source(case, place, name, sizes, first))
        first += sum(sizes)
        if name != "objects":
            index(sources[-1], folder / "index")
    if case.corrupt is not None:
        _damage(folder / "data0", *case.sources[0][:2], case.corrupt[1])
    made = sources[0]
    if len(sources) > 1:
        made = mix({each: share for each, (_, _, share) in zip(sources, case.sources, strict=True)}, stop=case.stop)  # type: ignore[arg-type]
    if case.window is not None:
        made = made.shuffle(case.window, seed=case.seed)
    if case.take is not None:
        made = made.take(case.take)
    if case.entry == "map":
        made = made.map(number_of)
    elif case.entry == "decode":
        made = made.decode(ps.Integer("n"))
    for kind, kept in case.stages:
        made = _with_stage(made, kind, kept)
    made = made.map(_drawing) if case.entry != "plain" else made
    kind, size = case.batch
    if kind == "size":
        made = made.batch_by_size(size, size=_weight, oversize="alone", drop_last=case.drop_last)
    else:
        made = made.batch(**{"n" if kind == "rank" else "global_size": size}, drop_last=case.drop_last)
    return made.evaluate() if case.evaluates else made


def _source(case: Case, place: Path, name: str, sizes: tuple[int, ...], first: int) -> Any:
    for shard, size in enumerate(sizes):
        numbers = range(first, first + size)
        first += size
        if name == "objects":
            for number in numbers:
                (place / f"{number:06d}.n").write_text(str(number))
            continue
        samples = [{"__key__": f"s{number:05d}", "n": b"%06d" % number} for number in numbers]
        (place / f"s-{shard:03d}.{name}").write_bytes(formatted(name, samples))
    if name == "objects":
        return objects(f"{place}/", group_by="stem")
    return ps.shards(f"{place}/", on_corrupt=case.corrupt[0] if case.corrupt is not None else "raise")  # type: ignore[arg-type]


def _damage(place: Path, name: str, sizes: tuple[int, ...], number: int) -> None:
    """Damage one sample, in the same version of its shard: nothing but its bytes tells."""
    shard, first = 0, 0
    while number >= first + sizes[shard]:
        first += sizes[shard]
        shard += 1
    path = place / f"s-{shard:03d}.{name}"
    data, before = bytearray(path.read_bytes()), path.stat()
    if name == "jsonl":
        data[data.index(b'{"n":%d}' % number)] = ord("[")
    elif name == "recordio":
        at = data.index(b"%06d" % number) - 8
        data[at : at + 4] = bytes(4)  # its magic
    else:
        data[data.index(b"%06d" % number)] ^= 0xFF
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _number(sample: dict[str, Any]) -> int:
    return int(sample["cls"] if "cls" in sample else sample["n"])


def _weight(sample: dict[str, Any]) -> int:
    return weight(Kept(_number(sample), 0, 0))


def _drawing(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "drawn": int(rng.integers(1 << 40))}


def _with_stage(made: Any, kind: str, kept: str) -> Any:
    if kind == "flat_map":
        return made.flat_map(lambda sample: [sample] * (_number(sample) % 3))
    keeps = KEPT[kept]

    def fails(sample: dict[str, Any]) -> bool:
        if not keeps(_number(sample)):
            raise ValueError(kept)
        return True

    if kind == "fail":
        return made.filter(fails, max_errors=1_000_000)
    return made.filter(lambda sample: keeps(_number(sample)), refill=kind == "refill")
