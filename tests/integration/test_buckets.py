"""Listing the buckets of an endpoint, from Python and from the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from exchanges import KeptServer
from penstock.cli.app import run
from penstock.compose import list_buckets
from penstock.config import RetryConfig
from penstock.errors import AccessDeniedError, ProtocolError, StoreError
from penstock.store.credentials import Credentials

pytestmark = pytest.mark.server


def answer(body: str, status: str = "200 OK") -> list[bytes]:
    return [f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()]


def buckets(*names: str, token: str = "") -> list[bytes]:
    rows = "".join(
        f"<Bucket><Name>{name}</Name><CreationDate>2026-01-02T03:04:05Z</CreationDate></Bucket>" for name in names
    )
    more = f"<ContinuationToken>{token}</ContinuationToken>" if token else ""
    return answer(f"<ListAllMyBucketsResult><Owner/><Buckets>{rows}</Buckets>{more}</ListAllMyBucketsResult>")


def test_buckets_of_a_real_store(user: Any, s3_endpoint: Any, bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, signed, with the time of their creation; filters take names; a wrong secret is refused."""
    other = s3_endpoint.create_bucket()
    assert {f"{bucket}/", f"{other}/"} <= {found.key for found in list_buckets()}
    assert run(["ls", "s3://"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if bucket in line)
    assert line.split()[0].startswith("20")
    assert line.endswith(f"s3://{bucket}/")
    assert run(["ls", "--json", "--include", other, "s3://"]) == 0
    assert json.loads(capsys.readouterr().out)["url"] == f"s3://{other}/"
    wrong = Credentials(access_key=s3_endpoint.access_key, secret_key="wrong")
    with pytest.raises(StoreError) as caught:
        list(list_buckets(credentials=wrong, endpoint_url=s3_endpoint.endpoint_url))
    assert "wrong" not in str(caught.value)


def test_pages_follow_each_other() -> None:
    """The token of each page is sent with the next request, and a page that fails is asked for again."""
    pages = [buckets("a", "b", token="t/1"), answer("", "503 Slow Down"), buckets("c"), []]
    with KeptServer(lambda connection, exchange, head: pages.pop(0)) as server:
        found = list_buckets(endpoint_url=server.url, anonymous=True, retry=RetryConfig(backoff_s=0.01))
        assert [bucket.key for bucket in found] == ["a/", "b/", "c/"]
        lines = [head.split(b"\r\n")[0].decode() for head in server.heads]
    assert lines[0] == "GET /?max-buckets=1000 HTTP/1.1"
    assert set(lines[1:]) == {"GET /?max-buckets=1000&continuation-token=t%2F1 HTTP/1.1"}


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (answer("<Error><Code>AccessDenied</Code></Error>", "403 Forbidden"), AccessDeniedError),
        (answer("<html>portal</html>"), ProtocolError),
    ],
)
def test_what_is_no_listing_is_an_error(said: list[bytes], error: type[StoreError]) -> None:
    """Keys that may not list buckets, and pages of portals, end with an error that names no bucket."""
    retry = RetryConfig(attempts_max=1)
    with KeptServer(lambda *_: said) as server, pytest.raises(error, match="LIST s3://"):
        list(list_buckets(endpoint_url=server.url, anonymous=True, retry=retry))
