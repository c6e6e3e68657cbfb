from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import ConfigError, DecodeError, FieldMissingError
from penstock.formats import Sample
from penstock.loader.samples import SampleRandom, Steps


def sample(**fields: bytes) -> Sample:
    return Sample("k", {name: memoryview(value) for name, value in fields.items()}, 512)


def run(pipeline: Any, given: Sample) -> Any:
    return Steps(pipeline)(given, shard="s.tar", position=3, random=SampleRandom(seed=1, epoch=2))


SOURCE = ps.shards("s3://b/t/")


def test_random_numbers_depend_on_seed_epoch_and_position_alone() -> None:
    """The stream of a position is the same after any history, and differs in each coordinate."""
    fresh, used = SampleRandom(seed=1, epoch=2), SampleRandom(seed=1, epoch=2)
    used.at(9).random(1001, dtype=np.float32)
    expected = fresh.at(5).random(4)
    np.testing.assert_array_equal(used.at(5).random(4), expected)
    for seed, epoch, position in ((0, 2, 5), (1, 0, 5), (1, 2, 6)):
        assert not np.any(SampleRandom(seed=seed, epoch=epoch).at(position).random(4) == expected)


def test_random_streams_do_not_overlap() -> None:
    """Long streams of neighbouring positions have no number in common."""
    random = SampleRandom(seed=0, epoch=0)
    drawn = [random.at(position).integers(1 << 63, size=1000) for position in range(20)]
    assert len(np.unique(drawn)) == 20_000


def test_golden_random_numbers() -> None:
    """The first numbers of two positions: augmentation is reproducible from version to version."""
    random = SampleRandom(seed=7, epoch=1)
    assert [random.at(position).integers(1000, size=3).tolist() for position in (0, 123)] == GOLDEN


def test_largest_seed() -> None:
    """Seeds use all 64 bits."""
    assert 0 <= SampleRandom(seed=2**64 - 1, epoch=0).at(2**63 - 1).random() < 1


def test_decode_names_all_that_is_left() -> None:
    """Members that decode does not name are left out."""
    values = run(SOURCE.decode(ps.Integer("cls")), sample(cls=b"3", txt=b"x"))
    assert values == {"cls": 3}


def test_map_sees_where_the_sample_is_from() -> None:
    """A function gets the values, its key, shard and position, and an rng of the sample's own; it cannot forge them."""

    def look(values: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        assert (values["__key__"], values["__shard__"], values["__position__"]) == ("k", "s.tar", 3)
        return {"r": rng.random(), "__position__": 99}

    values = run(SOURCE.map(look), sample(cls=b"3"))
    assert values == {"r": SampleRandom(seed=1, epoch=2).at(3).random()}


def test_two_maps_share_one_stream() -> None:
    """The second function of a sample goes on in its stream: it does not draw the first one's numbers again."""
    values = run(
        SOURCE.map(lambda s, rng: {"a": rng.random()}).map(lambda s, rng: {"a": s["a"], "b": rng.random()}),
        sample(x=b""),
    )
    assert [values["a"], values["b"]] == SampleRandom(seed=1, epoch=2).at(3).random(2).tolist()


def test_undecoded_members_are_bytes_of_their_own() -> None:
    """Functions before decode get bytes, which pin no part."""
    seen: list[Any] = []

    def keep(values: dict[str, Any]) -> dict[str, Any]:
        seen.append(values["cls"])
        return values

    assert run(SOURCE.map(keep).decode(ps.Integer("cls")), sample(cls=b"3")) == {"cls": 3}
    assert seen == [b"3"]
    assert type(seen[0]) is bytes


@pytest.mark.parametrize("result", [None, 3, [("cls", 3)]])
def test_map_must_return_a_sample(result: Any) -> None:
    """A function that forgets to return is told so, with its name."""

    def forgets(values: dict[str, Any]) -> Any:
        return result

    with pytest.raises(DecodeError, match="forgets") as caught:
        run(SOURCE.map(forgets), sample(cls=b"3"))
    assert isinstance(caught.value.__cause__, ConfigError)


def test_decode_errors_say_where() -> None:
    """A member that does not decode names field, sample, shard and offset, with the reason as cause."""
    with pytest.raises(DecodeError, match="not a whole number") as caught:
        run(SOURCE.decode(ps.Integer("cls")), sample(cls=b"x"))
    error = caught.value
    assert (error.stage, error.field, error.sample_key, error.shard, error.offset_bytes) == (
        "decode",
        "cls",
        "k",
        "s.tar",
        512,
    )
    assert isinstance(error.__cause__, ValueError)


def test_missing_members() -> None:
    """A member that is not there is FieldMissingError, not DecodeError."""
    with pytest.raises(FieldMissingError, match="'cls'"):
        run(SOURCE.decode(ps.Integer("label")), sample(cls=b"x"))


def test_fields_that_cannot_decode_are_refused_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is noticed before anything runs."""
    monkeypatch.setattr("penstock.pipeline.fields.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="PIL"):
        Steps(SOURCE.decode(ps.Image("jpg")))


GOLDEN = [[235, 211, 5], [616, 621, 687]]
