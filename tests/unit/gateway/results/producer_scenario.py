"""A process that produces a result slowly, until somebody kills it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from gateway_support.results import BLOCK_BYTES, FunctionTransform, Gate, get, open_results, point_of


async def main() -> None:
    """Produce three blocks and a half, say so, and hang."""
    gate = Gate(bytes(range(256)) * (10 * BLOCK_BYTES // 256))
    gate.allow(int(3.5 * BLOCK_BYTES))
    results = open_results(Path(sys.argv[1]))
    point = point_of(FunctionTransform(gate), results, {"a": b""})
    reading = asyncio.create_task(get(point, "a"))
    while len(list(Path(sys.argv[1]).rglob("*.?b"))) < 3:
        await asyncio.sleep(0.005)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await reading


asyncio.run(main())
