"""The definition of a run: the program, its channels, hyperparameters and hosts, and the URLs of its results."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.channels.environment import (
    Hosts,
    arguments_of,
    check_hyperparameters,
    hyperparameters_config,
)
from penstock.channels.inputs import channel_of_request, check_channels, field_of
from penstock.channels.runner.supervised import STOP_S
from penstock.config import check_number, check_whole, is_variable
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from penstock.channels.inputs import InputChannel


_NAME = re.compile(r"[A-Za-z0-9](-*[A-Za-z0-9]){0,62}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a program.

    Attributes:
        command: The program and its arguments.
        channels: Input channels of the job.
        hyperparameters: Hyperparameters; values that are not text become JSON.
        passes_hyperparameters: Whether the program gets the hyperparameters as arguments, too: ``--name value``.
        environment: Variables for the program, which take precedence over all others.
        hosts: The hosts of the run.
        name: Name of the job.
        base: Base directory; None makes a private one.
        downloads: Directory that keeps what File mode downloads for later runs; None keeps nothing.
        model_url: URL of the model; one that ends with ``.tar.gz`` is an archive, any other one a prefix.
        output_url: URL of the output, in the same form.
        checkpoint_url: Prefix of the checkpoints.
        stop_s: Seconds that the program has after a signal.
        runtime_s_max: Seconds after its start at which the program is stopped by SIGTERM.
        strict: Whether SageMaker's own limits hold.

    Raises:
        ConfigError: A value is out of bounds, or two channels have one name.
    """

    command: tuple[str, ...]
    channels: tuple[InputChannel, ...] = ()
    hyperparameters: Mapping[str, object] = field(default_factory=dict)
    passes_hyperparameters: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    hosts: Hosts = field(default_factory=Hosts)
    name: str = "penstock"
    base: Path | None = None
    downloads: Path | None = None
    model_url: str | None = None
    output_url: str | None = None
    checkpoint_url: str | None = None
    stop_s: float = STOP_S
    runtime_s_max: float = math.inf
    strict: bool = False

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("there is no program to run", hint="penstock run --channel train=URL -- python train.py")
        check_channels(list(self.channels), strict=self.strict)
        check_hyperparameters(self.hyperparameters, strict=self.strict)
        check_number("stop_s", self.stop_s, 0)

    @property
    def full_command(self) -> tuple[str, ...]:
        """The program and all its arguments."""
        return (*self.command, *(arguments_of(self.hyperparameter_texts) if self.passes_hyperparameters else ()))

    @property
    def hyperparameter_texts(self) -> dict[str, str]:
        """The hyperparameters as ``hyperparameters.json`` holds them."""
        return hyperparameters_config(self.hyperparameters)


def fields_of_request(request: Any, *, mode: str = "File") -> dict[str, Any]:
    """Return the fields of ``Job`` that a CreateTrainingJob request has; fields about machines and accounts are left out.

    Args:
        request: The request, or only its ``InputDataConfig``, a list.
        mode: Mode of channels for which the request names none.

    Raises:
        ConfigError: A part of it is not valid, or not supported.
    """
    if isinstance(request, list):
        request = {"InputDataConfig": request}
    if not isinstance(request, dict):
        raise ConfigError("a training job must be an object, or the list of its input channels")
    job_mode = field_of(_record(request, "AlgorithmSpecification"), "TrainingInputMode", str) or mode
    environment = _record(request, "Environment")
    for name, value in environment.items():
        if not is_variable(name, value):
            raise ConfigError(f"Environment in the request has {name!r:.60}, which cannot be a variable of text")
    found: dict[str, Any] = {
        "channels": tuple(
            channel_of_request(each, mode=job_mode) for each in field_of(request, "InputDataConfig", list) or []
        ),
        "hyperparameters": dict(_record(request, "HyperParameters")),
        "environment": dict(environment),
    }
    if job_name := field_of(request, "TrainingJobName", str):
        if not _NAME.fullmatch(job_name):
            raise ConfigError(f"TrainingJobName {job_name!r:.80} must be 1 to 63 letters, digits and hyphens")
        found["name"] = job_name
    if path := field_of(_record(request, "OutputDataConfig"), "S3OutputPath", str):
        folder = f"{path.rstrip('/')}/{found.get('name', 'penstock')}/output"
        found |= {"model_url": f"{folder}/model.tar.gz", "output_url": f"{folder}/output.tar.gz"}
    if url := field_of(_record(request, "CheckpointConfig"), "S3Uri", str):
        found["checkpoint_url"] = url
    seconds = _record(request, "StoppingCondition").get("MaxRuntimeInSeconds")
    if seconds is not None:
        check_whole("MaxRuntimeInSeconds", seconds, 1)
        found["runtime_s_max"] = seconds
    return found


def _record(request: Mapping[str, Any], name: str) -> dict[str, Any]:
    return field_of(request, name, dict) or {}
