"""The whole sequence of ``IndexedOrder`` and ``MixOrder`` against a reference with lists, written from the definitions."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from math import gcd

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ordering import position_of, run_segments, runs_count
from penstock.errors import ConfigError
from penstock.order import Batches, IndexedOrder, MixedSource, MixOrder, MixWeights, key_of
from penstock.order.permutation import GAMMA, mix

MASK = (1 << 64) - 1
UNITS = 1 << 24
GOLDEN = 6408327  # 0.381966 * 2**24, made odd


# ── the reference: O(samples), lists, no arithmetic beyond the definitions ─────────────────────────────────────────────


def permuted(count, key):
    return sorted(range(count), key=lambda i: mix(key + (i + 1) * GAMMA & MASK))


def naive_lanes(samples, *, seed, epoch, lanes, window, shuffled):
    """Each lane's (shard, sample) in the order in which they leave it."""
    shards, places = list(range(len(samples))), list(range(lanes))
    if shuffled:
        shards, places = permuted(len(samples), key_of(1, seed, epoch)), permuted(lanes, key_of(3, seed, epoch))
    line = [(shard, sample) for shard in shards for sample in range(samples[shard])]
    cut = {}
    at = 0
    for lane in places:
        size = len(range(lane, len(line), lanes))  # positions of this lane
        cut[lane], at = line[at : at + size], at + size
    assert at == len(line)
    return [naive_runs(cut[lane], lane, seed, epoch, lanes, window, shuffled) for lane in range(lanes)]


