"""The ``penstock`` command: see README.md in this folder. Importing it imports neither typer nor rich."""

from __future__ import annotations

import sys
from typing import NoReturn

__all__ = ["main"]


def main() -> NoReturn:
    """Run ``penstock`` with this process's arguments and exit.

    Exit codes: 0 done; 1 something failed, said in one line on stderr; 2 wrong usage; 130 after Ctrl-C. A closed pipe
    ends it as it ends ``cat``: by SIGPIPE, silently.
    """
    from penstock.cli.app import run

    sys.exit(run(sys.argv[1:]))
