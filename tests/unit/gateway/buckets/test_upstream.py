"""What an ``UpstreamBucket`` holds in memory."""

from __future__ import annotations

import asyncio

from gateway_support.results import request_of
from penstock.fetch import process_budget, set_process_budget
from penstock.gateway.buckets.upstream import UpstreamBucket
from penstock.store import MemoryStore

MIB = 1 << 20
READERS_COUNT = 80


def test_readers_that_take_nothing_do_not_use_the_budget_up() -> None:
    """The less of the budget is free, the less is read of an object when it is opened."""
    set_process_budget(64 * MIB)

    async def scenario() -> int:
        bucket = UpstreamBucket("bucket", MemoryStore({"k": bytes(10 * MIB)}))
        opened = await asyncio.gather(*(bucket.open(request_of("k"), None) for _ in range(READERS_COUNT)))
        used_bytes = process_budget().statistics().used_bytes
        for each in opened:
            assert each.head.size_bytes == 10 * MIB
            await each.close()
        await bucket.close()
        return used_bytes

    assert asyncio.run(scenario()) <= 64 * MIB
    del scenario
    statistics = process_budget().statistics()
    assert statistics.used_bytes == statistics.free_bytes
