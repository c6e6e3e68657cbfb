"""Loaders over a reader that gives each epoch once: each sample exactly once, resuming at every position, refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.errors import ConfigError
from penstock.formats import Sample
from penstock.loader.loader import Loader
from penstock.pipeline import Pipeline, Sequential

SAMPLES = 23
BLOCKS = (0, 1, 5, 0, 3, 9, 5)  # sizes of the blocks in which the samples arrive


class EpochOfNumbers:
    """The numbers of an epoch, in blocks."""

    def __init__(self, epoch: int) -> None:
        self.closed = threading.Event()
        values = [f"{epoch}:{number}".encode() for number in range(SAMPLES)]
        samples = [Sample(value.decode(), {"record": memoryview(value)}, 0) for value in values]
        ends = np.cumsum(BLOCKS).tolist()
        self._blocks = [samples[end - size : end] for end, size in zip(ends, BLOCKS, strict=True)]

    def read(self) -> Sequence[Sample] | None:
        return self._blocks.pop(0) if self._blocks else None

    def close(self) -> None:
        self.closed.set()


class WaitingEpoch(EpochOfNumbers):
    """An epoch of which nothing arrives."""

    waiting = threading.Event()

    def read(self) -> Sequence[Sample] | None:
        self.waiting.set()
        self.closed.wait(60)
        return None


class Numbers:
    """A reader that gives each epoch once; a ``SequentialReader``."""

    name = "numbers"

    def __init__(self, make: Callable[[int], Any] = EpochOfNumbers, *, identity: str = "numbers 1") -> None:
        self.identity = identity
        self.opened: list[Any] = []
        self.next_epoch = 0
        self._make = make

    def open_epoch(self, epoch: int) -> Any:
        if epoch < self.next_epoch:
            raise ConfigError(f"epoch {epoch} is over")
        self.next_epoch = epoch + 1
        self.opened.append(self._make(epoch))
        return self.opened[-1]

    def __repr__(self) -> str:
        return "Numbers()"


def source() -> Pipeline:
    return Pipeline(Sequential(Numbers()))


def text(sample: dict[str, Any]) -> dict[str, Any]:
    return {"text": bytes(sample["record"]).decode()}


def twice(sample: dict[str, Any]) -> list[dict[str, Any]]:
    return [text(sample)] * (int(sample["__key__"].partition(":")[2]) % 3)


def is_even(sample: dict[str, Any]) -> bool:
    return int(sample["__key__"].partition(":")[2]) % 2 == 0


PIPELINES: dict[str, Callable[[Pipeline], Pipeline]] = {
    "raw": lambda samples: samples.batch(4),
    "batches of one": lambda samples: samples.map(text).batch(1),
    "decoded": lambda samples: samples.decode(ps.Bytes("record")).batch(4),
    "shuffled": lambda samples: samples.shuffle(7, seed=3).map(text).batch(4),
    "shuffled raw": lambda samples: samples.shuffle(5).batch(3),
    "one window": lambda samples: samples.shuffle(1000).map(text).batch(5),
    "drop_last": lambda samples: samples.shuffle(7).map(text).batch(4, drop_last=True),
    "take": lambda samples: samples.shuffle(7).take(11).map(text).batch(4),
    "filtered": lambda samples: samples.shuffle(7).filter(is_even).map(text).batch(4),
    "refilled": lambda samples: samples.shuffle(7).filter(is_even, refill=True).map(text).batch(4),
    "flat_map": lambda samples: samples.shuffle(7).flat_map(twice).batch(4),
}


def comparable(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(values).tolist() for name, values in batch.items()}


def batches_of(loader: Loader) -> list[dict[str, Any]]:
    return [comparable(batch) for batch in loader]


@pytest.mark.parametrize("name", ["raw", "batches of one", "decoded", "shuffled", "shuffled raw", "one window"])
def test_each_sample_exactly_once(name: str) -> None:
    """Every epoch has each sample exactly once, whichever window and batch; without a window, in the reader's order."""
    with Loader(PIPELINES[name](source()), rank=0, world_size=1) as loader:
        for epoch in range(3):
            batches = batches_of(loader)
            keys = [key for batch in batches for key in batch["__key__"]]
            wanted = [f"{epoch}:{number}" for number in range(SAMPLES)]
            assert sorted(keys) == sorted(wanted)
            assert (keys == wanted) == ("shuffled" not in name and name != "one window")
            assert [at for batch in batches for at in batch["__position__"]] == list(range(SAMPLES))
            assert {shard for batch in batches for shard in batch["__shard__"]} == {"numbers"}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("in_order", [True, False])
def test_resuming_at_every_position(name: str, *, in_order: bool) -> None:
    """From each state of two epochs, a new loader on a new reader gives exactly the batches that were to come."""
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "threads": 1, "in_order": in_order}
    states, batches = [], []
    with Loader(PIPELINES[name](source()), **options) as loader:
        states.append(loader.state_dict())
        for _ in range(2):
            for batch in loader:
                batches.append(comparable(batch))
                states.append(loader.state_dict())
    assert len(batches) > 4
    for at, state in enumerate(states):
        with Loader(PIPELINES[name](source()), **options) as again:
            again.load_state_dict(state)
            rest: list[dict[str, Any]] = []
            while again.epoch < 2:
                rest += batches_of(again)
            wanted = batches[at:]
            if not in_order:
                rest, wanted = sorted(rest, key=itemgetter("__key__")), sorted(wanted, key=itemgetter("__key__"))
            assert rest == wanted, at


