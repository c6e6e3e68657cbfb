"""The contract of listing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from penstock.errors import ConfigError
from penstock.types import ListPage, Page
from store_contract.support import Capabilities, keys_of, one_version, raise_error, submit

if TYPE_CHECKING:
    from penstock.store import Store

KEYS = (
    "a",
    "a-b/c",
    "a.b",
    "a/b",
    "a/b.c",
    "a/b/c",
    "a/b/d/e",
    "a0",
    "ab",
    "b/\u00e9",
    "b/\U0001f600",
    "b/\uff5e",
    "c/x/y/z",
)
"""Keys in order: ``-`` and ``.`` sort before ``/``, which sorts before ``0``, and other characters by UTF-8, not by UTF-16."""


def shallow(keys: list[str], prefix: str) -> list[tuple[str, bool]]:
    """Return what a listing that stops at the next slash must contain: pairs (key, is_prefix)."""
    found = set()
    for key in keys:
        if key.startswith(prefix):
            head, slash, _ = key[len(prefix) :].partition("/")
            found.add((prefix + head + slash, bool(slash)))
    return sorted(found)


class ListingContract(Capabilities):
    """What listing must do."""

    def keys(self) -> list[str]:
        """Return ``KEYS`` without those that would be a file and a directory of the same name, if keys are paths."""
        clash = {"a", "a/b"} if self.keys_are_paths or self.keys_are_files else set()
        return [key for key in KEYS if key not in clash]

    @pytest.fixture
    def listed(self, store: Store) -> Store:
        """Return a store that holds ``keys()``."""
        self.seed(store, {key: key.encode() for key in self.keys()})
        return store

    def test_list_gives_all_in_key_order(self, listed: Store) -> None:
        """A listing contains every object once, in the order of the keys' UTF-8 bytes, with size and version."""
        infos = list(listed.list())
        assert keys_of(infos) == sorted(self.keys(), key=str.encode)
        assert [info.size_bytes for info in infos] == [len(info.key.encode()) for info in infos]
        assert not any(info.is_prefix for info in infos)
        for info in infos:
            assert one_version(info.etag, listed.stat(info.key).etag)
            assert info.etag is not None or not self.has_etags
            assert info.last_modified_s is not None

    @pytest.mark.parametrize("prefix", ["", "a", "a/", "a/b", "a/b/", "a.", "b/", "b/\u00e9", "c/x", "none", "none/"])
    def test_list_takes_any_prefix(self, listed: Store, prefix: str) -> None:
        """A prefix may be any string, not only whole path segments, also with ``recursive=False``."""
        keys = self.keys()
        assert keys_of(listed.list(prefix)) == sorted(key for key in keys if key.startswith(prefix))
        found = [(info.key, info.is_prefix) for info in listed.list(prefix, recursive=False)]
        assert found == shallow(keys, prefix)

    def test_list_of_an_empty_store(self, store: Store) -> None:
        """The listing of a store without objects is empty."""
        self.seed(store, {"k": b"x"})
        store.delete("k")
        assert list(store.list()) == []
        assert list(store.list(recursive=False)) == []

    def test_deleted_objects_take_their_prefix_with_them(self, store: Store) -> None:
        """A prefix exists only as long as there are objects below it."""
        if not self.prefixes_vanish:
            pytest.skip("prefixes_vanish is False")
        self.seed(store, {"p/q/a": b"", "p/b": b""})
        store.delete(["p/q/a"])
        assert keys_of(store.list(recursive=False)) == ["p/"]
        assert keys_of(store.list("p/", recursive=False)) == ["p/b"]
        store.delete(["p/b"])
        assert list(store.list(recursive=False)) == []

    def test_list_takes_many_pages(self, store: Store) -> None:
        """A listing of several pages contains every key once and in order, with one prefix and with many."""
        flat = {f"flat/{index:05}": b"" for index in range(self.keys_many)}
        deep = {f"deep/{index % 7}/{index:05}": b"" for index in range(0, self.keys_many, 5)}
        self.seed(store, flat | deep)
        assert keys_of(store.list("flat/")) == sorted(flat)
        assert keys_of(store.list()) == sorted(flat | deep)
        assert keys_of(store.list("flat/", recursive=False)) == sorted(flat)
        assert keys_of(store.list("deep/", recursive=False)) == [f"deep/{index}/" for index in range(7)]

    @pytest.mark.parametrize("keys_max", [1, 2, 3, 100])
    @pytest.mark.parametrize("delimiter", ["", "/"])
    def test_pages_join_without_gap(self, listed: Store, keys_max: int, delimiter: str) -> None:
        """Pages of any size, joined by their tokens, form the whole listing."""
        found: list[str] = []
        token = None
        for _ in range(50):
            completion = submit(listed, ListPage("", delimiter, token, "", keys_max))[1].wait()
            raise_error(completion)
            page: Page = completion.value
            assert len(page.objects) + len(page.prefixes) <= keys_max or keys_max < len(KEYS)
            found += sorted(keys_of(page.objects) + page.prefixes)
            token = page.next_token
            if token is None:
                break
        keys = self.keys()
        assert found == ([key for key, _ in shallow(keys, "")] if delimiter else sorted(keys))

    @pytest.mark.parametrize("start_after", ["a", "a.b", "a/", "a/b", "a/b/c", "a/b/zzz", "b/\u00e9", "zzz"])
    def test_start_after_is_exclusive(self, listed: Store, start_after: str) -> None:
        """A page begins with the first key after ``start_after``, which need not be a key itself."""
        completion = submit(listed, ListPage("", "", None, start_after))[1].wait()
        raise_error(completion)
        assert keys_of(completion.value.objects) == sorted(key for key in self.keys() if key > start_after)

    def test_list_checks_before_it_is_iterated(self, store: Store) -> None:
        """An invalid prefix raises when ``list`` is called, not when the result is first used."""
        with pytest.raises(ConfigError):
            store.list(b"bytes")  # type: ignore[arg-type,unused-ignore]
        with pytest.raises(ConfigError):
            store.list("\ud800")

    def test_a_dropped_listing_ends(self, listed: Store) -> None:
        """The store remains usable after a listing was dropped half-way."""
        assert next(listed.list()).key == min(self.keys())
        assert len(list(listed.list())) == len(self.keys())
