"""The destination of a packing."""

from __future__ import annotations

import pytest

import penstock as ps
from penstock.pack.destination import split_destination


@pytest.mark.parametrize(
    "url", ["https://host/d/", "https://host/d/x-%06d.tar", "https://host/d/?sig=a/b%2Fc", "http://host/{split}/x"]
)
def test_a_destination_over_http_is_refused_as_such(url: str) -> None:
    """An HTTP URL is refused with any query, because nothing can be written there."""
    with pytest.raises(ps.ConfigError, match="HTTP is read-only") as raised:
        split_destination(url)
    assert "b%2Fc" not in str(raised.value)
