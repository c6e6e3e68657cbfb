"""Where an epoch stands, as a small dict, and what a job must have in common with it to go on.

With an index, a state is about the job and the same on every rank: it holds at any world size that divides the lanes.
Without one it is about the lanes of one rank, and holds at the same world size only. The seed, the epoch, the position,
the lanes and the window make the order; the rest is there to notice that something else changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias

from penstock.errors import ConfigError
from penstock.order.bounds import check_ranges
from penstock.order.indexed import SAMPLES_MAX
from penstock.order.permutation import ORDER_VERSION
from penstock.order.progress import HandedOut
from penstock.order.weights import Weights

OrderMode: TypeAlias = Literal["index", "stream"]


def dataset_digest(shards: Iterable[Sequence[str | int | None]]) -> str:
    """What a data set is, in 32 hexadecimal digits: equal lists of shards have equal digests.

    Args:
        shards: Of each, in listed order, what makes it what it is: its key, then its size in bytes, samples or ETag as
            far as they are known. Of a mix, all sources' lists, each under a first entry of its own.
    """
    digest = hashlib.blake2b(digest_size=16)
    for shard in shards:
        digest.update(json.dumps(list(shard), ensure_ascii=False, separators=(",", ":")).encode())
        digest.update(b"\n")
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneState:
    """Where a lane without an index stands: in the run that begins at a byte of a shard.

    Attributes:
        lane: Its number.
        shard: Of the listing; the shard in which the run begins.
        offset_bytes: In that shard, of the run's first sample.
        run_index: From 0 in the epoch.
        emitted: Samples of the run that were handed out.
        taken: Samples of the lane that were handed out in the epoch, those of the run included.
    """

    lane: int
    shard: int
    offset_bytes: int
    run_index: int
    emitted: int
    taken: int

    def __post_init__(self) -> None:
        for name in _names(LaneState):
            check_ranges((name, _whole(name, getattr(self, name)), 0, SAMPLES_MAX))


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderState:
    """Where an epoch stands: what was handed out, never what was prefetched.

    Attributes:
        mode: With an index or without; a job keeps the mode that it began with.
        seed: Of the order.
        epoch: From 0.
        position: The first position that was not handed out, where batches come in order.
        lanes: L. A job without shuffling that did not say it has one for each rank it began with.
        window: Of the order.
        dataset: See ``dataset_digest``.
        global_size: G of the batches counted in `handed_out`, which begin at `position`.
        handed_out: ``HandedOut.as_json()`` where batches come in any order.
        weights: ``Weights.as_json()`` of a mix, its whole history.
        world_size: Of the ranks; binds without an index only.
        rank: That a state without an index belongs to.
        lane_states: Of that rank's lanes.
        version: ORDER_VERSION that made the sequence.

    Raises:
        ConfigError: A number that is none, or out of range.
    """

    mode: OrderMode
    seed: int
    epoch: int
    position: int
    lanes: int
    window: int
    dataset: str
    global_size: int | None = None
    handed_out: HandedOut | None = None
    weights: tuple[Weights, ...] = ()
    world_size: int = 1
    rank: int = 0
    lane_states: tuple[LaneState, ...] = ()
    version: int = ORDER_VERSION

    def __post_init__(self) -> None:
        if self.mode not in ("index", "stream") or not isinstance(self.dataset, str):
            raise ConfigError(f"mode {self.mode!r}, dataset {self.dataset!r:.80}: this is no state of an order")
        for name in ("version", "seed", "epoch", "position", "lanes", "window", "world_size", "rank"):
            low = 1 if name in ("version", "lanes", "window", "world_size") else 0
            check_ranges((name, _whole(name, getattr(self, name)), low, (1 << 64) - 1))
        if self.global_size is not None:
            check_ranges(("global_size", _whole("global_size", self.global_size), 1, SAMPLES_MAX))

    def as_dict(self) -> dict[str, Any]:
        """A dict of JSON's types. What is as in a new state, or of the other mode, is left out."""
        state: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("version", "mode", "seed", "epoch", "position", "lanes", "window", "dataset")
        }
        if self.global_size is not None:
            state["global_size"] = self.global_size
        if self.handed_out is not None:
            state["handed_out"] = self.handed_out.as_json()
        if self.weights:
            state["weights"] = [weights.as_json() for weights in self.weights]
        if self.mode == "stream":
            state |= {"world_size": self.world_size, "rank": self.rank}
            state["lane_states"] = [asdict(lane) for lane in self.lane_states]
        return state

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> OrderState:
        """The inverse of ``as_dict``.

        Raises:
            ConfigError: It is none of its results, or a newer or older penstock with another order wrote it.
        """
        if not isinstance(state, Mapping):
            raise ConfigError(f"{state!r:.80} is no state of an order: it must be a dict")
        if (version := state.get("version")) != ORDER_VERSION:
            raise ConfigError(
                f"the state has order version {version!r}, this penstock {ORDER_VERSION}: the sequences differ",
                hint="resume with the release that wrote it, or begin the epoch again",
            )
        known, needed = set(_names(cls)), {"mode", "seed", "epoch", "position", "lanes", "window", "dataset"}
        if set(state) - known or needed - set(state):
            raise ConfigError(
                f"a state of an order lacks {sorted(needed - set(state))} and does not know {sorted(set(state) - known)}"
            )
        values = dict(state)
        if values.get("handed_out") is not None:
            values["handed_out"] = HandedOut.from_json(values["handed_out"])
        values["weights"] = tuple(Weights.from_json(one) for one in _listed("weights", values.get("weights", ())))
        lanes = _listed("lane_states", values.get("lane_states", ()))
        values["lane_states"] = tuple(_lane_state(lane) for lane in lanes)
        return cls(**values)

    def check(self, job: OrderState, *, accept_changed_data: bool = False) -> None:
        """Refuse to go on where `job`, the state of the job at its beginning, has another order.

        Args:
            job: What this job is: its mode, seed, lanes, window, data set, world size, rank.
            accept_changed_data: Take a data set that changed, knowingly: positions then mean other samples.

        Raises:
            ConfigError: It names what differs, both values, and what to do.
        """
        if self.mode != job.mode:
            raise ConfigError(
                f"the state is of an order {_MODE[self.mode]}, this job has one {_MODE[job.mode]}: the sequences differ",
                hint=f'Loader(index="{"require" if self.mode == "index" else "stream"}")',
            )
        if self.mode == "stream" and (self.world_size, self.rank) != (job.world_size, job.rank):
            raise ConfigError(
                f"the state is of rank {self.rank} of {self.world_size}, this is rank {job.rank} of {job.world_size}: "
                "without an index a state holds at its own world size only",
                hint="run `penstock index` before a job that changes its world size",
            )
        for name in ("seed", "lanes", "window"):
            if getattr(self, name) != getattr(job, name):
                raise ConfigError(
                    f"the state has {name} {getattr(self, name)}, this job {getattr(job, name)}: the sequences differ",
                    hint=f"{name}={getattr(self, name)}",
                )
        if self.dataset != job.dataset and not accept_changed_data:
            raise ConfigError(
                f"the state is of another data set ({self.dataset}, this one is {job.dataset}): its list of shards changed",
                hint="resume on the same shards, or accept that the order changes: accept_changed_data=True",
            )
        if self.handed_out is not None and self.handed_out.higher and self.global_size != job.global_size:
            raise ConfigError(
                f"the state has batches of {self.global_size} handed out of order, this job has batches of "
                f"{job.global_size}",
                hint=f"global_size={self.global_size} until the epoch ends",
            )


_MODE = {"index": "with an index", "stream": "without an index"}


def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _whole(name: str, value: Any) -> int:
    if type(value) is not int:
        raise ConfigError(f"{name} {value!r:.80} of a state must be a whole number")
    return value


def _listed(name: str, value: Any) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{name} {value!r:.80} of a state must be a list")
    return value


def _lane_state(value: Any) -> LaneState:
    if not isinstance(value, Mapping) or set(value) != set(_names(LaneState)):
        raise ConfigError(f"lane {value!r:.80} of a state must have {', '.join(_names(LaneState))}")
    return LaneState(**value)
