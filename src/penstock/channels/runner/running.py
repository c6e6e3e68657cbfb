"""``run``: begins the channels, runs the program, stores its results, and leaves nothing behind."""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from penstock.channels.environment import Environment, find_hosts, input_data_config, resource_config, variables
from penstock.channels.file import ChannelProgress
from penstock.channels.inputs import InputChannel, parse_channel
from penstock.channels.inside import read_file, write_file
from penstock.channels.pipe import pipe_orders
from penstock.channels.runner.base import BaseDirectory, clean_abandoned
from penstock.channels.runner.beginning import RunStores, begin_channels
from penstock.channels.runner.job import Job
from penstock.channels.runner.signals import Interruptions
from penstock.channels.runner.supervised import STOP_S, SupervisedProgram
from penstock.channels.runner.supervisor import files_in
from penstock.channels.runner.uploads import CheckpointUploader, check_target, upload_folder
from penstock.config import cores_count
from penstock.errors import PenstockError
from penstock.system.tracebacks import boundary

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from penstock.channels.environment import ContainerLayout
    from penstock.channels.modes import RunningChannel

FAILURE_CHARACTERS_MAX = 1024
CHECK_S = 0.1
"""Seconds between two looks at the channels and the signals while a program runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run.

    Attributes:
        exit_code: Exit code of the program; 128 plus the number of the signal that ended it.
        failure: First 1 024 characters of the failure file; empty if there is none.
        warnings: If the program failed, why reads from its mounts failed, by object and cause; the program itself sees only
            a number such as ``EIO``. Each begins with the name of the channel.
        directory: Base directory, if it still holds results of the program; None if it was removed.
        is_out_of_time: Whether the program was stopped because the ``MaxRuntimeInSeconds`` of its request were over.
    """

    exit_code: int
    failure: str
    warnings: tuple[str, ...]
    directory: Path | None
    is_out_of_time: bool = False


class RunProgress(ChannelProgress, Protocol):
    """Hears the progress of a run; of downloads, from several threads."""

    def started(self) -> None:
        """The program starts now."""


@boundary
def run(
    program: str | Sequence[str],
    *,
    inputs: str | Mapping[str, str | InputChannel] | Iterable[InputChannel] = (),
    input_mode: str = "File",
    hyperparameters: Mapping[str, object] | None = None,
    passes_hyperparameters: bool = False,
    environment: Mapping[str, str] | None = None,
    hosts: Sequence[str] = (),
    current_host: str | None = None,
    base: str | os.PathLike[str] | None = None,
    downloads: str | os.PathLike[str] | None = None,
    model_url: str | None = None,
    output_url: str | None = None,
    checkpoint_url: str | None = None,
    stop_s: float = STOP_S,
    strict: bool = False,
    **connection: Any,
) -> RunResult:
    """Run a program as a SageMaker training job, with its channels as files, pipes or mounts.

    Args:
        program: The program and its arguments, ``["python", "train.py", "--epochs", "3"]``; a text that ends with ``.py`` is
            run by this Python.
        inputs: URL of each channel by its name, also with options as on the command line (``"s3://b/train/,seed=7"``); one URL
            for the channel ``training``; or ``InputChannel`` records.
        input_mode: Mode of channels that name none: ``"File"``, ``"Pipe"`` or ``"FastFile"``.
        hyperparameters: Hyperparameters by name.
        passes_hyperparameters: Whether the program gets them as arguments, too (``--name value``), as scripts of SageMaker's
            framework containers do.
        environment: Further variables for the program.
        hosts: Names of all hosts; empty takes them from the launcher: SLURM, torchrun or Open MPI.
        current_host: Name of this host; goes together with `hosts`.
        base: Base directory; None takes ``SAGEMAKER_BASE_DIR``, or makes a private one that is removed at the end.
        downloads: Directory that keeps downloads of File mode for later runs; None keeps nothing.
        model_url: URL of the model: a prefix, or one archive if it ends with ``.tar.gz``.
        output_url: URL of the output, in the same form.
        checkpoint_url: Prefix to which checkpoints go while the program runs, and from which they come at the start.
        stop_s: Seconds that the program has after a signal, before it is killed.
        strict: Whether SageMaker's own limits hold, such as 20 channels.
        **connection: Options of ``penstock.connect`` for all stores.

    Returns:
        The result of the run. A program that fails raises nothing here.

    Raises:
        ConfigError: An argument is not valid, or the program cannot be started.
        PenstockError: A channel could not give the program its data, or results could not be stored. Whether they can be is
            found out before the program starts.

    Cost: two requests for each URL of results; a supervisor process of about 10 MB; a thread and a read-ahead for each pipe.
    """
    command = (sys.executable, program) if isinstance(program, str) and program.endswith(".py") else program
    job = Job(
        command=(command,) if isinstance(command, str) else tuple(command),
        channels=tuple(_channels(inputs, input_mode)),
        hyperparameters=hyperparameters or {},
        passes_hyperparameters=passes_hyperparameters,
        environment=environment or {},
        hosts=find_hosts(os.environ, names=hosts, current=current_host),
        base=base_of(base),
        downloads=None if downloads is None else Path(downloads),
        model_url=model_url,
        output_url=output_url,
        checkpoint_url=checkpoint_url,
        stop_s=stop_s,
        strict=strict,
    )
    return run_job(job, connection=connection)


