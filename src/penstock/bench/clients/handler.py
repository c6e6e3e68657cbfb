"""A handler of S3 Object Lambda that makes TFRecords of tars, as people write it for AWS; the gateway runs it."""

from __future__ import annotations

import io
import urllib.request
from typing import TYPE_CHECKING, Any

import boto3
from PIL import Image

from penstock.bench.clients import loop
from penstock.formats import TFRecordWriter

if TYPE_CHECKING:
    from collections.abc import Callable


def handler_of(image: str, label: str | None, *, pixels: bool) -> Callable[[dict[str, Any], Any], dict[str, Any]]:
    """Return a handler that keeps these fields of each sample, the image as it is or as its `pixels`."""
    s3 = boto3.client("s3")

    def lambda_handler(event: dict[str, Any], _context: Any) -> dict[str, Any]:
        where, made = event["getObjectContext"], io.BytesIO()
        examples = TFRecordWriter(made.write)
        with urllib.request.urlopen(where["inputS3Url"]) as source:
            for sample in loop.read_tar(source, (image, label)):
                if pixels:
                    sample[image] = Image.open(io.BytesIO(sample[image])).convert("RGB").tobytes()
                examples.add(sample)
        examples.finish()
        s3.write_get_object_response(
            Body=made.getvalue(), RequestRoute=where["outputRoute"], RequestToken=where["outputToken"]
        )
        return {"statusCode": 200}

    return lambda_handler
