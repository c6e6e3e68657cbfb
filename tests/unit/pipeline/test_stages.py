from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.errors import ConfigError
from penstock.pipeline import BatchBySize, Evaluate, Float, Function, Numpy, Pipeline, Shuffle, mix, objects

SOURCE = ps.shards("s3://b/t/")
MIXED = "mix({objects('b/'): 1, shards('c/').decode(Float('x')): 2}, stop='first')"
DECODED = SOURCE.decode(ps.Image("jpg"), ps.Integer("cls"))


def keep(sample: Any) -> bool:
    return True


def read(key: str) -> bytes:
    return key.encode()


def gather(samples: Any) -> Any:
    return samples


@pytest.mark.parametrize(
    "text",
    [
        "shards('s3://b/t/').filter(keep)",
        "shards('s3://b/t/').filter(keep, refill=True, max_errors=3)",
        "shards('s3://b/t/').flat_map(keep).map(keep, max_errors=1)",
        "shards('s3://b/t/').select(['jpg', 'cls']).take(5)",
        "shards('s3://b/t/').join('labels.csv', on='key').join(shards('x/'), on='key', missing='drop')",
        "shards('s3://b/t/').join('a.parquet', on='id', fields=['label'], bytes_max=5)",
        "shards('s3://b/t/').map(keep, fields={'jpg': ('uint8', (2, 3)), 'cls': ('int64', ()), 't': object})",
        "shards('s3://b/t/').decode(Image('jpg', height=2, width=3, crop='random', flip=True).with_mask('seg', 'depth'))",
        "shards('s3://b/t/').decode(Float('x'), Numpy('npy', allow_pickle=True), Function('y', keep), max_errors=7)",
        "shards('s3://b/t/').batch(global_size=8, collate=gather, pad={'t': -1}, ragged=['u'])",
        "shards('s3://b/t/').batch_by_size(100, size='t', padded=True, samples_max=3, oversize='drop', drop_last=True)",
        "shards('s3://b/t/').batch_by_size(100, size=keep)",
        "shards('s3://b/t/').evaluate().batch(3)",
        "shards('s3://b/t/', format='tar', on_corrupt='skip_shard', region='r')",
        "shards(manifest='s3://b/m.jsonl')",
        "objects('s3://b/i/', group_by='stem')",
        "objects(['a', 'b'], read=read)",
        "objects(manifest='m.parquet', endpoint_url='http://h:1')",
        (
            f"mix({{{MIXED}: 0.7, shards('d/'): 0.3}}, schedule={{10: {{{MIXED}: 1, shards('d/'): 0}}}}, stop='first')"
            ".shuffle(window=5, seed=2)"
        ),
    ],
)
def test_repr_reads_like_the_code(text: str) -> None:
    """What a pipeline prints makes an equal pipeline, which hashes alike and pickles."""
    names = {
        "shards": ps.shards, "objects": objects, "mix": mix, "Image": ps.Image, "Float": Float, "Numpy": Numpy,
        "Function": Function, "keep": keep, "read": read, "gather": gather,
    }  # fmt: skip
    pipeline = eval(text, names)
    assert repr(pipeline) == text
    assert eval(repr(pipeline), names) == pipeline
    assert hash(pickle.loads(pickle.dumps(pipeline))) == hash(pipeline)


