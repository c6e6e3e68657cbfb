"""``penstock sandbox``: runs a program or a shell beside an S3 server of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import typer

from penstock.cli.options import argument, expand_groups, option
from penstock.cli.output import print_message

END_S_MAX = 10.0
"""Seconds that the program may take to end after SIGTERM; then it is killed."""


@expand_groups
def sandbox(
    command: list[str] | None = argument("COMMAND", "Program with its arguments; default: your shell.", default=None),
    *,
    bucket: str = option("NAME", "Name of the empty bucket.", default="bucket"),
) -> None:
    """Start an S3 server on a free loopback port, run COMMAND or your shell beside it, and end the server afterwards.

    The program finds the server through the AWS variables of its environment, with generated keys; AWS variables that were
    set before do not reach it. The objects are gone afterwards. The exit code is the program's. This needs the package
    ministack: pip install "ministack>=1.5.20"

    For example:

        penstock sandbox
        penstock sandbox python train.py s3://bucket/data/
        penstock sandbox sh -c "penstock cp data/ s3://bucket/data/ && penstock ls -r s3://bucket/"
    """
    from penstock.testing.ministack import Ministack

    program = command or _shell()
    with Ministack() as server:
        server.create_bucket(bucket)
        print_message(f"S3 at {server.endpoint_url}, with the empty bucket s3://{bucket}/; it ends with {program[0]}")
        code = _run(program, _environment() | server.environment)
    raise typer.Exit(code)


def _environment() -> dict[str, str]:
    """Return this environment without the AWS variables, which name other stores, and without a proxy for loopback."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    for name in ("NO_PROXY", "no_proxy"):
        kept[name] = ",".join(filter(None, [kept.get(name), "127.0.0.1"]))
    return kept


def _shell() -> list[str]:
    """Return the user's shell. Bash runs without its rc file, which may hide the environment that penstock is in."""
    shell = os.environ.get("SHELL", "/bin/sh")
    return [shell, "--norc"] if Path(shell).name == "bash" else [shell]


def _run(program: list[str], environment: dict[str, str]) -> int:
    """Run `program` and return its exit code; Ctrl-C only reaches the program, which has the same terminal."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with subprocess.Popen(program, env=environment) as process:
            try:
                code = process.wait()
            except BaseException:  # SIGTERM, which only this process receives
                _end(process)
                raise
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
