"""The ``penstock`` command: see README.md in this folder. Importing it imports neither typer nor rich."""

from __future__ import annotations

import sys
from typing import NoReturn

__all__ = ["main"]

EXIT_UNCHECKED = 3
EXIT_INTERRUPTED = 130


def main() -> NoReturn:
    """Run ``penstock`` with this process's arguments and exit.

    Exit codes: 0 done; 1 something failed, said in one line on stderr; 2 wrong usage; 3 of ``verify``, which found
    nothing wrong but could not check everything; 130 after Ctrl-C. A closed pipe
    ends it as it ends ``cat``: by SIGPIPE, silently.
    """
    try:
        from penstock.cli.app import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # while it was being imported; run() tells of those that come later by itself
        code = EXIT_INTERRUPTED
    sys.exit(code)
