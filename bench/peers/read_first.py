"""Reads the first record of a channel or a mount, as files or as a pipe, and prints when it was there (monotonic clock).

    read_first.py first [DIR]    the first file of the first folder; of a pipe, its first RECORD_BYTES bytes
    read_first.py all [DIR]      the same, after the names of all files have been listed

Without DIR, it reads the channel `train`. It also prints the memory of the processes of penstock that serve it.
"""

from __future__ import annotations

import json
import os
import sys
import time

from _serving import serving_bytes

RECORD_BYTES = 100


def first_file(folder: str) -> str:
    """Return the first file below a folder, of which no more names are read than needed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            return first_file(entry.path) if entry.is_dir() else entry.path
    raise FileNotFoundError(folder)


def read_record(path: str) -> bytes:
    record = b""
    with open(path, "rb", buffering=0) as file:
        while len(record) < RECORD_BYTES and (piece := file.read(RECORD_BYTES - len(record))):
            record += piece
    return record


def main(how: str, directory: str | None = None) -> None:
    channel = os.environ["SM_CHANNEL_TRAIN"] if directory is None else directory
    names_count = 0
    if os.path.isdir(channel):
        if how == "all":
            names_count = sum(len(names) for _, _, names in os.walk(channel))
        channel = first_file(channel)
    else:
        channel += "_0"
    record = read_record(channel)
    first_s = time.monotonic()
    answer = {"first_s": first_s, "record": record.decode(), "names": names_count, "serving_bytes": serving_bytes()}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