@pytest.mark.parametrize(
    "write",
    [
        lambda: SOURCE.filter(3),
        lambda: SOURCE.flat_map(None),
        lambda: SOURCE.map(keep, max_errors=-1),
        lambda: SOURCE.map(keep, max_errors=True),
        lambda: SOURCE.map(keep, fields={"x": 3}),
        lambda: SOURCE.map(keep, fields={"x": ("uint8", (-1,))}),
        lambda: SOURCE.decode(ps.Text("a"), max_errors=1.5),
        lambda: SOURCE.decode(ps.Image("a").with_mask("b"), ps.Text("b")),
        lambda: SOURCE.select([]),
        lambda: SOURCE.select(["a", "a"]),
        lambda: SOURCE.select([3]),
        lambda: DECODED.select("txt"),
        lambda: DECODED.batch(3, pad=["txt"]),
        lambda: DECODED.batch_by_size(3, size="cls", ragged=["txt"]),
        lambda: SOURCE.take(0),
        lambda: SOURCE.take(True),
        lambda: SOURCE.take(3).take(3),
        lambda: SOURCE.join("labels.txt"),
        lambda: SOURCE.join("labels.csv", on=""),
        lambda: SOURCE.join("labels.csv", missing="ignore"),
        lambda: SOURCE.join("labels.csv", bytes_max=0),
        lambda: SOURCE.join(SOURCE.batch(3)),
        lambda: SOURCE.batch(),
        lambda: SOURCE.batch(3, global_size=6),
        lambda: SOURCE.batch(global_size=0),
        lambda: SOURCE.batch(3, collate=3),
        lambda: SOURCE.batch(3, pad=["a"], ragged=["a"]),
        lambda: SOURCE.batch(3, pad=["__key__"]),
        lambda: SOURCE.batch_by_size(0, size="t"),
        lambda: SOURCE.batch_by_size(5, size=""),
        lambda: SOURCE.batch_by_size(5, size="t", samples_max=0),
        lambda: SOURCE.batch_by_size(5, size="t", oversize="cut"),
        lambda: SOURCE.batch_by_size(5, size="t").batch(2),
        lambda: SOURCE.batch_by_size(5, size="t").filter(keep),
        lambda: SOURCE.evaluate().shuffle(),
        lambda: ps.shards("x/", format=""),
        lambda: ps.shards("x/", on_corrupt="ignore"),
        lambda: ps.shards("x/", manifest="m.jsonl"),
        lambda: ps.shards(),
        lambda: objects("x/", group_by="folder"),
        lambda: objects("x/", read=read),
        lambda: objects(["x"], read=3),
        lambda: objects(["x"], read=read, group_by="stem"),
        lambda: objects(["x"], read=read, region="r"),
        lambda: mix({}),
        lambda: mix({"s3://b/": 1}),
        lambda: mix({SOURCE: -1}),
        lambda: mix({SOURCE: float("nan")}),
        lambda: mix({SOURCE: 0}),
        lambda: mix({SOURCE.shuffle(): 1}),
        lambda: mix({SOURCE.batch(2): 1}),
        lambda: mix({SOURCE: 1}, schedule={0: {SOURCE: 1}}),
        lambda: mix({SOURCE: 1}, schedule={5: {objects("x/"): 1}}),
        lambda: mix({SOURCE: 1}, schedule={5: {}}),
        lambda: mix({SOURCE: 1}, stop="never"),
        lambda: mix({mix({SOURCE: 1}): 1}, stop="first").flat(),
        lambda: mix({DECODED: 1}).decode(ps.Text("a")),
    ],
)
def test_bad_descriptions_are_refused_where_they_are_written(write: Any) -> None:
    """Each bad argument is a ConfigError at once, not when an epoch starts."""
    with pytest.raises((ConfigError, TypeError)):
        write()


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("int64", ("int64", ())),
        (np.float32, ("float32", ())),
        (np.dtype("uint8"), ("uint8", ())),
        (int, ("int64", ())),
        (float, ("float64", ())),
        (bool, ("bool", ())),
        (str, ("object", ())),
        (("uint8", (2, 3)), ("uint8", (2, 3))),
        ((np.uint8, (2,)), ("uint8", (2,))),
    ],
)
def test_fields_of_map_take_every_spelling_of_a_dtype(entry: Any, expected: Any) -> None:
    """Names, numpy's types and dtypes, and Python's own types mean the same."""
    (stage,) = SOURCE.map(keep, fields={"x": entry}).stages
    assert stage.fields == (("x", expected),)  # type: ignore[union-attr]


