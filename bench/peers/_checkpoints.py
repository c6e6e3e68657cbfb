"""The loop that the drivers of checkpoints share: a line of JSON in is a command, one out is its answer.

Commands:
  {"do": "open", "url": ..., "bucket": ..., "ca": null, "options": {"tensors": n, "tensor_bytes": m, ...}}
  {"do": "save", "key": ...}                  saves the state
  {"do": "load", "key": ...}                  loads it, looks at each tensor, and drops it
Each answers {"seconds", "cpu_s", "bytes", "check"}. A further command is a further method of the driver's class.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import _driver
import torch


def make_state(tensors_count: int, tensor_bytes: int) -> dict[str, Any]:
    """A state of random float32 tensors; the same in every process."""
    generator = torch.Generator().manual_seed(0)
    block = torch.rand(tensor_bytes // 4, generator=generator)
    return {f"layer{index:04d}.weight": block + index for index in range(tensors_count)}


def check(state: dict[str, Any]) -> int:
    """A number that depends on both ends of every tensor, and on its place."""
    total = 0
    for index, tensor in enumerate(state.values()):
        total += (index + 1) * int(tensor[0].item() * 1e6 + 31 * tensor[-1].item() * 1e6 + 17 * tensor.numel())
    return total


class Checkpoints:
    """What every driver has: the state. Subclasses have ``save(key)`` and ``load(key)``, which returns a state."""

    packages = ("torch",)

    def __init__(self, *, url: str, bucket: str, tensors: int, tensor_bytes: int) -> None:
        self.url, self.bucket = url, bucket
        self.state = make_state(tensors, tensor_bytes)
        self.bytes = tensors * tensor_bytes
        self.wanted = check(self.state)


def _measured(driver: Any, command: dict[str, Any]) -> dict[str, Any]:
    cpu_s, start_s = _driver._cpu_s(), time.perf_counter()
    found = getattr(driver, command["do"])(command["key"])
    seconds, cpu_s = time.perf_counter() - start_s, _driver._cpu_s() - cpu_s
    if found is not None and check(found) != driver.wanted:
        raise AssertionError("another state was loaded than was saved")
    return {"seconds": seconds, "cpu_s": cpu_s, "bytes": driver.bytes}


def serve(make: Callable[..., Any]) -> None:
    """Answers commands until standard input ends. What the client prints goes to standard error."""
    os.environ.update(AWS_ACCESS_KEY_ID=_driver.ACCESS_KEY, AWS_SECRET_ACCESS_KEY=_driver.SECRET_KEY)
    os.environ.update(AWS_REGION=_driver.REGION, AWS_DEFAULT_REGION=_driver.REGION)
    os.environ.update(AWS_EC2_METADATA_DISABLED="true", AWS_CONFIG_FILE="/dev/null")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    driver: Any = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["do"] == "open":
                driver = make(url=command["url"], bucket=command["bucket"], **command["options"])
                answer = {"versions": {name: importlib.metadata.version(name) for name in driver.packages}}
            else:
                answer = _measured(driver, command)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)
