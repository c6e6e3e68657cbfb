"""A random job of the loader: everything that decides what a rank gets, as one record of plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

from loading import FORMATS_WRITTEN

EPOCHS = 2
NAMED = tuple(name for name in FORMATS_WRITTEN if not name.startswith(("jsonl", "recordio")))
"""Formats whose samples have a field ``n``."""

DAMAGED = ("jsonl", "tfrecord", "recordio")
"""Formats of which one sample can be damaged alone."""

KEPT = {
    "all": lambda number: True,
    "none": lambda number: False,
    "one": lambda number: number == 3,
    "third": lambda number: number % 3 == 0,
    "late": lambda number: number >= 11,
    "early": lambda number: number < 11,
}
"""Which samples a filter keeps."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Case:
    """One job.

    Attributes:
        sources: Of the mix, or one: format, or ``"objects"``; samples of each shard; weight.
        stop: When the mix ends.
        is_indexed: Whether the loader goes by an index.
        window: Of ``shuffle``; None: not shuffled.
        seed: See there.
        take: Positions of an epoch; None: all.
        entry: How samples begin: ``"map"`` and ``"decode"`` give a number, ``"plain"`` does nothing to them.
        stages: What follows: ``("filter", kept)``, ``("refill", kept)``, ``("fail", kept)`` for a filter that fails within
            ``max_errors``, ``("flat_map", "")``, each number n mod 3 times.
        batch: ``("rank", n)``, ``("global", n)`` or ``("size", n)``.
        drop_last: Of the batches.
        evaluates: Whether the pipeline ends with ``evaluate()``.
        corrupt: Policy, and number of the damaged sample of the first source; None: nothing is damaged.
        lanes: Of the loader.
        worlds: Ranks before the stop, and behind it.
        processes: Worker processes before the stop, and behind it.
        threads: Of the loader.
        agrees: Whether ranks can ask each other.
        in_order: Of the loader.
        stride: Into how many loaders the batches are divided, as among the workers of a DataLoader.
        stopped: Batches of each rank before the stop; 0: the job is not stopped.
        paused: Batches of each rank behind which its loop breaks, and is begun again; 0: it does not.
        reweighted: Batches of each rank behind which the weights of the mix are turned round, from the next batch on; None:
            they are not.
        killed: Batch of rank 0 behind which one of its worker processes is killed; 0: none is.
        gap_bytes: Of ``FetchConfig``.
        leads: Whether all runs are led by single samples, however short they are.
    """

    sources: tuple[tuple[str, tuple[int, ...], int], ...]
    stop: str = "all"
    is_indexed: bool = True
    window: int | None = None
    seed: int = 0
    take: int | None = None
    entry: str = "map"
    stages: tuple[tuple[str, str], ...] = ()
    batch: tuple[str, int] = ("rank", 4)
    drop_last: bool = False
    evaluates: bool = False
    corrupt: tuple[str, int] | None = None
    lanes: int | None = None
    worlds: tuple[int, int] = (1, 1)
    processes: tuple[int, int] = (0, 0)
    threads: int = 1
    agrees: bool = False
    in_order: bool = True
    stride: int = 1
    stopped: int = 0
    paused: int = 0
    reweighted: int | None = None
    killed: int = 0
    gap_bytes: int = 0
    leads: bool = False

    def __repr__(self) -> str:
        """What differs from the defaults."""
        given = {
            each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default
        }
        return f"Case({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    @property
    def carries(self) -> bool:
        """Whether batches are made of what comes out of the stages, however much that is."""
        return self.batch[0] == "size" or any(kind in ("refill", "flat_map") for kind, _ in self.stages)

    @property
    def may_drop(self) -> bool:
        """Whether a position may have no sample."""
        return bool(self.stages) or self.corrupt is not None

    @property
    def is_shuffled(self) -> bool:
        """Whether it is: an evaluation is not."""
        return self.window is not None and not self.evaluates

    @property
    def is_ordered(self) -> bool:
        """Whether batches come in order: worker processes give them so in any case."""
        return self.in_order or min(self.processes) > 0

    def global_size(self, world_size: int) -> int:
        """Positions of a batch of all ranks."""
        kind, size = self.batch
        return {"rank": size * world_size, "global": size, "size": world_size}[kind]


