"""The local store keeps every promise that paths can keep."""

import os

import pytest

from penstock.store.local import LocalStore
from store_contract import StoreContract


class TestLocalStore(StoreContract):
    """LocalStore in a temporary directory."""

    keys_are_paths = True

    @pytest.fixture
    def store(self, tmp_path):
        (tmp_path / "root").mkdir()
        with LocalStore(tmp_path / "root") as store:
            yield store

    def uploads_left(self, store):
        return len(store._uploads) + sum(
            name.startswith(".penstock-") for _, folders, files in os.walk(store.root) for name in folders + files
        )