def naive_runs(stored, lane, seed, epoch, lanes, window, shuffled):
    run, out, run_index = max(1, window // lanes), [], 0
    length = run - lane * run // lanes
    while stored:
        taken, stored = stored[:length], stored[length:]
        order = permuted(len(taken), key_of(2, seed, epoch, lane, run_index)) if shuffled else range(len(taken))
        out += [taken[k] for k in order]
        run_index, length = run_index + 1, run
    return out


def naive_order(samples, **job):
    """Position by position."""
    lanes = naive_lanes(samples, **job)
    return [lanes[p % len(lanes)][p // len(lanes)] for p in range(sum(samples))]


def naive_shares(entries, alive):
    """[(source, share)] by products down the tree; sources numbered from left to right."""
    numbers = itertools.count()

    def numbered(entries):
        return [(e[0], numbered(e[1])) if isinstance(e, tuple) else (e, next(numbers)) for e in entries]

    def living(node):
        return node in alive if isinstance(node, int) else any(living(child) for _, child in node)

    def walk(node, share):
        if isinstance(node, int):
            return [(node, share)]
        here = [(Fraction(weight), child) for weight, child in node if living(child)]
        if not any(weight for weight, _ in here):
            here = [(Fraction(1), child) for _, child in here]
        total = sum(weight for weight, _ in here)
        return [leaf for weight, child in here for leaf in walk(child, share * weight / total)]

    return walk(numbered(entries), Fraction(1)) if alive else []


def naive_mix(mixed):
    """[(source, shard, sample)] of an epoch, lane by lane, sample by sample."""
    lanes, epoch, count = mixed.lanes_count, mixed.epoch, len(mixed.sources)
    totals = [sum(source.samples) for source in mixed.sources]
    copies = [-(-lanes // total) if mixed.stop == "repeat" else 1 for total in totals]
    turned = [sum(n * total for n, total in zip(copies[:i], totals[:i], strict=True)) % lanes for i in range(count)]

    @functools.cache
    def source_lanes(s, pass_index):
        seed = key_of(4, mixed.seed, s)
        samples = list(mixed.sources[s].samples)
        made = naive_lanes(
            samples * copies[s],
            seed=key_of(5, seed, pass_index) if pass_index else seed,
            epoch=epoch, lanes=lanes, window=mixed.sources[s].window, shuffled=mixed.sources[s].shuffled,
        )  # fmt: skip
        return [[(shard % len(samples), k) for shard, k in made[(lane - turned[s]) % lanes]] for lane in range(lanes)]

    near = sorted(range(lanes + 1), key=lambda q: (abs(q - round(lanes * 0.618033988749895)), -q))
    q = next(q for q in near if gcd(q, lanes) == 1) % lanes
    circle = lanes * UNITS
    out, seen = [], [[0] * count for _ in range(lanes)]
    shares, whole = {}, 0  # rows until every source that can be was seen completely
    for row in itertools.count():
        line, weights = [], naive_weights(mixed, row)
        for lane in range(lanes):
            lengths = [len(source_lanes(s, 0)[lane]) for s in range(count)]
            alive = frozenset(s for s in range(count) if mixed.stop != "all" or seen[lane][s] < lengths[s])
            if not alive:
                continue
            if (weights, alive) not in shares:
                shares[weights, alive] = naive_shares(weights, alive)
            point = (q * lane % lanes * UNITS + row * (GOLDEN - q * UNITS)) % circle
            ends = itertools.accumulate(share * circle for _, share in shares[weights, alive])
            source = next(s for (s, _), end in zip(shares[weights, alive], ends, strict=True) if point < int(end))
            index = seen[lane][source]
            seen[lane][source] += 1
            if mixed.stop == "first" and index == lengths[source]:
                return out
            whole = row + 1 if seen[lane][source] == lengths[source] else whole
            pass_index, index = divmod(index, lengths[source])
            line.append((source, *source_lanes(source, pass_index)[lane][index]))
        out += line
        if not line or (mixed.epoch_samples and len(out) >= mixed.epoch_samples):
            return out[: mixed.epoch_samples]
        if mixed.stop == "repeat" and not mixed.epoch_samples and row > 60 and row % 10 == 0:
            lasting = [s for s, share in naive_shares(naive_weights(mixed, 1 << 40), range(count)) if share]
            if all(seen[lane][s] >= len(source_lanes(s, 0)[lane]) for s in lasting for lane in range(lanes)):
                return out[: whole * lanes]
    raise AssertionError


def naive_weights(mixed, row):
    current = None
    for weights in mixed.history:
        if weights.epoch < mixed.epoch or (
            weights.epoch == mixed.epoch and weights.position <= row * mixed.lanes_count
        ):
            current = weights
    return current.entries


# ── random jobs ────────────────────────────────────────────────────────────────────────────────────────────────────────

seeds = st.integers(0, 2**64 - 1)
shard_lists = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)


@st.composite
def indexed(draw):
    world_size = draw(st.integers(1, 4))
    return IndexedOrder(
        samples=draw(st.one_of(shard_lists, st.lists(st.integers(1, 200), min_size=1, max_size=2))),
        seed=draw(seeds),
        epoch=draw(st.integers(0, 100)),
        lanes=world_size * draw(st.integers(1, 5)),
        window=draw(st.integers(1, 80)),
        world_size=world_size,
        shuffled=draw(st.booleans()),
    )


@st.composite
def mixes(draw, stop=None):
    lanes = draw(st.integers(1, 9))
    stop = stop or draw(st.sampled_from(["all", "repeat", "first"]))
    count = draw(st.integers(1, 4))
    sources = tuple(
        MixedSource(samples=draw(shard_lists), window=draw(st.integers(1, 60)), shuffled=draw(st.booleans()))
        for _ in range(count)
    )
    at = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60)), max_size=3))
    history = tuple(MixWeights(draw(entries(count)), *when) for when in sorted({(0, 0), *at}))
    epoch_samples = draw(st.integers(1, 150)) if stop == "repeat" and draw(st.booleans()) else None
    try:
        return MixOrder(
            sources=sources, history=history, stop=stop, epoch_samples=epoch_samples,
            seed=draw(seeds), epoch=draw(st.integers(0, 2)), lanes=lanes,
        )  # fmt: skip
    except ConfigError as error:  # a source too small for "first"
        if stop != "first" or "too few samples" not in str(error):
            raise
        return MixOrder(sources=sources, history=history, lanes=lanes)


@st.composite
def entries(draw, count):
    weights = draw(st.lists(st.sampled_from([0, 0.1, 0.25, 1, 2, 7.5]), min_size=count, max_size=count).filter(any))
    return tuple(weights)


