"""The variables that a training script finds, in both dialects.

The training toolkit names a hyperparameter ``SM_HP_LEARNING-RATE`` and sorts the channels; the SDK's container driver of
version 3 names it ``SM_HP_LEARNING_RATE``, keeps the order of the channels, and adds addresses and directories. One
environment holds both, since names differ wherever values would, except for ``SM_CHANNELS``: it is sorted, as more scripts
were written for the toolkit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.channels.environment.configuration import (
    INSTANCE_GROUP,
    INSTANCE_TYPE,
    NETWORK_INTERFACE,
    hyperparameters_of,
    input_data_config,
    resource_config,
)
from penstock.channels.environment.hosts import Hosts
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.channels.environment.layout import ContainerLayout
    from penstock.channels.inputs import InputChannel

MASTER_PORT = 7777


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the variables of a run say.

    Attributes:
        layout: The directory tree.
        channels: The channels.
        hyperparameters: Hyperparameters as texts.
        hosts: The hosts.
        command: The program and its arguments.
        job_name: Name of the job.
        cpus_count: Processors that the program may use.
        gpus_count: GPUs of this host.
    """

    layout: ContainerLayout
    channels: Sequence[InputChannel] = ()
    hyperparameters: Mapping[str, str] = field(default_factory=dict)
    hosts: Hosts = field(default_factory=Hosts)
    command: Sequence[str] = ()
    job_name: str = "penstock"
    cpus_count: int = 1
    gpus_count: int = 0


def variables(environment: Environment) -> dict[str, str]:
    """Return all variables of a run, in both dialects."""
    return {**_platform(environment), **_sdk(environment), **_toolkit(environment)}


def _platform(environment: Environment) -> dict[str, str]:
    """Return the variables of the platform itself."""
    name = environment.job_name
    return {
        "TRAINING_JOB_NAME": name,
        "TRAINING_JOB_ARN": f"arn:aws:sagemaker:local:000000000000:training-job/{name}",
        "SAGEMAKER_BASE_DIR": str(environment.layout.base),
    }


def _toolkit(environment: Environment) -> dict[str, str]:
    """Return the variables of the training toolkit; texts stay, other values are JSON with sorted keys."""
    values = _toolkit_values(environment)
    values["training_env"] = {name: value for name, value in values.items() if name != "hps"} | {
        "hyperparameters": values["hps"],
        "channel_input_dirs": {
            name: str(environment.layout.data / name) for name in input_data_config(environment.channels)
        },
        "job_name": environment.job_name,
    }
    found = {f"SM_{name.upper()}": _text(value) for name, value in values.items()}
    for name in input_data_config(environment.channels):
        found[f"SM_CHANNEL_{name.upper()}"] = str(environment.layout.data / name)
    for name, value in values["hps"].items():
        found[f"SM_HP_{name.upper()}"] = _text(value)
    return found


def _toolkit_values(environment: Environment) -> dict[str, Any]:
    layout, hosts = environment.layout, environment.hosts
    resources = resource_config(hosts)
    script = _script(environment.command)
    hyperparameters = hyperparameters_of(environment.hyperparameters)
    return {
        "hosts": list(hosts.names),
        "network_interface_name": NETWORK_INTERFACE,
        "hps": hyperparameters,
        "user_entry_point": script,
        "framework_params": {},
        "resource_config": resources,
        "input_data_config": input_data_config(environment.channels),
        "output_data_dir": str(layout.output_data),
        "channels": sorted(input_data_config(environment.channels)),
        "current_host": hosts.current,
        "current_instance_type": INSTANCE_TYPE,
        "current_instance_group": INSTANCE_GROUP,
        "current_instance_group_hosts": list(hosts.names),
        "instance_groups": [INSTANCE_GROUP],
        "instance_groups_dict": {INSTANCE_GROUP: resources["instance_groups"][0]},
        "distribution_instance_groups": [],
        "is_hetero": False,
        "module_name": script.removesuffix(".py"),
        "log_level": 20,
        "framework_module": "",
        "input_dir": str(layout.input),
        "input_config_dir": str(layout.config),
        "output_dir": str(layout.output),
        "num_cpus": environment.cpus_count,
        "num_gpus": environment.gpus_count,
        "num_neurons": 0,
        "model_dir": str(layout.model),
        "module_dir": str(layout.code),
        "user_args": _arguments(environment.command),
        "output_intermediate_dir": str(layout.intermediate),
    }


def _sdk(environment: Environment) -> dict[str, str]:
    """Return what the SDK's container driver of version 3 adds."""
    layout, hosts = environment.layout, environment.hosts
    found = {
        "SM_MASTER_ADDR": hosts.master,
        "SM_MASTER_PORT": str(MASTER_PORT),
        "SM_HOST_COUNT": str(hosts.count),
        "SM_CURRENT_HOST_RANK": str(hosts.rank),
        "SM_INPUT_DATA_DIR": str(layout.data),
        "SM_OUTPUT_FAILURE": str(layout.failure),
        "SM_SOURCE_DIR": str(layout.data / "code"),
        "SM_ENTRY_SCRIPT": _script(environment.command),
        "SM_DISTRIBUTED_CONFIG": "{}",
        "SM_DISTRIBUTED_DRIVER_DIR": str(layout.data / "sm_drivers" / "distributed_drivers"),
    }
    for name, value in hyperparameters_of(environment.hyperparameters).items():
        found[f"SM_HP_{name.upper().replace('-', '_')}"] = _text(value)
    return found


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise ConfigError("a hyperparameter is nested too deeply") from None


def _script(command: Sequence[str]) -> str:
    """Return the script of a command such as ``python -u train.py``: its first ``.py`` file, or else the program."""
    return next((word for word in command if word.endswith(".py")), command[0] if command else "")


def _arguments(command: Sequence[str]) -> list[str]:
    """Return the arguments of the command's script."""
    script = _script(command)
    return list(command[list(command).index(script) + 1 :]) if command else []
