from __future__ import annotations

import json
import pickle
from collections import Counter
from fractions import Fraction

import pytest

from penstock.errors import ConfigError
from penstock.order import IndexedOrder, MixedSource, MixOrder, MixWeights, key_of

TWO = (MixedSource(samples=[7, 0, 5], window=8), MixedSource(samples=[4, 2], window=8))


def mixed(weights=(2, 1), **job):
    return MixOrder(**{"sources": TWO, "history": (MixWeights(weights),), "lanes": 4, **job})


def places(order):
    return [tuple(order.locate(p)) for p in range(order.samples_count)]


def test_a_small_mix_is_pinned():
    """The whole epoch of two sources on 4 lanes: source, shard, sample, position by position."""
    assert places(mixed(seed=42, epoch=1)) == GOLDEN_STOP
    assert places(mixed(seed=42, epoch=1, stop="first")) == GOLDEN_FIRST
    assert places(mixed((1, 3), seed=42, epoch=1, stop="repeat", epoch_samples=18)) == GOLDEN_REPEAT


GOLDEN_STOP = [
    (0, 2, 0),
    (1, 0, 2),
    (0, 0, 1),
    (0, 2, 3),
    (0, 2, 1),
    (0, 0, 5),
    (1, 0, 0),
    (0, 2, 4),
    (1, 1, 0),
    (0, 0, 4),
    (0, 0, 2),
    (1, 1, 1),
    (0, 2, 2),
    (1, 0, 1),
    (0, 0, 3),
    (0, 0, 0),
    (1, 0, 3),
    (0, 0, 6),
]
GOLDEN_FIRST = [
    (0, 2, 0),
    (1, 0, 2),
    (0, 0, 1),
    (0, 2, 3),
    (0, 2, 1),
    (0, 0, 5),
    (1, 0, 0),
    (0, 2, 4),
    (1, 1, 0),
    (0, 0, 4),
    (0, 0, 2),
    (1, 1, 1),
    (0, 2, 2),
    (1, 0, 1),
    (0, 0, 3),
    (0, 0, 0),
]
GOLDEN_REPEAT = [
    (0, 2, 0),
    (1, 0, 2),
    (1, 0, 0),
    (1, 1, 1),
    (1, 1, 0),
    (0, 0, 5),
    (1, 0, 3),
    (1, 0, 0),
    (1, 0, 3),
    (1, 0, 1),
    (0, 0, 1),
    (1, 1, 0),
    (0, 2, 1),
    (1, 0, 1),
    (1, 0, 3),
    (1, 0, 1),
    (1, 1, 1),
    (0, 0, 4),
]


def test_a_large_mix_is_pinned():
    """Positions far into a mix of large sources, with weights that change."""
    sources = tuple(MixedSource(samples=[1000] * n, window=1 << 14) for n in (3000, 500, 2000))
    history = (MixWeights((5, 0.5, 1.5)), MixWeights((1, 1.5, 0.5), 0, 1_000_000))
    order = MixOrder(sources=sources, history=history, seed=3)
    assert order.samples_count == 5_500_000
    assert [tuple(order.locate(p)) for p in (0, 999_999, 1_000_000, 3_333_333, 5_499_999)] == GOLDEN_PLACES
    assert [order.taken(lane, 20_000) for lane in (0, 63)] == GOLDEN_TAKEN


GOLDEN_PLACES = [(0, 571, 793), (0, 702, 614), (1, 368, 302), (0, 1614, 557), (2, 995, 486)]
GOLDEN_TAKEN = [(12621, 3307, 4072), (12620, 3304, 4076)]


def test_a_mix_of_one_is_its_source():
    """One source gives the order that it has alone, under the seed that the mix derives for it."""
    for stop in ("all", "repeat"):
        order = mixed((3,), sources=TWO[:1], seed=9, epoch=2, stop=stop)
        alone = IndexedOrder(samples=[7, 0, 5], window=8, lanes=4, seed=key_of(4, 9, 0), epoch=2)
        assert places(order) == [tuple(alone.locate(p)) for p in range(12)]