def test_evaluate_changes_what_evaluation_must_not_have() -> None:
    """Shuffle and drop_last go, everything else stays, wherever it is said; twice is once."""
    train = SOURCE.shuffle(seed=3).decode(ps.Integer("cls")).batch(4, drop_last=True)
    expected = SOURCE.decode(ps.Integer("cls")).evaluate().batch(4)
    assert train.evaluate() == train.evaluate().evaluate() == expected
    assert expected.stage(Shuffle) is None
    assert expected.stage(Evaluate) is not None


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [
        (SOURCE, None),
        (SOURCE.shuffle().take(3), None),
        (DECODED, {"jpg", "cls"}),
        (SOURCE.decode(ps.Image("jpg").with_mask("seg")), {"jpg", "seg"}),
        (SOURCE.select("jpg").map(keep), {"jpg"}),
        (SOURCE.join("a.csv").select(["jpg"]), {"jpg"}),
        (SOURCE.map(keep).decode(ps.Text("a")), None),
        (SOURCE.filter(keep).select("a"), None),
    ],
)
def test_members_reach_down(pipeline: Pipeline, expected: set[str] | None) -> None:
    """The stored members that a pipeline needs are known unless a function may look at all of them."""
    assert pipeline.members() == expected


def test_a_mix_flattens() -> None:
    """Nested mixes become leaves with all their stages, and shares that are the products of the weights above them."""
    a, b, c = ps.shards("a/").decode(ps.Integer("x")), ps.shards("b/"), objects("c/")
    inner = mix({b: 1, c: 3}, schedule={20: {b: 1, c: 1}}).decode(ps.Integer("x"))
    flat = mix({a: 1, inner: 1}, schedule={10: {a: 0, inner: 5}}).shuffle(seed=4).batch(2).flat()
    assert [repr(leaf) for leaf in flat.leaves] == [
        f"{part}.decode(Integer('x')).shuffle(window=16384, seed=4).batch(2)"
        for part in ("shards('a/')", "shards('b/')", "objects('c/')")
    ]
    assert flat.schedule == ((0, (0.5, 0.125, 0.375)), (10, (0.0, 0.25, 0.75)), (20, (0.0, 0.5, 0.5)))
    assert flat.stop == "all"
    assert SOURCE.flat().leaves == (SOURCE,)
    assert SOURCE.flat().schedule == ((0, (1.0,)),)


@given(
    sizes=st.lists(st.integers(0, 20), max_size=60),
    padded=st.booleans(),
    samples_max=st.none() | st.integers(1, 5),
    oversize=st.sampled_from(["alone", "drop"]),
)
def test_batches_by_size_keep_their_bound(
    sizes: list[int], padded: bool, samples_max: int | None, oversize: Any
) -> None:
    """No batch passes a bound unless one sample alone does; none could have taken the next one; nothing is lost."""
    stage = BatchBySize(size_max=12, size="t", padded=padded, samples_max=samples_max, oversize=oversize)
    budget, batches = stage.budget(), [[]]
    for size in sizes:
        verdict = budget.add(size)
        if verdict == "new":
            batches.append([])
        if verdict != "drop":
            batches[-1].append(size)
            assert budget.samples == len(batches[-1])
    kept = [size for size in sizes if size <= 12 or oversize == "alone"]
    assert [size for batch in batches for size in batch] == kept

    def size_of(batch: list[int]) -> int:
        return max(batch) * len(batch) if padded else sum(batch)

    for number, batch in enumerate(batches):
        assert len(batch) <= (samples_max or len(batch))
        if batch and not (len(batch) == 1 and oversize == "alone"):
            assert size_of(batch) <= 12
        if number and batches[number - 1]:
            longer = [*batches[number - 1], batch[0]]
            assert size_of(longer) > 12 or len(longer) > (samples_max or len(longer))


def test_a_sample_larger_than_a_batch_is_refused() -> None:
    """Unless something else was said; so is a size below 0."""
    budget = BatchBySize(size_max=5, size="t").budget()
    with pytest.raises(ValueError, match="size 6 exceeds the largest size of a batch, 5"):
        budget.add(6)
    with pytest.raises(ValueError, match="less than 0"):
        budget.add(-1)
    assert BatchBySize(size_max=5, size=lambda sample: sample["n"]).size_of({"n": 3}) == 3
    assert BatchBySize(size_max=5, size="t").size_of({"t": [1, 2]}) == 2
