"""How the requests of stores travel."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock as ps
from penstock.store.exchange import is_read_by_tls, plain_transport_of


@pytest.mark.parametrize("url", ["s3://bucket/prefix/", "https://host/data/"])
def test_encrypted_stores(url: str) -> None:
    """A store that is read by TLS has no plain connections, also inside its wrappers."""
    with ps.connect(url) as store:
        assert is_read_by_tls(store)
        assert plain_transport_of(store) is None


def test_plain_stores(tmp_path: Path) -> None:
    """A store that is read by plain HTTP tells the configuration of its connections, also through a cache."""
    transport = ps.TransportConfig(connections_max=7)
    for cache in (None, f"{tmp_path}:1GB"):
        with ps.connect("s3://bucket/", endpoint_url="http://127.0.0.1:1", transport=transport, cache=cache) as store:
            assert not is_read_by_tls(store)
            assert plain_transport_of(store) is transport


def test_local_stores(tmp_path: Path) -> None:
    """A folder is read neither by TLS nor over connections."""
    with ps.connect(tmp_path.as_uri()) as store:
        assert not is_read_by_tls(store)
        assert plain_transport_of(store) is None
