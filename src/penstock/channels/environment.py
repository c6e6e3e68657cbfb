"""The environment of a SageMaker training script: directories, hosts, configuration files and variables. Pure.

The training toolkit names a hyperparameter ``SM_HP_LEARNING-RATE`` and sorts the channels; the SDK's container driver of
version 3 names it ``SM_HP_LEARNING_RATE``, keeps the order of the channels, and adds addresses and directories. One
environment holds both, since names differ wherever values would, except for ``SM_CHANNELS``: it is sorted, as more scripts
were written for the toolkit.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.config import is_variable
from penstock.errors import ConfigError
from penstock.text.json_text import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.channels.inputs import InputChannel


DEFAULT_HOST = "algo-1"
HOSTS_MAX = 10_000

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of a run.

    Attributes:
        names: Names of all hosts, sorted.
        current: Name of this host.

    Raises:
        ConfigError: This host is not one of them, or a name occurs twice.
    """

    names: tuple[str, ...] = (DEFAULT_HOST,)
    current: str = DEFAULT_HOST

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names) or not all(self.names):
            raise ConfigError(f"the hosts {', '.join(self.names)} must have different names")
        if list(self.names) != sorted(self.names):
            raise ConfigError("the names of the hosts must be sorted")
        if self.current not in self.names:
            raise ConfigError(f"this host, {self.current!r}, is not one of {', '.join(self.names)}")

    @property
    def rank(self) -> int:
        """Place of this host among all, from 0."""
        return self.names.index(self.current)

    @property
    def count(self) -> int:
        """Number of hosts."""
        return len(self.names)

    @property
    def master(self) -> str:
        """Address of the first host; the loopback address if there is only one, whose name nothing may resolve."""
        return self.names[0] if self.count > 1 else "127.0.0.1"


def find_hosts(environment: Mapping[str, str], *, names: Sequence[str] = (), current: str | None = None) -> Hosts:
    """Return the hosts of this run.

    They come from the first of: the arguments; SLURM's list of nodes; the node counts of torchrun or Open MPI, whose hosts
    become ``algo-1``, ``algo-2`` and so on. Otherwise there is one host.

    Args:
        environment: Variables of this process.
        names: Names of all hosts, in any order.
        current: Name of this host.

    Raises:
        ConfigError: Only one of `names` and `current` is given, or a variable is not valid.
    """
    if names or current is not None:
        if not names or current is None:
            raise ConfigError("hosts and current-host go together", hint="--hosts a,b --current-host a")
        return Hosts(names=tuple(sorted(names)), current=current)
    return _of_slurm(environment) or _of_torchrun(environment) or _of_open_mpi(environment) or Hosts()


def _of_slurm(environment: Mapping[str, str]) -> Hosts | None:
    nodes, number = environment.get("SLURM_STEP_NODELIST"), environment.get("SLURM_NODEID")
    if nodes is None or number is None or "SLURM_PROCID" not in environment:
        return None  # sbatch sets some of these outside of any step, too
    names = expand_nodes(nodes)
    index = _number("SLURM_NODEID", number, len(names))
    return Hosts(names=tuple(sorted(names)), current=names[index])


def _of_torchrun(environment: Mapping[str, str]) -> Hosts | None:
    number, count = environment.get("GROUP_RANK"), environment.get("GROUP_WORLD_SIZE")
    if number is None or count is None:
        return None
    return _numbered("GROUP_RANK", number, _number("GROUP_WORLD_SIZE", count, HOSTS_MAX + 1))


