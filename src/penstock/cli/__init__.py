"""The ``penstock`` command: see README.md in this folder. Importing it imports neither typer nor rich."""

from __future__ import annotations

import sys
from typing import NoReturn

__all__ = ["main"]

EXIT_USAGE = 2
EXIT_UNCHECKED = 3
EXIT_INTERRUPTED = 130


def main() -> NoReturn:
    """Run ``penstock`` with this process's arguments and exit.

    Exit codes: 0 if the command is done; 1 if something failed, which one line on stderr explains; 2 for wrong usage; 3
    from ``verify`` if nothing is wrong but not everything could be checked; 130 after Ctrl-C. If stdout is a closed pipe,
    SIGPIPE ends the process silently, as it ends ``cat``.
    """
    try:
        from penstock.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # during the import; run() handles later ones itself
        code = EXIT_INTERRUPTED
    sys.exit(code)
