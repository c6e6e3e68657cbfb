"""``pipeline.open()``: samples by number and by key, of objects and of indexed shards."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import penstock as ps
from counting import counted_plans
from loading import counted, formatted, shard, write_counted, write_formatted
from penstock.access.dataset import REQUESTS_MIN, PipelineDataset
from penstock.errors import ClosedError, ConfigError, ObjectChangedError, ObjectMissingError
from penstock.fetch import process_budget
from penstock.store.traced import Traced

SIZES = (9, 4, 7)
TOTAL = sum(SIZES)


@pytest.fixture(params=["objects", "shards"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> PipelineDataset:
    """Twenty samples whose ``cls`` is their number, as single objects or in three shards; keys ``s00000.cls`` or ``s00000``."""
    if request.param == "objects":
        for number in range(TOTAL):
            (tmp_path / f"s{number:05d}.cls").write_text(str(number))
        return ps.objects(f"{tmp_path}/").decode(ps.Integer("cls")).open()
    write_counted(tmp_path / "data", SIZES)
    return ps.shards(f"{tmp_path}/data/").decode(ps.Integer("cls")).open(index_dir=tmp_path / "index")


def numbers(samples: Any) -> list[int]:
    return [int(sample["cls"]) for sample in samples]


def requests_count(dataset: PipelineDataset) -> int:
    """GETs of samples so far."""
    reader: Any = dataset._reader
    return sum(store.statistics().operations.get("Get", 0) for store in reader.stores if isinstance(store, Traced))


def received_bytes(dataset: PipelineDataset) -> int:
    """Of samples so far."""
    reader: Any = dataset._reader
    return sum(store.statistics().received_bytes for store in reader.stores if isinstance(store, Traced))


def stored(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def test_a_batch_starts_with_the_largest_default_window() -> None:
    """Any default of ``requests_max`` allows the number of requests with which a data set starts."""
    assert ps.FetchConfig().requests_max == REQUESTS_MIN == ps.FetchConfig(requests_min=REQUESTS_MIN).requests_min


def test_by_number(dataset: PipelineDataset) -> None:
    """A number, negative or NumPy's, is one sample; a slice, a list, a range or an array is a list, in that order."""
    assert len(dataset) == TOTAL
    assert [dataset[number]["cls"] for number in range(TOTAL)] == list(range(TOTAL))
    assert (dataset[-1]["cls"], dataset[-TOTAL]["cls"], dataset[np.int64(3)]["cls"]) == (TOTAL - 1, 0, 3)
    scalar: Any = np.array(4)
    assert dataset[scalar]["cls"] == 4
    assert numbers(dataset[2:15:3]) == [2, 5, 8, 11, 14]
    assert numbers(dataset[::-1]) == list(range(TOTAL))[::-1]
    assert numbers(dataset[[5, 0, 5, -1]]) == numbers(dataset[np.array([5, 0, 5, -1])]) == [5, 0, 5, TOTAL - 1]
    assert numbers(dataset[range(3)]) == [0, 1, 2]
    assert (dataset[[]], dataset[TOTAL:], dataset.__getitems__([])) == ([], [], [])


def test_where_a_sample_is_from(dataset: PipelineDataset) -> None:
    """A sample says its key, the URL of its object or shard, and its number."""
    sample = dataset[10]
    assert sample["__key__"].partition(".")[0] == "s00010"
    assert sample["__shard__"].rpartition("/")[2] in ("s00010.cls", "s-001.tar")
    assert sample["__position__"] == 10


def test_by_key(dataset: PipelineDataset) -> None:
    """A key gives its sample, alone or in a list; ``get`` and ``in`` ask."""
    keys = [sample["__key__"] for sample in dataset]
    assert dataset[keys[7]]["cls"] == 7
    assert numbers(dataset[[keys[7], keys[0]]]) == [7, 0]
    assert keys[19] in dataset
    assert "s99999" not in dataset
    assert 3 not in dataset
    found = dataset.get(keys[3])
    assert found is not None
    assert found["cls"] == 3
    assert dataset.get("s99999") is None
    assert dataset.get("s99999", 5) == 5
    assert dataset.find(keys[11]) == 11
    with pytest.raises(KeyError, match="none of 20 samples has the key 's99999'"):
        dataset["s99999"]


