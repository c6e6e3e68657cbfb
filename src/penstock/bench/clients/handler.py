"""A handler of S3 Object Lambda that makes TFRecords of tars, as people write it for AWS; the gateway runs it."""

from __future__ import annotations

import io
import urllib.request
from typing import TYPE_CHECKING, Any

import boto3

from penstock.bench.clients import loop
from penstock.bench.samples import write_tfrecord

if TYPE_CHECKING:
    from collections.abc import Callable


def handler_of(image: str, label: str | None, *, pixels: bool) -> Callable[[dict[str, Any], Any], dict[str, Any]]:
    """Return a handler that keeps these fields of each sample, the image as it is or as its `pixels`."""
    s3 = boto3.client("s3")

    def example(sample: dict[str, bytes]) -> dict[str, bytes]:
        return {**sample, image: _pixels(sample[image])} if pixels else sample

    def lambda_handler(event: dict[str, Any], _context: Any) -> dict[str, Any]:
        where, made = event["getObjectContext"], io.BytesIO()
        with urllib.request.urlopen(where["inputS3Url"]) as source:
            write_tfrecord(made, map(example, loop.read_tar(source, (image, label))))
        s3.write_get_object_response(
            Body=made.getvalue(), RequestRoute=where["outputRoute"], RequestToken=where["outputToken"]
        )
        return {"statusCode": 200}

    return lambda_handler


def _pixels(data: bytes) -> bytes:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as picture:
        return picture.convert("RGB").tobytes()
