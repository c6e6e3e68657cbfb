"""Caches that share a directory, compared with a dictionary under random operations and damage to the disk."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.cache import CacheConfig, Cached
from penstock.errors import ObjectMissingError, SpanError
from penstock.store.memory import MemoryStore
from penstock.types import ByteRange
from store_contract.support import content

KEYS = ("a", "b", "b/c")  # few, so that operations meet
SIZES = (0, 1, 4095, 4096, 4097, 20_000)

operations = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.sampled_from(KEYS), st.sampled_from(SIZES), st.integers(0, 9)),
        st.tuples(st.just("write outside"), st.sampled_from(KEYS), st.sampled_from(SIZES), st.integers(0, 9)),
        st.tuples(st.just("read"), st.sampled_from(KEYS)),
        st.tuples(st.just("read"), st.sampled_from(KEYS)),
        st.tuples(st.just("span"), st.sampled_from(KEYS), st.integers(0, 21_000), st.integers(1, 21_000)),
        st.tuples(st.just("span"), st.sampled_from(KEYS), st.integers(0, 21_000), st.integers(1, 21_000)),
        st.tuples(st.just("list")),
        st.tuples(st.just("delete"), st.sampled_from(KEYS)),
        st.tuples(st.just("damage"), st.integers(0, 1000), st.integers(0, 10**6)),
        st.tuples(st.just("lose"), st.integers(0, 1000)),
        st.tuples(st.just("lose all")),
        st.tuples(st.just("lose account")),
    ),
    max_size=25,
)


class Model:
    """Two caches of one directory, the store inside, and the objects that it must hold."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, **options: Any) -> None:
        self.folder = folder
        self.memory = MemoryStore()
        self.objects: dict[str, bytes] = {}
        config = CacheConfig(folder, free_ratio_min=0.0, block_bytes=4096, threads_max=2, **options)
        self.caches = [stack.enter_context(Cached(self.memory, config)) for _ in range(2)]

    def entries(self) -> list[Path]:
        return sorted(self.folder.glob("v1/entries/*/*"))

    def apply(self, turn: int, name: str, *words: Any) -> None:
        """Perform one operation, alternating between the caches."""
        store = self.caches[turn % 2]
        if name in ("write", "write outside"):
            key, size_bytes, seed = words
            self.objects[key] = content(size_bytes, seed)
            (store if name == "write" else self.memory).write(key, self.objects[key])
        elif name in ("read", "span"):
            self.read(store, words[0], ByteRange(words[1], words[1] + words[2]) if name == "span" else None)
        elif name == "list":
            sizes = {key: len(data) for key, data in self.objects.items()}
            assert {info.key: info.size_bytes for info in store.list()} == sizes
        elif name == "delete":
            self.objects.pop(words[0], None)
            store.delete(words[0])
        elif name == "lose all":
            shutil.rmtree(self.folder, ignore_errors=True)
        elif name == "lose account":
            (self.folder / "v1/usage").unlink(missing_ok=True)
        elif entries := self.entries():
            path = entries[words[0] % len(entries)]
            if name == "lose":
                path.unlink()
            else:  # by renaming: a reader that has verified the file keeps what it has open
                raw = bytearray(path.read_bytes())
                raw[words[1] % len(raw)] ^= 0xFF
                path.unlink()
                path.write_bytes(raw)
                for cache in self.caches:  # as processes that begin now: they have verified nothing yet
                    cache.context.directory._seen.clear()

    def read(self, store: Cached, key: str, span: ByteRange | None) -> None:
        data = self.objects.get(key)
        try:
            blob = store.read(key, span)
        except ObjectMissingError:
            assert data is None
        except SpanError:
            assert data is not None
            assert span is not None
            assert span.start >= len(data)
        else:
            assert data is not None
            assert blob.data == (data if span is None else data[span.start : span.end])


@settings(max_examples=70, deadline=None)
@given(operations, st.sampled_from([10**8, 8 * 8192]))
@pytest.mark.server
def test_any_history_reads_as_a_dictionary(history: list[tuple[Any, ...]], bytes_max: int) -> None:
    """Without a TTL, every read and listing matches the store, and the limit is kept."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = Model(Path(folder) / "cache", stack, bytes_max=bytes_max)
        for turn, operation in enumerate(history):
            model.apply(turn, *operation)
        held = sum(-(-path.stat().st_size // 4096) * 4096 for path in model.entries())
        assert held <= bytes_max