def base_of(given: str | os.PathLike[str] | None) -> Path | None:
    """Return the base directory that was asked for, also by the environment; None if none was."""
    text = os.environ.get("SAGEMAKER_BASE_DIR") if given is None else os.fspath(given)
    return Path(text) if text else None


def _channels(inputs: Any, mode: str) -> Iterable[InputChannel]:
    if isinstance(inputs, str | os.PathLike):
        yield parse_channel(os.fspath(inputs), mode=mode)
    elif hasattr(inputs, "items"):
        for name, value in inputs.items():
            yield value if isinstance(value, InputChannel) else parse_channel(os.fspath(value), mode=mode, name=name)
    else:
        for each in inputs:
            yield each if isinstance(each, InputChannel) else parse_channel(each, mode=mode)


def run_job(job: Job, *, connection: Mapping[str, Any], progress: RunProgress | None = None) -> RunResult:
    """Run a job; see ``run``.

    Args:
        job: The job.
        connection: Options of ``penstock.connect`` for all stores.
        progress: Hears the progress of the run.

    Raises:
        PenstockError: A channel failed, the program could not be started, or results could not be stored.
    """
    clean_abandoned()
    with Interruptions() as interruptions, interruptions.cleanup() as stack:
        with interruptions.shielded():
            base = BaseDirectory(job.base)
            stack.callback(base.close)
        stores = stack.enter_context(RunStores(connection))
        try:
            return _run_in(base, job, stores, interruptions=interruptions, progress=progress)
        except BaseException:
            if base.is_private and base.has_results:
                logging.getLogger("penstock").warning("The results are in %s", base.layout.base)
            raise


def _run_in(
    base: BaseDirectory, job: Job, stores: RunStores, *, interruptions: Interruptions, progress: RunProgress | None
) -> RunResult:
    """Run a job in its base directory, and store its results.

    Raises:
        PenstockError: A channel failed, the program could not be started, or results could not be stored.
    """
    for url in dict.fromkeys((job.model_url, job.output_url, job.checkpoint_url)):
        if url is not None:  # now, rather than when the program has run for hours
            check_target(url, stores.open)
    _write_configuration(job, base.layout)
    uploader = None
    if job.checkpoint_url is not None:
        uploader = CheckpointUploader(base.layout.checkpoints, job.checkpoint_url, stores.open)
    try:
        exit_code, warnings, is_out_of_time = _run_program(
            base, job, stores, interruptions=interruptions, progress=progress
        )
    finally:
        if uploader is not None:
            uploader.close()
    failure = _failure(base.layout)
    if _store_results(job, base, stores):
        base.forget_results()
    directory = base.layout.base if not base.is_private or base.has_results else None
    return RunResult(
        exit_code=exit_code, failure=failure, warnings=warnings, directory=directory, is_out_of_time=is_out_of_time
    )