def sequence(order):
    """An order's whole epoch by its vector form, laid out by position."""
    found = {}
    for lane in range(order.lanes_count):
        part = order.locations(lane)
        for index in range(len(part.samples)):
            found[position_of(order, lane, index)] = tuple(part.location(index))
    assert sorted(found) == list(range(order.samples_count))
    return [found[position] for position in range(order.samples_count)]


# ── properties ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(indexed())
@settings(max_examples=120, deadline=None)
def test_an_indexed_order_is_the_reference(order):
    """Every position of the epoch, by lane, by position and by runs, equals the naive reference."""
    expected = naive_order(
        [int(n) for n in order.samples], seed=order.seed, epoch=order.epoch,
        lanes=order.lanes_count, window=order.window, shuffled=order.shuffled,
    )  # fmt: skip
    assert [place[1:] for place in sequence(order)] == expected
    assert [order.locate(p)[1:] for p in range(0, order.samples_count, 7)] == expected[::7]
    assert Counter(expected) == Counter((s, k) for s, n in enumerate(order.samples) for k in range(n))


@given(indexed())
@settings(max_examples=80, deadline=None)
def test_runs_read_segments_and_permute_them(order):
    """What a loader does, segments of a run laid end to end and permuted, gives the lane; no segment is empty."""
    for lane in range(order.lanes_count):
        out = []
        for run_index in range(runs_count(order, lane)):
            segments = run_segments(order, lane, run_index)
            stored = [(s.shard, s.first + k) for s in segments for k in range(s.samples_count)]
            assert all(s.samples_count for s in segments)
            assert len(stored) == order.run_length(lane, run_index)
            assert order.run_start(lane, run_index) == len(out)
            out += [stored[k] for k in order.permute_run(lane, run_index)]
        part = order.locations(lane)
        assert out == list(zip(part.shards.tolist(), part.samples.tolist(), strict=True))
        assert order.run_length(lane, runs_count(order, lane)) == 0


@given(mixes())
@settings(max_examples=200, deadline=None)
def test_a_mix_is_the_reference(mixed):
    """Every position of an epoch equals the naive reference: any weights, nesting, changes, ends, sources."""
    expected = naive_mix(mixed)
    assert sequence(mixed) == expected
    assert [tuple(mixed.locate(p)) for p in range(0, mixed.samples_count, 11)] == expected[::11]


@given(mixes(stop="all"))
@settings(max_examples=80, deadline=None)
def test_a_mix_that_stops_has_every_sample_once(mixed):
    """Whatever the weights and their changes: nothing lost, nothing repeated, lanes equal to within one."""
    every = Counter(
        (s, shard, k)
        for s, source in enumerate(mixed.sources)
        for shard, n in enumerate(source.samples)
        for k in range(n)
    )
    assert Counter(sequence(mixed)) == every


