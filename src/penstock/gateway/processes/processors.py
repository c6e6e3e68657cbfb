"""The processors that a process of the gateway uses.

The threads of a Python process take turns at the interpreter. If they are on several processors, each turn wakes another
processor up, and small requests spend more time on that than on their work. On one processor, a thread goes on until it waits.
So a gateway process stays on one processor, and its workers of transforms use all of them. What needs no interpreter, like
encryption for an upstream that is read by TLS, gains from further processors; then the process is left on all of them.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from penstock.config import cores_count
from penstock.store.carriers import is_read_by_tls

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.store import Store

_ALLOWED = sorted(os.sched_getaffinity(0))  # when the process started


def stays_on_one_processor(affinity: str, stores: Iterable[Store]) -> bool:
    """Whether a process with this setting of ``GatewayConfig.cpu_affinity`` and these upstreams uses one processor."""
    return affinity == "one" or (affinity == "auto" and not any(map(is_read_by_tls, stores)))


def stay_on_one_processor(number: int) -> None:
    """Keep this thread, and all that it starts, on one of the processors that this process may use.

    Args:
        number: The processors are counted from it, round and round.
    """
    cores_count()  # what depends on the number of processors, such as the number of workers, counts all of them
    os.sched_setaffinity(0, {_ALLOWED[number % len(_ALLOWED)]})


def use_all_processors(process_id: int) -> None:
    """Let a process that was just started use all processors that this process could use when it started."""
    with suppress(OSError):  # it has ended already, or its processors were taken away meanwhile
        os.sched_setaffinity(process_id, _ALLOWED)
