"""Headers of a webhook's response that readers of the result get."""

from __future__ import annotations

import pytest

from penstock.gateway.webhooks.response_head import response_head


def test_headers_are_forwarded_by_their_prefix() -> None:
    """Any header that describes the result is forwarded; others of the response are not."""
    head = response_head({"x-amz-fwd-header-Content-Language": "de", "X-Amz-Meta-A": "b", "Age": "1"}, status=200)
    assert head.headers == {"Content-Language": "de", "x-amz-meta-a": "b"}


@pytest.mark.parametrize(
    "name",
    [
        *("Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Connection", "TE", "Trailer", "Transfer-Encoding"),
        *("Upgrade", "Content-Length", "Content-Range", "Date", "ETag", "Location", "Server", "Set-Cookie"),
    ],
)
def test_headers_of_the_connection_are_not_forwarded(name: str) -> None:
    """A webhook cannot say how the gateway's own connection to a client goes on, or what the gateway says itself."""
    assert response_head({f"x-amz-fwd-header-{name}": "1"}, status=200).headers == {}
