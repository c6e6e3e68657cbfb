"""What a job must give, in plain lists, one sample at a time: independent of the loader, on ``penstock.order`` alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate, count
from typing import NamedTuple

import numpy as np

from fuzzing.case import EPOCHS, KEPT, Case
from penstock.order import IndexedOrder, MixedSource, MixOrder, MixWeights, StreamOrder

RANDOM_STREAM = 0x70656E73746F636B  # "penstock", the highest word of a sample's Philox counter


class Kept(NamedTuple):
    """A sample that a rank gets."""

    number: int
    position: int
    drawn: int


class Batch(NamedTuple):
    """A batch of a rank.

    Attributes:
        epoch: From 0.
        rows: Those that only pad included.
        is_masked: Whether it says which rows count.
        kept: Samples in the rows that count, in order.
        number: In the rank's epoch, those included that are not given, from where the job began or went on.
        end: Position in the epoch behind it, where an index tells.
    """

    epoch: int
    rows: int
    is_masked: bool
    kept: tuple[Kept, ...]
    number: int
    end: int


def whole_job(case: Case) -> list[list[Batch]]:
    """By rank, the batches of all epochs."""
    ranks: list[list[Batch]] = [[] for _ in range(case.worlds[0])]
    for epoch in range(EPOCHS):
        for batches, found in zip(ranks, _epoch(case, epoch, case.worlds[0], origin=0), strict=True):
            batches += found
    return ranks


def batches_count(case: Case) -> int:
    """Batches of a whole epoch, where an index tells: those included that are not given, because nothing of them is left."""
    count, size = len(_indexed(replace(case, reweighted=None), 0)), case.global_size(case.worlds[0])
    count = count if case.take is None else min(count, case.take)
    return count // size if case.drop_last and not case.evaluates else -(-count // size)


def rest_of_job(case: Case, whole: list[list[Batch]]) -> list[list[Batch]]:
    """By rank of the second world, what is left behind the stop."""
    if not case.is_indexed or case.carries or not case.is_ordered:
        return [batches[case.stopped :] for batches in whole]
    last = whole[0][case.stopped - 1]
    ranks: list[list[Batch]] = [[] for _ in range(case.worlds[1])]
    for epoch in range(last.epoch, EPOCHS):
        origin = last.end if epoch == last.epoch else 0
        for batches, found in zip(ranks, _epoch(case, epoch, case.worlds[1], origin=origin), strict=True):
            batches += found
    return ranks


def _epoch(case: Case, epoch: int, world_size: int, *, origin: int) -> list[list[Batch]]:
    """By rank, the batches of an epoch."""
    if not case.is_indexed:
        samples = [_streamed(case, epoch, rank, world_size) for rank in range(world_size)]
        cut = [each[: case.take] for each in samples]
        return _in_step(case, epoch, [_by_count(case, epoch, each) for each in cut], cut)
    every = _indexed(case, epoch)
    stop = len(every) if case.take is None else min(case.take, len(every))
    if case.carries:
        owned = [every[:stop][rank::world_size] for rank in range(world_size)]
        return _in_step(case, epoch, [_by_count(case, epoch, each) for each in owned], owned)
    return _counted(case, epoch, every[:stop], world_size, origin)


def _counted(case: Case, epoch: int, every: list[tuple[int, int]], world_size: int, origin: int) -> list[list[Batch]]:
    """Global batch k is G positions; rank r of W has those with p mod W = r."""
    size, stop = case.global_size(world_size), len(every)
    drops = case.drop_last and not case.evaluates
    if drops:
        stop -= max(0, stop - origin) % size
    masks = case.evaluates or (world_size > 1 and (not drops or case.may_drop))
    ranks: list[list[Batch]] = [[] for _ in range(world_size)]
    for number, first in enumerate(range(origin, stop, size)):
        end = min(first + size, stop)
        rows = -(-(end - first) // world_size)
        for rank in range(world_size):
            positions = [each for each in every[first:end] if each[1] % world_size == rank]
            kept = tuple(_outs(case, epoch, positions))
            if masks:
                ranks[rank].append(Batch(epoch, rows, True, kept, number, end))
            elif kept:
                ranks[rank].append(Batch(epoch, len(kept), False, kept, number, end))
    return ranks if _outs(case, epoch, every) else [[] for _ in ranks]


def _by_count(case: Case, epoch: int, samples: list[tuple[int, int]]) -> list[list[Kept]]:
    """A rank's samples in batches, where nobody knows beforehand how many there are."""
    drops = case.drop_last and not case.evaluates
    kind, size = case.batch
    size = size // case.worlds[0] if kind == "global" else size
    if not case.carries:
        groups = [samples[at : at + size] for at in range(0, len(samples), size)]
        return [_outs(case, epoch, group) for group in groups if len(group) == size or not drops]
    outs = _outs(case, epoch, samples)
    if kind != "size":
        made = [outs[at : at + size] for at in range(0, len(outs), size)]
        return [group for group in made if len(group) == size or not drops]
    made = []
    for out in outs:
        if not made or sum(map(weight, made[-1])) + weight(out) > size:
            made.append([])
        made[-1].append(out)
    return made[:-1] if drops else made


def weight(out: Kept) -> int:
    """What a sample counts where batches are made by size."""
    return out.number % 7


