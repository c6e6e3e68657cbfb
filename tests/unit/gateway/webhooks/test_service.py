"""Which sources of other servers' events are read."""

from __future__ import annotations

import pytest

from penstock.gateway.objects import S3Error
from penstock.gateway.webhooks.service import allowed_url

HOSTS = ("store.test:9000", "[::1]")


@pytest.mark.parametrize("url", ["http://store.test:9000/b/a%20b?X-Amz-Signature=1", "https://[::1]/b/k"])
def test_a_source_of_the_configuration_is_read_as_it_was_signed(url: str) -> None:
    """The path and the query stay as they came, because a signature covers them."""
    assert str(allowed_url(url, HOSTS)) == url


@pytest.mark.parametrize(
    "url",
    [
        "http://store.test:9000/b/k HTTP/1.1\r\nHost: inside.test\r\n\r\nGET /",
        "http://store.test:9000/b/k\r\nX-More: 1",
        "http://store.test:9000/b/k?a=\n",
        "http://store.test:9000/a b",
        "http://store.test:9000/\N{LATIN SMALL LETTER E WITH ACUTE}",
        "http://store.test:9000/\0",
    ],
    ids=["request", "header", "query", "space", "letter", "nul"],
)
def test_a_source_cannot_add_lines_to_the_request(url: str) -> None:
    """What is not percent-encoded is refused, because the URL is sent as it came."""
    with pytest.raises(S3Error, match="AccessDenied"):
        allowed_url(url, HOSTS)