def test_no_such_number(dataset: PipelineDataset) -> None:
    """A number that is none says so with the numbers that there are, and so does a mask."""
    for wrong in (TOTAL, -TOTAL - 1):
        with pytest.raises(IndexError, match=rf"sample {wrong} of 20: numbers range from -20 to 19"):
            dataset[wrong]
    with pytest.raises(ConfigError, match="flatnonzero"):
        dataset[np.ones(TOTAL, bool)]
    for wrong_key in (b"s00001", "s00001"):
        with pytest.raises(ConfigError, match="not numbers or keys"):
            dataset.read_samples(wrong_key)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        dataset[1.5]  # type: ignore[call-overload]


def test_in_any_order_one_by_one(dataset: PipelineDataset) -> None:
    """Iterating gives all as stored; a permutation, pulled lazily, is given in its order, as often as it says."""
    assert numbers(dataset) == list(range(TOTAL))
    order = np.random.default_rng(0).permutation(TOTAL)
    assert numbers(dataset.iter_samples(order)) == order.tolist()
    assert numbers(dataset.iter_samples(iter([3, 3, -1]))) == [3, 3, TOTAL - 1]
    endless = dataset.iter_samples(number % TOTAL for number in iter(int, 1))
    assert next(endless)["cls"] == 0
    with pytest.raises(IndexError, match="sample 20 of 20"):
        list(dataset.iter_samples([0, TOTAL]))


def test_what_is_asked_for_twice_is_read_once(dataset: PipelineDataset) -> None:
    """A batch reads each sample once, and what was asked for twice is two samples."""
    dataset[0]
    before = requests_count(dataset)
    first, _, second = dataset[[7, 12, 7]]
    assert requests_count(dataset) - before == 2
    assert first == second
    assert first is not second


