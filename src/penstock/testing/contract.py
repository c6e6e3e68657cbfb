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

_PARTS = (
    "contract_core",
    "contract_hedging",
    "contract_listing",
    "contract_reading",
    "contract_support",
    "contract_writing",
)
_modules = (f"penstock.testing.{part}" for part in _PARTS)
# So that failures show both sides.
pytest.register_assert_rewrite(*(name for name in _modules if name not in sys.modules))

from penstock.testing.contract_core import CoreContract  # noqa: E402 - after the line above
from penstock.testing.contract_hedging import HedgingContract  # noqa: E402
from penstock.testing.contract_listing import ListingContract  # noqa: E402
from penstock.testing.contract_reading import ReadingContract  # noqa: E402
from penstock.testing.contract_support import Capabilities  # noqa: E402
from penstock.testing.contract_writing import WritingContract  # noqa: E402

__all__ = ["Capabilities", "ReadOnlyStoreContract", "StoreContract"]


class ReadOnlyStoreContract(ReadingContract, HedgingContract):
    """What a read-only store must do. Override ``seed`` as well."""


class StoreContract(ReadingContract, HedgingContract, ListingContract, WritingContract, CoreContract):
    """What every store must do."""
