"""The whole command line: all commands together, and the exit code for each way in which a command can end."""

from __future__ import annotations

import functools
import logging
import os
import re
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import typer

import penstock
from penstock.cli import EXIT_INTERRUPTED, EXIT_USAGE
from penstock.cli.advise import advise
from penstock.cli.bench import bench
from penstock.cli.bucket import mb, presign
from penstock.cli.cache import cache
from penstock.cli.checkpoint import checkpoint
from penstock.cli.completing import answer
from penstock.cli.cost import cost
from penstock.cli.cp import cp, mv, sync
from penstock.cli.doctor import doctor
from penstock.cli.gateway import gateway
from penstock.cli.gateway_results import fill, gc
from penstock.cli.gateway_results import ls as ls_results
from penstock.cli.index import index, manifest, verify
from penstock.cli.info import info
from penstock.cli.ls import cat, du, ls
from penstock.cli.mount import MountCommand, mount, umount
from penstock.cli.options import expand_groups, flag
from penstock.cli.output import PrintableFormatter, one_line, print_message, print_result
from penstock.cli.pack import convert, pack
from penstock.cli.peek import peek
from penstock.cli.rm import rm
from penstock.cli.run import run as run_command
from penstock.cli.sandbox import sandbox
from penstock.errors import ConfigError, PenstockError
from penstock.system.tracebacks import users_text

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_FAILED = 1
EXIT_TERMINATED = 143
_COMPLETE = "_PENSTOCK_COMPLETE"
"""Environment variable that the scripts of ``--install-completion`` set; typer derives its name from the command's."""
_HELP = ["-h", "--help"]

app = typer.Typer(
    name="penstock",
    help="Object storage for training jobs: list it, read it, copy it, measure it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": _HELP},
    rich_markup_mode="markdown",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print_result(f"penstock {penstock.__version__}")
        raise typer.Exit


def _log_to_stderr(wanted: bool) -> None:
    if wanted:
        handler = logging.StreamHandler()
        handler.setFormatter(PrintableFormatter("%(name)s: %(message)s"))
        logger = logging.getLogger("penstock")
        logger.handlers = [handler]  # only one, even if the option is given twice
        logger.setLevel(logging.DEBUG)


@app.callback()
@expand_groups
def _root(
    version: bool = flag("Print the version.", callback=_print_version, is_eager=True),
    verbose: bool = flag(
        "Log requests, retries and the index in use to stderr.",
        names=("--verbose", "-v"),
        callback=_log_to_stderr,
        expose_value=False,
    ),
) -> None:
    """Object storage for training jobs: list it, read it, copy it, measure it."""


for _command in (
    ls,
    cat,
    cp,
    mv,
    sync,
    rm,
    du,
    mb,
    presign,
    index,
    manifest,
    pack,
    convert,
    verify,
    peek,
    info,
    doctor,
    cost,
    advise,
):
    app.command(name=_command.__name__, no_args_is_help=_command is not info)(_command)
app.command(
    name="mount",
    cls=MountCommand,
    no_args_is_help=True,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)(mount)
app.command(name="umount", no_args_is_help=True)(umount)
app.command(name="sandbox", context_settings={"allow_interspersed_args": False})(sandbox)  # the rest belongs to COMMAND
app.command(name="run", no_args_is_help=True, context_settings={"allow_interspersed_args": False})(run_command)
app.add_typer(bench)
app.add_typer(cache)
app.add_typer(checkpoint)
gateway.command()(fill)
gateway.command("ls")(ls_results)
gateway.command()(gc)
app.add_typer(gateway)


@functools.cache
def commands() -> Any:
    """Return all commands as typer builds them, once; ``--verbose`` may stand before or after a command's name."""
    root: Any = typer.main.get_command(app)
    verbose = next(parameter for parameter in root.params if parameter.name == "verbose")
    waiting = list(root.commands.values())
    _hide_flag_types(root)
    for command in waiting:
        command.params.append(verbose)
        waiting.extend(getattr(command, "commands", {}).values())
        _hide_flag_types(command)
    return root