def _in_step(
    case: Case, epoch: int, ranks: list[list[list[Kept]]], samples: list[list[tuple[int, int]]]
) -> list[list[Batch]]:
    """Ranks that end together, as they find out on the way."""
    world_size = len(ranks)
    drops = case.drop_last and not case.evaluates
    pads = case.evaluates or (world_size > 1 and not drops)
    masks = pads or (world_size > 1 and case.may_drop and not case.carries)
    batches_count = max(map(len, ranks)) if pads else min(map(len, ranks))
    if not any(_outs(case, epoch, each) for each in samples):
        batches_count = 0
    kind, size = case.batch
    size = size // world_size if kind == "global" else size
    found = []
    for groups in ranks:
        batches = []
        for number in range(batches_count):
            kept = tuple(groups[number]) if number < len(groups) else ()
            if masks:
                rows = size if kind != "size" else max(1, len(kept))
                batches.append(Batch(epoch, rows, True, kept, number, 0))
            elif kept:
                batches.append(Batch(epoch, len(kept), False, kept, number, 0))
        found.append(batches)
    return found


def _outs(case: Case, epoch: int, samples: list[tuple[int, int]]) -> list[Kept]:
    """What comes out of the stages, of numbers at positions; a number of -1 is a sample that was lost."""
    seed = case.seed if case.is_shuffled else 0
    return [
        Kept(number, position, drawn(seed, epoch, position, copy))
        for number, position in samples
        if number >= 0
        for copy in _copies(case.stages, number, 0, count(1))
    ]


def _copies(stages: tuple[tuple[str, str], ...], number: int, copy: int, numbers: Iterator[int]) -> Iterator[int]:
    """Numbers of what comes out of `stages` for one sample: ``flat_map`` counts what it makes, from 1."""
    if not stages:
        yield copy
        return
    (kind, kept), *rest = stages
    if kind != "flat_map":
        if KEPT[kept](number):
            yield from _copies(tuple(rest), number, copy, numbers)
        return
    for _ in range(number % 3):
        yield from _copies(tuple(rest), number, next(numbers), numbers)


def drawn(seed: int, epoch: int, position: int, copy: int) -> int:
    """The first number of a sample's own random stream."""
    bits = np.random.Philox(counter=[0, copy, position, RANDOM_STREAM], key=np.array([seed, epoch], np.uint64))
    return int(np.random.Generator(bits).integers(1 << 40))


def _indexed(case: Case, epoch: int) -> list[tuple[int, int]]:
    """Number and position, position by position."""
    order: IndexedOrder | MixOrder
    window, lanes, shares = case.window or 1, case.lanes, [share for _, _, share in case.sources]
    if lanes is None and not case.is_shuffled:
        lanes = case.worlds[0]
    counts = [sizes if name != "objects" else (1,) * sum(sizes) for name, sizes, _ in case.sources]
    if len(counts) == 1:
        order = IndexedOrder(
            samples=counts[0], window=window, shuffled=case.is_shuffled, seed=case.seed if case.is_shuffled else 0,
            epoch=epoch, lanes=lanes,
        )  # fmt: skip
    else:
        order = MixOrder(
            sources=tuple(
                MixedSource(samples=each, window=max(1, window // len(counts)), shuffled=case.is_shuffled)
                for each in counts
            ),
            history=(MixWeights(shares, 0, 0),),
            stop=case.stop,  # type: ignore[arg-type]
            seed=case.seed if case.is_shuffled else 0,
            lanes=lanes,
        )
        change = _change(case)
        if change is not None:
            order = order.at_epoch(change.epoch).with_weights(shares[::-1], position=change.position)
        order = order.at_epoch(epoch)
    firsts = list(accumulate((sum(each) for each in counts), initial=0))
    places = [order.locate(position) for position in range(order.samples_count)]
    numbers = [
        firsts[place.source] + sum(counts[place.source][: place.shard % len(counts[place.source])]) + place.sample
        for place in places
    ]
    lost = case.corrupt[1] if case.corrupt is not None else None
    return [(number if number != lost else -1, position) for position, number in enumerate(numbers)]


class _Change(NamedTuple):
    """The place where the weights of a mix change."""

    epoch: int
    position: int


@cache
def _change(case: Case) -> _Change | None:
    """Where the weights change: before the job, or behind a batch of it; None: never."""
    if not case.reweighted:
        return None if case.reweighted is None else _Change(0, 0)
    before = whole_job(replace(case, reweighted=None))[0][: case.stopped or None]
    if len(before) < case.reweighted:
        return None
    last = before[case.reweighted - 1]
    return _Change(last.epoch, last.end)


def _streamed(case: Case, epoch: int, rank: int, world_size: int) -> list[tuple[int, int]]:
    """Number and position of a rank's samples: the lanes that still have some in turn."""
    shards = list(_stored(case))
    order = StreamOrder(
        shards_count=len(shards), seed=case.seed if case.is_shuffled else 0, epoch=epoch, lanes=case.lanes,
        window=case.window or 1, shuffled=case.is_shuffled, rank=rank, world_size=world_size,
    )  # fmt: skip
    lanes = []
    for lane in order.lanes_owned:
        stored = [number for shard in order.shards_of(lane) for number in shards[shard]]
        left: list[tuple[int, int]] = []
        run_index = 0
        while len(left) < len(stored):
            run = stored[len(left) : len(left) + order.run_length(lane, run_index)]
            for index in order.permute_run(lane, run_index, len(run)):
                left.append((run[index], len(left) * order.lanes_count + lane))
            run_index += 1
        lanes.append(left)
    return [lane[turn] for turn in range(max(map(len, lanes))) for lane in lanes if turn < len(lane)]


def _stored(case: Case) -> Iterator[list[int]]:
    """The numbers in each shard that can be read from it."""
    first = 0
    for size in case.sources[0][1]:
        numbers = list(range(first, first + size))
        first += size
        if case.corrupt is not None and case.corrupt[1] in numbers:
            at = numbers.index(case.corrupt[1])
            numbers = numbers[:at] + (numbers[at + 1 :] if case.corrupt[0] == "skip_sample" else [])
        yield numbers