def _of_open_mpi(environment: Mapping[str, str]) -> Hosts | None:
    words = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    if any(word not in environment for word in words):
        return None
    rank, size, local = (_number(word, environment[word], 1 << 31) for word in words)
    if not local or size % local:
        raise ConfigError(f"{size} MPI processes are not the same number, {local}, on each host", hint="--hosts")
    return _numbered("OMPI_COMM_WORLD_RANK", str(rank // local), size // local)


def _numbered(word: str, number: str, count: int) -> Hosts:
    width = len(str(count))  # leading zeros, so that the sorted order is that of the numbers
    names = tuple(f"algo-{index + 1:0{width}d}" for index in range(count))
    return Hosts(names=names, current=names[_number(word, number, count)])


def _number(word: str, text: str, bound: int) -> int:
    if not text.isdecimal() or int(text) >= bound:
        raise ConfigError(f"the environment has {word}={text!r}, which is not a whole number in [0, {bound})")
    return int(text)


def expand_nodes(text: str) -> list[str]:
    """Return the nodes of a SLURM node list, such as ``gpu[01-03,07],login``, in its order.

    Raises:
        ConfigError: The list is not valid, or names more than ``HOSTS_MAX`` nodes.
    """
    names: list[str] = []
    for match in re.finditer(r"([^,\[\]]*)(?:\[([^\]]*)\])?([^,\[\]]*)(?:,|$)", text):
        head, ranges, tail = match[1], match[2], match[3]
        if ranges is None:
            names += [head] if head else []
            continue
        for each in ranges.split(","):
            found = _RANGE.fullmatch(each)
            if found is None:
                raise ConfigError(f"{text!r} is not a list of SLURM nodes: {each!r}", hint="gpu[01-03,07]")
            first, last = int(found[1]), int(found[2] or found[1])
            if last - first >= HOSTS_MAX:
                raise ConfigError(f"{text!r} names more than {HOSTS_MAX} nodes")
            names += [f"{head}{number:0{len(found[1])}d}{tail}" for number in range(first, last + 1)]
    if not names or len(names) > HOSTS_MAX:
        raise ConfigError(f"{text!r} names {len(names)} nodes; 1 to {HOSTS_MAX} are possible")
    return names


DEFAULT_BASE = Path("/opt/ml")


class ContainerLayout:
    """The paths below a base directory.

    Attributes:
        base: Base directory, ``/opt/ml`` on SageMaker.
        input: Directory of the data and the configuration.
        config: Directory of the configuration files.
        data: Directory of the channels.
        model: Directory whose contents become the model.
        output: Directory of the failure file and of further results.
        output_data: Directory whose contents become the output.
        intermediate: Directory of intermediate output.
        failure: File whose first 1 024 characters say why a run failed.
        checkpoints: Directory that is uploaded while the program runs.
        code: Directory of the training code.
    """

    def __init__(self, *, base: Path = DEFAULT_BASE) -> None:
        self.base = base
        self.input = base / "input"
        self.config = self.input / "config"
        self.data = self.input / "data"
        self.model = base / "model"
        self.output = base / "output"
        self.output_data = self.output / "data"
        self.intermediate = self.output / "intermediate"
        self.failure = self.output / "failure"
        self.checkpoints = base / "checkpoints"
        self.code = base / "code"

    def directories(self) -> list[Path]:
        """Return all directories that exist when the program starts."""
        return [self.config, self.data, self.model, self.output_data, self.intermediate, self.checkpoints, self.code]

    def written_directories(self) -> list[Path]:
        """Return all directories in which a run itself writes, or from which it stores results, each above those in it."""
        return [self.input, self.config, self.data, self.model, self.output, self.output_data, self.checkpoints]


NETWORK_INTERFACE = "eth0"
INSTANCE_GROUP = "homogeneousCluster"
INSTANCE_TYPE = "local"
HYPERPARAMETERS_MAX = 100
"""SageMaker's limit, which holds with ``--strict``."""


def input_data_config(channels: Iterable[InputChannel]) -> dict[str, dict[str, str]]:
    """Return the contents of ``inputdataconfig.json``: for each channel, and each pipe of one, the facts for the program."""
    found: dict[str, dict[str, str]] = {}
    for channel in channels:
        row = {} if channel.content_type is None else {"ContentType": channel.content_type}
        row |= {
            "TrainingInputMode": channel.mode,
            "S3DistributionType": channel.distribution,
            "RecordWrapperType": channel.record_wrapper,
        }
        found |= dict.fromkeys(channel.pipes(), row)
    return found


def resource_config(hosts: Hosts) -> dict[str, Any]:
    """Return the contents of ``resourceconfig.json``."""
    names = list(hosts.names)
    return {
        "current_host": hosts.current,
        "current_instance_type": INSTANCE_TYPE,
        "current_group_name": INSTANCE_GROUP,
        "hosts": names,
        "instance_groups": [
            {"instance_group_name": INSTANCE_GROUP, "instance_type": INSTANCE_TYPE, "hosts": names},
        ],
        "network_interface_name": NETWORK_INTERFACE,
    }


def hyperparameters_config(values: Mapping[str, object]) -> dict[str, str]:
    """Return the contents of ``hyperparameters.json``, in which every value is text: JSON, unless it was text already.

    Raises:
        ConfigError: A value cannot be JSON.
    """
    found: dict[str, str] = {}
    for name, value in values.items():
        try:
            found[name] = value if isinstance(value, str) else json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"hyperparameter {name!r} cannot be JSON: {error}") from error
        if not is_variable(name, found[name]):
            raise ConfigError(f"hyperparameter {name!r} cannot be a variable: it has NUL, or half of a character")
    return found


def hyperparameters_of(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the values that the training toolkit reads from ``hyperparameters.json``: JSON, or else the text itself."""
    found: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            found[name] = parse_json(text)
        except ValueError:
            found[name] = text
    return found


def parse_hyperparameter(text: str) -> tuple[str, str]:
    """Return name and value of an argument ``NAME=VALUE``.

    Raises:
        ConfigError: There is no equal sign, or no name before it.
    """
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigError(f"hyperparameter {text!r} must be NAME=VALUE", hint="--hyperparameter lr=0.1")
    return name, value


def arguments_of(texts: Mapping[str, str]) -> list[str]:
    """Return the arguments that the training toolkit gives a script: ``--name value``, or ``-n value``, sorted by the names."""
    found: list[str] = []
    for name, value in sorted(hyperparameters_of(texts).items()):
        found += [f"{'-' if len(name) == 1 else '--'}{name}", "" if value is None else str(value)]
    return found


def check_hyperparameters(values: Mapping[str, object], *, strict: bool) -> None:
    """Check the names of hyperparameters, and with `strict` their number.

    Raises:
        ConfigError: A name is no text or empty, or there are more than SageMaker allows.
    """
    for name in values:
        if not isinstance(name, str) or not name or "\0" in name or "=" in name:
            raise ConfigError(f"hyperparameter name {name!r} must be text without '='")
    if strict and len(values) > HYPERPARAMETERS_MAX:
        raise ConfigError(f"{len(values)} hyperparameters are more than SageMaker's {HYPERPARAMETERS_MAX}")


MASTER_PORT = 7777


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The values of a run's variables.

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
    """Return the variables that the SDK's container driver of version 3 adds."""
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