@settings(max_examples=20, deadline=None)
@given(order=st.lists(st.integers(-TOTAL, TOTAL - 1), max_size=30), gap_bytes=st.sampled_from([0, 3000, 1 << 20]))
def test_any_batch_as_single_samples(
    order: list[int], gap_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever is merged into one request, a batch's samples are those that the numbers give one by one."""
    folder = tmp_path_factory.getbasetemp() / "any-batch"
    if not folder.exists():
        write_counted(folder / "data", SIZES)
    fetch = ps.FetchConfig(gap_bytes_max=gap_bytes, part_bytes=64 << 10)
    with ps.shards(f"{folder}/data/").open(index_dir=folder / "index", fetch=fetch) as dataset:
        expected = {number: sample for number, sample in enumerate(dataset)}  # noqa: C416 - say what it is
        assert dataset[order] == [expected[number % TOTAL] for number in order]


def test_neighbours_are_one_request(tmp_path: Path) -> None:
    """Ranges that lie near each other in a shard are read as one, in whatever order they are asked for."""
    write_counted(tmp_path / "data", (40,))
    dataset = ps.shards(f"{tmp_path}/data/").decode(ps.Integer("cls")).open(index_dir=tmp_path / "index")
    dataset[0]  # reads where they lie
    before = requests_count(dataset)
    assert numbers(dataset[[30, 2, 17, 9]]) == [30, 2, 17, 9]
    assert requests_count(dataset) - before == 1


def test_nothing_stays_reserved(dataset: PipelineDataset) -> None:
    """After a batch, and after an iteration that was dropped half-way, the process's budget is as before."""

    def used_bytes() -> int:
        found = process_budget().statistics()
        return found.used_bytes - found.free_bytes

    gc.collect()  # what earlier tests left
    before = used_bytes()
    samples = dataset[0:TOTAL]
    assert used_bytes() <= before
    half = dataset.iter_samples()
    assert next(half) == samples[0]
    del half
    deadline_s = time.monotonic() + 20
    while used_bytes() > before and time.monotonic() < deadline_s:  # requests on their way are cancelled, and end
        threading.Event().wait(0.01)
    assert used_bytes() <= before


def test_members_nobody_wants_are_not_read(tmp_path: Path) -> None:
    """Where it pays, only the wanted members' ranges are asked for, in one piece or several; the samples are the same."""
    big = bytes(300_000)
    (tmp_path / "data").mkdir()
    members = [{"__key__": f"s{n}", "a": str(n), "b": big, "c": str(n) * 2, "d": big} for n in range(6)]
    (tmp_path / "data/s-000.tar").write_bytes(shard(members))
    source = ps.shards(f"{tmp_path}/data/")
    order = [4, 0, 4, 5]
    for fields in (["a"], ["a", "c"], ["c", "d"], ["b"]):
        dataset = source.select(fields).open(index_dir=tmp_path / "index")
        before = received_bytes(dataset)
        found = dataset[order]
        wanted = [{name: value for name, value in members[n].items() if name in ("__key__", *fields)} for n in order]
        assert [{name: each[name] for name in ("__key__", *fields)} for each in found] == [
            {name: value if name == "__key__" else stored(value) for name, value in each.items()} for each in wanted
        ]
        large = sum(name in ("b", "d") for name in fields)
        assert received_bytes(dataset) - before < 3 * (large * 300_000 + 10_000)
        assert [each["__key__"] for each in dataset.iter_samples(order)] == ["s4", "s0", "s4", "s5"]


def test_an_index_is_made_or_required(tmp_path: Path) -> None:
    """Without an index, ``auto`` makes one, once, and ``require`` refuses; there is no streaming by number."""
    write_counted(tmp_path / "data", SIZES)
    shards = ps.shards(f"{tmp_path}/data/").decode(ps.Integer("cls"))
    with pytest.raises(ConfigError, match=r"3 of 3 shards .* are not indexed.*penstock index"):
        shards.open(index="require", index_dir=tmp_path / "index")
    assert len(shards.open(index_dir=tmp_path / "index")) == TOTAL
    assert numbers(shards.open(index="require", index_dir=tmp_path / "index")[[19, 0]]) == [19, 0]
    with pytest.raises(ConfigError, match="must be 'auto' or 'require'"):
        shards.open(index="stream")  # type: ignore[arg-type]


@pytest.mark.parametrize("format_name", ["tfrecord", "jsonl", "recordio", "zip"])
def test_every_format_with_samples_to_enter(tmp_path: Path, format_name: str) -> None:
    """Records of the other formats are read by range alike."""
    total = write_formatted(tmp_path / "data", format_name, (5, 3))
    with ps.shards(f"{tmp_path}/data/").open(index_dir=tmp_path / "index") as dataset:
        assert len(dataset) == total
        assert dataset[[6, 1, 7]] == [dataset[6], dataset[1], dataset[7]]
        assert [sample["__position__"] for sample in dataset] == list(range(total))


def test_samples_of_a_zip_and_a_tar(tmp_path: Path) -> None:
    """Only the directory of a zip and the wanted members are read, also beside shards of another format and after pickling."""
    (tmp_path / "data").mkdir()
    large = [{"__key__": f"z{number}", "n": b"%d" % number, "big": bytes(200_000 + number)} for number in range(8)]
    (tmp_path / "data" / "a.zip").write_bytes(formatted("zip", large))
    (tmp_path / "data" / "b.tar").write_bytes(
        formatted("tar", [{"__key__": f"t{n}", "n": b"%d" % n} for n in range(8)])
    )
    with ps.shards(f"{tmp_path}/data/").select(["n"]).open(index_dir=tmp_path / "index") as dataset:
        before = received_bytes(dataset)
        found = pickle.loads(pickle.dumps(dataset))[[9, 7, 0, 12]]
        assert [(sample["__key__"], bytes(sample["n"])) for sample in found] == [
            ("t1", b"1"), ("z7", b"7"), ("z0", b"0"), ("t4", b"4"),
        ]  # fmt: skip
        assert bytes(dataset[3]["n"]) == b"3"
        assert received_bytes(dataset) - before < 200_000


def test_compressed_shards_are_refused(tmp_path: Path) -> None:
    """A shard that cannot be entered at a sample says so, and what to do."""
    write_formatted(tmp_path / "data", "tar.gz", (3,))
    with pytest.raises(ConfigError, match="can be read only from its beginning"):
        ps.shards(f"{tmp_path}/data/").open(index_dir=tmp_path / "index")
    write_formatted(tmp_path / "rows", "parquet", (3,))
    with pytest.raises(ConfigError, match="one block of samples at a time"):
        ps.shards(f"{tmp_path}/rows/").open(index_dir=tmp_path / "index")


def test_a_shard_that_changed(tmp_path: Path) -> None:
    """Of a shard that was replaced, nothing is given: the error names it, and the others can still be read."""
    write_counted(tmp_path / "data", SIZES)
    dataset = ps.shards(f"{tmp_path}/data/").decode(ps.Integer("cls")).open(index_dir=tmp_path / "index")
    (tmp_path / "data/s-001.tar").write_bytes(shard(counted(range(100, 110))))
    with pytest.raises(ObjectChangedError, match=r"s-001\.tar"):
        dataset[10]
    with pytest.raises(ObjectChangedError, match=r"s-001\.tar"):
        list(dataset)
    assert dataset[0]["cls"] == 0


def test_closed(dataset: PipelineDataset) -> None:
    """As a context manager it closes; what comes after is an error that says so, and closing twice is none."""
    with dataset as opened:
        assert opened is dataset
    dataset.close()
    assert "closed" in repr(dataset)
    for use in (lambda: dataset[0], lambda: list(dataset), lambda: "s" in dataset):
        with pytest.raises(ClosedError, match="open it again"):
            use()


def test_closed_while_it_is_iterated(dataset: PipelineDataset) -> None:
    """What iterates a data set that is closed hears so at the next sample, not after all that was read ahead."""
    samples = dataset.iter_samples(number % TOTAL for number in iter(int, 1))
    next(samples)
    dataset.close()
    with pytest.raises(ClosedError, match="open it again"):
        next(samples)


def test_calls_closed_under_way() -> None:
    """Threads that wait for a user's function when the data set is closed get samples or ``ClosedError``, nothing else."""
    began, goes_on = threading.Event(), threading.Event()

    def read(key: str) -> bytes:
        began.set()
        assert goes_on.wait(20)
        return key.encode()

    dataset = ps.objects([str(number) for number in range(200)], read=read).open()
    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(dataset.read_samples, range(200)) for _ in range(2)]
        assert began.wait(20)
        closing = pool.submit(dataset.close)
        while not dataset._closed:
            goes_on.wait(0.01)
        goes_on.set()
        closing.result(20)
        assert all(isinstance(each.exception(20), ClosedError) for each in asking)


