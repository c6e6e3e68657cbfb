"""Python processes that begin with PyTorch imported, because they are forked from one that has done nothing else.

Importing PyTorch and what trains with it takes 2 to 5 seconds of processor time; a suite that starts hundreds of such
processes does little else. What a program sees is otherwise that of ``python script.py`` or ``python -c``: its own
``__main__``, arguments, environment, directory and output, and its ``atexit`` functions at the end.
"""

from __future__ import annotations

import atexit
import builtins
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

IMPORTED = [
    "penstock",
    "penstock.loader",
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.data",
    "torchdata.stateful_dataloader",
    "lightning.pytorch",
    "transformers.trainer",
    "accelerate",
]  # those that are installed
_CONTEXT = multiprocessing.get_context("forkserver")


def start(
    program: Path | str,
    *arguments: str,
    environment: Mapping[str, str],
    folder: Path,
    stdout: Path,
    stderr: Path,
    warns: Sequence[str] = (),
) -> multiprocessing.process.BaseProcess:
    """Start a script, or code as ``python -c`` would.

    Args:
        program: A script's path, or code.
        arguments: Its arguments.
        environment: All of its environment variables.
        folder: Its working directory.
        stdout: File to which its output is appended.
        stderr: File to which its errors are appended.
        warns: What ``-W`` would be given, such as ``error``.
    """
    _start_server()
    process = _CONTEXT.Process(
        target=_run, args=(program, arguments, dict(environment), folder, stdout, stderr, tuple(warns))
    )
    process.start()
    return process


def run(
    program: Path | str,
    *arguments: str,
    environment: Mapping[str, str],
    folder: Path,
    warns: Sequence[str] = (),
    seconds_max: float = 100.0,
) -> subprocess.CompletedProcess[str]:
    """Run a script, or code, to its end, and return its exit code and what it printed."""
    with tempfile.TemporaryDirectory() as printed:
        stdout, stderr = Path(printed, "stdout"), Path(printed, "stderr")
        process = start(
            program, *arguments, environment=environment, folder=folder, stdout=stdout, stderr=stderr, warns=warns
        )
        process.join(seconds_max)
        if process.exitcode is None:
            process.kill()
            process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(arguments, process.exitcode, stdout.read_text(), stderr.read_text())


def _start_server() -> None:
    _CONTEXT.set_forkserver_preload(IMPORTED)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # it is read once, while PyTorch is imported; more threads round in another way
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def _run(
    program: Path | str,
    arguments: Sequence[str],
    environment: dict[str, str],
    folder: Path,
    stdout: Path,
    stderr: Path,
    warns: Sequence[str],
) -> None:
    for number, path in ((1, stdout), (2, stderr)):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    multiprocessing.set_start_method(None, force=True)  # the default again, not that of this process
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.warnoptions[:] = warns
    for each in warns:
        action, _, category = each.partition("::")
        warnings.simplefilter(action, getattr(builtins, category) if category else Warning)  # type: ignore[arg-type]
    if isinstance(program, Path):
        sys.argv = [str(program), *arguments]
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")
    else:
        sys.argv = ["-c", *arguments]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), main.__dict__)
    atexit._run_exitfuncs()  # multiprocessing's children leave them out
