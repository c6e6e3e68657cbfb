"""A process beside the training process, which joins the Ray cluster for it: ``python -m penstock.ray.broker FD PARENT``.

Ray ends a process that has lost the head of its cluster, and its calls block while the head is away. Neither may happen to
a training run. So Ray runs here: this process keeps as many actors (``host.py``) as the loader asks for, replaces those that
are lost, and tells the loader where they listen. The loader talks to them over sockets of its own. Their job belongs to this
process: when it ends, because the training process has ended in whatever way, Ray kills the actors.
"""

from __future__ import annotations

import asyncio
import pickle
import secrets
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray

from penstock.errors import ConfigError, PenstockError, WorkerDiedError
from penstock.loader.workers.messages import MessageChannel, RemoteError
from penstock.processes.starting import connect_to_parent
from penstock.ray import host
from penstock.ray.connecting import BrokerFailed, CountAllowed, HostJoined, HostLeft, HostsWanted
from penstock.ray.tasks import join
from penstock.version import __version__

if TYPE_CHECKING:
    from penstock.ray.workers import Workers

RETRY_S, RETRY_S_MAX = 0.5, 15.0
"""First and longest pause before another actor takes the place of one that was lost at its start, in seconds."""
REPORT_S = 1.0
NAMESPACE = "penstock"


class Broker:
    """Keeps the actors of one loader.

    Args:
        channel: Connection to the loader.
        options: The workers that the user asked for.
    """

    def __init__(self, channel: MessageChannel, options: Workers) -> None:
        self._channel = channel
        self._options = options
        self._wanted = HostsWanted(0, 0)
        self._actors: dict[str, Any] = {}
        self._ready: set[str] = set()
        self._retry_s = RETRY_S
        self._tasks: set[asyncio.Task[None]] = set()
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def _send(self, message: object) -> None:
        with suppress(OSError):
            self._channel.send_raw(pickle.dumps(message))

    def _begin(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self) -> None:
        """Do what the loader says until it is gone, or until no actor can be started.

        Raises:
            ConfigError: No cluster answers, or a machine of it lacks penstock or has another version.
        """
        join(self._options.address, namespace=NAMESPACE)
        self._host = ray.remote(host.Host)
        if self._options.pool is not None:
            self._begin(self._report(self._options.pool))
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, args=(loop,), name="penstock-broker", daemon=True).start()
        await self._end

    def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                message, _ = self._channel.receive()
                loop.call_soon_threadsafe(self._keep, message)
        except (EOFError, OSError):
            with suppress(RuntimeError):  # the event loop has ended before
                loop.call_soon_threadsafe(self._stop, None)

    def _stop(self, error: BaseException | None) -> None:
        if self._end.done():
            return
        if error is None:
            self._end.set_result(None)
        else:
            self._end.set_exception(error)

    def _keep(self, wanted: HostsWanted) -> None:
        """Start and end actors until there are as many as are wanted; those that wait for a place are the first to go."""
        self._wanted = wanted
        for name in wanted.dropped:
            self._drop(name)
        waiting = [name for name in self._actors if name not in self._ready]
        while len(self._actors) > wanted.count and waiting:
            self._drop(waiting.pop())
        while len(self._actors) < wanted.count:
            name = secrets.token_hex(4)
            options = self._options
            try:
                self._actors[name] = self._host.options(
                    num_cpus=options.cpus,
                    resources=dict(options.resources) or None,
                    runtime_env=dict(options.runtime_env) or None,
                    scheduling_strategy="SPREAD",
                    max_restarts=0,
                ).remote()
            except (TypeError, ValueError) as error:
                hint = "it is cpus=, resources= or runtime_env= of the workers"
                self._stop(ConfigError(f"Ray does not start such workers: {error}", hint=hint))
                return
            self._begin(self._follow(name, self._actors[name]))

    def _drop(self, name: str) -> None:
        if (actor := self._actors.pop(name, None)) is not None:
            with suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor)

    async def _follow(self, name: str, actor: Any) -> None:
        """Tell the loader about an actor from its start to its end."""
        secret = secrets.token_bytes(32)
        why = ""
        try:
            found = await actor.introduce.remote()
            if (problem := self._problem(found)) is not None:
                self._stop(problem)
                return
            self._ready.add(name)
            self._retry_s = RETRY_S
            self._send(HostJoined(name, found["node"], found["port"], secret))
            await actor.serve.remote(secret, self._options.memory_bytes_max)
        except ray.exceptions.RuntimeEnvSetupError as error:
            hint = "it is the runtime_env= of the workers"
            self._stop(ConfigError(f"Ray cannot set up the workers' environment: {error}", hint=hint))
        except ray.exceptions.RayError as error:
            why = _first_line(error)
        finally:
            self._send(HostLeft(name, why))
            was_kept = self._actors.pop(name, None) is not None
            was_ready = name in self._ready
            self._ready.discard(name)
        if was_kept:
            if not was_ready:
                retry_s, self._retry_s = self._retry_s, min(RETRY_S_MAX, 2 * self._retry_s)
                await asyncio.sleep(retry_s)
            self._keep(replace(self._wanted, dropped=()))

    def _problem(self, found: dict[str, Any]) -> PenstockError | None:
        if "problem" in found and found.get("version", __version__) == __version__:
            return ConfigError(
                f"node {found['node']} of the Ray cluster lacks a package: {found['problem']}",
                hint="install penstock there, or by Workers(runtime_env={'pip': [...]})",
            )
        if found["version"] != __version__:
            return ConfigError(
                f"node {found['node']} of the Ray cluster has penstock {found['version']}, and this process {__version__}",
                hint="install one version everywhere, or by Workers(runtime_env={'pip': [...]})",
            )
        return None

    async def _report(self, pool: str) -> None:
        """Ask again and again how many workers of the shared pool this loader may have."""
        me, shares = secrets.token_hex(8), ray.remote(host.Shares)
        options = {
            "name": f"shares-{pool}",
            "get_if_exists": True,
            "num_cpus": 0,
            "runtime_env": self._options.runtime_env,
        }
        while True:
            with suppress(ray.exceptions.RayError, ValueError):  # its owner has ended: another one takes its place
                actor = shares.options(**options).remote(10 * REPORT_S)
                while True:
                    wish = max(self._options.low, self._wanted.wish)
                    self._send(CountAllowed(await actor.report.remote(me, wish, self._options.high)))
                    await asyncio.sleep(REPORT_S)
            await asyncio.sleep(REPORT_S)


def _first_line(error: ray.exceptions.RayError) -> str:
    """What happened, in one line. The text of an error that a method of an actor raised begins with where it was raised."""
    is_raised = isinstance(error, ray.exceptions.RayTaskError)
    text = f"{type(error.cause).__name__}: {error.cause}" if is_raised else str(error)
    return text.strip().partition("\n")[0]


def main(descriptor: str, parent: str) -> None:
    """Keep the actors of the loader that started this process; the arguments are those of ``connect_to_parent``."""
    import signal

    channel = MessageChannel(connect_to_parent(descriptor, parent, ignored=(signal.SIGINT,)))
    ray.cloudpickle.register_pickle_by_value(host)
    options, _ = channel.receive()

    async def work() -> None:
        await Broker(channel, options).run()

    try:
        asyncio.run(work())
    except BaseException as error:
        known = error if isinstance(error, PenstockError) else WorkerDiedError(f"{type(error).__name__}: {error}")
        with suppress(OSError):
            channel.send_raw(pickle.dumps(BrokerFailed(RemoteError.of(known))))
    finally:
        ray.shutdown()
        channel.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
