"""A manifest that takes the place of listings."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import pytest

from penstock.errors import ConfigError, ObjectMissingError, UnavailableError
from penstock.mount.namespace.directories import StoreDirectories
from penstock.mount.namespace.manifest import ManifestStore, manifest_objects
from penstock.store.inflight import perform
from penstock.store.local import LocalStore
from penstock.store.memory import MemoryStore
from penstock.types import UNKNOWN_BYTES, Completion, Head, ListPage, ObjectInfo
from unit.mount.namespace.test_directories import Watched, look_up, walk

if TYPE_CHECKING:
    from pathlib import Path


def store_of(count: int, *, unknown: frozenset[int] = frozenset()) -> tuple[Watched, ManifestStore]:
    """Return a store of files, and a manifest of it that lacks some sizes."""
    inner = Watched(MemoryStore({f"d/{number:04d}": b"x" * number for number in range(count)}))
    objects = {
        f"d/{number:04d}": ObjectInfo(f"d/{number:04d}", UNKNOWN_BYTES if number in unknown else number, '"e"')
        for number in range(count)
    }
    return inner, ManifestStore(inner, objects)


def test_names_cost_no_request() -> None:
    """Walking and looking up is answered from the manifest alone, also on several pages."""
    inner, store = store_of(2500)
    directories = StoreDirectories(store, ttl_s=math.inf)
    assert len(walk(directories)) == 2500
    folder = look_up(directories, "d")
    assert look_up(directories, "0007", parent=folder.inode).info.size_bytes == 7
    fresh = StoreDirectories(store, ttl_s=0)
    assert look_up(fresh, "0008", parent=look_up(fresh, "d").inode).info.etag == '"e"'
    assert inner.operations == []


def test_objects_that_the_manifest_lacks_do_not_exist() -> None:
    """A HEAD of another key is missing, although the store has the object; its bytes come from the store."""
    inner, store = store_of(3)
    inner.inner.write("d/other", b"not listed")
    with pytest.raises(ObjectMissingError):
        store.stat("d/other")
    assert bytes(store.read("d/0002").data) == b"xx"


def test_sizes_that_are_missing_are_asked_for_once() -> None:
    """Objects without a size cost one HEAD each, when their page is listed."""
    inner, store = store_of(10, unknown=frozenset({3, 4}))
    for _ in range(2):
        page = perform(store, ListPage("d/", "/")).value
        assert [info.size_bytes for info in page.objects] == list(range(10))
    assert inner.operations == [Head("d/0003"), Head("d/0004")]
    assert perform(store, ListPage("d/", keys_max=1)).value.objects


def test_a_size_that_cannot_be_had_fails_the_page() -> None:
    """If a HEAD fails, the listing fails with its error, and the next attempt asks again."""
    inner, store = store_of(10, unknown=frozenset({3, 4}))
    inner.refuses = lambda operation: UnavailableError("503") if operation == Head("d/0004") else None
    with pytest.raises(UnavailableError):
        perform(store, ListPage("d/", "/"))
    inner.refuses = lambda operation: None
    assert len(perform(store, ListPage("d/", "/")).value.objects) == 10


def test_a_page_can_be_cancelled() -> None:
    """Cancelling a page cancels the requests for its sizes, and the page ends with that error."""
    inner, store = store_of(10, unknown=frozenset({3, 4}))
    inner.holds = lambda operation: True
    ended: list[Completion] = []

    class Sink:
        landing = None

        def head(self, info: Any, span: Any) -> None:
            """Have no body."""

        def done(self, completion: Completion) -> None:
            ended.append(completion)

    transfer = store.submit(ListPage("d/", "/"), Sink())
    transfer.cancel()
    assert [type(completion.error).__name__ for completion in ended] == ["CancelledOperationError"]


def test_keys_are_relative_to_what_is_mounted(tmp_path: Path) -> None:
    """A manifest may lie anywhere; its URLs become keys of the mounted store, and others are refused by name."""
    rows = [{"penstock_manifest": 1, "base_url": f"file://{tmp_path}/"}, {"key": "a b/c", "size_bytes": 1}]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    url = f"{tmp_path}/m.jsonl"
    with LocalStore(tmp_path) as store:
        assert list(manifest_objects(url, store, url=str(tmp_path), connection={})) == ["a b/c"]
    with (
        LocalStore(tmp_path / "other") as store,
        pytest.raises(ConfigError, match=r"is not below .*other"),
    ):
        manifest_objects(url, store, url=str(tmp_path / "other"), connection={})
