"""Whole handlers as people write them for AWS, in environments of their own (``make test-lambda``)."""

from __future__ import annotations

import asyncio
import io
import os
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from penstock.formats.tfrecord import masked_crc, parse_example
from penstock.gateway.config import LambdaConfig
from penstock.gateway.objects import S3Error
from servers.lambda_endpoint import endpoint

pytestmark = pytest.mark.server

HANDLERS = Path(__file__).parent / "lambda_handlers"
PYTHON = Path(os.environ.get("PENSTOCK_TEST_LAMBDA_PYTHON", Path(__file__).parents[3] / ".venvs/lambda/bin/python"))
OLD_PYTHON = Path(os.environ.get("PENSTOCK_TEST_OLD_BOTO3_PYTHON", PYTHON.parents[2] / "lambda-old/bin/python"))
COUNT = 250


def pictures() -> list[np.ndarray[Any, Any]]:
    """Small pictures, each different."""
    source = np.random.default_rng(1)
    return [source.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(COUNT)]


def tar_of(images: list[np.ndarray[Any, Any]]) -> bytes:
    """A WebDataset tar of PNGs and labels."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for number, image in enumerate(images):
            png = io.BytesIO()
            Image.fromarray(image).save(png, "png")
            for name, data in (("png", png.getvalue()), ("cls", str(number % 10).encode())):
                member = tarfile.TarInfo(f"{number:06}.{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def examples_of(data: bytes) -> list[dict[str, Any]]:
    """The examples of a TFRecord file, whose checksums are compared."""
    found, at = [], 0
    while at < len(data):
        head = data[at : at + 8]
        (size,) = struct.unpack("<Q", head)
        body = data[at + 12 : at + 12 + size]
        assert struct.unpack_from("<I", data, at + 8) == (masked_crc(head),)
        assert struct.unpack_from("<I", data, at + 12 + size) == (masked_crc(body),)
        found.append(parse_example(memoryview(body)))
        at += 16 + size
    return found


@pytest.mark.skipif(not PYTHON.exists(), reason="make test-lambda makes the handler's environment")
@pytest.mark.parametrize("mode", ["whole", "stream"])
def test_a_tar_becomes_tfrecord_with_decoded_pixels(mode: str) -> None:
    """A handler with NumPy 1, requests, imageio and generated protobuf code runs unchanged, at once or in batches."""
    images = pictures()

    async def run() -> bytes:
        async with endpoint(tar_of(images)) as server:
            code = str(HANDLERS / "article")
            config = LambdaConfig(
                handler="convert.lambda_handler", code_dir=code, python=str(PYTHON), payload=mode, memory_bytes_max=0
            )
            transform = server.transform(config)
            await transform.start()
            result = await server.run(transform)
            assert (result.size_bytes is None) == (mode == "stream")
            return bytes(result.data)

    examples = examples_of(asyncio.run(run()))
    assert len(examples) == COUNT
    for number, (example, image) in enumerate(zip(examples, images, strict=True)):
        assert bytes(example["image"]) == image.tobytes()
        assert list(example["label"].cast("B").cast("q")) == [number % 10]
        assert list(example["shape"].cast("B").cast("q")) == [32, 32, 3]


def test_a_handler_that_forwards_headers_and_checks_the_body() -> None:
    """The result has the source's headers and a checksum that was verified; signed headers and errors pass through."""

    async def run() -> None:
        async with endpoint(b"abc") as server:
            server.source_headers = {"Content-Type": "text/x", "Cache-Control": "no-cache", "x-amz-meta-a": "b"}
            config = LambdaConfig(
                handler="forward.lambda_handler", code_dir=str(HANDLERS / "forwarding"), memory_bytes_max=0
            )
            transform = server.transform(config)
            headers = {"Host": "gateway", "X-Amz-Expected-Bucket-Owner": "1111", "If-None-Match": '"other"'}
            result = await server.run(transform, headers=headers)
            assert bytes(result.data) == b"cba"
            assert result.headers["Content-Type"] == "text/x"
            assert result.headers["x-amz-meta-a"] == "b"
            assert "x-amz-checksum-sha256" in result.headers
            assert server.source.signed == {"X-Amz-Expected-Bucket-Owner": "1111"}
            assert server.gets[-1]["X-Amz-Expected-Bucket-Owner"] == "1111"
            assert "If-None-Match" not in server.gets[-1]
            server.source_error = (404, b"<Error><Code>NoSuchKey</Code><Message>It is gone.</Message></Error>")
            with pytest.raises(S3Error) as caught:
                await server.run(transform)
            assert (caught.value.status, caught.value.code, caught.value.message) == (404, "NoSuchKey", "It is gone.")

    asyncio.run(run())


CLIENTS = """
import urllib.request
import boto3
import botocore.session

early = boto3.client("s3")
by_botocore = botocore.session.get_session().create_client("s3", region_name="eu-west-1")

def lambda_handler(event, context):
    where = event["getObjectContext"]
    late = boto3.session.Session(region_name="us-west-2").client(service_name="s3")
    client = {"early": early, "late": late, "botocore": by_botocore}[event["configuration"]["payload"]]
    data = urllib.request.urlopen(where["inputS3Url"]).read()
    client.write_get_object_response(
        Body=data.upper(), RequestRoute=where["outputRoute"], RequestToken=where["outputToken"])
"""


@pytest.mark.skipif(not OLD_PYTHON.exists(), reason="make test-lambda makes the environment")
@pytest.mark.parametrize("client", ["early", "late", "botocore"])
def test_a_botocore_that_knows_no_endpoint_variables(client: str, tmp_path: Path) -> None:
    """Clients of 2022 reach the gateway, whenever and however they were made, and in any region."""
    (tmp_path / "app.py").write_text(CLIENTS)

    async def run() -> bytes:
        async with endpoint(b"abc") as server:
            config = LambdaConfig(
                handler="app.lambda_handler",
                code_dir=str(tmp_path),
                python=str(OLD_PYTHON),
                payload=client,
                memory_bytes_max=0,
            )
            return bytes((await server.run(server.transform(config))).data)

    assert asyncio.run(run()) == b"ABC"
