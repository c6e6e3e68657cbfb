"""A file system of fsspec keeps the promises that fsspec can keep."""

import pytest

from penstock.store.fsspec import FsspecStore
from store_contract import StoreContract


class TestFsspecStore(StoreContract):
    """fsspec's local file system, through fsspec."""

    keys_are_paths = True
    atomic_if_absent = False
    prefixes_vanish = False  # fsspec has no way to remove a directory only if it is empty

    @pytest.fixture
    def store(self, tmp_path):
        (tmp_path / "root").mkdir()
        with FsspecStore(f"local://{tmp_path}/root") as store:
            yield store

    def uploads_left(self, store):
        return len(store._uploads)
