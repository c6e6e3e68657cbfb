from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import ConfigError, DecodeError, FieldMissingError
from penstock.formats import Sample
from penstock.samples.columns import Layout
from penstock.samples.decoding import SampleRandom
from penstock.samples.transform import SampleTransform


def sample(**fields: bytes) -> Sample:
    return Sample("k", {name: memoryview(value) for name, value in fields.items()}, 512)


def run(pipeline: Any, given: Sample) -> Any:
    return SampleTransform(pipeline)(given, shard="s.tar", position=3, random=SampleRandom(seed=1, epoch=2))


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
        SampleTransform(SOURCE.decode(ps.Image("jpg")))


def picture(value: int, size: tuple[int, int] = (8, 6)) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", size, (value,) * 3).save(out, "PNG")
    return out.getvalue()


def test_filter_leaves_samples_out() -> None:
    """A sample whose function says no is None; the function may draw, and cannot change the sample."""

    def odd(values: dict[str, Any], rng: np.random.Generator) -> bool:
        assert rng.random() == SampleRandom(seed=1, epoch=2).at(3).random()
        values["cls"] += 100
        return values["cls"] % 2 == 1

    pipeline = SOURCE.decode(ps.Integer("cls")).filter(odd)
    assert run(pipeline, sample(cls=b"3")) == {"cls": 3}
    assert run(pipeline, sample(cls=b"4")) is None
    transform = SampleTransform(pipeline)
    assert (transform.may_drop, transform.is_many, transform.is_empty) == (True, False, False)


def test_filter_before_decode_sees_bytes_and_passes_members_on() -> None:
    """Filtering undecoded samples pins nothing, and what passes is still decoded."""
    pipeline = SOURCE.filter(lambda values: type(values["cls"]) is bytes).decode(ps.Integer("cls"))
    assert run(pipeline, sample(cls=b"3")) == {"cls": 3}


