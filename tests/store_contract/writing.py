"""The contract of writing: whole objects, unusual keys, writers, deleting and copying."""

from __future__ import annotations

import gc
import io
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import (
    ClosedError,
    ConfigError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectMissingError,
    StoreError,
)
from penstock.store.inflight import perform
from penstock.store.records import canonical_headers, written_headers
from penstock.store.writing import copy
from penstock.types import Copy, Head, same_version
from store_contract.support import (
    DOT_KEYS,
    LONGEST_KEY,
    NOT_PATHS,
    ODD_KEYS,
    WAIT_S_MAX,
    Capabilities,
    content,
    keys_of,
    one_version,
    raise_error,
    refused,
    short,
    submit,
)

if TYPE_CHECKING:
    from penstock.store import Store, Writer


class WritingContract(Capabilities):
    """What writing must do."""

    # ── whole objects ──────────────────────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
    @pytest.mark.parametrize("length_bytes", [0, 1, 100_000])
    def test_write_stores_the_bytes(self, store: Store, kind: type, length_bytes: int) -> None:
        """Any buffer of bytes is stored unchanged, and ``write`` returns the same version as ``stat``."""
        data = content(length_bytes)
        info = store.write("a/b", kind(data))
        assert store.read("a/b").data == data
        assert (info.key, info.size_bytes) == ("a/b", length_bytes)
        assert one_version(info.etag, store.stat("a/b").etag)

    def test_write_replaces(self, store: Store) -> None:
        """A second write of a key replaces the object completely."""
        store.write("k", b"first and long")
        before = store.stat("k")
        store.write("k", b"second")
        assert store.read("k").data == b"second"
        assert not same_version(store.stat("k"), before)

    def test_a_large_write_is_cut_and_whole(self, store: Store) -> None:
        """Data of several parts becomes one object, whose size ``write`` returns."""
        data = content(18_000_000)
        assert store.write("large", data).size_bytes == len(data)
        assert store.read("large").data == data
        assert self.uploads_left(store) in (None, 0)

    def test_if_absent_creates_or_refuses(self, store: Store) -> None:
        """With ``if_absent``, an existing object stays unchanged, and ``write`` raises ``ObjectExistsError`` with a hint."""
        if not self.knows_if_absent:
            pytest.skip("knows_if_absent is False")
        store.write("k", b"first", if_absent=True)
        with pytest.raises(ObjectExistsError, match=r"k.*Hint: .*another key") as caught:
            store.write("k", b"second", if_absent=True)
        assert isinstance(caught.value, FileExistsError)
        assert store.read("k").data == b"first"
        assert keys_of(store.list()) == ["k"]

    def test_if_absent_has_one_winner(self, store: Store) -> None:
        """Exactly one of many concurrent writes with ``if_absent`` succeeds, and the object has its bytes."""
        if not (self.atomic_if_absent and self.knows_if_absent):
            pytest.skip("atomic_if_absent is False")
        self._has_one_winner(store, ObjectExistsError, if_absent=True)

    @staticmethod
    def _has_one_winner(store: Store, loses: type[StoreError], **condition: Any) -> None:
        """Write one key on eight threads; one write succeeds, the others raise `loses`, and the object has its bytes."""
        won: list[bytes] = []

        def write(data: bytes) -> None:
            try:
                store.write("k", data, **condition)
            except loses:
                return
            won.append(data)

        threads = [threading.Thread(target=write, args=(b"%d" % index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S_MAX)
        assert len(won) == 1
        assert store.read("k").data == won[0]

    # ── what is kept besides the bytes ─────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("way", ["write", "parts", "copy", "copy in parts", "replacing copy"])
    def test_headers_are_kept(self, store: Store, way: str) -> None:
        """Type, encoding and user metadata come back with every ``Head``, and a copy has those of its source or its own."""
        headers = {"Content-Type": "text/x-a", "content-encoding": "x-b", "X-Amz-Meta-Run": "7"}
        if not store.keeps_records:
            with pytest.raises(ConfigError, match="headers"):
                store.write("k", b"x", headers=headers)
            assert list(store.list()) == []
            return
        if not (self.keeps_headers and self.copies_parts):
            pytest.skip("keeps_headers is False")
        part_bytes = max(self.part_bytes_min, 1 << 16)
        data = content(2 * part_bytes + 5)
        if way == "parts":
            with store.writer("k", part_bytes=part_bytes, headers=headers) as writer:
                writer.write(data)
        else:
            store.write("s" if "copy" in way else "k", data, headers=headers)
        if way == "copy":
            store.copy("s", "k")
        elif way == "copy in parts":
            copy(store, "s", "k", copy_bytes_max=part_bytes, part_bytes=part_bytes)
        elif way == "replacing copy":
            headers = {"Content-Type": "text/x-c", "Content-Encoding": "x-d"}
            raise_error(submit(store, Copy("s", "k", headers=headers))[1].wait())
        found = perform(store, Head("k", headers=True)).info
        assert found is not None
        assert written_headers(found) == canonical_headers(headers)
        store.write("k", b"anew")
        found = perform(store, Head("k", headers=True)).info
        assert found is not None
        assert written_headers(found).items() <= {"Content-Type": "application/octet-stream"}.items()

    def test_headers_that_no_object_has_are_refused(self, store: Store) -> None:
        """Another header, or one that would end its line, is refused before anything is written."""
        for headers in ({"Host": "a"}, {"x-amz-meta-a": "b\r\nHost: c"}, {"x-amz-meta-a:b": "c"}):
            with pytest.raises((ConfigError, StoreError)):
                store.write("k", b"x", headers=headers)
        assert list(store.list()) == []

    def test_if_match_replaces_one_version(self, store: Store) -> None:
        """With ``if_match``, only that version is replaced, in one request or in parts; a missing object is none."""
        if not store.keeps_records:
            with pytest.raises(ConfigError, match="if_match"):
                store.write("k", b"x", if_match='"x"')
            return
        if not (self.knows_if_match and self.has_etags):
            pytest.skip("knows_if_match is False")
        with pytest.raises(StoreError):
            store.write("k", b"none", if_match='"none"')
        store.write("k", b"first")
        first = store.stat("k").etag
        store.write("k", b"second", if_match=first)
        with pytest.raises(ObjectChangedError):
            store.write("k", b"third", if_match=first)
        writer = store.writer("k", part_bytes=max(self.part_bytes_min, 1 << 16), if_match=first)
        writer.write(content(2 * max(self.part_bytes_min, 1 << 16)))
        with pytest.raises(ObjectChangedError):
            writer.close()
        assert store.read("k").data == b"second"
        assert self.uploads_left(store) in (None, 0)

    def test_if_match_has_one_winner(self, store: Store) -> None:
        """Of many concurrent writes that replace one version, exactly one succeeds."""
        if not (store.keeps_records and self.knows_if_match and self.has_etags and self.atomic_if_absent):
            pytest.skip("knows_if_match is False")
        store.write("k", b"first")
        self._has_one_winner(store, ObjectChangedError, if_match=store.stat("k").etag)

    def test_what_is_no_bytes_is_refused(self, store: Store) -> None:
        """Text, non-contiguous buffers and other values raise ``ConfigError``."""
        for data in ("text", memoryview(b"0123456789")[::2], 5):
            with pytest.raises(ConfigError):
                store.write("k", data)  # type: ignore[arg-type,unused-ignore]
        assert list(store.list()) == []

    # ── keys ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @pytest.mark.parametrize("key", [*ODD_KEYS, LONGEST_KEY], ids=short)
    def test_any_key_is_kept_exactly(self, store: Store, key: str) -> None:
        """Every operation keeps spaces, unicode, percent signs, pluses and keys of 1 024 bytes unchanged."""
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
        """Empty segments are kept exactly; if keys are paths, the key is refused by name."""
        if self.keys_are_files:
            pytest.skip("keys_are_files is True")
        assert refused(store, key) == self.keys_are_paths
        if self.keys_are_paths:
            return
        assert store.read(key).data == b"exact"
        assert keys_of(store.list()) == [key]
        store.delete(key)
        assert list(store.list()) == []

    @pytest.mark.parametrize("key", DOT_KEYS)
    def test_dot_segments_never_name_another_object(self, store: Store, key: str) -> None:
        """A key with ``.`` or ``..`` segments is kept exactly or refused by name, and names no other object."""
        store.write("b", b"other")
        if refused(store, key):
            assert keys_of(store.list()) == ["b"]
            return
        assert keys_of(store.list()) == sorted(["b", key])
        assert store.read(key).data == b"exact"
        assert store.read("b").data == b"other"

    @pytest.mark.parametrize("key", ["", "k" * 1025, "é" * 513, "\ud800"], ids=short)
    def test_what_is_no_key_is_refused(self, store: Store, key: str) -> None:
        """Empty keys, keys of more than 1 024 bytes and lone surrogates raise ``ConfigError`` at once."""
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
        """Return a writer with the smallest parts that the store allows, but at least 64 KiB."""
        return store.writer(key, part_bytes=max(self.part_bytes_min, 1 << 16))

    def write_and_fail(self, writer: Writer, data: bytes) -> None:
        """Raise an exception inside ``with``."""
        with writer:
            writer.write(data)
            raise ZeroDivisionError

    def parts(self, count: int) -> bytes:
        """Return content for `count` full parts and a short one."""
        return content(count * max(self.part_bytes_min, 1 << 16) + 1234)

    @pytest.mark.parametrize("parts_count", [0, 1, 6])
    @pytest.mark.parametrize("step_bytes", [9_999, 10**9])
    def test_a_writer_commits_at_close(self, store: Store, parts_count: int, step_bytes: int) -> None:
        """Data written in pieces of any size becomes visible at ``close()``, completely and not before."""
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
        """Closing a writer without having written creates an empty object."""
        with store.writer("w"):
            pass
        assert store.stat("w").size_bytes == 0

    @pytest.mark.parametrize("parts_count", [0, 1, 6])
    def test_an_exception_never_commits(self, store: Store, parts_count: int) -> None:
        """After an exception inside ``with`` the old object is unchanged, and the parts sent are dropped."""
        store.write("w", b"before")
        writer = self.writer(store)
        with pytest.raises(ZeroDivisionError):
            self.write_and_fail(writer, self.parts(parts_count))
        assert writer.closed
        writer.close()
        self.assert_only_before(store)

    @pytest.mark.parametrize("parts_count", [0, 1, 6])
    def test_abort_never_commits(self, store: Store, parts_count: int) -> None:
        """``abort()`` drops the parts sent; afterwards ``close()`` does nothing, and ``write()`` raises."""
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
        """A writer that is garbage-collected, alone or in a cycle, commits nothing and drops the parts sent."""
        store.write("w", b"before")
        writer = self.writer(store)
        writer.write(self.parts(parts_count))
        if cycle:
            vars(writer)["itself"] = writer
        del writer
        gc.collect()
        self.assert_only_before(store)

    def assert_only_before(self, store: Store) -> None:
        """Assert that the old object is unchanged, and that no upload is left after a while."""
        assert store.read("w").data == b"before"
        assert keys_of(store.list()) == ["w"]
        pause = threading.Event()
        for _ in range(1000):  # a dropped writer aborts on a thread of its own
            if self.uploads_left(store) in (None, 0):
                return
            pause.wait(0.01)
        assert self.uploads_left(store) == 0

    def test_a_writer_is_a_file_object(self, store: Store) -> None:
        """A writer works with pickle and text wrappers, and is writable but neither readable nor seekable."""
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
        """Buffers with other item sizes are written as bytes, and may be changed as soon as ``write()`` has returned."""
        reused = bytearray(100_000)
        with self.writer(store) as writer:
            for value in range(4):
                reused[:] = bytes([value]) * len(reused)
                assert writer.write(memoryview(reused).cast("I")) == len(reused)
        assert store.read("w").data == b"".join(bytes([value]) * len(reused) for value in range(4))

    # ── deleting ───────────────────────────────────────────────────────────────────────────────────────────────────

    def test_delete_takes_one_or_many(self, store: Store) -> None:
        """``delete`` takes a key, a list or an iterator; missing keys are not an error, and other objects remain."""
        self.seed(store, {f"k{index}": b"x" for index in range(10)})
        store.delete("k0")
        store.delete(["k1", "none"])
        store.delete(f"k{index}" for index in range(2, 9))
        store.delete([])
        assert keys_of(store.list()) == ["k9"]
        with pytest.raises(ObjectMissingError):
            store.stat("k0")

    def test_delete_takes_more_than_one_request(self, store: Store) -> None:
        """All objects are deleted, even if there are more than one request may name."""
        keys = [f"p/{index:05}" for index in range(self.keys_many)]
        self.seed(store, dict.fromkeys(keys, b""))
        store.delete(keys)
        assert list(store.list()) == []

    # ── copying ────────────────────────────────────────────────────────────────────────────────────────────────────

    def test_copy_gives_the_same_bytes(self, store: Store) -> None:
        """A copy has the bytes of its source and replaces the target; the source remains."""
        data = content(50_000)
        store.write("s", data)
        store.write("x/t", b"before")
        info = store.copy("s", "x/t")
        assert (info.key, info.size_bytes) == ("x/t", len(data))
        assert one_version(info.etag, store.stat("x/t").etag)
        assert store.read("x/t").data == store.read("s").data == data

    def test_a_large_copy_goes_in_parts(self, store: Store) -> None:
        """Objects above the limit for one copy are copied in parts, with the same result."""
        if not self.copies_parts:
            pytest.skip("copies_parts is False")
        part_bytes = max(self.part_bytes_min, 1 << 16)
        data = content(3 * part_bytes + 77)
        store.write("s", data)
        assert copy(store, "s", "t", copy_bytes_max=part_bytes, part_bytes=part_bytes).size_bytes == len(data)
        assert store.read("t").data == data
        assert self.uploads_left(store) in (None, 0)

    def test_copying_what_is_missing(self, store: Store) -> None:
        """Copying a missing object raises an error that names it, and creates no target."""
        store.write("k", b"x")
        with pytest.raises(StoreError, match="none") as caught:
            store.copy("none", "t")
        assert isinstance(caught.value, ObjectMissingError)
        assert keys_of(store.list()) == ["k"]
