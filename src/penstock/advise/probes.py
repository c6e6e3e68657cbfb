"""Measures a store: first bytes, and the bandwidth of connections; and this machine, with the disk for a cache."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import statistics
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.advise.profiles import ConnectionRate, MachineProfile, StoreProfile
from penstock.config import KIB, MIB, FetchConfig, cores_count, memory_bytes_max
from penstock.errors import ObjectMissingError, ThrottledError
from penstock.loader.inspection import no_object
from penstock.store.inflight import perform, perform_many
from penstock.store.traced import BODY_BYTES_MIN
from penstock.types import ByteRange, Get

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.store import Store
    from penstock.types import Key, ObjectInfo, Operation

PROBES_COUNT = 100  # first bytes that are timed: enough for the 99th percentile to be one of them
PROBE_BYTES = 256 * MIB  # bytes that each measurement of bandwidth reads at most
CANDIDATES_COUNT = 1000  # objects below a prefix among which the largest is chosen: one page of a listing

CONNECTIONS = (1, 4, 16, 64, 256)  # whose bandwidth is measured; 256 is the default of ``FetchConfig.requests_max``
REQUEST_BYTES_MAX = FetchConfig().part_bytes
# Where connections share a bandwidth, bodies of 8 MiB on each of 256 would all end together, after seconds.
IN_FLIGHT_BYTES_MAX = 64 * MIB
SMALL_REQUEST_BYTES = 64 * KIB  # requests of this size show what a request costs besides its bytes
THROTTLED_RATIO_END = 0.5  # the sweep ends when the store refuses more than this share of the requests...
GAIN_MIN = 1.1  # ...or when four times the connections gain less than this, twice in a row
WRITTEN_BYTES = 64 * MIB  # of the file whose reading is timed, on a disk that has ten times as much free space


def largest(store: Store, key: Key, *, url: str) -> ObjectInfo:
    """Return the object, or the largest of the first 1 000 below a prefix.

    Args:
        store: The store.
        key: Key, or prefix that is empty or ends with a slash.
        url: URL of the key, for the message.

    Raises:
        ObjectMissingError: There is none.
    """
    if key and not key.endswith("/"):
        with suppress(ObjectMissingError):
            return store.stat(key)
    found = max(itertools.islice(store.list(key), CANDIDATES_COUNT), key=lambda each: each.size_bytes, default=None)
    if found is None:
        raise no_object(url)
    return found


def first_bytes(store: Store, found: ObjectInfo, seconds: float) -> list[float]:
    """Return the sorted seconds from sending a request to the first byte of its answer, for one request at a time."""
    operation = Get(found.key, ByteRange(0, min(found.size_bytes, 1 * KIB)), found.etag)
    perform(store, operation)  # connects, resolves credentials
    times: list[float] = []
    end_s = time.monotonic() + seconds
    while len(times) < PROBES_COUNT and (not times or time.monotonic() < end_s):
        start_s = time.monotonic()
        attempts = perform(store, operation).attempts
        times.append(attempts[-1].first_byte_s if attempts else time.monotonic() - start_s)
    return sorted(times)


def p50_p99(times: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile of sorted times."""
    return statistics.median(times), times[min(len(times) - 1, round(0.99 * len(times)))]


