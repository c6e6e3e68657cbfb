"""How good is a shuffle for the samples that it holds: penstock, WebDataset's buffer, MosaicML's py1e, a true permutation?

The peers are models of what their documentation describes, so that each is measured without files and servers:

* WebDataset, one worker: shards leave a buffer of 100 (or all of them are permuted), samples one of `shuffle(n)`. A random
  element leaves, the next takes its place; the buffer is filled before anything leaves.
* py1e: shards permuted, every sample's place moved by uniform noise as wide as a block of 0.75 to 1.25 times the given
  size, then sorted (one canonical node). Its default block is at least 2**18 samples.

The number of samples held is the most that are between the store and the batch at any time. penstock and WebDataset hold a
window in memory; py1e and the permutation hold whole shards on disk, from the first use to the last. Samples are sorted by
class within shards and across them, which is the worst case.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import numpy.typing as npt
from clients import Function
from harness import arguments

from penstock.bench.turns import Run
from penstock.order import IndexedOrder, StreamOrder

BATCH, CLASSES_COUNT, LAYOUT = 1024, 100, (1000, 1000)  # shards, samples in each
Places = npt.NDArray[np.int64]  # the stored position of each sample, in the order of delivery

METRICS = {
    "held": lambda answer: answer["held"],
    "order kB": lambda answer: answer["order_bytes"] / 1e3,
    "|rank corr|": lambda answer: answer["rank"],
    "in shard": lambda answer: answer["in_shard"],
    "same-shard %": lambda answer: answer["neighbours"] * 100,
    "shards/batch": lambda answer: answer["shards_per_batch"],
    "class skew": lambda answer: answer["skew"],
}


def measured(places: Places, shards: int, *, held: int | None, order_bytes: int) -> dict[str, Any]:
    """Numbers of one order.

    rank: correlation of place and position over the epoch. in_shard: the same among the samples of one shard, mean.
    neighbours: pairs that follow each other and share a shard. skew: half the sum of differences between a batch's
    shares of classes and the data's, mean.
    """
    count = len(places)
    assert np.array_equal(np.sort(places), np.arange(count))
    size = count // shards
    shard, position = places // size, np.empty(count, np.int64)
    position[places] = np.arange(count)
    by_shard = position.reshape(shards, size)
    ranks = np.argsort(np.argsort(by_shard, axis=1), axis=1)
    batches = shard[: count // BATCH * BATCH].reshape(-1, BATCH)
    classes = batches * CLASSES_COUNT // shards
    shares = np.stack([np.bincount(row, minlength=CLASSES_COUNT) for row in classes]) / BATCH
    if held is None:  # whole shards, from first use to last
        begun, ended = np.sort(by_shard.min(axis=1)), np.sort(by_shard.max(axis=1))
        held = int(max(np.arange(1, shards + 1) - np.searchsorted(ended, begun))) * size
    return {
        "held": held,
        "order_bytes": order_bytes,
        "rank": abs(float(np.corrcoef(places, np.arange(count))[0, 1])),
        "in_shard": float(np.mean([np.corrcoef(row, np.arange(size))[0, 1] for row in ranks])),
        "neighbours": float(np.mean(shard[1:] == shard[:-1])),
        "shards_per_batch": float(np.mean([len(np.unique(row)) for row in batches])),
        "skew": float(np.mean(np.abs(shares - 1 / CLASSES_COUNT).sum(axis=1) / 2)),
    }


def indexed(shards: int, size: int, seed: int, window: int, lanes: int) -> dict[str, Any]:
    order = IndexedOrder(samples=[size] * shards, seed=seed, window=window, lanes=lanes)
    places = np.empty(shards * size, np.int64)
    for lane in range(order.lanes_count):
        part = order.locations(lane)
        places[lane :: order.lanes_count] = part.shards * size + part.samples
    return measured(places, shards, held=window, order_bytes=24 * shards)


def streamed(shards: int, size: int, seed: int, window: int) -> dict[str, Any]:
    order, lanes = StreamOrder(shards_count=shards, seed=seed, window=window), {}
    for lane in order.lanes_owned:
        stored = np.concatenate([np.arange(size) + shard * size for shard in order.shards_of(lane)])
        left: list[int] = []
        run_index = 0
        while len(left) < len(stored):
            run = stored[len(left) : len(left) + order.run_length(lane, run_index)]
            left += run[order.permute_run(lane, run_index, len(run))].tolist()
            run_index += 1
        lanes[lane] = left
    rounds = itertools.zip_longest(*lanes.values())
    places = [place for places_of_round in rounds for place in places_of_round if place is not None]
    return measured(np.array(places), shards, held=window, order_bytes=40 * shards)


def buffered(items: Any, held: int, chance: random.Random) -> Any:
    """What leaves a buffer of `held`: a random element, whose place the next one takes."""
    buffer: list[Any] = []
    for item in items:
        if len(buffer) < held:
            buffer.append(item)
            continue
        at = chance.randrange(held)
        yield buffer[at]
        buffer[at] = item
    chance.shuffle(buffer)
    yield from buffer


def webdataset(shards: int, size: int, seed: int, held: int, shards_held: int) -> dict[str, Any]:
    chance = random.Random(seed)
    stored = (shard * size + k for shard in buffered(range(shards), shards_held, chance) for k in range(size))
    return measured(np.fromiter(buffered(stored, held, chance), np.int64), shards, held=held, order_bytes=8 * shards)


def py1e(shards: int, size: int, seed: int, block: int) -> dict[str, Any]:
    chance = np.random.default_rng(seed)
    line = (chance.permutation(shards)[:, None] * size + np.arange(size)).ravel()
    half = np.repeat(block * chance.uniform(0.75, 1.25, shards) / 2, size)
    middle, last = np.arange(len(line)), len(line) - 1
    moved = chance.uniform(np.maximum(middle - half, 0), np.minimum(middle + half, last))
    return measured(line[np.argsort(moved)], shards, held=None, order_bytes=8 * len(line))


def permuted(shards: int, size: int, seed: int) -> dict[str, Any]:
    places = np.random.default_rng(seed).permutation(shards * size)
    return measured(places, shards, held=None, order_bytes=8 * len(places))


class Shuffle(Function):
    """An order that is made anew, under another seed, in each turn."""

    def __init__(self, name: str, function: Any, layout: tuple[int, int], *bounds: int) -> None:
        seeds = iter(range(1000))
        super().__init__(name, lambda: function(*layout, next(seeds), *bounds))


def main(options: Any) -> None:
    layout = (200, 500) if options.quick else LAYOUT
    clients = [
        Shuffle("penstock 16384 (default)", indexed, layout, 16_384, 64),
        Shuffle("penstock 16384, lanes=256", indexed, layout, 16_384, 256),
        Shuffle("penstock 65536", indexed, layout, 65_536, 64),
        Shuffle("penstock without an index", streamed, layout, 16_384),
        Shuffle("webdataset shuffle(1000)", webdataset, layout, 1000, 100),
        Shuffle("webdataset shuffle(16384)", webdataset, layout, 16_384, 100),
        Shuffle("the same, shardshuffle all", webdataset, layout, 16_384, layout[0]),
        Shuffle("py1e block 16384", py1e, layout, 16_384),
        Shuffle("py1e block 2**18 (least)", py1e, layout, 1 << 18),
        Shuffle("permutation", permuted, layout),
    ]
    run = Run(
        f"shuffle of {layout[0]} shards of {layout[1]} samples, batches of {BATCH}",
        None, options.select(clients), METRICS, options.turns(5, 2),
    )  # fmt: skip
    with run:
        run.turns(lambda client: client.measure())
    run.report([])


if __name__ == "__main__":
    main(arguments(__doc__))
