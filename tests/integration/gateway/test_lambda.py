"""Unchanged Lambda handlers in their own interpreters, which answer by boto3."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.config import LambdaConfig
from servers.lambda_endpoint import endpoint

pytestmark = pytest.mark.server

UPPER = """
    import urllib.request, boto3
    s3 = boto3.client("s3")
    def lambda_handler(event, context):
        where = event["getObjectContext"]
        data = urllib.request.urlopen(where["inputS3Url"]).read()
        s3.write_get_object_response(
            Body=data.upper(), RequestRoute=where["outputRoute"], RequestToken=where["outputToken"],
            ContentType="text/plain", Metadata={"made": "here"})
        return {"status_code": 200}
"""


@pytest.fixture
def handler(tmp_path: Path) -> Callable[..., LambdaConfig]:
    """``handler(source, **settings)`` writes a module and describes its function ``lambda_handler``."""

    def write(source: str, **settings: Any) -> LambdaConfig:
        (tmp_path / "app.py").write_text(textwrap.dedent(source))
        settings = {"memory_bytes_max": 0, "time_s_max": 30.0} | settings
        return LambdaConfig(handler="app.lambda_handler", code_dir=str(tmp_path), **settings)

    return write


def test_an_unchanged_handler_answers(handler: Callable[..., LambdaConfig]) -> None:
    """A handler that uses boto3 as on AWS produces the result, with its headers."""

    async def run() -> None:
        async with endpoint() as server:
            transform = server.transform(handler(UPPER))
            await transform.start()
            result = await server.run(transform)
            assert bytes(result.data) == b"HELLO WORLD"
            assert result.size_bytes == 11
            assert result.headers == {"Content-Type": "text/plain", "x-amz-meta-made": "here"}
            assert len(server.internal.responses) == 0

    asyncio.run(run())