def test_another_batch_size_continues_with_the_next_sample() -> None:
    """A state is a number of samples, so batches of another size go on after the last sample that was delivered."""
    with Loader(source().shuffle(7).batch(4), rank=0, world_size=1) as loader:
        keys = [key for batch in loader for key in batch["__key__"]]
    with Loader(source().shuffle(7).batch(4), rank=0, world_size=1) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with Loader(source().shuffle(7).batch(5), rank=0, world_size=1) as loader:
        loader.load_state_dict(state)
        assert [key for batch in loader for key in batch["__key__"]] == keys[4:]


def test_a_state_is_a_number() -> None:
    """The position in a state does not grow with the window."""
    with Loader(source().shuffle(7).batch(4), rank=0, world_size=1) as loader:
        next(iter(loader))
        state = loader.state_dict()
    assert state["mode"] == "sequential"
    assert state["cursor"] == {"position": 4}


def test_an_epoch_that_is_left_is_closed() -> None:
    """Leaving an epoch closes it, and the next one begins at its first sample; so do ``take`` and ``close``."""
    reader = Numbers()
    with Loader(Pipeline(Sequential(reader)).take(2).batch(2), rank=0, world_size=1) as loader:
        assert [batch["__key__"] for batch in loader] == [["0:0", "0:1"]]
        assert [batch["__key__"] for batch in loader] == [["1:0", "1:1"]]
        next(iter(loader))
    assert [epoch.closed.is_set() for epoch in reader.opened] == [True, True, True]


def test_closing_while_nothing_arrives() -> None:
    """A loader whose reader waits for samples can be closed from another thread."""
    reader = Numbers(WaitingEpoch)
    loader = Loader(Pipeline(Sequential(reader)).batch(2), rank=0, world_size=1)
    failures: list[BaseException] = []

    def iterate() -> None:
        try:
            list(loader)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=iterate)
    thread.start()
    assert WaitingEpoch.waiting.wait(30)
    loader.close()
    thread.join(30)
    assert not thread.is_alive()
    assert reader.opened[0].closed.is_set()
    assert all(isinstance(failure, ps.ClosedError) for failure in failures)


def test_a_window_that_exceeds_the_budget() -> None:
    """A window that the first samples show to be larger than the memory budget is refused, with the numbers."""
    fetch = ps.FetchConfig(budget_bytes_max=32 << 20)
    with (
        Loader(source().shuffle(1 << 24).batch(4), rank=0, world_size=1, fetch=fetch) as loader,
        pytest.raises(ConfigError, match=r"this plan holds .*more than its budget of 32"),
    ):
        next(iter(loader))


def test_the_same_epoch_again_is_refused() -> None:
    """A state of an epoch that the reader has begun is refused by the reader."""
    with Loader(source().batch(4), rank=0, world_size=1) as loader:
        state = loader.state_dict()
        next(iter(loader))
        loader.load_state_dict(state)
        with pytest.raises(ConfigError, match="epoch 0 is over"):
            next(iter(loader))


def test_a_state_of_other_data_or_another_window() -> None:
    """A state is refused if the reader, the window or the seed is another one, or if it is one of shards."""
    pipeline = source().shuffle(7).batch(4)
    with Loader(pipeline, rank=0, world_size=1) as loader:
        next(iter(loader))
        state = loader.state_dict()
    for changed, message in (
        (Pipeline(Sequential(Numbers(identity="numbers 2"))).shuffle(7).batch(4), "the data set changed"),
        (source().shuffle(8).batch(4), "window=7.*window=8"),
        (source().shuffle(7, seed=1).batch(4), "seed=0.*seed=1"),
        (source().batch(4), "shuffled=True"),
    ):
        with Loader(changed, rank=0, world_size=1) as loader:
            loader.load_state_dict(state)
            with pytest.raises(ConfigError, match=message):
                next(iter(loader))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 1, "world_size": 2}, r"world_size=2.*copies= or split=.*Loader\(rank=0, world_size=1\)"),
        ({"processes": 2}, r"processes=2: only one process can read numbers.*threads="),
        ({"stride": (0, 2)}, "2 DataLoader workers"),
        ({"index": "require"}, "numbers has no index"),
        ({"lanes": 4}, "lanes=4"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    """What needs more than one pass in one process is refused, with what to do instead."""
    with (
        Loader(source().batch(4), **({"rank": 0, "world_size": 1} | options)) as loader,
        pytest.raises(ConfigError, match=message),
    ):
        next(iter(loader))


def test_refused_uses() -> None:
    """Functions that list, count or read samples again name the pipeline and refuse it."""
    pipeline = source()
    with (
        Loader(pipeline.evaluate().batch(4), rank=0, world_size=1) as loader,
        pytest.raises(ConfigError, match=r"cannot be padded.*leave .evaluate\(\) out"),
    ):
        next(iter(loader))
    for name, use in {
        "open": pipeline.open,
        "peek": lambda: ps.peek(pipeline),
        "explain": lambda: ps.explain(pipeline),
        "mix": lambda: ps.mix({pipeline: 1.0}),
        "join": lambda: ps.shards("memory://bucket/").join(pipeline),
        "build_index": lambda: ps.build_index(pipeline),
        "warm_cache": lambda: ps.warm_cache(pipeline, "/nowhere"),
        "pack": lambda: ps.pack(pipeline, "memory://bucket/packed/"),
    }.items():
        with pytest.raises(
            ConfigError, match=rf"{name}\(\) of Numbers\(\)\.pipeline\(\): its samples come once per epoch"
        ):
            use()
