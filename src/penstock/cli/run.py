"""``penstock run``: runs a program as a SageMaker training job."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli.options import ConnectionGroup, argument, expand_groups, flag, option
from penstock.cli.output import ProgressReport, one_line, print_message
from penstock.config import RetryConfig
from penstock.errors import ConfigError
from penstock.text.json_text import parse_json
from penstock.text.sizes import format_bytes

if TYPE_CHECKING:
    from penstock.channels import InputChannel


EXIT_NOT_EXECUTABLE, EXIT_NOT_FOUND = 126, 127
"""Exit codes of a shell for a program that cannot be executed, and for one that does not exist."""


@expand_groups
def run(
    command: list[str] = argument("COMMAND", "Program with its arguments, after --."),
    *,
    channel: list[str] | None = option(
        "[NAME=]URL[,OPTION=VALUE]...", "An input channel; may be repeated.", names=("--channel", "-c")
    ),
    hyperparameter: list[str] | None = option("NAME=VALUE", "A hyperparameter; may be repeated."),
    hyperparameter_arguments: bool = flag(
        "Also append hyperparameters to COMMAND as --NAME VALUE, as SageMaker's framework containers do."
    ),
    mode: str = option(
        "MODE",
        "Mode of channels that name none: file, pipe or fastfile.",
        default="file",
        values=lambda: ("file", "pipe", "fastfile"),
    ),
    job: str | None = option("FILE", "JSON of a CreateTrainingJob request, or of its input channels."),
    base: str | None = option(
        "DIR", "Base directory, e.g. /opt/ml; default: SAGEMAKER_BASE_DIR, or a private one that is removed at the end."
    ),
    downloads: str | None = option("DIR", "Keep what File mode downloads there, for later runs."),
    model_url: str | None = option("URL", "Where the model goes; one archive if it ends with .tar.gz."),
    output_url: str | None = option("URL", "Where the output goes; one archive if it ends with .tar.gz."),
    checkpoint_url: str | None = option("URL", "Where checkpoints go and come from, while it runs."),
    hosts: str | None = option("NAME,...", "All hosts; default: from SLURM, torchrun or Open MPI."),
    current_host: str | None = option("NAME", "This host."),
    stop_s: float = option("SECONDS", "Time between SIGTERM and SIGKILL.", default=120.0),
    strict: bool = flag("Enforce SageMaker's own limits, such as 20 channels."),
    connection: ConnectionGroup,
) -> None:
    """Run COMMAND as a SageMaker training job, with its channels as files, named pipes or mounts.

    COMMAND finds the directories, configuration files and SM_* variables that SageMaker's containers have.

    A channel is [NAME=]URL with options: mode=file|pipe|fastfile, type=S3Prefix|ManifestFile|AugmentedManifestFile,
    attributes=A+B, distribution=FullyReplicated|ShardedByS3Key, compression=Gzip, wrapper=RecordIO, seed=N, content-type=T,
    copies=N (N pipes with all data, each in its own order), split=N (N pipes that share the data), start=lazy (in File mode,
    COMMAND starts at once and the files arrive meanwhile). A URL without a name is the channel "training". A directory of
    this machine is a channel, too.

    SIGTERM, SIGINT and SIGHUP are passed on; 120 seconds later, the program and all that it started are killed. The exit code
    is the program's, or 128 plus the number of the signal that ended it; 127 if there is no such program, 126 if it is not
    executable. Nothing stays mounted, running or half-written.

    For example:

        penstock run --channel train=s3://bucket/train/ --hyperparameter lr=0.1 -- python train.py
        penstock run --mode pipe -c train=s3://bucket/train/,seed=7 -c val=s3://bucket/val/,mode=file -- python train.py
        penstock run -c train=data/train --model-url s3://bucket/models/run-7/ -- python train.py
        penstock run --job create-training-job.json --checkpoint-url s3://bucket/checkpoints/ -- python train.py
        penstock run -c train=s3://bucket/train/,mode=pipe,copies=8 -- torchrun --nproc-per-node 8 train.py
    """
    from penstock.channels.environment import find_hosts, parse_hyperparameter
    from penstock.channels.inputs import parse_channel
    from penstock.channels.runner.job import Job, fields_of_request
    from penstock.channels.runner.running import base_of, run_job

    fields: dict[str, Any] = {"channels": (), "hyperparameters": {}}
    if job is not None:
        fields |= fields_of_request(_read_json(Path(job)), mode=mode)
    fields["channels"] += tuple(parse_channel(text, mode=mode) for text in channel or ())
    fields["hyperparameters"] |= dict(parse_hyperparameter(text) for text in hyperparameter or ())
    given = {"model_url": model_url, "output_url": output_url, "checkpoint_url": checkpoint_url}
    fields |= {name: url for name, url in given.items() if url is not None}
    what = Job(
        command=tuple(command),
        hosts=find_hosts(os.environ, names=hosts.split(",") if hosts else (), current=current_host),
        base=base_of(base),
        downloads=Path(downloads) if downloads else None,
        passes_hyperparameters=hyperparameter_arguments,
        stop_s=stop_s,
        strict=strict,
        **fields,
    )
    report = RunReport()
    try:
        with report:
            result = run_job(what, connection=connection.options(retry_s=RetryConfig().total_s_max), progress=report)
    except ConfigError as error:
        if not isinstance(error.__cause__, FileNotFoundError | PermissionError):
            raise
        print_message(f"penstock: {one_line(error)}")
        raise typer.Exit(
            EXIT_NOT_FOUND if isinstance(error.__cause__, FileNotFoundError) else EXIT_NOT_EXECUTABLE
        ) from None
    for warning in result.warnings:
        print_message(f"penstock: {warning}")
    if result.is_out_of_time:
        print_message(f"penstock: MaxRuntimeExceeded: the program was stopped after {what.runtime_s_max} s")
    if result.failure:
        print_message(f"penstock: the program failed: {one_line(Exception(result.failure))}")
    if base is None and result.directory is not None:
        print_message(f"penstock: the results are in {result.directory}")
    raise typer.Exit(result.exit_code)


def _read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error})") from error


class RunReport(ProgressReport):
    """Shows how far the downloads are, until the program starts; a ``RunProgress``."""

    shown = ("Spinner", "TimeElapsed")

    def __init__(self) -> None:
        super().__init__(as_json=False)
        self._count = self._arrived_count = self._bytes = self._arrived_bytes = 0
        self._lock = threading.Lock()  # several channels may be downloaded at the same time

    def planned(self, channel: InputChannel, count: int, size_bytes: int) -> None:
        """So many files of so many bytes are missing."""
        del channel
        with self._lock:
            self._count += count
            self._bytes += size_bytes

    def progressed(self, channel: InputChannel, count: int, size_bytes: int) -> None:
        """So many files, and bytes, have arrived since the last call."""
        with self._lock:
            self._arrived_count += count
            self._arrived_bytes += size_bytes
            if self.has_bar:
                arrived = f"{self._arrived_count} of {self._count} files, {format_bytes(self._arrived_bytes)}"
                self.update(
                    description=f"{channel.name}: {arrived} of {format_bytes(self._bytes)}, {self.rate(self._arrived_bytes)}"
                )

    def started(self) -> None:
        """End the bar: the terminal is the program's now."""
        self.end_bar()
        sys.stderr.flush()