def drawn_case(number: int, *, with_processes: bool = False) -> Case:
    """One of the jobs that the loader takes, always the same for a `number`.

    Args:
        number: From 0.
        with_processes: Whether it has worker processes, which cost half a second.
    """
    rng = Random(f"{number} {with_processes}")
    is_indexed = rng.random() < 0.6
    worlds = rng.choice([(1, 1), (1, 1), (2, 2), (3, 3), (1, 2), (2, 1), (3, 2), (2, 3)])
    world_size = worlds[0]
    entry = rng.choice(["map", "map", "decode", "plain"])
    sources_count = rng.choice([1, 1, 2, 3]) if is_indexed and entry != "plain" else 1
    shards_min = 1 if is_indexed else world_size
    sources = tuple(_source(rng, entry, is_indexed, shards_min) for _ in range(sources_count))
    kind = rng.choice(["rank", "rank", "global", "size"]) if entry != "plain" else "rank"
    case = Case(
        sources=sources,
        stop=rng.choice(["all", "first", "repeat"]) if sources_count > 1 else "all",
        is_indexed=is_indexed,
        window=rng.choice([None, rng.randint(1, 40), rng.randint(1, 40)]),
        seed=rng.randrange(4),
        take=rng.choice([None, None, rng.randint(1, 60)]) if is_indexed or world_size == 1 else None,
        entry=entry,
        stages=tuple(_stage(rng) for _ in range(rng.choice([0, 1, 1, 2]))) if entry != "plain" else (),
        batch=(kind, rng.choice([6, 12]) if kind == "global" else rng.randint(1, 9)),
        drop_last=rng.random() < 0.5,
        evaluates=rng.random() < 0.2,
        corrupt=_corrupt(rng, sources[0], is_indexed),
        lanes=rng.choice([None, 1, 2, 5, 12] if worlds == (1, 1) else [6, 12]),
        threads=rng.randint(1, 3),
        gap_bytes=rng.choice([0, 512 * 1024]),
        leads=rng.random() < 0.3,
    )
    stopped = rng.choice([0, rng.randint(1, 4), rng.randint(1, 12)])
    case = replace(
        case,
        worlds=worlds if is_indexed and not case.carries else (world_size, world_size),
        agrees=rng.random() < 0.5 or case.carries or not is_indexed,
        stopped=stopped,
        paused=rng.choice([0, 0, rng.randint(1, 6)]),
        reweighted=rng.randint(0, stopped or 8)
        if sources_count > 1 and not case.carries and rng.random() < 0.5
        else None,
    )
    if with_processes:
        killed = rng.choice([0, rng.randint(1, 6)])
        processes = rng.choice([(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1), (2, 2)])
        case = replace(case, processes=processes, killed=killed, stopped=stopped if processes[0] else max(1, stopped))
        return replace(case, in_order=rng.random() < 0.6 or not _may_be_unordered(case))
    kind = rng.choice(["as it is", "as it is", "divided", "in any order"])
    if kind == "divided" and worlds == (1, 1):
        return replace(case, stride=rng.randint(2, 4), stopped=0, reweighted=None)
    return replace(case, in_order=kind != "in any order" or not _may_be_unordered(case))


def _may_be_unordered(case: Case) -> bool:
    """Whether the loader takes a state of batches out of order, and a change of weights."""
    return case.worlds[0] == case.worlds[1] and case.reweighted is None


def _stage(rng: Random) -> tuple[str, str]:
    kind = rng.choice(["filter", "filter", "fail", "refill", "flat_map"])
    return kind, "" if kind == "flat_map" else rng.choice(list(KEPT))


def _source(rng: Random, entry: str, is_indexed: bool, shards_min: int) -> tuple[str, tuple[int, ...], int]:
    names = NAMED if entry == "decode" else FORMATS_WRITTEN
    name = rng.choice([*names, *(["objects"] * 3 if is_indexed else [])])
    sizes = [rng.choice([0, rng.randint(1, 4), rng.randint(1, 12)]) for _ in range(rng.randint(shards_min, 7))]
    return name, tuple(sizes) if any(sizes) else (*sizes[1:], 5), rng.randint(1, 4)


def _corrupt(rng: Random, source: tuple[str, tuple[int, ...], int], is_indexed: bool) -> tuple[str, int] | None:
    name, sizes, _ = source
    if name not in DAMAGED or rng.random() < 0.3:
        return None
    return rng.choice(["skip_sample"] if is_indexed else ["skip_sample", "skip_shard"]), rng.randrange(sum(sizes))


def simpler(case: Case) -> Iterator[Case]:
    """Cases that have less to them than `case`: a default, a source, shard, sample or stage less, a smaller number."""
    for each in fields(case):
        value = getattr(case, each.name)
        if each.name == "sources":
            for number, (name, sizes, share) in enumerate(value):
                others = value[:number], value[number + 1 :]
                if len(value) > 1:
                    yield replace(case, sources=others[0] + others[1])
                for changed in _fewer(sizes):
                    yield replace(case, sources=(*others[0], (name, changed, share), *others[1]))
                yield replace(case, sources=(*others[0], ("tar", sizes, 1), *others[1]))
        elif value != each.default:
            yield replace(case, **{each.name: each.default})
            if each.name == "stages":
                yield from (replace(case, stages=changed) for changed in _fewer(value))
            elif isinstance(value, int) and value > 1:
                yield replace(case, **{each.name: value - 1})


def _fewer(values: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    for at, value in enumerate(values):
        yield values[:at] + values[at + 1 :]
        if isinstance(value, int) and value:
            yield (*values[:at], value // 2, *values[at + 1 :])
            yield (*values[:at], value - 1, *values[at + 1 :])
