"""A saved state: plain JSON, with everything that decides which sample comes next, and checks before it is believed."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.order import ORDER_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.loader.finding import FoundSource

STATE_VERSION = 1
_REQUIRED = {"version": int, "order_version": int, "mode": str, "epoch": int, "batches": int, "job": dict, "data": str}
_WORDS = {
    "seed": "the seed of .shuffle()",
    "window": "the window of .shuffle()",
    "shuffled": "whether the pipeline shuffles",
    "lanes": "Loader(lanes=)",
    "batch": "the size of .batch()",
    "rank": "the rank",
    "world_size": "the world size",
}


def data_digest(sources: Iterable[FoundSource]) -> str:
    """Identity of a data set: a digest of its shards' URLs, sizes and versions, as far as the listing tells."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sources:
        for shard in source.shards:
            line = f"{shard.url}\n{shard.listed_size_bytes}\n{shard.listed_etag}\n"
            digest.update(line.encode(errors="surrogateescape"))
        if source.objects is not None:
            for group in source.objects.groups:
                digest.update(f"{group.key}\n".encode(errors="surrogateescape"))
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
    return dict(state)


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
        if saved.get(name) == value:
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
