"""Stages that change how many samples there are: what they refuse, how they fail, and what they count."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from loading import index, numbers, pipeline, write_counted
from penstock.errors import ConfigError, DecodeError
from resuming import assert_resumes_everywhere, in_step


def repeated(sample: dict[str, Any], rng: np.random.Generator) -> list[dict[str, Any]]:
    """A sample n mod 3 times, each with a number of its own."""
    return [{"cls": sample["cls"], "again": again, "noise": rng.random()} for again in range(sample["cls"] % 3)]


def decoded(folder: Path, window: int | None) -> Any:
    made = ps.shards(f"{folder}/")
    return (made if window is None else made.shuffle(window=window)).decode(ps.Integer("cls"))


def test_several_ranks_must_agree(tmp_path: Path) -> None:
    """Where ranks may have different numbers of batches and cannot ask each other, it is refused, also with an index."""
    write_counted(tmp_path / "data", (9, 9))
    made = pipeline(tmp_path / "data", window=None)
    place = index(made, tmp_path / "index")
    made = decoded(tmp_path / "data", None).flat_map(repeated).batch(4)
    with ps.Loader(made, rank=0, world_size=2, index_dir=place) as loader:
        with pytest.raises(ConfigError, match="agree"):
            next(iter(loader))


def test_the_world_may_change_between_epochs_only(tmp_path: Path) -> None:
    """A carry belongs to its rank: inside an epoch another world size is refused, at its beginning taken."""
    write_counted(tmp_path / "data", (9, 9))
    made = decoded(tmp_path / "data", None)
    place = index(made, tmp_path / "index")
    made = made.flat_map(repeated).batch(4)
    with ps.Loader(made, index_dir=place, lanes=2) as loader:
        next(iter(loader))
        inside = loader.state_dict()
        list(loader)
        between = loader.state_dict()
    with ps.Loader(made, index_dir=place, lanes=2, rank=0, world_size=2, agree=int) as loader:
        loader.load_state_dict(inside)
        with pytest.raises(ConfigError, match="world_size"):
            next(iter(loader))
        loader.load_state_dict(between)
        next(iter(loader))


def test_errors_come_in_order(tmp_path: Path) -> None:
    """What fails does so behind the batches before it; too large a sample names its stage and key."""
    write_counted(tmp_path, (30,))

    def fails(sample: dict[str, Any]) -> list[dict[str, Any]]:
        if sample["cls"] == 17:
            raise ValueError("seventeen")
        return [sample]

    with ps.Loader(decoded(tmp_path, None).flat_map(fails).batch(5)) as loader:
        seen: list[int] = []
        with pytest.raises(DecodeError, match="seventeen"):
            seen.extend(number for batch in loader for number in numbers([batch]))
        assert seen == list(range(15))
    made = decoded(tmp_path, None).batch_by_size(10, size=lambda sample: sample["cls"])
    with ps.Loader(made) as loader, pytest.raises(DecodeError, match="s00011") as caught:
        list(loader)
    assert caught.value.stage == "batch_by_size"
    made = decoded(tmp_path, None).batch_by_size(10, size=lambda sample: sample["cls"], oversize="drop")
    with ps.Loader(made) as loader:
        assert sorted(numbers(loader)) == list(range(11))
        assert loader.statistics().oversize_count == 19


def test_collate_and_pad(tmp_path: Path) -> None:
    """Arrays of different lengths are padded or put end to end; a collate function makes the batch."""
    write_counted(tmp_path, (7,))

    def grows(sample: dict[str, Any]) -> dict[str, Any]:
        return {"cls": sample["cls"], "x": np.arange(sample["cls"])}

    made = decoded(tmp_path, None).map(grows)
    with ps.Loader(made.batch(4, pad={"x": -1})) as loader:
        first, last = loader
    assert first["x"].shape == (4, 3)
    assert first["__x_length__"].tolist() == [0, 1, 2, 3]
    assert last["x"][0].tolist() == [0, 1, 2, 3, -1, -1]
    with ps.Loader(made.batch(4, ragged=["x"])) as loader:
        assert next(iter(loader))["x"].offsets.tolist() == [0, 0, 1, 3, 6]
    made = decoded(tmp_path, None)
    with ps.Loader(made.batch(4, collate=lambda samples: [each["cls"] for each in samples])) as loader:
        assert list(loader) == [[0, 1, 2, 3], [4, 5, 6]]
    with ps.Loader(ps.shards(f"{tmp_path}/").batch(4, collate=len)) as loader:
        assert list(loader) == [4, 3]


def test_dropped_samples_are_counted_once(tmp_path: Path) -> None:
    """max_errors bounds and counts what is dropped; samples tried to find the first layout are not counted twice."""
    write_counted(tmp_path, (20,))

    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["cls"] < 9:
            raise ValueError
        return sample

    with ps.Loader(decoded(tmp_path, None).map(fails, max_errors=9).batch(4)) as loader:
        assert numbers(loader) == list(range(9, 20))
        assert loader.statistics().dropped == {"map[0]": 9}
        assert loader.statistics().samples == 11
    with ps.Loader(decoded(tmp_path, None).map(fails, max_errors=8).batch(4)) as loader, pytest.raises(DecodeError):
        list(loader)


END = 50_256


def tokenized(sample: dict[str, Any]) -> dict[str, Any]:
    """A document of 0 to 40 tokens, each of which says where it comes from."""
    number = int(sample["cls"])
    return {"tokens": [number * 100 + at for at in range(number * 7 % 41)], "other": "dropped"}


def documents(folder: Path, window: int | None = 16) -> Any:
    """The documents of a folder, shuffled."""
    made = ps.shards(f"{folder}/")
    return (made if window is None else made.shuffle(window=window, seed=3)).decode(ps.Integer("cls")).map(tokenized)


def concatenated(made: Any, **options: Any) -> list[int]:
    """All tokens of an epoch, a separator behind each document, as a loop over the documents gives them."""
    with ps.Loader(made.batch(1), **options) as loader:
        found = [batch["tokens"][0] for batch in loader]
    return [token for tokens in found if len(tokens) for token in [*tokens, END]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Shards of 60 documents, and their index."""
    write_counted(tmp_path / "data", (20, 25, 15))
    index(pipeline(tmp_path / "data"), tmp_path / "index")
    return tmp_path