@pytest.mark.parametrize("stop", ["all", "repeat"])
def test_epochs_have_every_sample(stop):
    """Stopping: each once. Repeating: each at least once, and an epoch ends at a multiple of L."""
    order = mixed(stop=stop)
    every = {(s, shard, k) for s, source in enumerate(TWO) for shard, n in enumerate(source.samples) for k in range(n)}
    seen = Counter(places(order))
    assert set(seen) == every
    assert (max(seen.values()) == 1) == (stop == "all")
    assert stop == "all" or order.samples_count % 4 == 0


def test_first_ends_before_a_source_lacks_a_sample():
    """The epoch is a multiple of L, no sample comes twice, and one more row would need one that is not there."""
    order = mixed(sources=(MixedSource(samples=[64 * 50]), MixedSource(samples=[64 * 10])), stop="first", lanes=64)
    assert order.samples_count % 64 == 0
    assert max(Counter(places(order)).values()) == 1
    assert 64 * 10 * 3 - 64 * 6 < order.samples_count <= 64 * 10 * 3


def test_a_source_smaller_than_the_lanes_repeats_in_all_of_them():
    """Every lane needs one of its samples: it is laid out several times, each sample equally often."""
    order = mixed(
        sources=(MixedSource(samples=[3]), MixedSource(samples=[40])), stop="repeat", epoch_samples=400, lanes=8
    )
    seen = Counter(place for place in places(order) if place[0] == 0)
    assert sum(seen.values()) == pytest.approx(400 * 2 / 3, abs=6)
    assert max(seen.values()) - min(seen.values()) < 12


def test_a_source_without_weight_comes_when_it_is_alone():
    """Stopping leaves nothing out: what weighs nothing comes when the others have ended."""
    order = [place[0] for place in places(mixed((1, 0)))]
    assert order == [0] * 12 + [1] * 6
    repeated = [place[0] for place in places(mixed((1, 0), stop="repeat"))]
    assert repeated == [0] * 12


def test_weights_of_an_earlier_epoch_hold():
    """A change belongs to its epoch and position: later epochs begin with it, earlier ones do not know it."""
    history = (MixWeights((1, 0)), MixWeights((0, 1), 1, 6))
    orders = [mixed(history=history, epoch=epoch) for epoch in range(3)]
    assert [[place[0] for place in places(order)][:9] for order in orders] == [
        [0] * 9, [0] * 8 + [1], [1] * 6 + [0] * 3,
    ]  # fmt: skip


def test_a_later_change_replaces_the_schedule():
    """with_weights drops what was to come after it, and keeps what was before."""
    order = mixed(history=(MixWeights((1, 1)), MixWeights((1, 0), 0, 4), MixWeights((0, 1), 0, 8)))
    changed = order.with_weights((1, 2), position=6)
    assert changed.history == (MixWeights((1, 1)), MixWeights((1, 0), 0, 4), MixWeights((1, 2), 0, 6))
    assert changed.with_weights((3, 3), position=6).history[2:] == (MixWeights((3, 3), 0, 6),)


def test_mixes_pickle():
    """A mix crosses to a worker process and says the same there."""
    order = mixed(seed=8, epoch=1)
    assert places(pickle.loads(pickle.dumps(order))) == places(order)