def test_repr_says_what_it_is(dataset: PipelineDataset) -> None:
    """What was opened, as it was written, and how many samples there are."""
    assert repr(dataset).startswith(("<Dataset objects('", "<Dataset shards('"))
    assert repr(dataset).endswith(".decode(Integer('cls')): 20 samples>")


def test_a_pickle_is_what_was_found(dataset: PipelineDataset) -> None:
    """A copy has samples, keys and versions without looking again."""
    keys = [sample["__key__"] for sample in dataset]
    assert keys[3] in dataset
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(copy) == TOTAL
    assert copy[[4, 2]] == dataset[[4, 2]]
    assert copy[keys[5]] == dataset[5]


def test_many_threads_at_once(dataset: PipelineDataset) -> None:
    """Batches that threads ask for side by side are each its own, in order."""
    orders = [np.random.default_rng(seed).permutation(TOTAL).tolist() for seed in range(16)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda order: numbers(dataset[order]), orders))
    assert found == orders


def test_random_numbers_are_the_epochs(tmp_path: Path) -> None:
    """What ``map`` draws depends on seed, epoch and number, not on how a sample was asked for."""
    (tmp_path / "a.cls").write_text("0")
    (tmp_path / "b.cls").write_text("1")
    drawn = ps.objects(f"{tmp_path}/").map(_drawn)
    dataset = drawn.open(seed=3)
    first = [sample["drawn"] for sample in dataset]
    assert [dataset[1]["drawn"], dataset[0]["drawn"]] == first[::-1]
    assert [sample["drawn"] for sample in dataset.read_samples([0, 1], epoch=1)] != first
    assert [sample["drawn"] for sample in drawn.open(seed=4)] != first


