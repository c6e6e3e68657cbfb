"""What commands print: names in a store and messages that quote them, which must not command a terminal."""

from __future__ import annotations

import logging
import sys

from penstock.redaction import printable, public_text


def show(line: str) -> None:
    """One line of a command's result on stdout: exact into a pipe or file, control characters escaped on a terminal."""
    sys.stdout.write((printable(line) if sys.stdout.isatty() else line) + "\n")


def tell(line: str) -> None:
    """One line for people on stderr, control characters escaped wherever it goes: logs are read on terminals later."""
    print(printable(line), file=sys.stderr)


class PrintableFormatter(logging.Formatter):
    """Log records for stderr: they quote names in a store, and URLs that may hold secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        return printable(public_text(super().format(record)), lines=True)
