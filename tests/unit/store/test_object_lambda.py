"""Object Lambda access points are addressed and signed for as boto3 does, for the same ARN and endpoint."""

from __future__ import annotations

import re
from typing import Any

import boto3
import pytest
from botocore.config import Config

import penstock as ps
from penstock.errors import ConfigError
from penstock.store.base import innermost
from penstock.store.s3_endpoint import S3Endpoint
from penstock.store.s3_requests import S3Options, build_request
from penstock.types import Get

ARN = "arn:aws:s3-object-lambda:eu-west-1:123456789012:accesspoint/resized"


class _StopSendingError(Exception):
    """Ends boto3's call when its request is known."""


def sent_by_boto3(bucket: str, endpoint_url: str | None) -> tuple[str, str]:
    """URL and signing scope of boto3's GET."""
    client = boto3.client(
        "s3",
        endpoint_url=endpoint_url,
        region_name="cn-north-1" if "aws-cn" in bucket else "eu-west-1",
        aws_access_key_id="AKID",
        aws_secret_access_key="secret",
        config=Config(retries={"total_max_attempts": 1}),
    )
    found: list[Any] = []

    def stop(request: Any, **_: Any) -> None:
        found.append(request)
        raise _StopSendingError

    client.meta.events.register("before-send.s3.GetObject", stop)
    with pytest.raises(_StopSendingError):
        client.get_object(Bucket=bucket, Key="dir/a b.tar")
    scope = re.search(rb"/([a-z0-9-]+/[a-z0-9-]+)/aws4_request", found[0].headers["Authorization"])
    assert scope is not None
    return str(found[0].url), scope[1].decode()


@pytest.mark.parametrize("endpoint_url", [None, "http://gateway.example:9000", "https://gateway.example/base"])
@pytest.mark.parametrize(
    "bucket",
    [
        ARN,
        ARN.replace("accesspoint/", "accesspoint:"),
        "arn:aws-cn:s3-object-lambda:cn-north-1:123456789012:accesspoint/resized",
        "resized-abcdefghijklmnopqrstuvwx--ol-s3",
    ],
    ids=["arn", "colon", "china", "alias"],
)
def test_requests_go_where_those_of_boto3_go(bucket: str, endpoint_url: str | None) -> None:
    """Host, path, region and service equal those of boto3's request."""
    url, scope = sent_by_boto3(bucket, endpoint_url)
    endpoint = S3Endpoint(bucket=bucket, endpoint_url=endpoint_url, region="eu-west-1")
    ours = build_request(endpoint, S3Options(), Get("dir/a b.tar"))
    assert ours.url == url
    assert f"{endpoint.region}/{endpoint.service}" == scope


@pytest.mark.parametrize(
    ("endpoint_url", "addressing", "start"),
    [
        ("http://127.0.0.1:9000", "auto", "http://127.0.0.1:9000/resized/"),
        ("http://[::1]:9000", "auto", "http://[::1]:9000/resized/"),
        ("http://localhost:9000", "auto", "http://localhost:9000/resized/"),
        ("http://gateway.example", "path", "http://gateway.example/resized/"),
        ("http://localhost:9000", "virtual", "http://resized-123456789012.localhost:9000/"),
    ],
)
def test_without_subdomains_the_name_is_in_the_path(endpoint_url: str, addressing: str, start: str) -> None:
    """An IP address has no subdomains, so the access point is addressed by its name, and signed for as before."""
    endpoint = S3Endpoint(bucket=ARN, endpoint_url=endpoint_url, addressing=addressing)
    assert endpoint.base_url == start
    assert (endpoint.region, endpoint.service) == ("eu-west-1", "s3-object-lambda")


def test_connect_takes_the_arn_and_a_prefix() -> None:
    """The part after the name is the prefix of all keys."""
    with ps.connect(f"s3://{ARN}/train/", anonymous=True, endpoint_url="http://127.0.0.1:1") as store:
        endpoint = innermost(store).endpoint
    assert (endpoint.bucket, endpoint.prefix) == (ARN, "train/")
    assert endpoint.base_url == "http://127.0.0.1:1/resized/"


@pytest.mark.parametrize(
    "bucket",
    [
        "arn:aws:s3-object-lambda:eu-west-1:12345:accesspoint/resized",
        "arn:aws:s3-object-lambda:eu-west-1:123456789012:accesspoint/-resized",
        "arn:aws:s3-object-lambda::123456789012:accesspoint/resized",
        "arn:aws:s3-object-lambda:eu-west-1:123456789012:function/resized",
    ],
)
def test_what_is_no_such_arn_is_refused(bucket: str) -> None:
    """An account of 12 digits, a region and a valid name are needed."""
    with pytest.raises(ConfigError):
        S3Endpoint(bucket=bucket)
