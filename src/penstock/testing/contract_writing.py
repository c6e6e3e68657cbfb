"""The contract of writing: whole objects, writers, deleting, copying, odd keys."""

from __future__ import annotations

import gc
import io
import pickle
import threading
from typing import TYPE_CHECKING

import pytest

from penstock.errors import (
    ClosedError,
    ConfigError,
    ObjectExistsError,
    ObjectMissingError,
    StoreError,
)
from penstock.store.writing import copy
from penstock.testing.contract_support import (
    DOT_KEYS,
    LONGEST_KEY,
    NOT_PATHS,
    ODD_KEYS,
    WAIT_S_MAX,
    Capabilities,
    content,
    keys_of,
    one_version,
    refused,
    short,
)
from penstock.types import same_version

if TYPE_CHECKING:
    from penstock.store import Store, Writer


class WritingContract(Capabilities):
    """What writing promises."""

    # ── whole objects ──────────────────────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    @pytest.mark.parametrize("length_bytes", [0, 1, 100_000])
    def test_write_stores_the_bytes(self, store: Store, kind: type, length_bytes: int) -> None:
        """Any buffer of bytes is stored as it is, and what write returns is what stat says."""
        data = content(length_bytes)
        info = store.write("a/b", kind(data))
        assert store.read("a/b").data == data
        assert (info.key, info.size_bytes) == ("a/b", length_bytes)
        assert one_version(info.etag, store.stat("a/b").etag)

    def test_write_replaces(self, store: Store) -> None:
        """A second write of a key takes the place of the first, whole."""
        store.write("k", b"first and long")
        before = store.stat("k")
        store.write("k", b"second")
        assert store.read("k").data == b"second"
        assert not same_version(store.stat("k"), before)

    def test_a_large_write_is_cut_and_whole(self, store: Store) -> None:
        """Data of several parts is stored whole; what write returns has its size."""
        data = content(18_000_000)
        assert store.write("large", data).size_bytes == len(data)
        assert store.read("large").data == data
        assert self.uploads_left(store) in (None, 0)

    def test_if_absent_creates_or_refuses(self, store: Store) -> None:
        """With if_absent an existing object stays as it is, and the writer hears ObjectExistsError, with a hint."""
        if not self.knows_if_absent:
            pytest.skip("the server ignores If-None-Match, and says so")
        store.write("k", b"first", if_absent=True)
        with pytest.raises(ObjectExistsError, match=r"k.*Hint: .*another key") as caught:
            store.write("k", b"second", if_absent=True)
        assert isinstance(caught.value, FileExistsError)
        assert store.read("k").data == b"first"
        assert keys_of(store.list()) == ["k"]

    def test_if_absent_has_one_winner(self, store: Store) -> None:
        """Of many concurrent writes with if_absent exactly one succeeds, and its bytes are there."""
        if not (self.atomic_if_absent and self.knows_if_absent):
            pytest.skip("the store looks first and writes then, and says so")
        won: list[bytes] = []

        def write(data: bytes) -> None:
            try:
                store.write("k", data, if_absent=True)
            except ObjectExistsError:
                return
            won.append(data)

        threads = [threading.Thread(target=write, args=(b"%d" % index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S_MAX)
        assert len(won) == 1
        assert store.read("k").data == won[0]

    def test_what_is_no_bytes_is_refused(self, store: Store) -> None:
        """Text and buffers with holes are the caller's error."""
        for data in ("text", memoryview(b"0123456789")[::2], 5):
            with pytest.raises(ConfigError):
                store.write("k", data)  # type: ignore[arg-type,unused-ignore]
        assert list(store.list()) == []

    # ── keys ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("key", [*ODD_KEYS, LONGEST_KEY], ids=short)
    def test_any_key_is_kept_exactly(self, store: Store, key: str) -> None:
        """Spaces, unicode, percent signs, pluses and 1 024 bytes come back as they went, everywhere."""
        store.write(key, b"here")
        assert store.read(key).data == b"here"
        assert store.stat(key).key == key
        assert keys_of(store.list()) == [key]
        assert keys_of(store.list(key)) == [key]
        store.copy(key, "copied")
        assert store.read("copied").data == b"here"
        store.copy("copied", key)
        store.delete([key])
        assert keys_of(store.list()) == ["copied"]

    @pytest.mark.parametrize("key", NOT_PATHS)
    def test_keys_that_are_no_paths(self, store: Store, key: str) -> None:
        """Empty segments are kept exactly, or refused by name where keys are paths."""
        if self.keys_are_files:
            pytest.skip("the server keeps objects as files, and says so")
        assert refused(store, key) == self.keys_are_paths
        if self.keys_are_paths:
            return
        assert store.read(key).data == b"exact"
        assert keys_of(store.list()) == [key]
        store.delete(key)
        assert list(store.list()) == []

    @pytest.mark.parametrize("key", DOT_KEYS)
    def test_dot_segments_never_name_another_object(self, store: Store, key: str) -> None:
        """A key with ``.`` or ``..`` segments works exactly or is refused by name; no other object appears."""
        store.write("b", b"other")
        if refused(store, key):
            assert keys_of(store.list()) == ["b"]
            return
        assert keys_of(store.list()) == sorted(["b", key])
        assert store.read(key).data == b"exact"
        assert store.read("b").data == b"other"

    @pytest.mark.parametrize("key", ["", "k" * 1025, "é" * 513, "\ud800"], ids=short)
    def test_what_is_no_key_is_refused(self, store: Store, key: str) -> None:
        """Empty keys, keys of more than 1 024 bytes and lone surrogates are the caller's error, at once."""
        with pytest.raises(ConfigError):
            store.write(key, b"")
        with pytest.raises(ConfigError):
            store.stat(key)
        with pytest.raises(ConfigError):
            store.read(key)
        with pytest.raises(ConfigError):
            store.delete(key)

    # ── writers ────────────────────────────────────────────────────────────────────────────────────────────────────

    def writer(self, store: Store, key: str = "w") -> Writer:
        """A writer with the smallest parts that the store takes, at least 64 KiB."""
        return store.writer(key, part_bytes=max(self.part_bytes_min, 1 << 16))

    def write_and_fail(self, writer: Writer, data: bytes) -> None:
        """An exception inside ``with``."""
        with writer:
            writer.write(data)
            raise ZeroDivisionError

    def parts(self, count: int) -> bytes:
        """Content of `count` full parts and a bit."""
        return content(count * max(self.part_bytes_min, 1 << 16) + 1234)

    @pytest.mark.parametrize("parts_count", [0, 1, 6])
    @pytest.mark.parametrize("step_bytes", [9_999, 10**9])
    def test_a_writer_commits_at_close(self, store: Store, parts_count: int, step_bytes: int) -> None:
        """What was written, in pieces of any size, becomes visible at close(), whole, and not before."""
        data = self.parts(parts_count)
        writer = self.writer(store)
        for start in range(0, len(data), step_bytes):
            assert writer.write(data[start : start + step_bytes]) == len(data[start : start + step_bytes])
        assert writer.tell() == len(data)
        assert list(store.list()) == []
        writer.close()
        assert writer.closed
        assert store.read("w").data == data
        assert writer.info is not None
        assert writer.info.size_bytes == len(data)
        assert self.uploads_left(store) in (None, 0)

    def test_an_empty_writer_makes_an_empty_object(self, store: Store) -> None:
        """Closing without having written stores an object of no bytes."""
        with store.writer("w"):
            pass
        assert store.stat("w").size_bytes == 0

    @pytest.mark.parametrize("parts_count", [0, 1, 6])
    def test_an_exception_never_commits(self, store: Store, parts_count: int) -> None:
        """An exception inside ``with`` leaves what was there before, and drops what was sent."""
        store.write("w", b"before")
        writer = self.writer(store)
        with pytest.raises(ZeroDivisionError):
            self.write_and_fail(writer, self.parts(parts_count))
        assert writer.closed
        writer.close()
        self.assert_only_before(store)

    @pytest.mark.parametrize("parts_count", [0, 1, 6])
    def test_abort_never_commits(self, store: Store, parts_count: int) -> None:
        """abort() drops what was sent; close() after it does nothing, write() is refused."""
        store.write("w", b"before")
        writer = self.writer(store)
        writer.write(self.parts(parts_count))
        writer.abort()
        writer.abort()
        writer.close()
        with pytest.raises(ClosedError):
            writer.write(b"more")
        self.assert_only_before(store)

    @pytest.mark.parametrize("parts_count", [0, 1, 6])
    @pytest.mark.parametrize("cycle", [False, True])
    def test_garbage_collection_never_commits(self, store: Store, parts_count: int, cycle: bool) -> None:
        """A dropped writer, alone or in a reference cycle, commits nothing and drops what was sent."""
        store.write("w", b"before")
        writer = self.writer(store)
        writer.write(self.parts(parts_count))
        if cycle:
            vars(writer)["itself"] = writer
        del writer
        gc.collect()
        self.assert_only_before(store)

    def assert_only_before(self, store: Store) -> None:
        """The object is as it was; sooner or later no upload is left."""
        assert store.read("w").data == b"before"
        assert keys_of(store.list()) == ["w"]
        pause = threading.Event()
        for _ in range(1000):  # a dropped writer aborts on a thread of its own
            if self.uploads_left(store) in (None, 0):
                return
            pause.wait(0.01)
        assert self.uploads_left(store) == 0

    def test_a_writer_is_a_file_object(self, store: Store) -> None:
        """Pickle and a text wrapper write through it; it is writable, not readable, not seekable."""
        value = {"weights": list(range(10_000)), "name": "é"}
        with store.open("w", "wb") as file:
            assert isinstance(file, io.IOBase)
            assert (file.writable(), file.readable(), file.seekable(), file.closed) == (True, False, False, False)
            pickle.dump(value, file)
            file.flush()
        assert pickle.loads(store.read("w").data) == value
        with io.TextIOWrapper(store.writer("t"), encoding="utf-8") as text:
            text.write("zeile\n")
        assert store.read("t").data == b"zeile\n"

    def test_a_writer_takes_any_buffer(self, store: Store) -> None:
        """Buffers of other item sizes are taken as bytes, and may be changed as soon as write() returned."""
        reused = bytearray(100_000)
        with self.writer(store) as writer:
            for value in range(4):
                reused[:] = bytes([value]) * len(reused)
                assert writer.write(memoryview(reused).cast("I")) == len(reused)
        assert store.read("w").data == b"".join(bytes([value]) * len(reused) for value in range(4))

    # ── deleting ───────────────────────────────────────────────────────────────────────────────────────────────────

    def test_delete_takes_one_or_many(self, store: Store) -> None:
        """A key, a list, an iterator; keys that are not there are no error; the others stay."""
        self.seed(store, {f"k{index}": b"x" for index in range(10)})
        store.delete("k0")
        store.delete(["k1", "none"])
        store.delete(f"k{index}" for index in range(2, 9))
        store.delete([])
        assert keys_of(store.list()) == ["k9"]
        with pytest.raises(ObjectMissingError):
            store.stat("k0")

    def test_delete_takes_more_than_one_request(self, store: Store) -> None:
        """More keys than one request may name are deleted all."""
        keys = [f"p/{index:05}" for index in range(self.keys_many)]
        self.seed(store, dict.fromkeys(keys, b""))
        store.delete(keys)
        assert list(store.list()) == []

    # ── copying ────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_copy_gives_the_same_bytes(self, store: Store) -> None:
        """A copy holds the source's bytes and replaces what was there; the source stays."""
        data = content(50_000)
        store.write("s", data)
        store.write("x/t", b"before")
        info = store.copy("s", "x/t")
        assert (info.key, info.size_bytes) == ("x/t", len(data))
        assert one_version(info.etag, store.stat("x/t").etag)
        assert store.read("x/t").data == store.read("s").data == data

    def test_a_large_copy_goes_in_parts(self, store: Store) -> None:
        """Above the store's limit for one copy, parts are copied, with the same result."""
        if not self.copies_parts:
            pytest.skip("the server copies no parts, and says so")
        part_bytes = max(self.part_bytes_min, 1 << 16)
        data = content(3 * part_bytes + 77)
        store.write("s", data)
        assert copy(store, "s", "t", copy_bytes_max=part_bytes, part_bytes=part_bytes).size_bytes == len(data)
        assert store.read("t").data == data
        assert self.uploads_left(store) in (None, 0)

    def test_copying_what_is_missing(self, store: Store) -> None:
        """A missing source is named, and no target appears."""
        store.write("k", b"x")
        with pytest.raises(StoreError, match="none") as caught:
            store.copy("none", "t")
        assert isinstance(caught.value, ObjectMissingError)
        assert keys_of(store.list()) == ["k"]
