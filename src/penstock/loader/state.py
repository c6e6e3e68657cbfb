"""The saved state of a loader: everything that decides which sample comes next, to and from JSON.

``LoaderState.from_json`` checks everything: it refuses a state that was cut short, edited or written by another version, and
names the part that is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from penstock.errors import ConfigError
from penstock.formats import FORMATS
from penstock.loader.position import (
    LANE_BEGIN,
    IndexPosition,
    LanePosition,
    OutOfOrderPosition,
    RebatchedPosition,
    RunStart,
    StreamPosition,
    feed_position,
)
from penstock.loader.statistics import LoaderStatistics
from penstock.order import ORDER_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.loader.position import FeedPosition, Position

STATE_VERSION = 1
_REQUIRED = {"version": int, "order_version": int, "mode": str, "epoch": int, "batches": int, "job": dict, "data": str}
_LANE_COUNTS = ("segment", "offset_bytes", "sample", "run", "before", "emitted")
_COUNT_MAX = (1 << 62) - 1
_COUNTED_MODES = ("index", "sequential")  # their positions are numbers of samples
_HINT = "a state is what loader.state_dict() returned"
_FACTS = {
    "seed": "the seed of .shuffle()",
    "window": "the window of .shuffle()",
    "shuffled": "whether the pipeline shuffles",
    "lanes": "Loader(lanes=)",
    "batch": "the size of .batch()",
    "rank": "the rank",
    "world_size": "the world size",
    "stop": "the stop= of ps.mix()",
    "has_set_weights": "whether set_weights() was called",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """The place of a training loop, and the facts that its order depends on.

    Attributes:
        epoch: Epoch number, from 0.
        batches_count: Number of batches of this epoch that have been handed out.
        mode: ``"index"``, ``"stream"`` or ``"sequential"``; empty if nothing has been read.
        facts: The facts that the order depends on, by name; empty if nothing has been read.
        data_digest: Identity of the data set; empty if nothing has been read.
        position: Position from which reading continues; None is the beginning of the epoch.
        epoch_statistics: The statistics that were passed to ``on_epoch`` for this epoch; None if it was not called.
        pipeline_change: The epoch and the statistics for which ``on_epoch`` returned the current pipeline; None if it did not.
        accepts_changed_data: Whether the epoch begins again if the data set changed; it is not saved.
    """

    epoch: int
    batches_count: int
    mode: str = ""
    facts: Mapping[str, Any]
    data_digest: str = ""
    position: Position | None = None
    epoch_statistics: Mapping[str, Any] | None = None
    pipeline_change: Mapping[str, Any] | None = None
    accepts_changed_data: bool = False

    def to_json(self) -> dict[str, Any]:
        """The state as JSON."""
        return {
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "mode": self.mode,
            "epoch": self.epoch,
            "batches": self.batches_count,
            "job": dict(self.facts),
            "data": self.data_digest,
            "cursor": None if self.position is None else _position_to_json(self.position),
            "on_epoch": self.epoch_statistics,
            "changed": self.pipeline_change,
        }

    @property
    def kept_facts(self) -> Mapping[str, Any]:
        """The facts that a job keeps. At the beginning of an epoch another job may continue, but with weights that were set."""
        if self.position is not None:
            return self.facts
        names = ("weights", "has_set_weights") if self.facts.get("has_set_weights") else ()
        return {name: self.facts[name] for name in names if name in self.facts}

    @classmethod
    def from_json(cls, state: Mapping[str, Any], *, accepts_changed_data: bool = False) -> Self:
        """The state that JSON describes.

        Raises:
            ConfigError: `state` is not a state, or has another version.
        """
        if not isinstance(state, dict):
            raise ConfigError(f"a state is a dict, not {type(state).__name__}", hint=_HINT)
        for name, kind in _REQUIRED.items():
            if not isinstance(state.get(name), kind):
                raise ConfigError(f"the state has {name}={state.get(name)!r}, not {kind.__name__}")
        if state["version"] != STATE_VERSION:
            raise ConfigError(f"the state has version {state['version']}, but this penstock reads {STATE_VERSION}")
        if state["order_version"] != ORDER_VERSION:
            raise ConfigError(
                f"the state was saved in order version {state['order_version']}, but this penstock has {ORDER_VERSION}",
                hint="continue with the version of penstock that saved it, or start at the beginning of an epoch",
            )
        if state["epoch"] < 0 or state["batches"] < 0:
            raise ConfigError(
                f"the state has epoch={state['epoch']}, batches={state['batches']}: neither can be negative"
            )
        change = state.get("changed")
        _check_statistics(state.get("on_epoch"))
        if change is not None:
            _check_statistics(_checked_dict(change, "changed", ("epoch", "statistics"))["statistics"])
        cursor = state.get("cursor", {})
        if (cursor is None and state["batches"]) or (cursor is not None and not state["job"]):
            raise ConfigError(
                f"the state has batches={state['batches']}, cursor={cursor!r:.80}, job={state['job']!r:.80}: "
                "a part of it is missing"
            )
        return cls(
            epoch=state["epoch"],
            batches_count=state["batches"],
            mode=state["mode"],
            facts=state["job"],
            data_digest=state["data"],
            position=None if cursor is None else _position_from_json(cursor, mode=state["mode"]),
            epoch_statistics=state.get("on_epoch"),
            pipeline_change=change,
            accepts_changed_data=accepts_changed_data,
        )

    def check_same_job(self, *, mode: str, facts: Mapping[str, Any]) -> None:
        """Refuse a state that was saved with another order.

        Args:
            mode: Mode of this loader: ``"index"``, ``"stream"`` or ``"sequential"``.
            facts: The facts that its order depends on, by name.

        Raises:
            ConfigError: A fact differs. The message names it; for ranks and world sizes, the hint is to make an index.
        """
        if self.mode != mode:
            raise ConfigError(
                f"the state was saved in mode {self.mode!r}, but this loader reads in mode {mode!r}",
                hint=f"Loader(index={'stream' if self.mode == 'stream' else 'require'!r}): "
                "a run keeps the mode it began with",
            )
        saved = self.facts
        for name, value in facts.items():
            if saved.get(name) == value or (name == "stop" and name not in saved):  # older states have no stop
                continue
            hint = None
            if name in ("rank", "world_size"):
                hint = "without an index each rank resumes its own state, at the same world size: run `penstock index`"
                if isinstance(self.position, RebatchedPosition):
                    hint = (
                        "with refill, flat_map, token_blocks or batch_by_size, each rank resumes its own state, at the "
                        "same world size"
                    )
            raise ConfigError(
                f"the state has {name}={saved.get(name)!r}, but this loader has {name}={value!r}: {_FACTS.get(name, name)}",
                hint=hint,
            )

    def check_same_data(self, digest: str) -> None:
        """Refuse a state that was saved with another data set.

        Raises:
            ConfigError: Shards were added, removed, renamed or rewritten since the state was saved.
        """
        if self.data_digest != digest:
            raise ConfigError(
                f"the data set changed since the state was saved: the digest of its shards was {self.data_digest}, "
                f"and is now {digest}",
                hint="load_state_dict(state, accept_changed_data=True) starts the state's epoch again with the new data",
            )


# ── positions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _position_to_json(position: Position) -> dict[str, Any]:
    base = feed_position(position)
    assert base is not None
    if isinstance(base, IndexPosition):
        cursor: dict[str, Any] = {"position": base.position}
    else:
        lanes = {str(number): _lane_to_json(lane) for number, lane in base.lanes.items()}
        cursor = {"round": base.round_count, "turn": base.turn, "left": base.remaining_count, "lanes": lanes}
    if isinstance(position, RebatchedPosition):
        cursor["skip"] = position.skip_count
        if position.skip_tokens:
            cursor["skip_tokens"] = position.skip_tokens
    elif isinstance(position, OutOfOrderPosition):
        cursor.update(handed=list(position.handed_out), handed_size=position.global_size)
    return cursor


def _lane_to_json(lane: LanePosition) -> dict[str, Any] | None:
    start, given_count = lane
    if start.segment_index is None:
        return None  # nothing of the lane has been read
    return {
        "segment": start.segment_index,
        "format": start.format,
        "etag": start.etag,
        "offset_bytes": start.offset_bytes,
        "sample": start.sample,
        "run": start.run_index,
        "before": start.before_count,
        "emitted": given_count,
    }


def _position_from_json(cursor: Any, *, mode: str) -> Position:
    """The position that JSON describes, in a state of this mode."""
    base: FeedPosition
    if mode in _COUNTED_MODES:
        _checked_dict(cursor, "cursor", ("position",))
        base = IndexPosition(_checked_count(cursor["position"], "cursor['position']"))
    else:
        _checked_dict(cursor, "cursor", ("round", "turn", "left", "lanes"))
        lanes = {
            _lane_number(name): _lane_from_json(entry, f"cursor['lanes'][{name!r}]")
            for name, entry in _checked_dict(cursor["lanes"], "cursor['lanes']").items()
        }
        left = cursor["left"]
        base = StreamPosition(
            round_count=_checked_count(cursor["round"], "cursor['round']"),
            turn=_checked_count(cursor["turn"], "cursor['turn']"),
            remaining_count=None if left is None else _checked_count(left, "cursor['left']"),
            lanes=lanes,
        )
        if base.turn >= max(1, len(lanes)):
            raise ConfigError(f"the state has turn={base.turn} of {len(lanes)} lanes")
    if "skip" in cursor:
        counts = (_checked_count(cursor.get(name, 0), f"cursor[{name!r}]") for name in ("skip", "skip_tokens"))
        return RebatchedPosition(base, *counts)
    if "handed" in cursor:
        handed = cursor["handed"]
        if not isinstance(handed, list | tuple):
            raise ConfigError(f"the state has cursor['handed']={handed!r:.40}, not a list", hint=_HINT)
        size = _checked_count(cursor.get("handed_size"), "cursor['handed_size']")
        return OutOfOrderPosition(base, tuple(_checked_count(each, "cursor['handed']") for each in handed), size)
    return base


def _lane_number(name: str) -> int:
    if not name.isdecimal():
        raise ConfigError(f"the state has a lane {name!r}, which is not a number")
    return int(name)


def _lane_from_json(entry: Any, where: str) -> LanePosition:
    if entry is None:
        return LANE_BEGIN
    _checked_dict(entry, where, (*_LANE_COUNTS, "format", "etag"))
    segment, offset_bytes, sample, run, before, given = (
        _checked_count(entry[name], f"{where}[{name!r}]") for name in _LANE_COUNTS
    )
    if entry["etag"] is not None and not isinstance(entry["etag"], str):
        raise ConfigError(f"the state has {where}['etag']={entry['etag']!r:.40}, which is not an ETag")
    if not isinstance(entry["format"], str) or entry["format"] not in FORMATS:
        raise ConfigError(f"the state has {where}['format']={entry['format']!r}, which is not the name of a format")
    return RunStart(run, segment, offset_bytes, sample, before, entry["format"], entry["etag"]), given


# ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_statistics(values: Any) -> None:
    names = {each.name for each in fields(LoaderStatistics)}
    if values is not None and not (isinstance(values, dict) and values.keys() == names):
        raise ConfigError(f"the state has {values!r:.80}, which are not the statistics of a loader")


def _checked_dict(value: Any, where: str, names: Iterable[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict) or (missing := [name for name in names if name not in value]):
        lacks = f", without {missing[0]!r}" if isinstance(value, dict) else ""
        raise ConfigError(f"the state has {where}={value!r:.80}{lacks}", hint=_HINT)
    return value


def _checked_count(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value <= _COUNT_MAX:
        raise ConfigError(f"the state has {where}={value!r:.40}, not a number in [0, {_COUNT_MAX}]")
    return value