def _hide_flag_types(command: Any) -> None:
    """Keep ``--help`` from showing ``<bool>`` after flags, which take no value."""
    context = typer.Context(command, help_option_names=_HELP)
    for parameter in command.get_params(context):  # including --help, which the command creates here and keeps
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; results go to stdout, everything else to stderr.

    If stdout is closed, it does not return: SIGPIPE ends the process, as its shell expects.
    """
    interrupted: list[int] = []

    def on_terminate(number: int, _frame: object) -> NoReturn:
        interrupted.append(number)
        raise KeyboardInterrupt

    if logging.lastResort is not None:  # prints warnings if logging is not configured
        logging.lastResort.setFormatter(PrintableFormatter())
    before = signal.signal(signal.SIGTERM, on_terminate)
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        _end_by_sigpipe()
    except KeyboardInterrupt:
        code = EXIT_TERMINATED if interrupted else EXIT_INTERRUPTED
    except Exception as error:
        code = _failed(error, arguments)
    finally:
        signal.signal(signal.SIGTERM, before)
    return code


def _failed(error: Exception, arguments: Sequence[str]) -> int:
    """Print why a command failed: in one line, or as the traceback of the user's code if that raised the error.

    Returns:
        The exit code: that of wrong usage if an argument cannot be used.
    """
    text = "" if isinstance(error, PenstockError) else users_text(error)
    if text:
        for line in text.splitlines():
            print_message(line)
    elif isinstance(error, ConfigError) and "\n" in error.what:
        _print_with_traceback(error)
    elif isinstance(error, PenstockError | OSError):
        what, hint, advice = one_line(error).partition(" Hint: ")
        _print_error(what + hint + _in_options(advice, _command_of(arguments)[0]))
    else:
        raise error
    return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED


_ARGUMENT = re.compile(r"""(?<![\w.&?/-])([a-z_]+)=(-?\w+(?:\.\w+)*|'[^']*'|"[^"]*")?""")
"""An argument of Python as hints write it: ``profile=``, ``anonymous=True``, ``index_dir='DIR'``."""


def _in_options(text: str, command: Any) -> str:
    """Return a hint in which arguments of Python are named by the command's options, if it has them."""
    options = {
        name.removeprefix("--").replace("-", "_"): (name, parameter)
        for parameter in command.params
        for name in parameter.opts
        if name.startswith("--")
    }

    def named(match: re.Match[str]) -> str:
        name, parameter = options.get(match[1], (match[0], None))
        if parameter is None or getattr(parameter, "is_flag", False) or not match[2]:
            return str(name)
        return f"{name} {match[2]}"

    return _ARGUMENT.sub(named, text)


def _print_with_traceback(error: ConfigError) -> None:
    """Print an error whose message ends with the traceback of code that cannot be used, e.g. that of a transform."""
    first, *rest = error.what.splitlines()
    _print_error(first)
    for line in rest:
        print_message(f"    {line}")
    if error.hint:
        print_message(f"Hint: {error.hint}")


def _run(arguments: Sequence[str]) -> int:
    command = commands()
    if _COMPLETE in os.environ:  # a shell asks for completions
        answer(lambda: command.main(prog_name="penstock"))
    try:
        with command.make_context("penstock", list(arguments)) as context:
            command.invoke(context)
    except Exception as error:
        # typer's own exceptions, and click's in versions of typer that build on click: no common base to import
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        message = error.format_message() if hasattr(error, "format_message") else ""
        if message:  # empty if the help was printed instead
            _print_error(message, hint=f"{_command_of(arguments)[1]} --help")
        return int(code)
    return 0


def _command_of(arguments: Sequence[str]) -> tuple[Any, str]:
    """Return the command that a line calls, and its name, e.g. ``penstock gateway try``; not every error says whose it is."""
    command, path = commands(), ["penstock"]
    for word in arguments:
        inner = getattr(command, "commands", {}).get(word)
        if inner is not None:
            command, path = inner, [*path, word]
    return command, " ".join(path)


def _print_error(text: str, *, hint: str | None = None) -> None:
    print_message(f"penstock: {text}" + (f" (see {hint})" if hint else ""))


def _end_by_sigpipe() -> NoReturn:
    # Python ignores SIGPIPE, and must do so while sockets are open: a TLS connection that the store closed would end us.
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())  # so that buffered output is dropped
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGPIPE)
    raise AssertionError("SIGPIPE ends the process")
