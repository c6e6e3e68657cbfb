"""Predicts how many samples a second a configuration delivers: pure arithmetic on what was measured.

A rate is the smallest of four: what the connections can ask for (``connections / (first byte + body)``), what the store sends
(``bandwidth / size``), what the cores decode, and what the training step takes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from penstock.config import MIB, FetchConfig
from penstock.loader.lanes.segments import lane_read_ahead_sizes

if TYPE_CHECKING:
    from penstock.advise.profiles import Configuration, DataProfile, Profile, StoreProfile

LARGE_BYTES = 1 * MIB  # requests of this size show the bandwidth of a store; smaller ones may show what a request costs
BUSY_CORES_MIN = 0.7  # a process that used so much of a core for small objects was itself the limit, not the store


class Limits(NamedTuple):
    """Samples per second that each part allows; infinite if it was not measured.

    Attributes:
        latency: Connections divided by the time of a request.
        bandwidth: Bytes that the store sends to this machine per second, divided by the size of a sample.
        decode: Rate at which the cores parse and decode, or at which the disk of a cache reads.
    """

    latency: float = math.inf
    bandwidth: float = math.inf
    decode: float = math.inf

    @property
    def part(self) -> str:
        """The part that sets the pace."""
        return min(self._fields, key=lambda name: float(getattr(self, name)))


def predict_samples_per_s(profile: Profile, configuration: Configuration) -> float:
    """Return the samples per second that a configuration is predicted to deliver on a measured store and machine.

    Args:
        profile: A measurement; parts that were not measured set no limit.
        configuration: A way to read the data.
    """
    return min(*limits_of(profile, configuration), profile.step_samples_per_s)


def limits_of(profile: Profile, configuration: Configuration) -> Limits:
    """Return what each part allows, in samples per second."""
    data, store = profile.data, profile.store
    if data is None:
        return Limits()
    decode = _decode_limit(profile, data, configuration)
    if configuration.is_cached:
        return Limits(decode=min(decode, profile.machine.disk_bytes_per_s / data.sample_bytes))
    if store is None:
        return Limits(decode=decode)
    connections, request_bytes = in_flight(data, configuration)
    samples_per_request = request_bytes / data.sample_bytes
    request_s = store.first_byte_p50_s + request_bytes / store.connection_bytes_per_s
    if configuration.client == "blocking":  # its workers decode between their requests
        request_s += data.decode_s * samples_per_request
    return Limits(
        latency=connections / request_s * samples_per_request,
        bandwidth=capacity_bytes_per_s(store, connections, request_bytes) / data.sample_bytes,
        decode=decode,
    )


def in_flight(data: DataProfile, configuration: Configuration) -> tuple[int, float]:
    """Return how many requests a configuration has in flight, and the mean size of their bodies in bytes."""
    object_bytes = configuration.shard_bytes or data.object_bytes
    if configuration.client == "blocking":
        return configuration.workers, object_bytes
    fetch = FetchConfig(requests_max=configuration.requests_max, requests_min=1)
    if data.kind == "objects" and configuration.shard_bytes is None:
        return configuration.requests_max, min(object_bytes, fetch.part_bytes)
    sizes = lane_read_ahead_sizes(data.lanes, fetch)
    request_bytes = min(object_bytes, sizes.part_bytes)
    return min(data.lanes * sizes.requests_max, max(1, math.ceil(data.objects_bytes / request_bytes))), request_bytes


def capacity_bytes_per_s(store: StoreProfile, connections: int, request_bytes: float) -> float:
    """Return the bytes per second that the store and this machine manage in requests of a size, however many there are.

    A request costs a fixed time besides its bytes. What it costs is known if both large and small requests were measured, or
    if this process was busy with small ones.
    """
    if not store.rates:
        return math.inf
    throttled = store.throttled_connections
    if throttled is not None and connections >= throttled:
        return min(rate.bytes_per_s for rate in store.rates if rate.connections >= throttled)
    bytes_per_s, small_bytes = store.bandwidth_bytes_per_s, 1.1 * min(rate.request_bytes for rate in store.rates)
    fastest = max(store.rates, key=lambda rate: (rate.request_bytes <= small_bytes, rate.requests_per_s))
    has_large = any(rate.request_bytes >= LARGE_BYTES for rate in store.rates)
    if not has_large and fastest.busy_cores >= BUSY_CORES_MIN:
        return max(bytes_per_s, request_bytes * fastest.requests_per_s)
    request_s = max(0.0, 1 / fastest.requests_per_s - fastest.request_bytes / bytes_per_s)
    return request_bytes / (request_s + request_bytes / bytes_per_s)


def break_even_gap_bytes(store: StoreProfile, requests_max: int, request_bytes: int = 64 * 1024) -> int:
    """Return the gap between two ranges of an object that takes as long to read as another request.

    As long as requests wait for their first byte, it is ``first byte * rate of a connection``. Once the connections fill the
    bandwidth, waiting costs nothing, and only what a request costs besides its bytes counts.

    Args:
        store: The store.
        requests_max: Number of requests in flight.
        request_bytes: Size of a range.
    """
    if not math.isfinite(store.connection_bytes_per_s):
        return FetchConfig().gap_bytes_max
    wait_bytes = store.first_byte_p50_s * store.connection_bytes_per_s
    bytes_per_s = capacity_bytes_per_s(store, requests_max, request_bytes)
    if requests_max * request_bytes / (wait_bytes + request_bytes) * store.connection_bytes_per_s <= bytes_per_s:
        return round(wait_bytes)
    spent_bytes = request_bytes * (store.bandwidth_bytes_per_s / bytes_per_s - 1)
    return round(min(wait_bytes, max(0.0, spent_bytes)))


def _decode_limit(profile: Profile, data: DataProfile, configuration: Configuration) -> float:
    """What the cores decode: as measured, or scaled from the nearest; workers of a blocking client are processes."""
    if not data.cpu_rates:
        return math.inf
    is_blocking = configuration.client == "blocking"
    threads = min(configuration.workers, profile.machine.cores_count) if is_blocking else configuration.threads
    has_processes = is_blocking or configuration.processes > 0
    alike = [rate for rate in data.cpu_rates if (rate.processes > 0) == has_processes] or data.cpu_rates
    nearest = min(alike, key=lambda rate: abs(rate.threads - threads))
    scaled = nearest.samples_per_s * threads / nearest.threads
    return min(scaled, max(rate.samples_per_s for rate in alike))
