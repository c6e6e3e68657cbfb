"""Reads the first byte of a channel, as files or as a pipe, and prints when it was there, on the monotonic clock."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


def first_file(folder: Path) -> Path:
    for path in folder.iterdir():
        return first_file(path) if path.is_dir() else path
    raise FileNotFoundError(folder)


def main() -> None:
    channel = Path(os.environ["SM_CHANNEL_TRAIN"])
    path = first_file(channel) if channel.is_dir() else channel.with_name(f"{channel.name}_0")
    with path.open("rb", buffering=0) as file:
        if len(file.read(1)) != 1:
            raise EOFError(path)
        print(json.dumps({"first_s": time.monotonic()}), flush=True)


if __name__ == "__main__":
    main()
