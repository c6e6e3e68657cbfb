"""Limits and defaults, each with its unit and where the number comes from."""

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
"""The largest seed or epoch: each is one word of the random generator's key."""


def check_whole(name: str, value: object, low: int, high: int | None = None) -> None:
    """Refuse what is no whole number in [low, high], or where there is no bound above, of at least `low`.

    Raises:
        ConfigError: It names the value and its bounds.
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < low or (high is not None and value > high):  # type: ignore[operator]
        bounds = f"of at least {low}" if high is None else f"in [{low}, {high}]"
        raise ConfigError(f"{name}={value!r} must be a whole number {bounds}")


def check_number(name: str, value: object, low: float, high: float = math.inf, *, opened: bool = False) -> None:
    """Refuse what is no number in [low, high], or with `opened` in (low, high].

    Raises:
        ConfigError: It names the value and its bounds.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (opened and value == low):  # type: ignore[operator]
        bounds = f"{'more than' if opened else 'at least'} {low}" + (f" and at most {high}" if high < math.inf else "")
        raise ConfigError(f"{name}={value!r} must be a number, {bounds}")


def check_path(name: str, value: object) -> None:
    """Refuse what is no path; None is none given.

    Raises:
        ConfigError: It names the value.
    """
    if value is not None and not isinstance(value, str | os.PathLike):
        raise ConfigError(f"{name}={value!r} must be a path")


def check_names(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse options that do not exist.

    Args:
        what: Takes them, for the message.
        given: Their names.
        known: All that there are.

    Raises:
        ConfigError: It names the option, and the one that was probably meant.
    """
    names = list(known)
    for name in given:
        if name not in names:
            from difflib import get_close_matches

            near = get_close_matches(name, names, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}=?" if near else f"it takes {', '.join(names)}"
            raise ConfigError(f"{what}({name}=...) is no option of {what}()", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """How connections are made and when they are given up.

    Attributes:
        connect_s_max: Seconds for DNS, TCP and TLS together.
        first_byte_s_max: Seconds from sending a request to the first byte of its answer.
        stall_bytes_per_s: A body slower than this for ``stall_s_max`` seconds is given up (and resumed by ``Retrying``).
        stall_s_max: See ``stall_bytes_per_s``.
        total_s_max: Seconds for one attempt, whatever its size.
        connections_max: Open connections kept in the pool of one event loop.
        threads_count: Event-loop threads. None follows the machine and the scheme: one for plain HTTP; over TLS one for
            every four of ``cores_count()``, at most four. Source: bench/event_loops.py.
        receive_buffer_bytes: libcurl's receive buffer, used over TLS and through proxies. TLS records are 16 KiB, and a small
            buffer stays in the cache. Source: docs/development/experiments.md, 2026-11-21, large objects.
        ca_bundle: PEM file of the authorities to trust; None means ``AWS_CA_BUNDLE``, ``SSL_CERT_FILE``, or the system's.
        verify_tls: False accepts any certificate; for tests only.
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
            raise ConfigError("proxy= must be a URL without white space", hint="%20 stands for a space in a password")
        check_whole("receive_buffer_bytes", self.receive_buffer_bytes, 1 * KIB, 10 * MIB)  # libcurl's limits

    def __repr__(self) -> str:
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        if self.proxy is not None:
            values["proxy"] = public_url(self.proxy if "://" in self.proxy else f"http://{self.proxy}")
        return f"TransportConfig({', '.join(f'{name}={value!r}' for name, value in values.items())})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryConfig:
    """When a failed request is tried again.

    Attributes:
        attempts_max: Attempts, the first included.
        total_s_max: Seconds from submission after which no new attempt starts.
        backoff_s: Mean wait before the second attempt; doubles each time, with full jitter.
        backoff_s_max: Longest wait, also when the store asks for more by ``Retry-After``.
    """

    attempts_max: int = 5
    total_s_max: float = 120.0
    backoff_s: float = 0.1
    backoff_s_max: float = 20.0

    def __post_init__(self) -> None:
        check_whole("attempts_max", self.attempts_max, 1)
        for name in ("total_s_max", "backoff_s", "backoff_s_max"):
            check_number(name, getattr(self, name), 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HedgeConfig:
    """When a second, identical GET or HEAD is sent because the first is late.

    Attributes:
        quantile: A request is late when its answer has not begun after this quantile of recent first-byte times.
        ratio_max: Hedges per request in the long run: a token bucket.
        wait_s_min: Never hedge earlier than this.
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
    """How far and how wide reading runs ahead of its consumer.

    Attributes:
        part_bytes: Larger spans are cut into parts of this size, fetched in parallel.
        requests_min: Requests in flight at the start.
        requests_max: The most in flight; 256 covers 30 ms at 8 000 small objects/s.
        gap_bytes_max: Two ranges of one object closer than this are read as one request. Break-even is
            rate_bytes_per_s * first_byte_s, e.g. 90 MB/s * 30 ms = 2.7 MB; the default is careful.
        budget_bytes_max: Bytes that all reading in this process may hold; None means ``default_budget_bytes()``.
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
    """Refuse what is no record of its kind, before threads of the transport find out.

    Raises:
        ConfigError: It names the argument and the record.
    """
    kinds = {"transport": TransportConfig, "retry": RetryConfig, "hedge": HedgeConfig, "fetch": FetchConfig}
    for (name, kind), value in zip(kinds.items(), (transport, retry, hedge, fetch), strict=True):
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{name}={value!r} must be a {kind.__name__}", hint=f"{name}=ps.{kind.__name__}(...)")


@cache
def memory_bytes_max() -> int:
    """Bytes of memory that this process may use: the machine's, or its cgroup's limit if smaller.

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
    """Say that this process is one of `processes_count` alike, among which the machine's cores are divided."""
    global _sharing_count
    _sharing_count = processes_count
    cores_count.cache_clear()


@cache
def cores_count() -> int:
    """Cores for this process, at least one: those that the system lets it use, divided by ``share_machine``'s number."""
    return max(1, len(os.sched_getaffinity(0)) // _sharing_count)


def default_budget_bytes() -> int:
    """The smaller of 2 GiB and an eighth of the memory that this process may use."""
    return min(2 * GIB, memory_bytes_max() // 8)
