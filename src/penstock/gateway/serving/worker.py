"""A worker process: ``python -m penstock.gateway.serving.worker CHANNEL LISTENER``, with the numbers of two descriptors.

The first message of the channel holds the order to serve. The process ends when the supervisor says so, or when the channel
ends because the supervisor was killed. If its event loop hangs then, a thread ends the process.
"""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

import uvloop

from penstock.errors import ConfigError, PenstockError
from penstock.gateway.serving.journal import Journal
from penstock.gateway.serving.process import GatewayProcess
from penstock.gateway.serving.snapshots import Totals, add_up
from penstock.processes.channel import JsonChannel
from penstock.processes.starting import connect_to_parent, watch_parent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.gateway.serving.assembly import WorkerOrder

GRACE_S = 5.0
TOTALS_S_MAX = 3.0


class SupervisedPeers:
    """Asks the supervisor for the snapshot of all processes. Implements ``Peers``.

    Args:
        channel: Connection to the supervisor.
    """

    def __init__(self, channel: JsonChannel) -> None:
        self._channel = channel
        self._waiting: dict[int, asyncio.Future[Totals]] = {}
        self._asked = 0

    async def totals(self) -> Totals:
        """Return the sums over all processes. Raises ``TimeoutError`` if the supervisor does not answer."""
        self._asked += 1
        number = self._asked
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._channel.send({"kind": "totals", "id": number})
        try:
            return await asyncio.wait_for(future, TOTALS_S_MAX)
        finally:
            self._waiting.pop(number, None)

    def arrived(self, message: dict[str, object]) -> None:
        """Take the supervisor's answer."""
        future = self._waiting.pop(message["id"], None)  # type: ignore[call-overload]
        if future is not None and not future.done():
            totals = add_up(message["snapshots"], ended=message["ended"])  # type: ignore[arg-type]
            totals.restarts = message["restarts"]  # type: ignore[assignment]
            future.set_result(totals)


def decoded(text: str) -> Any:
    """Return what ``encoded`` gave. Only a worker calls it, for what its supervisor sent."""
    return pickle.loads(base64.b64decode(text))


async def _work(end: socket.socket, listener: socket.socket) -> int:
    channel = await JsonChannel.over(end)
    first = await channel.receive()
    if first is None:
        return 1
    order: WorkerOrder = decoded(first["order"])
    # If the event loop does not notice that the supervisor is gone, a thread ends the process.
    watch_parent(end, lambda: os._exit(1), grace_s=order.config.drain_s_max + GRACE_S)
    peers = SupervisedPeers(channel)
    journal = Journal(order.config.log_format)
    process = GatewayProcess(order, peers=peers, journal=journal)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    hearing = asyncio.create_task(_hear(channel, process, peers, stop))
    try:
        try:
            await process.start(listener)
        except (PenstockError, OSError) as error:
            channel.send({"kind": "failed", "message": str(error), "code": 2 if isinstance(error, ConfigError) else 1})
            await channel.drain()
            return 1
        channel.send({"kind": "ready"})
        await stop.wait()
        return 0 if await process.drain() else 1
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        await process.close()
        channel.close()


async def _hear(channel: JsonChannel, process: GatewayProcess, peers: SupervisedPeers, stop: asyncio.Event) -> None:
    """Follow the supervisor's messages, until it is gone."""
    try:
        while (message := await channel.receive()) is not None:
            match message["kind"]:
                case "drain":
                    stop.set()
                case "reload":
                    process.reload(decoded(message["keys"]))
                case "report":
                    channel.send({"kind": "report", "id": message["id"], "snapshot": process.snapshot()})
                case "totals":
                    peers.arrived(message)
    finally:
        stop.set()


def main(arguments: Sequence[str]) -> int:
    """Serve until the supervisor says otherwise, and return the exit code."""
    end = connect_to_parent(arguments[0], "0", ignored=(signal.SIGINT, signal.SIGHUP))
    listener = socket.socket(fileno=int(arguments[1]))
    listener.set_inheritable(False)  # transforms run in processes of their own
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_work(end, listener))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
