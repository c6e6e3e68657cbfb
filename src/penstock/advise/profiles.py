"""What ``advise`` measures, and what it says: frozen records, which tests make without measuring anything."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from penstock.config import FetchConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

THROTTLED_RATIO_MAX = 0.01  # a store throttles if it asks for more than this share of requests to be sent more slowly
KNEE_RATIO = 0.9  # the knee is the smallest number of connections with this share of the largest bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionRate:
    """What a number of connections received together.

    Attributes:
        connections: Number of requests in flight at a time.
        request_bytes: Mean size of the body of a request.
        bytes_per_s: Bytes that arrived per second on all connections together.
        throttled_ratio: Share of the requests that the store asked to send more slowly (503, 429), in [0, 1].
        body_bytes_per_s: Rate of a body once it has begun, on one of the connections; infinite if bodies are too small to tell.
        busy_cores: CPU seconds that this process used per second while it received.
    """

    connections: int
    request_bytes: int
    bytes_per_s: float
    throttled_ratio: float = 0.0
    body_bytes_per_s: float = math.inf
    busy_cores: float = 0.0

    @property
    def requests_per_s(self) -> float:
        """Number of requests that were answered per second."""
        return self.bytes_per_s / max(1, self.request_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreProfile:
    """How fast a store answers.

    Attributes:
        first_byte_p50_s: Median time from sending a request to the first byte of its answer, in seconds.
        first_byte_p99_s: The 99th percentile of this time, in seconds.
        rates: Bandwidth by number of connections, in the order of the measurements.
    """

    first_byte_p50_s: float
    first_byte_p99_s: float
    rates: tuple[ConnectionRate, ...] = ()

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """The largest bandwidth that was measured."""
        return max((rate.bytes_per_s for rate in self.rates), default=math.inf)

    @property
    def connection_bytes_per_s(self) -> float:
        """Rate of a body on one connection alone; infinite if bodies are too small to tell."""
        return min((rate.body_bytes_per_s for rate in self.rates if rate.connections == 1), default=math.inf)

    @property
    def knee_connections(self) -> int:
        """The smallest number of connections with nearly the largest bandwidth."""
        wanted = KNEE_RATIO * self.bandwidth_bytes_per_s
        return min((rate.connections for rate in self.rates if rate.bytes_per_s >= wanted), default=1)

    @property
    def throttled_connections(self) -> int | None:
        """The smallest number of connections at which the store throttled; None if it never did."""
        found = [rate.connections for rate in self.rates if rate.throttled_ratio > THROTTLED_RATIO_MAX]
        return min(found, default=None)


@dataclass(frozen=True, slots=True)
class CpuRate:
    """Samples per second that this machine parses and decodes if the store costs no time.

    Attributes:
        threads: Number of decode threads, in all processes together.
        processes: Number of worker processes; 0 decodes in threads of one process.
        samples_per_s: Samples per second.
    """

    threads: int
    processes: int
    samples_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DataProfile:
    """What lies at a URL.

    Attributes:
        kind: Whether samples lie in shards, or are objects of their own.
        objects_count: Number of objects.
        is_sampled: Whether not all objects were looked at, so that their number and size are estimates.
        objects_bytes: Size of all objects.
        formats: Number of objects by format, or by suffix if the names show no format.
        samples_per_object: Mean number of samples in a shard; 1 for objects, and less if several objects are a sample.
        member_bytes: Mean size of each member of the first samples, as stored.
        group_by: ``"stem"`` if objects whose names are equal up to the first dot are one sample.
        is_indexed: Whether an index knows all shards.
        stages: The stages that were measured, as code.
        unused_members: Members that are fetched although the pipeline uses none of them.
        batch_size: Number of samples in a batch.
        lanes: Number of lanes of the pipeline's order: 64 if it shuffles.
        cpu_rates: Rates of parsing and decoding; empty if the pipeline raised an error.
        samples_per_s: Rate of a ``Loader`` with its defaults on the store; None if it was not measured.
    """

    kind: Literal["shards", "objects"]
    objects_count: int
    is_sampled: bool
    objects_bytes: int
    formats: Mapping[str, int]
    samples_per_object: float
    member_bytes: Mapping[str, float]
    group_by: str | None = None
    is_indexed: bool = False
    stages: str = ""
    unused_members: tuple[str, ...] = ()
    batch_size: int = 1
    lanes: int = 1
    cpu_rates: tuple[CpuRate, ...] = ()
    samples_per_s: float | None = None

    @property
    def object_bytes(self) -> float:
        """Mean size of an object in bytes."""
        return self.objects_bytes / max(1, self.objects_count)

    @property
    def sample_bytes(self) -> float:
        """Mean size of a sample as stored, with its share of the shard, in bytes."""
        return self.object_bytes / max(1e-9, self.samples_per_object)

    @property
    def decode_s(self) -> float:
        """Seconds of one core that parse and decode a sample; 0 if it was not measured."""
        return 1 / max((rate.samples_per_s for rate in self.cpu_rates if rate.threads == 1), default=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """What this process may use of the machine.

    Attributes:
        cores_count: Number of cores.
        memory_bytes: Bytes of memory.
        disk_path: A directory on the disk with the most free space; None if none may be written to.
        disk_free_bytes: Bytes that are free there.
        disk_bytes_per_s: Rate at which a file that is not in memory is read from it; infinite if it was not measured.
    """

    cores_count: int
    memory_bytes: int
    disk_path: str | None = None
    disk_free_bytes: int = 0
    disk_bytes_per_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything that was measured. A part is None if it was not, because it failed or was interrupted.

    Attributes:
        url: The URL of the data, without secrets.
        machine: This machine.
        options: Options of the connection that were given.
        pipeline_name: ``module:name`` of the pipeline; None if none was given by name.
        is_pipeline_function: Whether this name is that of a function that returns it.
        store: The store.
        data: The data set.
        step_samples_per_s: Samples per second that the training step alone takes; infinite if no step was given.
        epochs: Number of times that the data is read.
        listed_per_s: Keys listed per second; None if nothing was listed.
        received_bytes: Bytes that the measurement read from the store.
        seconds: Seconds that the measurement took.
        notes: Parts that could not be measured, and the reasons.
        is_interrupted: Whether Ctrl-C ended the measurement.
    """

    url: str
    machine: MachineProfile
    options: Mapping[str, str | bool] = field(default_factory=dict)
    pipeline_name: str | None = None
    is_pipeline_function: bool = False
    store: StoreProfile | None = None
    data: DataProfile | None = None
    step_samples_per_s: float = math.inf
    epochs: int = 1
    listed_per_s: float | None = None
    received_bytes: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    is_interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A way to read a data set: what advice chooses, and what ``predict_samples_per_s`` predicts.

    Attributes:
        client: ``"loader"`` is penstock's; ``"blocking"`` a library whose workers each read one object at a time.
        requests_max: Largest number of requests in flight of the loader.
        threads: Number of decode threads of the loader.
        processes: Number of worker processes of the loader.
        workers: Number of worker processes of a blocking client.
        shard_bytes: Size of a shard if the data is packed again; None leaves the data as it is.
        is_cached: Whether the data is read from a cache on this machine's disk.
        gap_bytes_max: For random access: largest gap between two ranges of an object that one request reads through.
    """

    client: Literal["loader", "blocking"] = "loader"
    requests_max: int = FetchConfig().requests_max
    threads: int = 1
    processes: int = 0
    workers: int = 1
    shard_bytes: int | None = None
    is_cached: bool = False
    gap_bytes_max: int = FetchConfig().gap_bytes_max


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do, or to leave as it is.

    Attributes:
        topic: ``"limit"``, ``"decoding"``, ``"cluster"``, ``"concurrency"``, ``"workers"``, ``"shard size"``,
            ``"cache"``, ``"random access"``, ``"index"``, ``"fields"`` or ``"door"``.
        text: The thing to do.
        evidence: The measured numbers that it follows from.
        command: A command that measures it.
        samples_per_s: Samples per second that are predicted if it is followed; None if it does not change the rate.
        gain_samples_per_s: Number of samples per second more than without it; 0 if things may stay as they are.
    """

    topic: str
    text: str
    evidence: str
    command: str = ""
    samples_per_s: float | None = None
    gain_samples_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was measured, and what follows from it.

    Attributes:
        profile: The measurement.
        now: A ``Loader`` with its defaults on the data as it is.
        best: The advised configuration; its `workers` are for a blocking client, `shard_bytes` is None and `is_cached` False if
            packing or a cache gain little.
        advice: The advice, what limits first.
    """

    profile: Profile
    now: Configuration
    best: Configuration
    advice: tuple[Advice, ...] = ()
