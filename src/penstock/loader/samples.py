"""What happens to one sample between its shard and its row of a batch: decode, map, and whose fault an error is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import ConfigError, DecodeError, FieldMissingError, PenstockError
from penstock.formats import RESERVED_FIELDS
from penstock.pipeline import Decode, Map

if TYPE_CHECKING:
    from penstock.formats import Sample
    from penstock.pipeline import Field, Pipeline

_STREAM = 0x70656E73746F636B  # "penstock": tells these streams from others with the same seed


class SampleRandom:
    """One Philox per thread, put where a sample's own stream begins.

    Its key is (seed, epoch); its counter starts at (0, 0, position, _STREAM), whose low word runs on with the numbers
    drawn, so that streams of different samples never meet. The second word is kept for the index within ``flat_map``.
    """

    def __init__(self, *, seed: int, epoch: int) -> None:
        self._bits = np.random.Philox()
        self._generator = np.random.Generator(self._bits)
        self._key = np.array([seed, epoch], dtype=np.uint64)

    def at(self, position: int) -> np.random.Generator:
        """The generator, at the start of the stream of `position`; valid until the next call."""
        self._bits.state = {
            "bit_generator": "Philox",
            "state": {"counter": np.array([0, 0, position, _STREAM], dtype=np.uint64), "key": self._key},
            "buffer": np.zeros(4, dtype=np.uint64),
            "buffer_pos": 4,
            "has_uint32": 0,
            "uinteger": 0,
        }
        return self._generator


class Steps:
    """The stages of a pipeline that see single samples, in order.

    Raises:
        ConfigError: a field needs a package that is not installed.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._steps: list[tuple[str, Decode | Map]] = []
        for stage in pipeline.stages:
            if isinstance(stage, Decode):
                for field in stage.fields:
                    field.require()
                self._steps.append(("decode", stage))
            elif isinstance(stage, Map):
                maps_count = sum(isinstance(step, Map) for _, step in self._steps)
                self._steps.append((f"map[{maps_count}]", stage))

    def __call__(self, sample: Sample, *, shard: str, position: int, random: SampleRandom) -> Mapping[str, Any]:
        """The values of one sample by name. Without stages, the members as ``bytes``.

        Raises:
            FieldMissingError: a member that the pipeline decodes is not there.
            DecodeError: a member or a user's function fails; ``__cause__`` is what it raised.
        """
        values: Mapping[str, Any] | None = None
        rng: np.random.Generator | None = None
        for name, step in self._steps:
            if isinstance(step, Decode):
                members = sample.fields if values is None else values
                values = {field.name: _decoded(field, members, sample, shard) for field in step.fields}
                continue
            given = dict(_copied(sample) if values is None else values)
            given.update(__key__=sample.key, __shard__=shard, __position__=position)
            if step.takes_rng and rng is None:
                rng = random.at(position)
            values = _mapped(step, name, given, rng, shard)
        return _copied(sample) if values is None else values


def _copied(sample: Sample) -> dict[str, bytes]:
    """The members as bytes of their own: nothing handed to a user pins a part."""
    return {name: bytes(value) for name, value in sample.fields.items()}


def _decoded(field: Field, members: Mapping[str, Any], sample: Sample, shard: str) -> Any:
    data = members.get(field.name)
    if data is None:
        raise FieldMissingError(
            f"{field!r}: the sample has {', '.join(map(repr, members)) or 'no members'}",
            stage="decode",
            field=field.name,
            sample_key=sample.key,
            shard=shard,
        )
    try:
        return field.decode(memoryview(data))
    except PenstockError:
        raise
    except Exception as error:
        raise DecodeError(
            f"{field!r} cannot read these {len(data)} bytes: {error or type(error).__name__}",
            stage="decode",
            field=field.name,
            sample_key=sample.key,
            offset_bytes=sample.offset_bytes,
            shard=shard,
        ) from error


def _mapped(
    step: Map, name: str, given: dict[str, Any], rng: np.random.Generator | None, shard: str
) -> Mapping[str, Any]:
    key = given["__key__"]
    try:
        result = step.fn(given, rng) if step.takes_rng else step.fn(given)
        if not isinstance(result, Mapping):
            raise ConfigError(
                f"{step.name} returned {type(result).__name__}, not a dict of values",
                hint="return the sample, also where it was changed in place",
            )
    except Exception as error:
        raise DecodeError(
            f"{step.name} failed: {type(error).__name__}: {error}", stage=name, sample_key=key, shard=shard
        ) from error
    return {field: value for field, value in result.items() if field not in RESERVED_FIELDS}