@given(mixes(), st.integers(0, 80), st.data())
@settings(max_examples=100, deadline=None)
def test_a_change_of_weights_leaves_what_was_before_it(mixed, position, data):
    """Up to the change the sequence is as it was; after it every source goes on where it stood."""
    try:
        changed = mixed.with_weights(data.draw(entries(len(mixed.sources))), position=position)
    except ConfigError as error:
        if "too few samples" not in str(error):
            raise
        return
    row = -(-position // mixed.lanes_count)
    kept = min(row * mixed.lanes_count, mixed.samples_count, changed.samples_count)
    assert sequence(mixed)[:kept] == sequence(changed)[:kept]
    if mixed.stop == "all":
        assert Counter(sequence(changed)) == Counter(sequence(mixed))
    elif mixed.stop == "first":
        assert max(Counter(sequence(changed)).values()) == 1


@given(mixes(stop="repeat"))
@settings(max_examples=60, deadline=None)
def test_a_pass_that_repeats_has_every_sample_once(mixed):
    """Of the passes that all lanes have completed, each has every sample of the source once (few samples: equally often)."""
    lanes = range(mixed.lanes_count)
    for source, described in enumerate(mixed.sources):
        every = [(source, shard, k) for shard, n in enumerate(described.samples) for k in range(n)]
        copies = -(-mixed.lanes_count // len(every)) if len(every) < mixed.lanes_count else 1
        mine = []
        for lane in lanes:
            part = mixed.locations(lane)
            places = [tuple(part.location(i)) for i in range(len(part.samples)) if part.sources[i] == source]
            first = mixed.source_at(source, lane, 0)
            length = first.order.lane_length(first.lane)
            mine.append([places[at : at + length] for at in range(0, len(places) - length + 1, length)])
        for passed in zip(*mine, strict=False):
            assert Counter(itertools.chain(*passed)) == Counter(every * copies)


@given(st.one_of(indexed(), mixes()), st.data())
@settings(max_examples=50, deadline=None)
def test_any_world_sizes_hand_out_the_same_sequence(order, data):
    """Stopped at any batch and resumed there with another world size and batch size, ranks give each position once."""
    lanes = order.lanes_count
    divisors = [w for w in range(1, lanes + 1) if lanes % w == 0]
    expected, got, origin = sequence(order), {}, 0
    take = data.draw(st.one_of(st.none(), st.integers(0, order.samples_count + 5)))
    for last in (False, False, True):
        world_size = data.draw(st.sampled_from(divisors))
        ranks = [replace(order, rank=rank, world_size=world_size) for rank in range(world_size)]
        size = world_size * data.draw(st.integers(1, 9))
        plans = [
            Batches(
                samples_count=mine.samples_count, global_size=size, rank=mine.rank,
                world_size=world_size, take=take, origin=origin,
            )
            for mine in ranks
        ]  # fmt: skip
        assert len({len(plan) for plan in plans}) == 1
        steps = len(plans[0]) if last else data.draw(st.integers(0, len(plans[0])))
        for step in range(steps):
            shares = [plan.batch(step) for plan in plans]
            assert len({len(share.positions) for share in shares}) == 1
            for mine, share in zip(ranks, shares, strict=True):
                for position in share.positions[: share.valid_count].tolist():
                    assert position not in got
                    assert position % lanes in mine.lanes_owned
                    got[position] = tuple(mine.locate(position))
            origin = plans[0].position_after(step)
    assert [got[p] for p in sorted(got)] == expected[:take]


@given(mixes(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_lane_is_entered_at_any_row(mixed, data):
    """Reading a lane from any row on gives the tail of reading it from its start."""
    lane = data.draw(st.integers(0, mixed.lanes_count - 1))
    left = mixed.locations(lane)
    whole = [tuple(left.location(i)) for i in range(mixed.lane_length(lane))]
    row = data.draw(st.integers(0, len(whole)))
    count = data.draw(st.integers(0, 20))
    part = mixed.locations(lane, row, count)
    assert [tuple(part.location(i)) for i in range(len(part.samples))] == whole[row : row + count]
    assert mixed.taken(lane, row) == tuple(
        sum(place[0] == source for place in whole[:row]) for source in range(mixed.sources_count)
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 70), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_rows_hold_the_proportions(weights, lanes, epoch):
    """Each row of L positions has each source within one sample of its weight."""
    mixed = MixOrder(
        sources=tuple(MixedSource(samples=[4000]) for _ in weights), history=(MixWeights(weights),),
        stop="repeat", epoch_samples=lanes * 40, lanes=lanes, epoch=epoch,
    )  # fmt: skip
    shares = MixWeights(weights).shares([True] * len(weights))
    rows = list(zip(*(mixed.sources_of(lane, 0, 40).tolist() for lane in range(lanes)), strict=True))
    for row in rows:
        for source, share in enumerate(shares):
            assert abs(row.count(source) - share * lanes) < 1
        assert abs(row.count(0) - shares[0] * lanes) < 1
    flat = [source for row in rows for source in row]
    for start in range(len(flat) - lanes):
        for source, share in enumerate(shares):
            assert abs(flat[start : start + lanes].count(source) - share * lanes) < 3


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_an_epoch_of_one_sample_reaches_every_rank(world_size):
    """Fewer samples than ranks: all ranks have one batch, padded where there is nothing to give."""
    shares = [
        Batches(samples_count=1, global_size=8, rank=rank, world_size=world_size).batch(0) for rank in range(world_size)
    ]
    assert [share.positions.tolist() for share in shares] == [[0]] * world_size
    assert [share.valid_count for share in shares] == [1] + [0] * (world_size - 1)
