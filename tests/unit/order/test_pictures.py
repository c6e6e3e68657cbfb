from __future__ import annotations

import runpy
from pathlib import Path

import pytest

CONCEPTS = Path(__file__).parents[3] / "docs" / "concepts"
PICTURES = runpy.run_path(str(CONCEPTS / "order_pictures.py"))["PICTURES"]


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_pictures_are_what_the_order_gives(name):
    """The pictures of the concept page are drawn from the order as it is now: docs/concepts/order_pictures.py."""
    assert (CONCEPTS / name).read_text() == PICTURES[name]()