def _drawn(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "drawn": float(rng.random())}


def test_calls_of_your_own(tmp_path: Path) -> None:
    """Keys that a function reads have numbers and keys too, and its threads end with the data set."""
    with ps.objects(["7", "8", "9"], read=str.encode).open() as dataset:
        assert [sample["data"] for sample in dataset] == [b"7", b"8", b"9"]
        assert dataset["8"]["data"] == b"8"
        assert dataset.find("0") is None
        assert pickle.loads(pickle.dumps(dataset))[2]["data"] == b"9"


def test_several_stores_and_groups(tmp_path: Path) -> None:
    """Objects of several stores, grouped by stem, come in the order asked, in a batch and one by one."""
    for number in range(6):
        folder = tmp_path / f"{number % 2}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.cls").write_text(str(number))
        (folder / f"{number}.txt").write_text(f"text {number}")
    urls = [f"{tmp_path}/0/", f"{tmp_path}/1/"]
    dataset = ps.objects(urls, group_by="stem").decode(ps.Integer("cls"), ps.Text("txt")).open()
    assert numbers(dataset) == [0, 2, 4, 1, 3, 5]
    order = [5, 0, 3, 3, 1]
    assert numbers(dataset[order]) == numbers(dataset.iter_samples(order)) == [5, 0, 1, 1, 2]
    assert dataset["4"]["txt"] == "text 4"


@pytest.mark.parametrize("kind", ["objects", "shards"])
def test_several_stores_are_one_plan(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neighbours in the order lie in different prefixes, reading ahead goes on: each order is one ``read_many``."""
    for name in "ab":
        write_counted(tmp_path / name, (5,))
        (tmp_path / name / "x.cls").write_text("0")
    urls = [f"{tmp_path}/a/", f"{tmp_path}/b/"]
    source = ps.objects(urls) if kind == "objects" else ps.shards(urls)
    with source.open(index_dir=tmp_path / "index") as dataset:
        order = [number for pair in zip(range(len(dataset) // 2), range(len(dataset) // 2, len(dataset)), strict=True)
                 for number in pair]  # fmt: skip
        expected = [dataset[number] for number in order]
        plans = counted_plans(monkeypatch)
        assert list(dataset.iter_samples(order)) == expected
        assert dataset[order] == expected
        assert len(plans) == 2


def test_nothing_there(tmp_path: Path) -> None:
    """An empty prefix is no data set of length 0."""
    with pytest.raises(ObjectMissingError, match=r"no objects here.*use a list"):
        ps.objects(f"{tmp_path}/").open()


@pytest.mark.parametrize("stage", ["batch", "shuffle", "filter", "flat_map", "take", "max_errors", "mix"])
def test_stages_without_a_sample_for_each_number_are_refused(stage: str) -> None:
    """What batches, orders, drops, multiplies or mixes is refused before anything is looked at."""
    made = ps.objects("s3://bucket/images/")
    wrong: Any = {
        "batch": lambda: made.batch(4),
        "shuffle": made.shuffle,
        "filter": lambda: made.filter(bool),
        "flat_map": lambda: made.flat_map(lambda sample: [sample]),
        "take": lambda: made.take(3),
        "max_errors": lambda: made.map(dict, max_errors=1),
        "mix": lambda: ps.mix({made: 1}),
    }[stage]
    with pytest.raises(ConfigError, match=r"single samples|may drop|mixes"):
        wrong().open()
