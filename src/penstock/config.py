"""Limits and defaults, each with its unit and the source of the number."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.redaction import public_url

if TYPE_CHECKING:
    from collections.abc import Iterable

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

SEED_MAX = 2**64 - 1
"""The largest seed or epoch number; each fills one word of the random generator's key."""


def check_whole(name: str, value: object, low: int, high: int | None = None) -> None:
    """Check that an argument is a whole number in [low, high].

    Args:
        name: Name of the argument.
        value: Value of the argument.
        low: Smallest value allowed.
        high: Largest value allowed; None if there is no upper bound.

    Raises:
        ConfigError: The value is not a whole number in these bounds; the message names both.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < low or (high is not None and value > high):  # type: ignore[operator]
        bounds = f"of at least {low}" if high is None else f"in [{low}, {high}]"
        is_other_integer = hasattr(value, "__index__") and not isinstance(value, int)  # of NumPy or PyTorch
        hint = f"int({name})" if is_other_integer else None
        raise ConfigError(f"{name}={value!r} must be a whole number {bounds}", hint=hint)


def check_number(name: str, value: object, low: float, high: float = math.inf, *, opened: bool = False) -> None:
    """Check that an argument is a number in [low, high].

    Args:
        name: Name of the argument.
        value: Value of the argument.
        low: Smallest value allowed.
        high: Largest value allowed.
        opened: Whether `low` itself is excluded.

    Raises:
        ConfigError: The value is not a number in these bounds; the message names both.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (opened and value == low):  # type: ignore[operator]
        bounds = f"{'more than' if opened else 'at least'} {low}" + (f" and at most {high}" if high < math.inf else "")
        raise ConfigError(f"{name}={value!r} must be a number, {bounds}")


def check_path(name: str, value: object) -> None:
    """Check that an argument is a path or None.

    Raises:
        ConfigError: The value is neither; the message names it.
    """
    if value is not None and not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name}={value!r} must be a path")


