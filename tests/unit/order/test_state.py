from __future__ import annotations

import json
from dataclasses import replace

import pytest

from penstock.errors import ConfigError
from penstock.order import ORDER_VERSION, HandedOut, LaneState, OrderState, Weights, dataset_digest

INDEXED = OrderState(
    mode="index", seed=2**64 - 1, epoch=3, position=4096, lanes=64, window=16384, dataset="ab", global_size=1024,
    weights=(Weights((1, (2, (1, 1)))), Weights((0, (1, (0, 1))), 3, 2048)),
)  # fmt: skip
STREAM = OrderState(
    mode="stream", seed=1, epoch=0, position=7, lanes=4, window=64, dataset="cd", world_size=2, rank=1,
    lane_states=(LaneState(lane=1, shard=3, offset_bytes=10240, run_index=2, emitted=5, taken=37),),
)  # fmt: skip


@pytest.mark.parametrize("state", [INDEXED, STREAM])
def test_states_survive_json(state):
    """What comes back from JSON is equal, to the last bit of the seed."""
    assert OrderState.from_dict(json.loads(json.dumps(state.as_dict()))) == state


def test_the_form_is_pinned():
    """A state is small, and old ones stay readable."""
    assert INDEXED.as_dict() == {
        "version": 1, "mode": "index", "seed": 2**64 - 1, "epoch": 3, "position": 4096, "lanes": 64, "window": 16384,
        "dataset": "ab", "global_size": 1024,
        "weights": [[0, 0, [1, [2, [1, 1]]]], [3, 2048, [0, [1, [0, 1]]]]],
    }  # fmt: skip
    assert STREAM.as_dict()["lane_states"] == [
        {"lane": 1, "shard": 3, "offset_bytes": 10240, "run_index": 2, "emitted": 5, "taken": 37}
    ]


def test_batches_handed_out_of_order_are_kept():
    """The lowest that was not handed out, and the higher ones that were."""
    state = replace(INDEXED, handed_out=HandedOut(3, [5, 9]))
    back = OrderState.from_dict(json.loads(json.dumps(state.as_dict())))
    assert back.handed_out.as_json() == [3, [5, 9]]


def test_with_an_index_any_world_size_goes_on():
    """Rank and world size are not part of where the job stands."""
    INDEXED.check(replace(INDEXED, world_size=8, rank=5, position=0, epoch=0, global_size=512))


@pytest.mark.parametrize(
    ("state", "changed", "message"),
    [
        (INDEXED, {"seed": 1}, r"has seed 18446744073709551615, this job 1.*seed=18446744073709551615$"),
        (INDEXED, {"lanes": 8}, r"has lanes 64, this job 8.*lanes=64$"),
        (INDEXED, {"window": 1}, r"has window 16384, this job 1"),
        (INDEXED, {"mode": "stream"}, r'with an index, this job has one without an index.*index="require"'),
        (STREAM, {"mode": "index"}, r'without an index, this job has one with an index.*index="stream"'),
        (INDEXED, {"dataset": "xy"}, r"another data set \(ab, this one is xy\).*accept_changed_data=True$"),
        (STREAM, {"world_size": 4}, r"rank 1 of 2, this is rank 1 of 4.*penstock index"),
        (STREAM, {"rank": 0}, r"rank 1 of 2, this is rank 0 of 2"),
    ],
)
def test_another_order_is_refused(state, changed, message):
    """The error names what differs, both values, and the way out."""
    with pytest.raises(ConfigError, match=message):
        state.check(replace(state, **changed))


def test_another_data_set_is_taken_knowingly():
    """With the flag the list of shards may differ, and nothing else."""
    INDEXED.check(replace(INDEXED, dataset="xy"), accept_changed_data=True)
    with pytest.raises(ConfigError, match="seed"):
        INDEXED.check(replace(INDEXED, dataset="xy", seed=1), accept_changed_data=True)


def test_batches_out_of_order_bind_their_size():
    """Numbers of batches mean nothing with another G."""
    state = replace(INDEXED, handed_out=HandedOut(0, [2]))
    with pytest.raises(ConfigError, match=r"batches of 1024 handed out of order.*batches of 512"):
        state.check(replace(INDEXED, global_size=512))
    replace(INDEXED, handed_out=HandedOut(2)).check(replace(INDEXED, global_size=512))


@pytest.mark.parametrize("version", [None, 0, ORDER_VERSION + 1, "1"])
def test_another_version_is_refused(version):
    """A state of another sequence is never taken for this one's."""
    with pytest.raises(ConfigError, match="order version"):
        OrderState.from_dict({**INDEXED.as_dict(), "version": version})


@pytest.mark.parametrize(
    "damage",
    [
        {"seed": "1"}, {"seed": -1}, {"epoch": 1.0}, {"position": None}, {"lanes": 0}, {"window": True}, {"mode": "x"},
        {"dataset": 3}, {"weights": 3}, {"weights": [3]}, {"handed_out": "x"}, {"lane_states": [{}]}, {"more": 1},
        {"lane_states": [3]}, {"lane_states": "x"}, {"global_size": 0}, {"global_size": "8"},
        {"lane_states": [dict.fromkeys(("lane", "shard", "offset_bytes", "run_index", "emitted", "taken"), -1)]},
    ],
)  # fmt: skip
def test_damage_is_refused(damage):
    """A state that was cut, edited or belongs to something else is a ConfigError, not a crash."""
    with pytest.raises(ConfigError):
        OrderState.from_dict({**INDEXED.as_dict(), **damage})


def test_what_is_no_state_is_refused():
    """Neither nothing nor half of a state is one."""
    with pytest.raises(ConfigError, match="must be a dict"):
        OrderState.from_dict([1])
    with pytest.raises(ConfigError, match=r"lacks \['seed'\]"):
        OrderState.from_dict({name: value for name, value in INDEXED.as_dict().items() if name != "seed"})


def test_digests_tell_data_sets_apart():
    """Another key, size, count, ETag, order or number of shards is another data set; the digest is pinned."""
    shards = [("a.tar", 10, 3, '"x"'), ("b.tar", None, None, None)]
    other = [
        shards[:1], shards[::-1], [("a.tar", 11, 3, '"x"'), shards[1]], [("a.tar", 10, 4, '"x"'), shards[1]],
        [("a.tar", 10, 3, '"y"'), shards[1]], [("ä.tar", 10, 3, '"x"'), shards[1]], [("a.tar", "10", 3, '"x"'), shards[1]],
        [("a.tar",), (10, 3, '"x"'), shards[1]], [],
    ]  # fmt: skip
    digests = [dataset_digest(one) for one in (shards, *other)]
    assert len(set(digests)) == len(digests)
    assert digests[0] == GOLDEN_DIGEST


GOLDEN_DIGEST = "40a7af2baac4baac4cd79b97a8cc9214"
