"""Channels from the command line and from a training job's JSON."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.channels import InputChannel
from penstock.channels.inputs import channel_of_request, check_channels, parse_channel
from penstock.channels.runner.job import Job, fields_of_request
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("s3://b/train/", {"name": "training", "url": "s3://b/train/"}),
        ("train=s3://b/x=1/y,z/", {"name": "train", "url": "s3://b/x=1/y,z/"}),
        ("t=data/x", {"name": "t", "url": "data/x"}),
        ("data/x", {"name": "training", "url": "data/x"}),
        ("t=s3://b/,mode=fastfile", {"mode": "FastFile"}),
        ("t=s3://b/,MODE=x/,mode=PIPE", {"url": "s3://b/,MODE=x/", "mode": "Pipe"}),
        ("t=s3://b/,mode=pipe,seed=7,copies=8", {"mode": "Pipe", "shuffle_seed": 7, "copies": 8}),
        (
            "t=s3://b/m,mode=pipe,type=augmentedmanifestfile,attributes=image-ref+label,wrapper=recordio,compression=gzip",
            {
                "data_type": "AugmentedManifestFile",
                "attribute_names": ("image-ref", "label"),
                "record_wrapper": "RecordIO",
                "compression": "Gzip",
            },
        ),
        ("t=s3://b/,distribution=shardedbys3key,content-type=text/csv",
         {"distribution": "ShardedByS3Key", "content_type": "text/csv"}),
    ],
)  # fmt: skip
def test_parse(text: str, fields: dict[str, Any]) -> None:
    """A channel of the command line has the fields that its options name; its URL may hold commas and equal signs."""
    found = parse_channel(text)
    assert {name: getattr(found, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("t=", "has no URL"),
        ("t=s3://b/,mode=fast", "mode='fast' must be one of"),
        ("t=s3://b/,sede=7", r"no option sede=.*did you mean seed"),
        ("t=s3://b/,seed=x", "not a whole number"),
        ("t=s3://b/,seed=-1", "seed=-1"),
        ("t=s3://b/,copies=2", "is for Pipe mode"),
        ("t=s3://b/,mode=pipe,copies=2,split=2", "exclude each other"),
        ("t=s3://b/,mode=fastfile,compression=gzip", "FastFile mode mounts a prefix as it is"),
        ("t=s3://b/,mode=fastfile,type=ManifestFile", "FastFile mode mounts a prefix as it is"),
        ("t=s3://b/,mode=pipe,type=AugmentedManifestFile", "attributes go together"),
        ("t=s3://b/,mode=pipe,attributes=a", "attributes go together"),
        ("t=s3://b/,type=AugmentedManifestFile,attributes=a", "is for Pipe mode"),
        (f"{'x' * 65}=s3://b/", "1 to 64 letters"),
        ("..=s3://b/", "1 to 64 letters"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    """A channel that cannot be is refused, with the value and what is possible."""
    with pytest.raises(ConfigError, match=message):
        parse_channel(text)


def test_request() -> None:
    """The channels, hyperparameters and URLs of a CreateTrainingJob request become those of a job."""
    request = {
        "TrainingJobName": "job-1",
        "AlgorithmSpecification": {"TrainingInputMode": "Pipe", "TrainingImage": "x"},
        "RoleArn": "arn:aws:iam::1:role/x",
        "HyperParameters": {"lr": "0.1"},
        "Environment": {"A": "b"},
        "InputDataConfig": [
            {
                "ChannelName": "train",
                "DataSource": {
                    "S3DataSource": {
                        "S3DataType": "AugmentedManifestFile",
                        "S3Uri": "s3://b/m.jsonl",
                        "S3DataDistributionType": "ShardedByS3Key",
                        "AttributeNames": ["image-ref", "label"],
                    }
                },
                "CompressionType": "Gzip",
                "RecordWrapperType": "RecordIO",
                "ShuffleConfig": {"Seed": 5},
            },
            {
                "ChannelName": "val",
                "InputMode": "FastFile",
                "DataSource": {"S3DataSource": {"S3DataType": "S3Prefix", "S3Uri": "s3://b/val/"}},
            },
        ],
        "OutputDataConfig": {"S3OutputPath": "s3://b/out/"},
        "CheckpointConfig": {"S3Uri": "s3://b/ckpt/"},
    }
    job = Job(command=("x",), **fields_of_request(request))
    train, val = job.channels
    assert train == InputChannel(
        name="train", url="s3://b/m.jsonl", mode="Pipe", data_type="AugmentedManifestFile", distribution="ShardedByS3Key",
        attribute_names=("image-ref", "label"), compression="Gzip", record_wrapper="RecordIO", shuffle_seed=5,
    )  # fmt: skip
    assert (val.mode, val.url) == ("FastFile", "s3://b/val/")
    assert job.model_url == "s3://b/out/job-1/output/model.tar.gz"
    assert job.output_url == "s3://b/out/job-1/output/output.tar.gz"
    assert (job.checkpoint_url, job.hyperparameters, job.environment) == ("s3://b/ckpt/", {"lr": "0.1"}, {"A": "b"})


@pytest.mark.parametrize(
    ("request_part", "message"),
    [
        ({"DataSource": {}}, "no ChannelName"),
        ({"ChannelName": "a", "DataSource": {"FileSystemDataSource": {}}}, "no S3DataSource"),
        ({"ChannelName": "a", "InputModee": "Pipe"}, "InputModee, which is not supported"),
        ("x", "is a str, not an object"),
    ],
)
def test_bad_requests(request_part: Any, message: str) -> None:
    """A part of a request that cannot be is refused by its name."""
    with pytest.raises(ConfigError, match=message):
        channel_of_request(request_part)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (3, "must be an object"),
        ({"InputDataConfig": {"a": 1}}, "InputDataConfig in the request must be a list"),
        ({"InputDataConfig": [3]}, "a channel is a int"),
        (
            {"InputDataConfig": [{"ChannelName": "a", "DataSource": {"S3DataSource": {"S3Uri": 3}}}]},
            "S3Uri .* must be text",
        ),
        (
            {"InputDataConfig": [{"ChannelName": "a", "DataSource": {"S3DataSource": {"AttributeNames": [3]}}}]},
            "AttributeNames must be texts",
        ),
        ({"AlgorithmSpecification": []}, "AlgorithmSpecification .* must be an object"),
        ({"HyperParameters": [1]}, "HyperParameters .* must be an object"),
        ({"Environment": {"A=B": "x"}}, "Environment .* has 'A=B'"),
        ({"Environment": {"A": "\ud800"}}, "Environment .* has 'A'"),
        ({"Environment": {"A": 1}}, "Environment .* has 'A'"),
        ({"TrainingJobName": "../../x"}, "TrainingJobName '../../x' must be 1 to 63"),
        ({"OutputDataConfig": {"S3OutputPath": []}}, "S3OutputPath .* must be text"),
        (
            {"StoppingCondition": {"MaxRuntimeInSeconds": 0}},
            "MaxRuntimeInSeconds=0 must be a whole number of at least 1",
        ),
        ({"StoppingCondition": {"MaxRuntimeInSeconds": "9"}}, "MaxRuntimeInSeconds='9' must be a whole number"),
    ],
)
def test_requests_of_another_form(request_: Any, message: str) -> None:
    """A field of a request that is of another kind, or out of bounds, is refused by its name."""
    with pytest.raises(ConfigError, match=message):
        fields_of_request(request_)


def test_names_must_differ() -> None:
    """Two channels of one name are refused, also where a pipe of one has the name of the other."""
    one = InputChannel(name="a", url="s3://b/")
    for other in (
        one,
        InputChannel(name="a-0", url="s3://b/"),
    ):
        with pytest.raises(ConfigError, match="two channels are named"):
            check_channels([InputChannel(name="a", url="s3://b/", mode="Pipe", copies=1), other])
    with pytest.raises(ConfigError, match="has the name of epoch 3 of the pipe 'a'"):
        check_channels([InputChannel(name="a", url="s3://b/", mode="Pipe"), InputChannel(name="a_3", url="s3://b/")])


def test_limits_of_sagemaker() -> None:
    """More than 20 channels are fine, unless SageMaker's limits are asked for."""
    channels = [InputChannel(name=f"c{number}", url="s3://b/") for number in range(21)]
    check_channels(channels)
    with pytest.raises(ConfigError, match="21 channels are more than SageMaker's 20"):
        check_channels(channels, strict=True)
    with pytest.raises(ConfigError, match="neither copies nor split"):
        check_channels([InputChannel(name="a", url="s3://b/", mode="Pipe", copies=2)], strict=True)
    with pytest.raises(ConfigError, match="is not an s3:// URL"):
        check_channels([InputChannel(name="a", url="data/")], strict=True)


def test_lazy_start() -> None:
    """File mode may start lazily, with what a mount can give; other modes, and SageMaker's own limits, refuse it."""
    channel = parse_channel("s3://b/train/,mode=file,start=lazy")
    assert (channel.mode, channel.start, channel.is_mounted) == ("File", "lazy", True)
    assert not parse_channel("s3://b/train/").is_mounted
    for text in ("mode=pipe,start=lazy", "start=lazy,compression=gzip", "start=lazy,type=ManifestFile", "start=soon"):
        with pytest.raises(ConfigError, match=r"start"):
            parse_channel(f"s3://b/train/,{text}")
    with pytest.raises(ConfigError, match="start=lazy"):
        check_channels([channel], strict=True)
