"""Starts a gateway: checks the configuration, reads the keys, opens the port, and runs one process or several.

``penstock gateway check`` prints what it would serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from penstock.errors import ConfigError, PenstockError
from penstock.gateway.authentication.keys import KEYS_VARIABLE, AccessKey, AccessKeys
from penstock.gateway.serving.assembly import WorkerOrder
from penstock.gateway.serving.checks import check_config, is_loopback
from penstock.gateway.serving.journal import Journal
from penstock.gateway.serving.listening import TlsCertificate, listen
from penstock.gateway.serving.process import GatewayProcess
from penstock.gateway.serving.snapshots import add_up
from penstock.gateway.serving.supervisor import EXIT_INTERRUPTED, Supervisor
from penstock.gateway.transforms.builtin import BUILTINS
from penstock.gateway.transforms.program import load_program, spelled_program
from penstock.redaction import public_url

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from penstock.gateway.config import AccessPoint, GatewayConfig
    from penstock.gateway.serving.snapshots import Totals


CACHE_SIZE = "10GB"
"""Size of the cache if none is configured."""


def serve(config: GatewayConfig) -> int:
    """Serve until a signal arrives, and return the exit code: 0 if all transfers were finished, 130 after Ctrl-C.

    Raises:
        ConfigError: The configuration is not valid, or the port cannot be opened.
    """
    config = with_defaults(config)
    check_config(config)
    journal = Journal(config.log_format)
    keys = read_keys(config)
    os.environ.pop(KEYS_VARIABLE, None)  # transforms inherit the environment
    if config.tls_certificate:
        expiry = TlsCertificate(config).warning()
        if expiry:
            journal.say(expiry, level="warning")
    order = WorkerOrder(config=config, keys=keys, internal_key=AccessKey.generate(), index=0, started_s=time.time())
    listeners = listen(config.host, config.port, count=config.workers)
    port = listeners[0].getsockname()[1]
    lines = announcement(config, port=port)

    def on_ready() -> None:
        for line in lines:
            journal.say(line)

    with contextlib.ExitStack() as stack, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for listener in listeners:
            stack.callback(listener.close)  # idempotent: whoever serves closes it earlier, unless it cannot start
        if config.workers > 1:
            supervisor = Supervisor(
                order, listeners, journal=journal, read_keys=lambda: read_keys(config), on_ready=on_ready
            )
            return runner.run(supervisor.run())
        return runner.run(_serve_alone(order, listeners[0], journal=journal, on_ready=on_ready))


def with_defaults(config: GatewayConfig) -> GatewayConfig:
    """Return the configuration with its cache, and a name of this machine instead of nothing."""
    if config.cache == "none":
        return replace(config, cache="")
    if config.cache:
        return config
    folder = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return replace(config, cache=f"{Path(folder) / 'penstock' / 'gateway'}:{CACHE_SIZE}")


def read_keys(config: GatewayConfig) -> AccessKeys | None:
    """Return the access keys of the file or the variable; None if there are none, which is allowed on loopback only.

    Raises:
        ConfigError: The keys are not valid, or a gateway that others reach has none.
    """
    is_exposed = not is_loopback(config.host)
    if config.keys_file:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            keys = AccessKeys.from_file(config.keys_file, is_exposed=is_exposed)
        for warning in caught:
            Journal(config.log_format).say(str(warning.message), level="warning")
    else:
        keys = AccessKeys.from_environment(_environment)
    if keys or keys.anonymous is not None:
        keys.for_access_points(config.access_points)
        return keys
    named = next((point for point in config.access_points if point.keys), None)
    if named is not None:
        raise ConfigError(
            f"access point {named.name!r} is for certain access keys, and there are none", hint=_KEYS_HINT
        )
    if is_exposed:
        raise ConfigError(
            f"the gateway would listen on {config.host} without access keys, and everybody could read what it serves",
            hint=_KEYS_HINT,
        )
    return None


_environment = dict(os.environ)
"""The environment at the start: keys are removed from the real one, and read again on SIGHUP."""

_KEYS_HINT = f"--keys FILE, or {KEYS_VARIABLE}=ACCESS:SECRET:ro; or --host 127.0.0.1"


def announcement(config: GatewayConfig, *, port: int) -> list[str]:
    """Return the text that is printed when the gateway is ready: its address, and a command that reads from it.

    Args:
        config: The configuration.
        port: Port that it listens on.
    """
    scheme = "https" if config.tls_certificate else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
        config.host, f"[{config.host}]" if ":" in config.host else config.host
    )
    url = f"{scheme}://{host}:{port}"
    names = [f"{point.name} ({plan_text(point)})" for point in config.access_points]
    if config.directory:
        names.append(f"the folders of {config.directory}")
    processes = "" if config.workers == 1 else f" with {config.workers} processes"
    first = config.access_points[0].name if config.access_points else "BUCKET"
    unsigned = "" if config.keys_file or _environment.get(KEYS_VARIABLE) else " --no-sign-request"
    return [
        f"serving {', '.join(names)}{processes} at {url} (Ctrl-C stops)",
        f"try: aws s3 ls --endpoint-url {url}{unsigned} s3://{first}/",
    ]


def plan_text(point: AccessPoint) -> str:
    """Describe in a few words what an access point serves."""
    what = point.transform
    if point.handler is not None:
        what = f"Lambda {point.handler.handler}"
    elif point.webhook is not None:
        what = "webhook"
    shown = public_url(point.upstream)
    return f"{shown} through {what}" if what else shown


class LonePeer:
    """The only process of a gateway. Implements ``Peers``.

    Attributes:
        process: The process.
    """

    process: GatewayProcess

    async def totals(self) -> Totals:
        """Return the numbers of this process."""
        return add_up([self.process.snapshot()])


async def _serve_alone(
    order: WorkerOrder, listener: socket.socket, *, journal: Journal, on_ready: Callable[[], None]
) -> int:
    """Serve in this process until a signal arrives, and return the exit code."""
    peer = LonePeer()
    process = GatewayProcess(order, peers=peer, journal=journal)
    peer.process = process
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    numbers: list[int] = []

    def on_signal(number: int) -> None:
        numbers.append(number)
        if stop.is_set() and number == signal.SIGINT:
            os._exit(EXIT_INTERRUPTED)  # transforms end with the pipes to them
        stop.set()

    def on_hangup() -> None:
        try:
            keys = read_keys(order.config)
        except (PenstockError, OSError) as error:
            journal.say(f"the old access keys remain in force: {error}", level="error")
            keys = None
        process.reload(keys)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        starting = asyncio.create_task(process.start(listener))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            on_ready()
        else:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        await stopping
        whole = await process.drain()
    finally:
        await process.close()
    if signal.SIGINT in numbers:
        return EXIT_INTERRUPTED
    return 0 if whole else 1


def plan_lines(config: GatewayConfig) -> list[str]:
    """Check a configuration, and return what it would serve.

    Raises:
        ConfigError: It is not valid.
    """
    config = with_defaults(config)
    check_config(config)
    for point in config.access_points:
        if point.transform:
            _check_builtins(point, config.names.of(f"access_points.{point.name}.transform"))
    keys = read_keys(config)
    scheme = "https" if config.tls_certificate else "http"
    processes = "1 process" if config.workers == 1 else f"{config.workers} processes"
    lines = [
        f"listens on {scheme}://{config.host}:{config.port} with {processes}",
        _keys_line(keys),
        f"cache: {config.cache or 'none'}",
    ]
    if config.results:
        lines.append(f"results: {config.results}")
    if config.tls_certificate:
        lines.append(TlsCertificate(config).warning() or f"certificate: {config.tls_certificate}")
    if config.directory:
        access = "read and write" if config.read_write else "read only"
        lines.append(f"buckets: the folders of {config.directory}, {access}")
    lines += [_access_point_line(point) for point in config.access_points]
    return lines


def _check_builtins(point: AccessPoint, name: str) -> None:
    """Check the arguments of built-in transforms; code of others is run only by worker processes.

    Raises:
        ConfigError: An argument is unknown, missing or has a wrong value.
    """
    program = spelled_program(point.transform, arguments=point.arguments, folder=point.folder)
    steps = tuple(step for step in program.steps if step.target in BUILTINS.values())
    try:
        load_program(program._replace(steps=steps))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.what}", hint=error.hint) from None


def _keys_line(keys: AccessKeys | None) -> str:
    if keys is None:
        return "access keys: none; everyone on this machine may read"
    text = f"access keys: {len(keys)}"
    return f"{text}, and unsigned requests" if keys.anonymous is not None else text


def _access_point_line(point: AccessPoint) -> str:
    access = "read and write" if point.read_write else "read only"
    keys = f", for the keys {', '.join(point.keys)}" if point.keys else ""
    return f"access point {point.name}: {plan_text(point)}, {access}{keys}"