def test_flat_map_gives_each_sample_a_stream_of_its_own() -> None:
    """Every result of flat_map passes the later stages, with random numbers that no other sample has."""

    def parts(values: dict[str, Any], rng: np.random.Generator) -> Any:
        for part in range(values["cls"]):
            yield {"part": part, "drawn": rng.random()}

    def draw(values: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        return {**values, "own": rng.random()}

    pipeline = SOURCE.decode(ps.Integer("cls")).flat_map(parts).filter(lambda v: v["part"] != 1).map(draw)
    transform = SampleTransform(pipeline)
    assert transform.is_many
    values = run(pipeline, sample(cls=b"4"))
    assert [value["part"] for value in values] == [0, 2, 3]
    random = SampleRandom(seed=1, epoch=2)
    assert [value["own"] for value in values] == [random.at(3, index).random() for index in (1, 3, 4)]
    assert len({value[name] for value in values for name in ("own", "drawn")}) == 6
    assert run(pipeline, sample(cls=b"0")) == []


def test_flat_map_in_flat_map() -> None:
    """Nested, every sample still has its own stream: the index counts all that were made."""
    twice = SOURCE.flat_map(lambda v: [{"a": 0}, {"a": 1}]).flat_map(lambda v: [v, v])
    values = run(twice.map(lambda v, rng: {**v, "own": rng.random()}), sample(cls=b""))
    assert [value["a"] for value in values] == [0, 0, 1, 1]
    assert len({value["own"] for value in values}) == 4


@pytest.mark.parametrize("result", [None, 3, {"a": 1}, [3]])
def test_flat_map_must_give_samples(result: Any) -> None:
    """Anything but an iterable of dicts is an error that names the function and the sample."""
    with pytest.raises(DecodeError, match="lambda") as caught:
        run(SOURCE.flat_map(lambda _: result), sample(cls=b""))
    assert (caught.value.stage, caught.value.sample_key, caught.value.shard) == ("flat_map[0]", "k", "s.tar")


def test_select_keeps_some_fields() -> None:
    """Before and after decode; a field that is not there is named."""
    assert run(SOURCE.select("cls"), sample(cls=b"3", txt=b"x")) == {"cls": b"3"}
    both = SOURCE.decode(ps.Integer("cls"), ps.Text("txt"))
    assert run(both.select(["txt"]), sample(cls=b"3", txt=b"x")) == {"txt": "x"}
    with pytest.raises(FieldMissingError) as caught:
        run(SOURCE.select(["cls", "jpg"]), sample(cls=b"3"))
    assert (caught.value.stage, caught.value.field) == ("select", "jpg")


def test_bad_samples_are_dropped_up_to_a_bound() -> None:
    """Each stage drops as many as it may per epoch, counts them, and then raises with a note that says so."""

    def fails(values: dict[str, Any]) -> dict[str, Any]:
        if values["cls"] == 1:
            raise ValueError("one")
        return values

    transform = SampleTransform(SOURCE.decode(ps.Integer("cls"), max_errors=2).map(fails, max_errors=1))
    assert transform.may_drop

    def call(cls: bytes, epoch: int = 0) -> Any:
        return transform(sample(cls=cls), shard="s", position=0, random=SampleRandom(seed=0, epoch=epoch))

    assert [call(b"x"), call(b"2"), call(b"1"), call(b"x")] == [None, {"cls": 2}, None, None]
    assert transform.tolerance.counts() == {"decode": 2, "map[0]": 1}
    with pytest.raises(DecodeError, match="not a whole number") as caught:
        call(b"x")
    assert caught.value.__notes__ == ["max_errors=2: decode has already dropped this many samples in epoch 0"]
    assert call(b"x", epoch=1) is None
    assert transform.tolerance.counts() == {"decode": 3, "map[0]": 1}


def test_missing_members_count_as_errors() -> None:
    """A sample without a member is dropped like one whose member does not decode."""
    transform = SampleTransform(SOURCE.decode(ps.Integer("cls"), max_errors=1))
    layout = Layout({"cls": 1})
    written = transform.write(sample(), layout, layout.allocate(1), 0, shard="s", position=0,
                          random=SampleRandom(seed=0, epoch=0))  # fmt: skip
    assert written is False
    assert transform.tolerance.counts() == {"decode": 1}


def test_writing_decodes_into_the_row() -> None:
    """What is written to a row equals what a call gives, and pictures of fixed size go there without another array."""
    image = ps.Image("png", height=4, width=5, crop="random", flip=True).with_mask("seg")
    pipeline = SOURCE.decode(image, ps.Integer("cls"), ps.Text("txt"))
    transform = SampleTransform(pipeline)
    mask = io.BytesIO()
    from PIL import Image

    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(6, 8)).save(mask, "PNG")
    given = sample(png=picture(200), seg=mask.getvalue(), cls=b"3", txt=b"x")
    expected = run(pipeline, given)
    layout = Layout(expected)
    batch = layout.allocate(3)
    rows = {name: batch[name] for name in batch}
    assert transform.write(given, layout, batch, 1, shard="s.tar", position=3, random=SampleRandom(seed=1, epoch=2))
    for name, value in expected.items():
        assert batch[name] is rows[name]
        np.testing.assert_array_equal(batch[name][1], value)
    assert transform.specs() == {
        "png": ("uint8", (4, 5, 3)), "seg": ("uint8", (4, 5)), "cls": ("int64", ()), "txt": ("object", ()),
    }  # fmt: skip
    assert {name: column.dtype for name, column in Layout.of_specs(transform.specs() or {}).columns.items()} == {
        name: column.dtype for name, column in layout.columns.items()
    }


