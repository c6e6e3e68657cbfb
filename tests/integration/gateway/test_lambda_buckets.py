"""HEAD and LIST that a handler answers, and buckets whose requests name a webhook."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.authentication.verifying import OpenAuthenticator
from penstock.gateway.aws_lambda import LambdaBucket
from penstock.gateway.config import LambdaConfig
from penstock.gateway.objects import Answer, ObjectHead, S3Error
from penstock.gateway.webhooks import ArnBucket
from penstock.types import ListPage
from servers.lambda_endpoint import Endpoint, endpoint

pytestmark = pytest.mark.server

HANDLER = """
    import urllib.request

    def lambda_handler(event, context):
        if "headObjectContext" in event:
            url = event["headObjectContext"]["inputS3Url"]
            if "missing" in event["userRequest"]["url"]:
                return {"statusCode": 404, "errorCode": "NoSuchKey", "errorMessage": "It is not there."}
            size = len(urllib.request.urlopen(url).read())
            return {"statusCode": 200, "headers": {"Content-Length": size * 2, "x-amz-meta-url": url}}
        if "listObjectsContext" in event:
            return {"statusCode": 200, "listResultXml": event["listObjectsContext"]["inputS3Url"]}
        url = event["listObjectsV2Context"]["inputS3Url"]
        page = {"name": url, "maxKeys": 1, "keyCount": 0, "isTruncated": False}
        return {"statusCode": 200, "listBucketResult": page}
"""


class Named:
    """A bucket whose answers are its name."""

    created_s = 1.0

    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = 0

    async def head(self, request: Any) -> ObjectHead:
        return ObjectHead(key=self.name, size_bytes=0, etag='"0"', last_modified_s=0)

    async def open(self, request: Any, hint: Any) -> Any:
        return self.name

    async def list_objects(self, request: Any, operation: Any) -> Answer:
        return Answer(body=self.name.encode())

    async def perform(self, request: Any, body: Any) -> Answer:
        return Answer(body=self.name.encode())

    async def close(self) -> None:
        self.closed += 1


def wrapped(server: Endpoint, folder: Path, *actions: str) -> LambdaBucket:
    """A bucket with a handler for some actions."""
    (folder / "app.py").write_text(textwrap.dedent(HANDLER))
    config = LambdaConfig(handler="app.lambda_handler", code_dir=str(folder), memory_bytes_max=0, actions=actions)

    def sign(method: str, key: str, *, query: Mapping[str, str], headers: Mapping[str, str]) -> str:
        return f"http://127.0.0.1:{server.port}/{method}/{len(query)}/{len(headers)}"

    return LambdaBucket(Named("plain"), transform=server.transform(config), actions=actions, sign=sign)


def test_head_and_list_are_answered_by_the_handler(tmp_path: Path) -> None:
    """Each context has its URL, and what the handler returns is the answer."""

    async def run() -> None:
        async with endpoint(b"12345") as server:
            bucket = wrapped(server, tmp_path, "HeadObject", "ListObjects", "ListObjectsV2")
            headers = {"X-Amz-Request-Payer": "requester", "Host": "g"}
            head = await bucket.head(server.request(method="HEAD", query={"versionId": "1", "x": "2"}, headers=headers))
            assert (head.key, head.size_bytes) == (server.source.key, 10)
            assert head.headers["x-amz-meta-url"].endswith("/HEAD/1/1")
            with pytest.raises(S3Error) as caught:
                await bucket.head(server.request(key="missing"))
            assert (caught.value.status, caught.value.code) == (404, "NoSuchKey")
            first = await bucket.list_objects(server.request(key="", query={"prefix": "a"}), ListPage())
            assert isinstance(first, Answer)
            assert first.body.endswith(b"/GET/1/0")
            second = await bucket.list_objects(
                server.request(key="", query={"list-type": "2", "prefix": "a"}), ListPage()
            )
            assert isinstance(second, Answer)
            assert b"/GET/2/0</Name>" in second.body

    asyncio.run(run())


def test_other_actions_pass_through(tmp_path: Path) -> None:
    """What the handler is not configured for is answered by the bucket itself."""

    async def run() -> None:
        async with endpoint() as server:
            bucket = wrapped(server, tmp_path, "ListObjectsV2")
            assert (bucket.name, bucket.created_s) == ("plain", 1.0)
            assert (await bucket.head(server.request())).key == "plain"
            assert await bucket.open(server.request(), None) == "plain"
            answer = await bucket.list_objects(server.request(key=""), ListPage())
            assert isinstance(answer, Answer)
            assert answer.body == b"plain"
            assert (await bucket.perform(server.request(), None)).body == b"plain"  # type: ignore[arg-type]
            await bucket.close()

    asyncio.run(run())


def test_requests_that_name_a_webhook() -> None:
    """``lambdaArn`` chooses the webhook; everything else is the plain bucket."""

    async def run() -> None:
        async with endpoint() as server:
            plain, made = Named("plain"), Named("made")
            bucket = ArnBucket(plain, targets={"hook": made}, authenticator=OpenAuthenticator())
            arn = {"lambdaArn": "arn:minio:s3-object-lambda::hook:webhook"}
            assert await bucket.open(server.request(), None) == "plain"
            assert await bucket.open(server.request(query=arn), None) == "made"
            assert (await bucket.head(server.request(query=arn))).key == "made"
            listing = await bucket.list_objects(server.request(query=arn, key=""), ListPage())
            assert isinstance(listing, Answer)
            assert listing.body == b"plain"
            assert (await bucket.perform(server.request(), None)).body == b"plain"  # type: ignore[arg-type]
            for wrong, code in (
                ("arn:minio:s3-object-lambda::other:webhook", "LambdaARNNotFound"),
                ("arn:aws:s3-object-lambda::hook:webhook", "LambdaARNInvalid"),
                ("arn:minio:s3-object-lambda::hook:webhook:x", "LambdaARNInvalid"),
                ("", "LambdaARNInvalid"),
            ):
                with pytest.raises(S3Error, match=code):
                    await bucket.open(server.request(query={"lambdaArn": wrong}), None)
            await bucket.close()
            assert (plain.closed, made.closed) == (1, 1)

    asyncio.run(run())
