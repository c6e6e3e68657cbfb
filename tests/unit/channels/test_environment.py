"""What a training script finds around it: variables in both dialects, configuration files, hosts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.channels import InputChannel
from penstock.channels.environment import (
    ContainerLayout,
    Environment,
    Hosts,
    arguments_of,
    expand_nodes,
    find_hosts,
    hyperparameters_config,
    hyperparameters_of,
    input_data_config,
    parse_hyperparameter,
    resource_config,
    variables,
)
from penstock.errors import ConfigError

NESTED = "[" * 100_000 + "]" * 100_000

ENVIRONMENT = Environment(
    layout=ContainerLayout(base=Path("/opt/ml")),
    channels=(
        InputChannel(name="train", url="s3://b/train/"),
        InputChannel(
            name="VAL-set", url="s3://b/val/", mode="Pipe", content_type="image/jpeg", record_wrapper="RecordIO"
        ),
    ),
    hyperparameters={"learning-rate": "0.1", "name": "abc", "layers": "[1,2]", "none": "null"},
    hosts=Hosts(names=("algo-1", "algo-2"), current="algo-2"),
    command=("python", "-u", "train.py", "--epochs", "3"),
    job_name="job-7",
    cpus_count=8,
    gpus_count=2,
)

EXPECTED = {
    # the training toolkit's
    "SM_HOSTS": '["algo-1","algo-2"]',
    "SM_NETWORK_INTERFACE_NAME": "eth0",
    "SM_HPS": '{"layers":[1,2],"learning-rate":0.1,"name":"abc","none":null}',
    "SM_USER_ENTRY_POINT": "train.py",
    "SM_FRAMEWORK_PARAMS": "{}",
    "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data",
    "SM_CHANNELS": '["VAL-set","train"]',
    "SM_CURRENT_HOST": "algo-2",
    "SM_CURRENT_INSTANCE_GROUP": "homogeneousCluster",
    "SM_CURRENT_INSTANCE_GROUP_HOSTS": '["algo-1","algo-2"]',
    "SM_INSTANCE_GROUPS": '["homogeneousCluster"]',
    "SM_DISTRIBUTION_INSTANCE_GROUPS": "[]",
    "SM_IS_HETERO": "false",
    "SM_MODULE_NAME": "train",
    "SM_LOG_LEVEL": "20",
    "SM_FRAMEWORK_MODULE": "",
    "SM_INPUT_DIR": "/opt/ml/input",
    "SM_INPUT_CONFIG_DIR": "/opt/ml/input/config",
    "SM_OUTPUT_DIR": "/opt/ml/output",
    "SM_NUM_CPUS": "8",
    "SM_NUM_GPUS": "2",
    "SM_NUM_NEURONS": "0",
    "SM_MODEL_DIR": "/opt/ml/model",
    "SM_MODULE_DIR": "/opt/ml/code",
    "SM_USER_ARGS": '["--epochs","3"]',
    "SM_OUTPUT_INTERMEDIATE_DIR": "/opt/ml/output/intermediate",
    "SM_CHANNEL_TRAIN": "/opt/ml/input/data/train",
    "SM_CHANNEL_VAL-SET": "/opt/ml/input/data/VAL-set",
    "SM_HP_LEARNING-RATE": "0.1",
    "SM_HP_NAME": "abc",
    "SM_HP_LAYERS": "[1,2]",
    "SM_HP_NONE": "",
    "SAGEMAKER_BASE_DIR": "/opt/ml",
    # the SDK's
    "SM_HP_LEARNING_RATE": "0.1",
    "SM_MASTER_ADDR": "algo-1",
    "SM_MASTER_PORT": "7777",
    "SM_HOST_COUNT": "2",
    "SM_CURRENT_HOST_RANK": "1",
    "SM_INPUT_DATA_DIR": "/opt/ml/input/data",
    "SM_OUTPUT_FAILURE": "/opt/ml/output/failure",
    "SM_SOURCE_DIR": "/opt/ml/input/data/code",
    "SM_ENTRY_SCRIPT": "train.py",
    "SM_DISTRIBUTED_CONFIG": "{}",
    # the platform's
    "TRAINING_JOB_NAME": "job-7",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_variables(name: str) -> None:
    """Each variable has the value that its dialect gives it."""
    assert variables(ENVIRONMENT)[name] == EXPECTED[name]


def test_further_variables() -> None:
    """The variables whose values are whole records are JSON of them."""
    found = variables(ENVIRONMENT)
    assert json.loads(found["SM_RESOURCE_CONFIG"]) == resource_config(ENVIRONMENT.hosts)
    assert json.loads(found["SM_INPUT_DATA_CONFIG"]) == input_data_config(ENVIRONMENT.channels)
    training = json.loads(found["SM_TRAINING_ENV"])
    assert training["channel_input_dirs"] == {
        "train": "/opt/ml/input/data/train",
        "VAL-set": "/opt/ml/input/data/VAL-set",
    }
    assert training["hyperparameters"] == {"learning-rate": 0.1, "name": "abc", "layers": [1, 2], "none": None}
    assert json.loads(found["SM_INSTANCE_GROUPS_DICT"])["homogeneousCluster"]["hosts"] == ["algo-1", "algo-2"]
    assert {"SM_TRAINING_ENV", "SM_CURRENT_INSTANCE_TYPE", "SM_DISTRIBUTED_DRIVER_DIR"} <= set(found)


def test_input_data_config() -> None:
    """The file has the names of the container's side, and no content type where none was given."""
    assert input_data_config(ENVIRONMENT.channels) == {
        "train": {
            "TrainingInputMode": "File",
            "S3DistributionType": "FullyReplicated",
            "RecordWrapperType": "None",
        },
        "VAL-set": {
            "ContentType": "image/jpeg",
            "TrainingInputMode": "Pipe",
            "S3DistributionType": "FullyReplicated",
            "RecordWrapperType": "RecordIO",
        },
    }
    copies = InputChannel(name="t", url="s3://b/", mode="Pipe", copies=2)
    assert list(input_data_config([copies])) == ["t-0", "t-1"]