def test_lanes_follow_shuffling():
    """64 lanes when a source is shuffled, else as many as ranks."""
    stored = tuple(MixedSource(samples=source.samples, shuffled=False) for source in TWO)
    assert mixed(lanes=None).lanes_count == 64
    assert mixed(lanes=None, sources=stored, world_size=2).lanes_count == 2
    assert [place[1:] for place in places(mixed(lanes=None, sources=stored)) if place[0] == 0] == [
        (shard, k) for shard, n in enumerate(TWO[0].samples) for k in range(n)
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sources": ()}, "at least one source"),
        ({"history": ()}, "at least one source, and weights"),
        ({"history": (MixWeights((1, 1, 1)),)}, "3 weights for 2 sources"),
        ({"history": (MixWeights((1, 1), 0, 4),)}, "must ascend, starting"),
        ({"history": (MixWeights((1, 1)), MixWeights((1, 2)))}, "must ascend, starting"),
        ({"stop": "never"}, "stop='never' must be"),
        ({"epoch_samples": 10}, "needs stop='repeat', not 'all'"),
        ({"epoch_samples": 0, "stop": "repeat"}, "epoch_samples 0 must be in"),
        ({"world_size": 3}, r"world_size 3 does not divide lanes 4"),
        ({"sources": (TWO[0], MixedSource(samples=[0]))}, r"samples 0 must be in \[1,"),
        ({"history": (MixWeights((1, 9)),), "stop": "first", "lanes": 16}, "too few samples for 16 lanes"),
        ({"lanes": 1 << 17}, "lanes 131072 must be in"),
    ],
)
def test_what_cannot_be_mixed_is_refused(wrong, message):
    """Each error names the value and the bound."""
    with pytest.raises(ConfigError, match=message):
        mixed(**wrong)


def test_places_that_do_not_exist_are_refused():
    """Positions, lanes and sources beyond the mix are the caller's mistake."""
    order = mixed()
    with pytest.raises(ConfigError, match=r"position 18 must be in \[0, 17\]"):
        order.locate(18)
    with pytest.raises(ConfigError, match=r"lane 4 must be in"):
        order.taken(4, 0)
    with pytest.raises(ConfigError, match=r"source 2 must be in"):
        order.source_at(2, 0, 0)


def test_an_empty_epoch_names_the_argument_of_mix():
    """The hint of the error names an argument that users pass, with values that it accepts."""
    with pytest.raises(ConfigError) as caught:
        mixed(history=(MixWeights((1, 9)),), stop="first", lanes=16)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith('ps.mix(stop="all") or "repeat"')


def test_shares_are_of_the_active_sources():
    """What has ended leaves its share to the others, in their proportions."""
    weights = MixWeights((1, 1, 2))
    assert weights.sources_count == 3
    assert weights.shares([True] * 3) == [Fraction(1, 4), Fraction(1, 4), Fraction(1, 2)]
    assert weights.shares([True, False, True]) == [Fraction(1, 3), 0, Fraction(2, 3)]
    assert weights.shares([False] * 3) == [0, 0, 0]


def test_whoever_is_left_comes():
    """Where all that is left weighs nothing, it shares equally."""
    assert MixWeights((1, 0, 0)).shares([False, True, True]) == [0, Fraction(1, 2), Fraction(1, 2)]


def test_weights_survive_json():
    """A state has them as lists; they come back equal."""
    weights = MixWeights((0.1, 2, 0), 3, 640)
    assert MixWeights.from_json(json.loads(json.dumps(weights.as_json()))) == weights
    assert weights.as_json() == [3, 640, [0.1, 2, 0]]


@pytest.mark.parametrize(
    "entries",
    [(), (0, 0), (1, -1), (1, float("nan")), (float("inf"),), "ab", 3, (True,), (1, (2, (1,))), None],
)
def test_what_is_no_weight_is_refused(entries):
    """Negative, infinite, missing, not numbers or all zero: the error shows it."""
    with pytest.raises(ConfigError, match="weight"):
        MixWeights(entries)


@pytest.mark.parametrize("value", [None, [], [0, 0], [0.0, 0, [1]], [0, "0", [1]], [0, -1, [1]]])
def test_what_is_no_state_of_weights_is_refused(value):
    """A damaged state is the caller's mistake, not a crash."""
    with pytest.raises(ConfigError):
        MixWeights.from_json(value)
