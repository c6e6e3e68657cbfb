"""What commands print. Names in a store, and messages that quote them, must not control a terminal."""

from __future__ import annotations

import logging
import sys

from penstock.errors import PenstockError
from penstock.redaction import printable, public_text


def print_result(line: str) -> None:
    """Print one line of a command's result on stdout. On a terminal, control characters are escaped."""
    sys.stdout.write((printable(line) if sys.stdout.isatty() else line) + "\n")


def print_message(line: str) -> None:
    """Print one line for people on stderr. Control characters are always escaped, because logs are read on terminals."""
    print(printable(line), file=sys.stderr)


def one_line(error: Exception) -> str:
    """Return an error's message as one line; for errors of the operating system, with the name of the file."""
    if isinstance(error, PenstockError) or not isinstance(error, OSError):
        return " ".join(str(error).split())
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"


class PrintableFormatter(logging.Formatter):
    """Formats log records for stderr. They may quote names in a store, and URLs that hold secrets."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's text with control characters escaped and without secrets."""
        return printable(public_text(super().format(record)), lines=True)
