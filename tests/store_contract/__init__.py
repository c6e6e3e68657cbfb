"""What every store must do, as a pytest suite: inherit from ``StoreContract``, define a ``store`` fixture, run pytest.

::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self):
            with MyStore(...) as store:
                yield store

The suite runs on penstock's own stores and on every wrapper. A store that may differ declares it by a class attribute of
``Capabilities``; everything else is the same for all stores.
"""

from __future__ import annotations

import sys

import pytest

_modules = (f"store_contract.{part}" for part in ("core", "hedging", "listing", "reading", "support", "writing"))
# So that failures show both sides.
pytest.register_assert_rewrite(*(name for name in _modules if name not in sys.modules))

from store_contract.core import CoreContract  # noqa: E402 - after the line above
from store_contract.hedging import HedgingContract  # noqa: E402
from store_contract.listing import ListingContract  # noqa: E402
from store_contract.reading import ReadingContract  # noqa: E402
from store_contract.support import Capabilities  # noqa: E402
from store_contract.writing import WritingContract  # noqa: E402

__all__ = ["Capabilities", "ReadOnlyStoreContract", "StoreContract"]


class ReadOnlyStoreContract(ReadingContract, HedgingContract):
    """What a read-only store must do. Override ``seed`` as well."""


class StoreContract(ReadingContract, HedgingContract, ListingContract, WritingContract, CoreContract):
    """What every store must do."""
