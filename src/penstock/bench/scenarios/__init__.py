"""Scenarios of published measurements: what data they read, by which clients and settings; one TOML file for each."""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib.resources import files
from typing import Any

from penstock.bench.running import BenchOptions, selected
from penstock.bench.samples import KINDS
from penstock.errors import ConfigError
from penstock.text.sizes import parse_bytes

SHRINK = 0.1
"""Below this scale the shards shrink with the data, so that there are still several of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Samples that are made, and how they are stored.

    Attributes:
        name: Name of the folder; `folder` adds the number of samples.
        kind: Kind of sample, of ``samples.KINDS``.
        format: ``tar``, ``tfrecord``, or ``objects``: each sample is one.
        count: Number of samples.
        shard_bytes: Approximate size of a shard in bytes.
        shard_samples: Samples of a shard, instead of `shard_bytes`.
        seed: Seed of the samples.
    """

    name: str
    kind: str
    format: str
    count: int
    shard_bytes: int = 0
    shard_samples: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.format not in ("tar", "tfrecord", "objects"):
            raise ConfigError(f"data {self.name!r} has kind={self.kind!r} and format={self.format!r}")
        if self.format != "objects" and not self.shard_bytes and not self.shard_samples:
            raise ConfigError(f"data {self.name!r} needs shard_bytes or shard_samples")

    @property
    def folder(self) -> str:
        """The folder below the URL of the data: another scale has another one."""
        return f"{self.name}-{self.count}"

    def scaled(self, scale: float) -> DataSet:
        """Return this data set with a share of its samples, at least one; see ``SHRINK``."""
        shrink = min(1.0, scale / SHRINK)
        return replace(
            self,
            count=max(1, round(self.count * scale)),
            shard_bytes=math.ceil(self.shard_bytes * shrink),
            shard_samples=math.ceil(self.shard_samples * shrink),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One data set that clients read with the same settings.

    Attributes:
        title: Title in the record and in tables.
        data: The data set.
        options: Clients and settings; the time is that of the part.
    """

    title: str
    data: DataSet
    options: BenchOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio that was published, and the two measurements that it compares.

    Attributes:
        text: Names of the two measurements, the slower one first.
        value: The published ratio, as text: ``20`` or ``more than 3``.
        slower: Title of a part, and the client that took more time for 100 batches.
        faster: Title of a part, and the client that took less.
    """

    text: str
    value: str
    slower: tuple[str, str]
    faster: tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A published comparison.

    Attributes:
        name: Name of its file.
        asks: The question that it answers.
        parts: The measurements, in order.
        reported: Ratios that were published.
    """

    name: str
    asks: str
    parts: tuple[Part, ...]
    reported: tuple[Ratio, ...] = field(default=())

    def scaled(self, scale: float) -> Scenario:
        """Return the scenario with a share of its data."""
        if scale <= 0:
            raise ConfigError(f"--scale {scale:g} must be more than 0")
        return replace(self, parts=tuple(replace(part, data=part.data.scaled(scale)) for part in self.parts))

    @property
    def data(self) -> list[DataSet]:
        """The data sets, each once."""
        return list({part.data.folder: part.data for part in self.parts}.values())


def scenario_names() -> list[str]:
    """Return the names of all scenarios."""
    return sorted(path.name.removesuffix(".toml") for path in files(__name__).iterdir() if path.name.endswith(".toml"))


def read_scenario(name: str) -> Scenario:
    """Read a scenario.

    Raises:
        ConfigError: There is none of this name, or it names a client or a kind of sample that does not exist.
    """
    known = scenario_names()
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else ", ".join(known)
        raise ConfigError(f"no scenario is called {name!r}", hint=hint)
    found = tomllib.loads((files(__name__) / f"{name}.toml").read_text())
    data = {each: DataSet(name=each, **_sizes(values)) for each, values in found["data"].items()}
    parts = [part for values in found["parts"] for part in _parts(values, data)]
    reported = [
        Ratio(text=each["text"], value=each["value"], slower=tuple(each["slower"]), faster=tuple(each["faster"]))
        for each in found.get("reported", ())
    ]
    for each in reported:
        selected([each.slower[1], each.faster[1]])
        if missing := {each.slower[0], each.faster[0]} - {part.title for part in parts}:
            raise ConfigError(f"{name}: no part has the title {missing.pop()!r}")
    return Scenario(name=name, asks=found["asks"], parts=tuple(parts), reported=tuple(reported))


def _parts(values: dict[str, Any], data: dict[str, DataSet]) -> list[Part]:
    """Return the part of a declaration, or one for each size of shards or number of samples that it names."""
    given = dict(values)
    title, read = given.pop("title"), data[given.pop("data")]
    varied = next((name for name in ("shard_bytes", "count") if name in given), "")
    sizes = given.pop(varied, [])
    options = BenchOptions(**given)
    selected(options.clients)
    if not sizes:
        return [Part(title=title, data=read, options=options)]
    return [
        Part(
            title=f"{title}, {size}",
            data=replace(read, name=f"{read.name}-{size}", **_sizes({varied: size})),
            options=options,
        )
        for size in sizes
    ]


def _sizes(values: dict[str, Any]) -> dict[str, Any]:
    return {name: parse_bytes(value) if name == "shard_bytes" else value for name, value in values.items()}
