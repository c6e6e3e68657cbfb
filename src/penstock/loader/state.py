"""A saved state: plain JSON, with everything that decides which sample comes next, and checks before it is believed."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.formats import FORMATS
from penstock.loader.statistics import LoaderStatistics
from penstock.order import ORDER_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.loader.plan.sources import DataSource

STATE_VERSION = 1
_REQUIRED = {"version": int, "order_version": int, "mode": str, "epoch": int, "batches": int, "job": dict, "data": str}
_COUNTS = ("segment", "offset_bytes", "sample", "run", "before", "emitted")  # of a lane in a cursor
_COUNT_MAX = (1 << 62) - 1
_WORDS = {
    "seed": "the seed of .shuffle()",
    "window": "the window of .shuffle()",
    "shuffled": "whether the pipeline shuffles",
    "lanes": "Loader(lanes=)",
    "batch": "the size of .batch()",
    "rank": "the rank",
    "world_size": "the world size",
    "stop": "the stop= of ps.mix()",
}


def data_digest(sources: Iterable[DataSource]) -> str:
    """Identity of a data set: a digest of its shards' URLs, sizes and versions, as far as the listing tells."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        lines = [f"{shard.url}\n{shard.listed_size_bytes}\n{shard.listed_etag}\n" for shard in source.shards]
        if source.objects is not None:
            lines += [f"{group.key}\n" for group in source.objects.groups]
        digest.update("".join(lines).encode(errors="surrogateescape"))  # at once: there may be millions
    return digest.hexdigest()


def checked(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `state`, where it has the form of one.

    Raises:
        ConfigError: it has not, or is of another version.
    """
    if not isinstance(state, dict):
        raise ConfigError(f"a state is a dict, not {type(state).__name__}", hint="what loader.state_dict() gave")
    for name, kind in _REQUIRED.items():
        if not isinstance(state.get(name), kind):
            raise ConfigError(f"the state has {name}={state.get(name)!r}, not {kind.__name__}")
    if state["version"] != STATE_VERSION:
        raise ConfigError(f"the state is of version {state['version']}, this penstock reads {STATE_VERSION}")
    if state["order_version"] != ORDER_VERSION:
        raise ConfigError(
            f"the state was saved in order version {state['order_version']}, this penstock has {ORDER_VERSION}",
            hint="go on with the penstock that saved it, or begin at an epoch",
        )
    if state["epoch"] < 0 or state["batches"] < 0:
        raise ConfigError(f"the state has epoch={state['epoch']}, batches={state['batches']}: neither can be negative")
    _check_statistics(state.get("on_epoch"))
    if state.get("changed") is not None:
        _check_statistics(_entries(state["changed"], "changed", ("epoch", "statistics"))["statistics"])
    cursor = state.get("cursor", {})
    if (cursor is None and state["batches"]) or (cursor is not None and not state["job"]):
        raise ConfigError(
            f"the state has batches={state['batches']}, cursor={cursor!r:.80}, job={state['job']!r:.80}: a part of it is gone"
        )
    _check_cursor(cursor, mode=state["mode"])
    return dict(state)


def _check_statistics(said: Any) -> None:
    names = {each.name for each in fields(LoaderStatistics)}
    if said is not None and not (isinstance(said, dict) and said.keys() == names):
        raise ConfigError(f"the state has {said!r:.80}, which are no statistics of a loader")


def _check_cursor(cursor: Any, *, mode: str) -> None:
    """Refuse what no loader of this mode left: a state that was cut or edited."""
    if cursor is None:
        return
    names = ("position",) if mode == "index" else ("round", "turn", "left", "lanes")
    _entries(cursor, "cursor", names)
    for name in ("position", "round", "turn", "left", "skip", "handed_size"):
        if name in cursor and not (cursor[name] is None and name == "left"):
            _check_count(f"cursor[{name!r}]", cursor[name])
    handed = cursor.get("handed", [])
    for number in handed if isinstance(handed, list | tuple) else [handed]:
        _check_count("cursor['handed']", number)
    for lane, entry in _entries(cursor.get("lanes", {}), "cursor['lanes']", ()).items():
        if not lane.isdecimal():
            raise ConfigError(f"the state has a lane {lane!r}, which is no number")
        if entry is not None:
            where = f"cursor['lanes'][{lane!r}]"
            _entries(entry, where, (*_COUNTS, "format", "etag"))
            for name in _COUNTS:
                _check_count(f"{where}[{name!r}]", entry[name])
            if not isinstance(entry["format"], str) or entry["format"] not in FORMATS:
                raise ConfigError(f"the state has {where}['format']={entry['format']!r}, which is none")
    if "lanes" in cursor and cursor["turn"] >= max(1, len(cursor["lanes"])):
        raise ConfigError(f"the state has turn={cursor['turn']} of {len(cursor['lanes'])} lanes")


def _entries(value: Any, where: str, names: Iterable[str]) -> dict[str, Any]:
    if not isinstance(value, dict) or (missing := [name for name in names if name not in value]):
        lacks = f", without {missing[0]!r}" if isinstance(value, dict) else ""
        raise ConfigError(f"the state has {where}={value!r:.80}{lacks}", hint="what loader.state_dict() gave")
    return value


def _check_count(where: str, value: Any) -> None:
    if type(value) is not int or not 0 <= value <= _COUNT_MAX:
        raise ConfigError(f"the state has {where}={value!r:.40}, not a number in [0, {_COUNT_MAX}]")


def check_same_job(state: Mapping[str, Any], *, mode: str, job: Mapping[str, Any]) -> None:
    """Refuse a state that another order made.

    Raises:
        ConfigError: says what differs; at another world size, that an index would allow it.
    """
    if state["mode"] != mode:
        raise ConfigError(
            f"the state was saved in mode {state['mode']!r}, this loader reads in mode {mode!r}",
            hint=f"Loader(index={'stream' if state['mode'] == 'stream' else 'require'!r}): a run keeps the mode it began with",
        )
    saved = state["job"]
    for name, value in job.items():
        if saved.get(name) == value or (name == "stop" and name not in saved):  # which older states do not have
            continue
        hint = None
        if name in ("rank", "world_size"):
            hint = "without an index each rank resumes its own state, at the same world size: run `penstock index`"
        raise ConfigError(
            f"the state has {name}={saved.get(name)!r}, this loader {name}={value!r}: {_WORDS.get(name, name)}",
            hint=hint,
        )


def check_same_data(state: Mapping[str, Any], digest: str) -> None:
    """Refuse a state of another data set.

    Raises:
        ConfigError: shards were added, removed, renamed or rewritten since it was saved.
    """
    if state["data"] != digest:
        raise ConfigError(
            f"the data set changed since the state was saved: {state['data']} was the digest of its shards, now {digest}",
            hint="load_state_dict(state, accept_changed_data=True) begins the state's epoch again with the new data",
        )
