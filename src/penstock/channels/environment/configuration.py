"""The contents of the configuration files that a training script may read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from penstock.config import is_variable
from penstock.errors import ConfigError
from penstock.text.json_text import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from penstock.channels.environment.hosts import Hosts
    from penstock.channels.inputs import InputChannel

NETWORK_INTERFACE = "eth0"
INSTANCE_GROUP = "homogeneousCluster"
INSTANCE_TYPE = "local"
HYPERPARAMETERS_MAX = 100
"""SageMaker's limit, which holds with ``--strict``."""


def input_data_config(channels: Iterable[InputChannel]) -> dict[str, dict[str, str]]:
    """Return the contents of ``inputdataconfig.json``: for each channel, and each pipe of one, what the program may know."""
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
