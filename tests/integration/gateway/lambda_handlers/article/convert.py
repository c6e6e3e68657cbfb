"""A handler of S3 Object Lambda, as people write them for AWS: a WebDataset tar becomes TFRecord with decoded pixels.

It needs NumPy below 2: ``np.uint32`` of a larger integer keeps its low bits there, and is an error in NumPy 2.
"""

import io
import itertools
import struct
import tarfile

import boto3
import crc32c
import imageio.v3 as imageio
import numpy as np
import requests
from botocore.config import Config
from example_pb2 import BytesList, Example, Feature, Features, Int64List

RECORDS_AT_ONCE = 100
s3 = boto3.client("s3")
streaming_s3 = boto3.client("s3", config=Config(s3={"payload_signing_enabled": False}))


def masked(data):
    crc = crc32c.crc32c(data)
    return np.uint32(((crc >> 15) | (crc << 17)) + 0xA282EAD8)


def record(example):
    length = struct.pack("<Q", len(example))
    return length + struct.pack("<I", masked(length)) + example + struct.pack("<I", masked(example))


def samples(stream):
    sample, current = {}, None
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            key, _, extension = member.name.partition(".")
            if key != current and sample:
                yield sample
                sample = {}
            current = key
            sample[extension] = tar.extractfile(member).read()
    if sample:
        yield sample


def records(stream):
    for sample in samples(stream):
        pixels = imageio.imread(io.BytesIO(sample["png"]))
        features = {
            "image": Feature(bytes_list=BytesList(value=[pixels.tobytes()])),
            "shape": Feature(int64_list=Int64List(value=pixels.shape)),
            "label": Feature(int64_list=Int64List(value=[int(sample["cls"])])),
        }
        yield record(Example(features=Features(feature=features)).SerializeToString(deterministic=True))


class Batches:
    """An iterator of records as a body that botocore can stream."""

    def __init__(self, source):
        self.source = source

    def read(self, size=-1):
        return b"".join(itertools.islice(self.source, RECORDS_AT_ONCE))


def lambda_handler(event, context):
    get_context = event["getObjectContext"]
    response = requests.get(get_context["inputS3Url"], stream=True)
    response.raise_for_status()
    made = records(response.raw)
    answer = {"RequestRoute": get_context["outputRoute"], "RequestToken": get_context["outputToken"]}
    if event["configuration"]["payload"] == "stream":
        streaming_s3.write_get_object_response(Body=Batches(made), **answer)
    else:
        s3.write_get_object_response(Body=b"".join(made), **answer)
    return {"status_code": 200}
