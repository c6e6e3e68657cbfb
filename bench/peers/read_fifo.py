"""Reads a FIFO to its end, in pieces of up to 1 MiB, and prints how many bytes came in how many seconds."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time

MIB = 1 << 20


def main(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, MIB)
    buffer, size_bytes = bytearray(MIB), 0
    size_bytes = os.readv(fd, [buffer])  # the first bytes are there: what came before is not the pipe's speed
    begin_s, first_bytes = time.perf_counter(), size_bytes
    while count := os.readv(fd, [buffer]):
        size_bytes += count
    seconds = time.perf_counter() - begin_s
    print(json.dumps({"bytes": size_bytes - first_bytes, "all_bytes": size_bytes, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