def _run_program(
    base: BaseDirectory, job: Job, stores: RunStores, *, interruptions: Interruptions, progress: RunProgress | None
) -> tuple[int, tuple[str, ...], bool]:
    """Run the program with its channels.

    Returns:
        Its exit code; the channels' warnings if that is not 0; whether it was stopped because its time was over.

    Raises:
        PenstockError: A channel failed, or the program could not be started.
    """
    layout = base.layout
    with interruptions.cleanup() as stack:
        channels = begin_channels(job, layout, stores, stack=stack, progress=progress)
        if progress is not None:
            progress.started()
        with interruptions.shielded():  # a signal during the start would leave a program without its runner
            program = SupervisedProgram(
                job.full_command,
                environment=_variables(job, layout),
                base=base,
                stop_s=job.stop_s,
                runtime_s_max=job.runtime_s_max,
            )
            stack.callback(program.close)
        exit_code = _wait(program, channels, layout)
        named = zip(job.channels, channels, strict=True) if exit_code else ()
        warnings = tuple(f"channel {each.name}: {text}" for each, channel in named for text in channel.warnings())
        return exit_code, warnings, program.is_out_of_time


def _wait(program: SupervisedProgram, channels: Sequence[RunningChannel], layout: ContainerLayout) -> int:
    """Wait for the end of the program, and end it if a channel fails."""
    failure: PenstockError | None = None
    with program.forwarding():
        while (code := program.wait_exit_code(CHECK_S)) is None:
            if failure is not None:
                continue
            try:
                for channel in channels:
                    channel.check()
            except PenstockError as error:
                failure = error
                program.stop()
    if failure is not None:
        if not os.path.lexists(layout.failure):
            write_file(layout.failure, str(failure)[:FAILURE_CHARACTERS_MAX].encode())
        raise failure
    return code


def _write_configuration(job: Job, layout: ContainerLayout) -> None:
    """Write the configuration files; the last one, which SageMaker does not have, records the seeds of all pipes."""
    seeds = {
        name: order.seed
        for channel in job.channels
        if channel.mode == "Pipe"
        for name, order in zip(
            channel.pipes(),
            pipe_orders(channel, host_rank=job.hosts.rank, hosts_count=job.hosts.count),
            strict=True,
        )
    }
    for name, value in (
        ("inputdataconfig", input_data_config(job.channels)),
        ("resourceconfig", resource_config(job.hosts)),
        ("hyperparameters", job.hyperparameter_texts),
        ("penstock", {"pipe_seeds": seeds}),
    ):
        write_file(layout.config / f"{name}.json", json.dumps(value, indent=2).encode() + b"\n")


def _variables(job: Job, layout: ContainerLayout) -> dict[str, str]:
    environment = Environment(
        layout=layout,
        channels=job.channels,
        hyperparameters=job.hyperparameter_texts,
        hosts=job.hosts,
        command=job.full_command,
        job_name=job.name,
        cpus_count=cores_count(),
        gpus_count=len(list(Path("/proc/driver/nvidia/gpus").glob("*"))),
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SM_")}
    return {**inherited, **variables(environment), **job.environment}


def _failure(layout: ContainerLayout) -> str:
    head = read_file(layout.failure, bytes_max=FAILURE_CHARACTERS_MAX * 4) or b""  # UTF-8 has at most four for each
    return head.decode(errors="replace")[:FAILURE_CHARACTERS_MAX]


def _store_results(job: Job, base: BaseDirectory, stores: RunStores) -> bool:
    """Upload model and output. Returns whether nothing is left in the base directory that is nowhere else."""
    layout = base.layout
    all_stored = True
    for folder, url in ((layout.model, job.model_url), (layout.output_data, job.output_url)):
        if url is not None:
            upload_folder(folder, url, stores.open)
        else:
            all_stored = all_stored and not any(files_in(folder))
    if job.checkpoint_url is None:
        all_stored = all_stored and not any(files_in(layout.checkpoints))
    return all_stored
