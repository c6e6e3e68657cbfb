"""Time to first batch: it waits for its own samples, and for nothing else that the order does not ask for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from loading import index, index_beside, numbers, shard
from penstock import compose
from penstock.store import Store, Wrapper
from penstock.types import Get, ListPage, Operation, Sink, Transfer

WAIT_S_MAX = 20.0
SHARDS, EACH = 12, 40
TOTAL = SHARDS * EACH
SAMPLE_BYTES = 80_000  # a gap of one sample is wider than what is read through
OTHERS = [f"{number:03d}.tar" for number in range(1, SHARDS)]


class Gate:
    """Holds back, of all stores, the operations that `holds` says, until ``open()``."""

    def __init__(self) -> None:
        self.holds: Callable[[Operation], bool] = lambda _: False
        self._held: list[tuple[Store, Operation, Sink]] = []
        self._lock = threading.RLock()

    def asked(self, store: Store, operation: Operation, sink: Sink) -> Transfer:
        with self._lock:
            if self.holds(operation):
                self._held.append((store, operation, sink))
                return _Held()
        return store.submit(operation, sink)

    def open(self) -> None:
        with self._lock:
            self.holds = lambda _: False
            held, self._held = self._held, []
        for store, operation, sink in held:
            store.submit(operation, sink)

    def first_batch(self, loader: ps.Loader) -> Any:
        """The first batch, though the gate is closed."""
        with ThreadPoolExecutor(1) as pool:
            try:
                return pool.submit(next, iter(loader)).result(WAIT_S_MAX)
            finally:
                self.open()


class _Held:
    def cancel(self) -> None:
        """It is sent once the gate opens."""

    def unanswered_s(self) -> float:
        return 0.0


class _Gated(Wrapper):
    def __init__(self, inner: Store, gate: Gate) -> None:
        super().__init__(inner)
        self.gate = gate

    def submit(self, operation: Operation, sink: Sink) -> Transfer:
        return self.gate.asked(self.inner, operation, sink)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Of all stores that are connected from now on."""
    gate, connect = Gate(), compose.connect
    monkeypatch.setattr(compose, "connect", lambda *arguments, **options: _Gated(connect(*arguments, **options), gate))
    return gate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 2.6 MB: a run of the window below is far more than a batch."""
    folder = tmp_path_factory.mktemp("data")
    for number in range(SHARDS):
        samples = [{"__key__": f"s{n:05d}", "cls": str(n), "bin": bytes(SAMPLE_BYTES)} for n in _numbers(number)]
        (folder / f"s-{number:03d}.tar").write_bytes(shard(samples))
    return folder


def _numbers(number: int) -> range:
    return range(number * EACH, (number + 1) * EACH)


def batches(source: Any, *, window: int | None = None) -> Any:
    made = source if window is None else source.shuffle(window=window, seed=0)
    return made.decode(ps.Integer("cls")).batch(8)


def test_it_does_not_wait_for_its_window(folder: Path, tmp_path: Path, gate: Gate) -> None:
    """By an index a batch of a window of 240 is there before any request for more than single samples is answered."""
    made = batches(ps.shards(f"{folder}/"), window=240)
    place = index(made, tmp_path)
    gate.holds = lambda operation: (
        isinstance(operation, Get)
        and (
            operation.key.endswith(".tar")
            and (operation.span is None or operation.span.length_bytes > 3 * SAMPLE_BYTES)
        )
    )
    with ps.Loader(made, lanes=4, threads=1, index="require", index_dir=place) as loader:
        first = gate.first_batch(loader)
        assert sorted(numbers([first, *loader])) == list(range(TOTAL))


@pytest.mark.parametrize("mode", ["stream", "require"])
def test_it_does_not_wait_for_what_is_read_ahead(folder: Path, tmp_path: Path, gate: Gate, mode: Any) -> None:
    """As stored, a batch is there when its shard's bytes are, however much more of the budget was asked for."""
    made = batches(ps.shards(f"{folder}/"))
    place = index(made, tmp_path)
    gate.holds = lambda operation: isinstance(operation, Get) and operation.key[-7:] in OTHERS
    with ps.Loader(made, threads=1, index=mode, index_dir=place) as loader:
        first = gate.first_batch(loader)
        assert numbers([first, *loader]) == list(range(TOTAL))


@pytest.mark.parametrize("named", ["list", "braces", "manifest"])
def test_it_waits_for_no_listing_where_shards_are_named(folder: Path, tmp_path: Path, gate: Gate, named: str) -> None:
    """Shards by name, by braces or by a manifest: nothing is listed."""
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text("".join(f'{{"url": "{url}"}}\n' for url in urls))
    source = {
        "list": lambda: ps.shards(urls),
        "braces": lambda: ps.shards(f"{folder}/s-{{000..{SHARDS - 1:03d}}}.tar"),
        "manifest": lambda: ps.shards(manifest=str(manifest)),
    }[named]()
    gate.holds = lambda operation: isinstance(operation, ListPage)
    with ps.Loader(batches(source), threads=1, index="stream") as loader:
        assert numbers([gate.first_batch(loader)]) == list(range(8))


def test_an_index_is_not_asked_for_after_the_listing(folder: Path, gate: Gate) -> None:
    """The index beside the shards and their listing are one round trip: no page comes before the index is asked for."""
    index_beside(folder)
    asked = threading.Event()

    def holds(operation: Operation) -> bool:
        if isinstance(operation, Get) and operation.key.endswith("dataset.index"):
            asked.set()
            gate.open()
        return isinstance(operation, ListPage) and not asked.is_set()

    gate.holds = holds
    with ps.Loader(batches(ps.shards(f"{folder}/")), threads=1) as loader:
        assert numbers([gate.first_batch(loader)]) == list(range(8))
        assert loader.state_dict()["mode"] == "index"