@pytest.mark.parametrize("mode", ["stream", "require"])
def test_every_token_comes_once_and_in_order(folder: Path, mode: str) -> None:
    """Blocks end to end are the documents end to end; position ids begin anew in each document and block."""
    made, options = documents(folder / "data"), {"index": mode, "index_dir": folder / "index", "lanes": 2}
    expected = concatenated(made.map(lambda sample: {"tokens": list(sample["tokens"])}), **options)
    blocks = made.token_blocks(16, separator=END, position_ids=True, pad=7).batch(3)
    with ps.Loader(blocks, **options) as loader:
        batches = list(loader)
    tokens = np.concatenate([batch["tokens"] for batch in batches])
    assert tokens.dtype == np.int64
    assert tokens.shape == (-(-len(expected) // 16), 16)
    assert tokens.reshape(-1)[: len(expected)].tolist() == expected
    assert set(tokens.reshape(-1)[len(expected) :].tolist()) == {7}
    with ps.Loader(made.token_blocks(16, separator=END).batch(3), **options) as loader:  # without what fills no block
        assert (
            np.concatenate([batch["tokens"] for batch in loader]).reshape(-1).tolist()
            == expected[: len(expected) // 16 * 16]
        )
    for batch in batches:
        flat = batch["tokens"].reshape(-1)
        starts = [
            at for at in range(flat.size) if at % 16 == 0 or flat[at - 1] == END or (flat[at] == 7 != flat[at - 1])
        ]
        assert ps.cu_seqlens(batch["position_ids"]).tolist() == [*starts, flat.size]
        for row, key in enumerate(batch["__key__"]):
            assert flat[16 * row] in (END, *(int(key[1:]) * 100 + np.arange(41)))


@pytest.mark.parametrize("mode", ["stream", "require"])
@pytest.mark.parametrize("length", [5, 16, 100])
def test_a_state_lies_between_any_two_blocks(folder: Path, mode: str, length: int) -> None:
    """A loader goes on at the very next token, in the middle of a document, with an index and without."""
    blocks = documents(folder / "data").token_blocks(length, separator=END, position_ids=True).batch(1)
    make = partial(ps.Loader, blocks, index=mode, index_dir=folder / "index", lanes=2, threads=1)
    assert assert_resumes_everywhere(make, every=max(3, 200 // length)) > 100


def test_ranks_divide_the_documents(folder: Path) -> None:
    """On two ranks every token comes once, and both ranks have the same number of batches."""
    made = documents(folder / "data")
    make = partial(ps.Loader, made.token_blocks(16, pad=7).batch(2), index_dir=folder / "index", lanes=4)
    ranks = in_step(make, 2)
    assert len(ranks[0]) == len(ranks[1])
    rows = [batch["tokens"][batch["__valid__"]] for batches in ranks for batch in batches]
    found = [token for token in np.concatenate(rows).reshape(-1).tolist() if token != 7]
    assert sorted(found) == sorted(token for number in range(60) for token in tokenized({"cls": number})["tokens"])


def test_a_mix_is_cut_after_it_is_mixed(folder: Path) -> None:
    """A block holds documents of several sources."""
    mixed = ps.mix({documents(folder / "data", None): 0.5, documents(folder / "data", None).map(dict): 0.5})
    with ps.Loader(mixed.token_blocks(64).batch(1), index_dir=folder / "index") as loader:
        assert len({token // 100 for token in next(iter(loader))["tokens"][0].tolist()}) > 1


def test_what_is_refused(folder: Path) -> None:
    """Wrong arguments are errors at once; documents without tokens name the field and the sample."""
    made = documents(folder / "data")
    for wrong in (
        {"length": 0},
        {"length": 8, "dtype": "int8"},
        {"length": 8, "separator": -1},
        {"length": 8, "field": ""},
    ):
        with pytest.raises(ConfigError):
            made.token_blocks(**wrong)
    with pytest.raises(ConfigError, match="65535"):
        made.token_blocks(8, separator=70_000, dtype="uint16")
    with pytest.raises(ConfigError, match=r"map\(\) must come before .token_blocks\(\)"):
        made.token_blocks(8).map(dict)
    with pytest.raises(ConfigError, match="already has"):
        made.token_blocks(8).token_blocks(8)
    with pytest.raises(ConfigError, match="must come after mix"):
        ps.mix({made.token_blocks(8): 1.0})
    cases: list[tuple[Any, str, str]] = [
        (lambda sample: {"text": "a"}, "int64", "no such field, only text"),
        (lambda sample: {"tokens": "a b"}, "int64", "str of"),
        (lambda sample: {"tokens": [0.5]}, "int64", "float64"),
        (lambda sample: {"tokens": [[1], [2]]}, "int64", r"\[2, 1\]"),
        (lambda sample: {"tokens": [1, 65_536]}, "uint16", "uint16 does not hold all of 1 to 65536"),
        (lambda sample: {"tokens": [-1]}, "uint16", "uint16 does not hold"),
    ]
    for fn, dtype, message in cases:
        wrong_kind = ps.shards(f"{folder}/data/").map(fn).token_blocks(8, dtype=dtype).batch(1)
        with ps.Loader(wrong_kind) as loader, pytest.raises(DecodeError, match=message) as caught:
            next(iter(loader))
        assert (caught.value.stage, caught.value.field, caught.value.sample_key) == ("token_blocks", "tokens", "s00000")


def test_peek_shows_documents(folder: Path) -> None:
    """``peek`` shows the documents that blocks are made of."""
    assert ps.peek(documents(folder / "data").token_blocks(8), 2)[1]["other"] == "dropped"


def test_a_rebatched_job_says_what_it_cannot_know(folder: Path) -> None:
    """An index does not tell the number of blocks, and lets no other number of ranks resume: the errors do not ask for one."""
    blocks = documents(folder / "data").token_blocks(8).batch(1)
    with ps.Loader(blocks, index_dir=folder / "index", lanes=2) as loader:
        with pytest.raises(TypeError, match=r"a stage changes the number of samples\. Hint: count once"):
            len(loader)
        next(iter(loader))
        state = loader.state_dict()
    with pytest.raises(ConfigError, match="token_blocks"):
        next(iter(ps.Loader(blocks, index_dir=folder / "index", rank=0, world_size=2)))
    with ps.Loader(blocks, index_dir=folder / "index", lanes=2, rank=0, world_size=2, agree=int) as loader:
        loader.load_state_dict(state)
        with pytest.raises(ConfigError, match=r"world_size=1.*Hint: with refill, flat_map, token_blocks") as caught:
            next(iter(loader))
        assert "penstock index" not in str(caught.value)
