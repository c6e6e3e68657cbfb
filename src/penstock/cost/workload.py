"""What is paid for: a data set, the epochs that read it, and the hosts that wait for it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias

from penstock.config import FetchConfig, check_number, check_whole
from penstock.errors import ConfigError
from penstock.fetch.plan import is_one_request
from penstock.types import ByteRange

HoursAre: TypeAlias = Literal["measured", "full-speed"]
"""What hours of a run are: those that it takes while data is the limit, or those that the GPUs alone would take."""

GB = 10**9
SAMPLE_BYTES = 115_000
"""The size of a sample if none is given: a JPEG of ImageNet, as the articles use it."""
FUNCTION_S_PER_GB = 50.0
"""Seconds of one vCPU to transform a GB, if none are given: the articles' 5 s for an object of 100 MB."""

_POSITIVE = ("step_samples_per_s", "delivered_samples_per_s", "sample_bytes", "cluster_hosts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training run and its data.

    Attributes:
        objects_count: Number of objects of the data set.
        size_bytes: Bytes of all objects together.
        epochs: Number of times that the run reads the data set.
        hosts: Number of GPU hosts.
        host_dollars_per_hour: Price of one GPU host, in US dollars per hour.
        hours: Length of the run in hours; None derives it from the rates, if they are given.
        hours_are: Whether `hours` were ``"measured"`` while data was the limit, or are those at ``"full-speed"``; None if
            that is not known, so that `readings` returns both.
        busy: Share of the measured time in which the GPUs compute, 0 to 1; None derives it from the rates, otherwise it is 1.
        step_samples_per_s: Samples per second that the step of one host takes if it never waits for data.
        delivered_samples_per_s: Samples per second that one host got, as a benchmark measured them.
        sample_bytes: Bytes of one sample; None takes 115 000, or the size of an object if that is smaller.
        returned_bytes: Bytes of all objects after a transform; None if it does not change the size.
        function_s: Seconds of one vCPU that a transform of one object takes; None takes 5 s per 100 MB.
        function_bytes: Memory of a function that transforms, in bytes.
        months: For how long copies of the data are kept, in months.
        shard_bytes: Size of the objects of a converted copy, in bytes.
        cluster_hosts: CPU hosts that preprocess during the whole run; None pays for the time of the transform only.
        cpu_host_vcpus: vCPUs of a CPU host.
        download_bytes_per_s: Bytes per second at which one GPU host downloads.
        crosses_regions: Whether the store is in another region than the hosts, so that each read pays for the transfer.

    Raises:
        ConfigError: A value is outside its bounds.
    """

    objects_count: int
    size_bytes: int
    epochs: int = 1
    hosts: int = 1
    host_dollars_per_hour: float = 0.0
    hours: float | None = None
    hours_are: HoursAre | None = None
    busy: float | None = None
    step_samples_per_s: float | None = None
    delivered_samples_per_s: float | None = None
    sample_bytes: int | None = None
    returned_bytes: int | None = None
    function_s: float | None = None
    function_bytes: int = GB
    months: float = 1.0
    shard_bytes: int = 256_000_000
    cluster_hosts: int | None = None
    cpu_host_vcpus: int = 16
    download_bytes_per_s: int = GB
    crosses_regions: bool = False

    def __post_init__(self) -> None:
        for name in ("objects_count", "epochs", "hosts", "shard_bytes", "cpu_host_vcpus", "download_bytes_per_s"):
            check_whole(name, getattr(self, name), 1)
        sizes = ("size_bytes", "returned_bytes", "function_bytes", "function_s")
        for name in (*sizes, "months", "hours", "host_dollars_per_hour", *_POSITIVE):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0, opened=name in _POSITIVE)
        if self.busy is not None:
            check_number("busy", self.busy, 0, 1, opened=True)
        if self.hours_are not in (None, "measured", "full-speed"):
            raise ConfigError(f"hours_are={self.hours_are!r}", hint="hours_are='measured' or hours_are='full-speed'")

    @property
    def object_bytes(self) -> float:
        """Mean size of an object."""
        return self.size_bytes / self.objects_count

    @property
    def object_parts(self) -> int:
        """GETs with which penstock reads an object of mean size."""
        part_bytes = FetchConfig().part_bytes
        is_one = is_one_request(ByteRange(0, round(self.object_bytes)), part_bytes)
        return 1 if is_one else math.ceil(self.object_bytes / part_bytes)

    @property
    def samples_count(self) -> int:
        """Samples of the data set."""
        return math.ceil(self.size_bytes / (self.sample_bytes or max(1, min(SAMPLE_BYTES, self.object_bytes))))

    @property
    def transform_s(self) -> float:
        """Seconds of one vCPU to transform one object."""
        return self.object_bytes / GB * FUNCTION_S_PER_GB if self.function_s is None else self.function_s

    @property
    def returned_gb(self) -> float:
        """GB of the transformed objects."""
        return (self.size_bytes if self.returned_bytes is None else self.returned_bytes) / GB

    @property
    def busy_share(self) -> float:
        """Share of the measured time in which the GPUs compute; 1 if nothing is known of it."""
        if self.busy is not None:
            return self.busy
        if self.step_samples_per_s and self.delivered_samples_per_s:
            return min(1.0, self.delivered_samples_per_s / self.step_samples_per_s)
        return 1.0

    def readings(self) -> tuple[Self, ...]:
        """Return this workload in each sense that its hours may have: one, or two if `hours_are` would make a difference.

        Hours that follow from a rate have the sense of that rate, so of these there is one.
        """
        if self.hours is None:
            rate = self.step_samples_per_s or self.delivered_samples_per_s
            if rate is None:
                return (self,)
            hours = self.epochs * self.samples_count / (rate * self.hosts) / 3600
            hours_are: HoursAre = "full-speed" if self.step_samples_per_s else "measured"
            return (replace(self, hours=hours, hours_are=hours_are),)
        if self.hours_are is not None:
            return (self,)
        if self.busy_share == 1.0:
            return (replace(self, hours_are="measured"),)
        return replace(self, hours_are="measured"), replace(self, hours_are="full-speed")

    def at_epochs(self, epochs: int) -> Self:
        """Return the same run over another number of epochs; its hours grow with them."""
        hours = None if self.hours is None else self.hours * epochs / self.epochs
        return replace(self, epochs=epochs, hours=hours)

    def at_object_bytes(self, object_bytes: int) -> Self:
        """Return the same bytes and samples in objects of another size."""
        count = max(1, round(self.size_bytes / object_bytes))
        return replace(
            self,
            objects_count=count,
            sample_bytes=math.ceil(self.size_bytes / self.samples_count) if self.samples_count else None,
            function_s=self.transform_s * self.objects_count / count,
        )