def check_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Check that options exist.

    Args:
        what: Name of the function that takes the options, for the message.
        given: Names of the options given.
        known: Names of all options that exist.

    Raises:
        ConfigError: An option does not exist; the message names it and says what was meant.
    """
    names = list(known)
    for name in given:
        if name not in names:
            from penstock.system.argument_names import unknown_argument

            raise unknown_argument(what, name, names)


def is_variable(name: str, value: object) -> bool:
    """Whether a variable of an environment can have this name and value."""
    if not name or "=" in name or not isinstance(value, str) or "\0" in name + value:
        return False
    try:
        os.fsencode(name + value)
    except UnicodeEncodeError:  # in JSON, an escape may stand for half of a character
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """How connections are opened, and when an attempt is abandoned.

    Attributes:
        connect_s_max: Longest time for DNS, TCP and TLS together, in seconds.
        first_byte_s_max: Longest time from sending a request to the first byte of its answer, in seconds.
        stall_bytes_per_s: Slowest rate of a body. A body that is slower for ``stall_s_max`` seconds is abandoned, and
            ``Retrying`` resumes it.
        stall_s_max: Longest time that a body may be slower than ``stall_bytes_per_s``, in seconds.
        total_s_max: Longest time for one attempt, whatever its size, in seconds.
        connections_max: Largest number of open connections in the pool of one event loop.
        threads_count: Number of event-loop threads. None chooses by scheme and machine: one thread for plain HTTP; over TLS one
            for every four of ``cores_count()``, but at most four. Source: bench/event_loops.py.
        receive_buffer_bytes: Size of libcurl's receive buffer, which is used over TLS and through proxies. TLS records are
            16 KiB long, and a small buffer stays in the processor's cache.
            Source: docs/development/measurements.md.
        ca_bundle: PEM file of the certificate authorities to trust; None takes ``AWS_CA_BUNDLE``, ``SSL_CERT_FILE``, or the
            system's.
        verify_tls: Whether to verify the server's certificate; False accepts any, and is for tests only.
        proxy: URL of a proxy, ``http://[user:password@]host:port``; None follows ``HTTPS_PROXY``, ``HTTP_PROXY``,
            ``ALL_PROXY`` and ``NO_PROXY``. Its user and password are never shown.
    """

    connect_s_max: float = 5.0
    first_byte_s_max: float = 20.0
    stall_bytes_per_s: int = 1 * KIB
    stall_s_max: float = 20.0
    total_s_max: float = 3600.0
    connections_max: int = 1024
    threads_count: int | None = None
    receive_buffer_bytes: int = 64 * KIB
    ca_bundle: str | None = None
    verify_tls: bool = True
    proxy: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "connect_s_max",
            "first_byte_s_max",
            "stall_s_max",
            "total_s_max",
            "connections_max",
            "threads_count",
        ):
            value = getattr(self, name)
            if value is not None:
                check_number(name, value, 0, opened=True)
        proxy = self.proxy
        if proxy is not None and not (isinstance(proxy, str) and proxy.isprintable() and proxy and " " not in proxy):
            raise ConfigError("proxy= must be a URL without white space", hint="write a space in a password as %20")
        check_whole("receive_buffer_bytes", self.receive_buffer_bytes, 1 * KIB, 10 * MIB)  # libcurl's limits

    def __repr__(self) -> str:
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        if self.proxy is not None:
            values["proxy"] = public_url(self.proxy if "://" in self.proxy else f"http://{self.proxy}")
        return f"TransportConfig({', '.join(f'{name}={value!r}' for name, value in values.items())})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryConfig:
    """When a failed request is sent again, and for how long a store that does not answer is waited for.

    Operations that may be repeated are sent again; the body of a client that the gateway passes on as a stream cannot be.

    Attributes:
        attempts_max: Largest number of attempts, including the first, while the endpoint answers other requests: after
            throttling (SlowDown, 429), broken bodies, wrong checksums, or errors that only this request gets. Attempts to
            reach an endpoint that answers nobody do not count if it has answered this process before. 1 sends every operation
            once, and waits for nothing.
        total_s_max: Time after an operation's first failure in which it may be sent again, in seconds. An endpoint that has
            answered this process before, and then refuses, resets, does not answer in time or answers with 500, 502, 503 or
            504, is waited for that long. If it has never answered, no attempt starts after 4 s without a connection.
        backoff_s: Mean wait before the second attempt, in seconds. It doubles each time, with full jitter.
        backoff_s_max: Longest wait in seconds, even if the store asks for a longer one by ``Retry-After``.
    """

    attempts_max: int = 5
    total_s_max: float = 120.0
    backoff_s: float = 0.1
    backoff_s_max: float = 10.0

    def __post_init__(self) -> None:
        check_whole("attempts_max", self.attempts_max, 1)
        for name in ("total_s_max", "backoff_s", "backoff_s_max"):
            check_number(name, getattr(self, name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgeConfig:
    """When a second, identical GET or HEAD is sent because the first one is late.

    Attributes:
        quantile: Quantile of recent first-byte times, in [0.5, 1), after which a request without an answer is late.
        ratio_max: Largest number of second requests per request in the long run, limited by a token bucket.
        wait_s_min: Shortest time before a second request is sent, in seconds.
    """

    quantile: float = 0.99
    ratio_max: float = 0.05
    wait_s_min: float = 0.02

    def __post_init__(self) -> None:
        check_number("quantile", self.quantile, 0.5, 1)
        if self.quantile == 1:
            raise ConfigError(f"quantile={self.quantile!r} must be less than 1")
        check_number("ratio_max", self.ratio_max, 0, 1)
        check_number("wait_s_min", self.wait_s_min, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    """How far ahead of its consumer a reader reads, and with how many requests.

    Attributes:
        part_bytes: Size of a part. Larger spans are cut into parts of this size, which are fetched in parallel.
        requests_min: Number of requests in flight at the start.
        requests_max: Largest number of requests in flight; 256 covers 30 ms at 8 000 small objects/s.
            Source: bench/small_objects.py.
        gap_bytes_max: Largest gap between two ranges of one object that are read with one request. The break-even gap is
            rate_bytes_per_s * first_byte_s, e.g. 90 MB/s * 30 ms = 2.7 MB; the default is cautious.
        budget_bytes_max: Largest number of bytes that all readers in this process may hold; None takes
            ``default_budget_bytes()``.
    """

    part_bytes: int = 8 * MIB
    requests_min: int = 8
    requests_max: int = 256
    gap_bytes_max: int = 512 * KIB
    budget_bytes_max: int | None = None

    def __post_init__(self) -> None:
        check_whole("part_bytes", self.part_bytes, 64 * KIB)
        check_whole("requests_min", self.requests_min, 1)
        check_whole("requests_max", self.requests_max, 1)
        check_whole("gap_bytes_max", self.gap_bytes_max, 0)
        if self.budget_bytes_max is not None:
            check_whole("budget_bytes_max", self.budget_bytes_max, 1)
        if self.requests_min > self.requests_max:
            raise ConfigError(f"requests_min={self.requests_min!r} must lie in [1, requests_max={self.requests_max!r}]")


def check_configs(
    *, transport: object = None, retry: object = None, hedge: object = None, fetch: object = None
) -> None:
    """Check the types of configs, before a thread of the transport fails on them.

    Raises:
        ConfigError: A config has the wrong type; the message names the argument and the type.
    """
    kinds = {"transport": TransportConfig, "retry": RetryConfig, "hedge": HedgeConfig, "fetch": FetchConfig}
    for (name, kind), value in zip(kinds.items(), (transport, retry, hedge, fetch), strict=True):
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{name}={value!r} must be a {kind.__name__}", hint=f"{name}=ps.{kind.__name__}(...)")


@cache
def memory_bytes_max() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its cgroup's limit if that is smaller.

    Source: cgroup v2 ``memory.max``, cgroup v1 ``memory.limit_in_bytes``, ``sysconf``.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        group = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        group = []
    for line in group:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, name, root = Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.max", Path("/sys/fs/cgroup")
        elif "memory" in controllers.split(","):
            root = Path("/sys/fs/cgroup/memory")
            folder, name = root / path.lstrip("/"), "memory.limit_in_bytes"
        else:
            continue
        for parent in (folder, *folder.parents):
            try:
                text = (parent / name).read_text().strip()
            except OSError:
                text = "max"
            if text.isdigit():
                limits.append(int(text))
            if parent == root:
                break
    return min(limits)


_sharing_count = 1


def share_machine(processes_count: int) -> None:
    """Divide the machine's cores: this process is one of `processes_count` that do the same work."""
    global _sharing_count
    _sharing_count = processes_count
    cores_count.cache_clear()


@cache
def cores_count() -> int:
    """Return the number of cores for this process, at least 1: those it may use, divided by ``share_machine``'s number."""
    return max(1, len(os.sched_getaffinity(0)) // _sharing_count)


def default_budget_bytes() -> int:
    """Return the default byte budget: 2 GiB, or an eighth of the memory that this process may use if that is less."""
    return min(2 * GIB, memory_bytes_max() // 8)