def test_writing_without_fixed_shapes() -> None:
    """Pictures of the first one's size, and pipelines that end in a function, are written all the same."""
    for pipeline in (SOURCE.decode(ps.Image("png")), SOURCE.decode(ps.Image("png")).map(lambda v: v)):
        layout = Layout({"png": np.zeros((6, 8, 3), np.uint8)})
        batch = layout.allocate(1)
        transform = SampleTransform(pipeline)
        random = SampleRandom(seed=0, epoch=0)
        assert transform.write(sample(png=picture(9)), layout, batch, 0, shard="s", position=0, random=random)
        assert (batch["png"] == 9).all()
        with pytest.raises(DecodeError, match="does not fit"):
            transform.write(sample(png=picture(9, (3, 3))), layout, batch, 0, shard="s", position=0, random=random)


def test_a_sample_unlike_the_first_is_an_error_when_written() -> None:
    """Another set of fields is noticed although some are in the row already."""
    transform = SampleTransform(SOURCE.decode(ps.Image("png", height=2, width=2), ps.Integer("cls")))
    layout = Layout({"png": np.zeros((2, 2, 3), np.uint8)})
    with pytest.raises(DecodeError, match="the first one had"):
        transform.write(sample(png=picture(9), cls=b"1"), layout, layout.allocate(1), 0, shard="s", position=0,
                    random=SampleRandom(seed=0, epoch=0))  # fmt: skip


def test_specs_follow_the_stages() -> None:
    """What comes out is known from fields alone, from map's fields=, and not where a function may do anything."""
    decoded = SOURCE.decode(ps.Integer("cls"), ps.Text("txt"))
    assert SampleTransform(decoded.select("cls")).specs() == {"cls": ("int64", ())}
    assert SampleTransform(decoded.map(len)).specs() is None
    assert SampleTransform(decoded.map(len, fields={"x": (np.float32, (2,)), "t": str})).specs() == {
        "x": ("float32", (2,)), "t": ("object", ()),
    }  # fmt: skip
    assert SampleTransform(SOURCE.decode(ps.Json("json"))).specs() is None
    assert SampleTransform(SOURCE).specs() is None
    assert SampleTransform(SOURCE).is_empty


def test_masks_are_members_like_others() -> None:
    """A mask that is missing or does not decode names itself, its sample and its shard."""
    pipeline = SOURCE.decode(ps.Image("png").with_mask("seg"))
    with pytest.raises(FieldMissingError) as caught:
        run(pipeline, sample(png=picture(1)))
    assert caught.value.field == "seg"
    with pytest.raises(DecodeError, match="mask 'seg'"):
        run(pipeline, sample(png=picture(1), seg=picture(1)))


def typed(**arrays: Any) -> Sample:
    return Sample("k", {name: memoryview(value) for name, value in arrays.items()}, 512)


def test_numbers_of_the_format_are_numbers() -> None:
    """What Parquet, MDS or tf.train.Example store as numbers decodes as such; text fields refuse it."""
    given = typed(cls=np.array([7]), x=np.array(0.5, np.float32), t=np.arange(6, dtype=np.int32).reshape(2, 3))
    values = run(SOURCE.decode(ps.Integer("cls"), ps.Float("x"), ps.Numpy("t")), given)
    assert (values["cls"], values["x"]) == (7, 0.5)
    np.testing.assert_array_equal(values["t"], np.arange(6).reshape(2, 3))
    assert values["t"].flags.owndata
    for field in (ps.Integer("x"), ps.Integer("t"), ps.Float("t"), ps.Text("cls"), ps.Bytes("t"), ps.Image("t")):
        with pytest.raises(DecodeError):
            run(SOURCE.decode(field), given)


def test_undecoded_numbers_are_arrays_of_their_own() -> None:
    """Without decode a typed member is an array or a number, which pins no part either."""
    stored = np.arange(3)
    values = run(SOURCE, typed(t=stored, n=np.array(5), b=np.frombuffer(b"ab", np.uint8)))
    stored[:] = 0
    assert values["t"].tolist() == [0, 1, 2]
    assert (values["n"], type(values["n"]), values["b"]) == (5, np.int64, b"ab")


GOLDEN = [[235, 211, 5], [616, 621, 687]]