def test_hyperparameters_are_texts() -> None:
    """The file holds texts only; reading them gives JSON values, and what is no JSON as text."""
    texts = hyperparameters_config({"a": 1, "b": "x", "c": [1, None], "d": True})
    assert texts == {"a": "1", "b": "x", "c": "[1, null]", "d": "true"}
    assert hyperparameters_of(texts) == {"a": 1, "b": "x", "c": [1, None], "d": True}
    assert parse_hyperparameter("url=s3://b/?x=1") == ("url", "s3://b/?x=1")
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        parse_hyperparameter("lr")


def test_arguments() -> None:
    """Hyperparameters become arguments as in the training toolkit: sorted, with one hyphen before a single letter."""
    texts = hyperparameters_config({"lr": 0.1, "b": 8, "name": "a b", "flag": True, "none": None})
    assert arguments_of(texts) == ["-b", "8", "--flag", "True", "--lr", "0.1", "--name", "a b", "--none", ""]


@pytest.mark.parametrize(
    ("environment", "names", "current"),
    [
        ({}, ("algo-1",), "algo-1"),
        ({"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3"}, ("algo-1", "algo-2", "algo-3"), "algo-2"),
        (
            {"SLURM_STEP_NODELIST": "gpu[01-03,07],login", "SLURM_NODEID": "3", "SLURM_PROCID": "3"},
            ("gpu01", "gpu02", "gpu03", "gpu07", "login"),
            "gpu07",
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            ("algo-1", "algo-2"),
            "algo-2",
        ),
        ({"SLURM_STEP_NODELIST": "a,b"}, ("algo-1",), "algo-1"),  # sbatch, outside of a step
    ],
)
def test_hosts_of_launchers(environment: dict[str, str], names: tuple[str, ...], current: str) -> None:
    """The hosts come from the variables of SLURM, torchrun or Open MPI; without them there is one."""
    found = find_hosts(environment)
    assert (found.names, found.current) == (names, current)


def test_many_numbered_hosts_are_sorted_by_their_numbers() -> None:
    """The sorted names of invented hosts have the order of their numbers, also with ten and more."""
    found = find_hosts({"GROUP_RANK": "9", "GROUP_WORLD_SIZE": "12"})
    assert found.rank == 9
    assert list(found.names) == sorted(found.names)


def test_given_hosts() -> None:
    """Hosts that are given come before the launcher's, and are sorted."""
    found = find_hosts({"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "9"}, names=["b", "a"], current="b")
    assert (found.names, found.rank, found.master) == (("a", "b"), 1, "a")
    for arguments in ({"names": ["a"]}, {"current": "a"}, {"names": ["a"], "current": "b"}):
        with pytest.raises(ConfigError):
            find_hosts({}, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="different names"):
        find_hosts({}, names=["a", "a"], current="a")


@pytest.mark.parametrize("text", ["a[1-x]", "", "a[1-99999999]"])
def test_bad_node_lists(text: str) -> None:
    """A list of nodes that is not valid is refused."""
    with pytest.raises(ConfigError):
        expand_nodes(text)


def test_hyperparameters_that_no_program_can_be_given() -> None:
    """Text of many brackets stays text, as SageMaker's toolkit keeps what is not JSON; what no variable can hold is refused."""
    assert hyperparameters_of({"a": NESTED, "b": "9" * 5000}) == {"a": NESTED, "b": "9" * 5000}
    assert arguments_of({"a": NESTED}) == ["-a", NESTED]
    for depth in range(880, 1000, 3):
        try:
            variables(replace(ENVIRONMENT, hyperparameters={"a": "[" * depth + "]" * depth}))
        except ConfigError as error:
            assert "nested too deeply" in str(error)  # noqa: PT017 - most depths are no error
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    for wrong in (value, {1, 2}, float):
        with pytest.raises(ConfigError, match="hyperparameter 'a' cannot be JSON"):
            hyperparameters_config({"a": wrong})
    for text in ("x\0", "\ud800"):
        with pytest.raises(ConfigError, match="hyperparameter 'a' cannot be a variable"):
            hyperparameters_config({"a": text})
    while value:
        value = value[0]  # type: ignore[assignment]  # to free it level by level