class StoreProbe:
    """Measures one store, a part at a time, so that an interrupted measurement keeps what it has.

    Args:
        store: The store.
        objects: Objects to read, in this order, again and again; none of them is empty.
        seconds: Seconds that the measurement of one number of connections takes, about.
        bytes_max: Bytes that the measurement of one number of connections may read, about.

    Attributes:
        received_bytes: Bytes that were read up to now.
    """

    def __init__(
        self, store: Store, objects: Sequence[ObjectInfo], *, seconds: float, bytes_max: int = PROBE_BYTES
    ) -> None:
        self._store = store
        self._objects = objects
        self._seconds = seconds
        self._bytes_max = min(PROBE_BYTES, bytes_max)
        self._first_bytes_s: list[float] = []
        self._rates: list[ConnectionRate] = []
        self.received_bytes = 0

    @property
    def profile(self) -> StoreProfile | None:
        """The measurement up to now; None before the first bytes were timed."""
        if not self._first_bytes_s:
            return None
        p50_s, p99_s = p50_p99(self._first_bytes_s)
        return StoreProfile(first_byte_p50_s=p50_s, first_byte_p99_s=p99_s, rates=tuple(self._rates))

    def run(self, progress: Callable[[str], None]) -> None:
        """Measure first bytes, then the bandwidth by number of connections until more of them gain nothing.

        Args:
            progress: Called with the name of each part before it runs.

        Raises:
            StoreError: The store failed for another reason than throttling.
        """
        progress("first bytes")
        self._first_bytes_s = first_bytes(self._store, self._objects[0], self._seconds)
        gains, best = list[float](), 1.0
        for connections in CONNECTIONS:
            progress(f"{connections} connections")
            rate = self.measure(connections)
            gains.append(rate.bytes_per_s / best)
            best = max(best, rate.bytes_per_s)
            if max(gains[-2:]) < GAIN_MIN or rate.throttled_ratio > THROTTLED_RATIO_END:
                break
        if max(rate.request_bytes for rate in self._rates) > 2 * SMALL_REQUEST_BYTES:
            progress("small requests")
            self.measure(CONNECTIONS[-1], SMALL_REQUEST_BYTES)

    def _operations(self, request_bytes: int) -> Iterator[tuple[None, Operation]]:
        for each in itertools.cycle(self._objects):
            for start in range(0, each.size_bytes, request_bytes):
                yield None, Get(each.key, ByteRange(start, min(start + request_bytes, each.size_bytes)), each.etag)

    def measure(self, connections: int, request_bytes: int | None = None) -> ConnectionRate:
        """Measure the bandwidth of a number of connections.

        The measurement begins at the end of the first wave of requests: these wait for connections, and for each other.

        Args:
            connections: Number of requests in flight.
            request_bytes: Largest body of a request; None takes as much as lets bodies end one after the other.

        Raises:
            StoreError: The store failed for another reason than throttling.
        """
        operations = self._operations(
            request_bytes or max(256 * KIB, min(REQUEST_BYTES_MAX, IN_FLIGHT_BYTES_MAX // connections))
        )
        ends_s, sizes, cpu_s, throttled, body_s = [time.monotonic()], [0], time.process_time(), 0, 0.0
        try:
            for _, done in perform_many(self._store, operations, requests_max=connections):
                ends_s.append(time.monotonic())
                sizes.append(done.received_bytes)
                throttled += sum(attempt.throttled for attempt in done.attempts)
                body_s += sum(attempt.total_s - attempt.first_byte_s for attempt in done.attempts)
                spent_s = ends_s[-1] - ends_s[0]
                is_enough = spent_s > self._seconds or sum(sizes) > self._bytes_max
                if (is_enough and len(sizes) > 2 * connections) or spent_s > 3 * self._seconds:
                    break
        except ThrottledError:
            throttled += connections  # not even retries helped
        received, count = sum(sizes), len(sizes) - 1
        first = connections if count > connections else 0
        rate = ConnectionRate(
            connections=connections,
            request_bytes=received // max(1, count),
            bytes_per_s=sum(sizes[first + 1 :]) / max(ends_s[-1] - ends_s[first], 1e-6),
            throttled_ratio=throttled / max(1, count + throttled),
            busy_cores=(time.process_time() - cpu_s) / max(ends_s[-1] - ends_s[0], 1e-6),
            body_bytes_per_s=received / body_s if body_s and received >= count * BODY_BYTES_MIN else math.inf,
        )
        self.received_bytes += received
        self._rates.append(rate)
        return rate


def measure_machine() -> MachineProfile:
    """Return what this process may use of the machine.

    Cost: one file of 64 MiB, which is written, read and removed.
    """
    free_bytes, path = max(_disks(), key=lambda disk: disk[0], default=(0, None))
    return MachineProfile(
        cores_count=cores_count(),
        memory_bytes=memory_bytes_max(),
        disk_path=path,
        disk_free_bytes=free_bytes,
        disk_bytes_per_s=_read_bytes_per_s(path) if free_bytes > 10 * WRITTEN_BYTES else math.inf,
    )


def _disks() -> Iterator[tuple[int, str]]:
    """The free bytes of directories on disks that this user may write to, and their paths; those in memory are left out."""
    mounts = [line.split()[:2] for line in Path("/proc/self/mounts").read_text().splitlines()]
    mounted = [Path(path) for device, path in mounts if device.startswith(("/dev/", "overlay"))]
    devices = {path.stat().st_dev for path in mounted if os.access(path, os.F_OK)}
    for path in [Path(tempfile.gettempdir()), Path("~/.cache").expanduser(), Path.cwd(), *mounted]:
        if os.access(path, os.W_OK) and path.is_dir() and path.stat().st_dev in devices:
            yield shutil.disk_usage(path).free, str(path)


def _read_bytes_per_s(folder: str | None) -> float:
    """The rate at which a file is read that the kernel no longer has in memory; infinite if it cannot be measured."""
    block = bytearray(os.urandom(4 * MIB))
    with suppress(OSError), tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(WRITTEN_BYTES // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        start_s = time.monotonic()
        while file.readinto(block):
            pass
        return WRITTEN_BYTES / (time.monotonic() - start_s)
    return math.inf
