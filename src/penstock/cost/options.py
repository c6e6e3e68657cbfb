"""The ways to feed a GPU, each as a method that lists what it pays for.

A charge keeps the factors that it was multiplied from, so the formula that a reader sees is the one that was computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock.cost.prices import Price
from penstock.cost.workload import GB
from penstock.store.upload import PART_BYTES

if TYPE_CHECKING:
    from penstock.cost.prices import Prices
    from penstock.cost.workload import Workload

MONTH_HOURS = 730
"""Hours of a month, as Amazon bills them: 365 days / 12."""

_COUNTED = ("epochs", "hosts", "hours", "GETs", "objects", "samples", "times", "months")
"""Nouns of factors that have a singular."""


class Factor(NamedTuple):
    """A factor of a charge.

    Attributes:
        value: A number.
        noun: The things that it counts, in the plural.
        divides: Whether the charge is divided by it.
    """

    value: float
    noun: str
    divides: bool = False


@dataclass(frozen=True, slots=True)
class Charge:
    """One line of a bill.

    Attributes:
        what: The thing that is paid for.
        price: Price of a unit.
        factors: Numbers whose product is the quantity, in units of the price.
    """

    what: str
    price: Price
    factors: tuple[Factor, ...]

    @property
    def quantity(self) -> float:
        """How much is paid for, in units of the price."""
        return math.prod(1 / each.value if each.divides else each.value for each in self.factors)

    @property
    def dollars(self) -> float:
        """US dollars."""
        return self.quantity * self.price.value / self.price.per

    @property
    def formula(self) -> str:
        """How the dollars are computed, for a reader who wants to do it by hand."""
        text = ""
        for value, noun, divides in self.factors:
            sign = " / " if divides else " x "
            noun = noun[:-1] if value == 1 and noun in _COUNTED else noun  # noqa: PLW2901 - the same noun
            text += f"{sign if text else ''}{number(value)} {noun}"
        return f"{text} x {price_text(self.price)} = {dollars_text(self.dollars)}"


@dataclass(frozen=True, slots=True)
class Option:
    """A way to feed the GPUs, and what it costs beside the hours of their hosts.

    Attributes:
        name: Short name, e.g. ``"node-cache"``.
        title: Description in a few words.
        charges: All that it pays for.
    """

    name: str
    title: str
    charges: tuple[Charge, ...]

    @property
    def dollars(self) -> float:
        """US dollars of all charges."""
        return sum(each.dollars for each in self.charges)


def number(value: float) -> str:
    """Return a number as people write it: thousands apart, without an exponent."""
    if value < 0.001:
        return _decimal(value, 9)
    text = f"{value:,.2f}".removesuffix(".00") if value >= 100 else f"{value:.4g}"
    return text.replace(",", " ")


def dollars_text(dollars: float) -> str:
    """Return an amount in cents; less than a cent with as many digits as it needs."""
    if 0 < dollars < 0.01:
        return f"${_decimal(dollars, 6)}"
    return f"${dollars:,.2f}".replace(",", " ")


def price_text(price: Price) -> str:
    """Return a price with its unit, e.g. ``$0.0004 per 1 000 requests``."""
    unit = price.unit.removesuffix("s") if price.per == 1 else f"{number(price.per)} {price.unit}"
    return f"${_decimal(price.value, 10)} per {unit}"


def _decimal(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".rstrip("0").rstrip(".")


class Bill:
    """Charges of all ways to feed the GPUs of a training run.

    Args:
        workload: The run, one of its `readings`.
        prices: Prices.

    Attributes:
        gpu_hosts: The charge for the GPU hosts, if they never wait for data.
    """

    def __init__(self, workload: Workload, prices: Prices) -> None:
        self._workload = workload
        self._prices = prices
        self._gpu_host = Price(value=workload.host_dollars_per_hour, unit="host hours")
        self._objects = Factor(workload.objects_count, "objects")
        self._size = Factor(workload.size_bytes / GB, "GB")
        self._returned = Factor(workload.returned_gb, "GB")
        self._epochs = Factor(workload.epochs, "epochs")
        self._hosts = Factor(workload.hosts, "hosts")
        self._once = Factor(1, "times")
        self._part_gets = Factor(workload.object_parts, "GETs")
        self._one_get = Factor(1, "GETs")
        busy = (Factor(workload.busy_share, "of them busy"),) if workload.hours_are == "measured" else ()
        hours = Factor(workload.hours or 0.0, "hours")
        self.gpu_hosts = Charge("GPU hosts at full speed", self._gpu_host, (hours, *busy, self._hosts))
        self._hours = self.gpu_hosts.quantity / workload.hosts

    def options(self) -> tuple[Option, ...]:
        """Return all options; an option that cannot be computed without hours or a price per hour is left out."""
        charges = {
            ("direct", "read directly, as penstock does: in parts of 8 MiB"): self._direct(),
            ("whole-objects", "read directly, one GET for each object"): self._whole_objects(),
            ("single-samples", "each sample is an object, one GET for each"): self._single_samples(),
            ("node-cache", "a cache on each GPU host: later epochs need no request"): self._node_cache(),
            ("converted-copy", "convert once, keep the copy in the store, read that"): self._converted_copy(),
            ("object-lambda", "S3 Object Lambda transforms every object in every epoch"): self._object_lambda(),
            ("gateway", "penstock gateway on a CPU host: transforms once, keeps the results"): self._gateway(),
            ("cpu-cluster", "ps.ray.Workers: CPU hosts of a Ray cluster transform in every epoch"): self._cpu_cluster(),
            ("file-mode", "every GPU host downloads everything before it starts"): self._file_mode(),
            ("mirror", "a file system that mirrors the bucket, such as FSx for Lustre"): self._mirror(),
            ("idle-gpu", "change nothing: the GPUs go on waiting"): self._idle_gpu(),
        }
        return tuple(Option(*names, tuple(found)) for names, found in charges.items() if found)

    def _charge(self, what: str, price: str, *factors: Factor) -> Charge:
        return Charge(what, self._prices[price], factors)

    def _reads(self, objects: Factor, gets: Factor, times: Factor, size: Factor | None = None) -> list[Charge]:
        """The charges for reading objects, by default the data set, a number of times with a number of GETs for each."""
        charges = [self._charge("GET requests", "store_get", objects, gets, times)]
        if self._workload.crosses_regions:
            charges.append(self._charge("transfer between regions", "store_transfer", size or self._size, times))
        return charges

    def _disk(self, price: str, size: Factor, hosts: Factor, hours: float) -> Charge:
        factors = (size, hosts, Factor(hours, "hours"), Factor(MONTH_HOURS, "hours a month", True))
        return self._charge("disk", price, *factors)

    def _transform(self, times: Factor) -> Charge:
        """The charge for transforming all objects on CPU hosts that do nothing else."""
        seconds = Factor(self._workload.transform_s, "s of a vCPU")
        divisors = (Factor(self._workload.cpu_host_vcpus, "vCPUs", True), Factor(3600, "s", True))
        return self._charge("transform", "cpu_host", self._objects, seconds, times, *divisors)

    def _direct(self) -> list[Charge]:
        return self._reads(self._objects, self._part_gets, self._epochs)

    def _whole_objects(self) -> list[Charge]:
        return self._reads(self._objects, self._one_get, self._epochs)

    def _single_samples(self) -> list[Charge]:
        return self._reads(Factor(self._workload.samples_count, "samples"), self._one_get, self._epochs)

    def _node_cache(self) -> list[Charge]:
        # In the worst case every host needs all shards in time, each of them once.
        times = Factor(min(self._workload.epochs, self._workload.hosts), "times")
        disk = self._disk("local_nvme", self._size, self._hosts, self._hours)
        return [*self._reads(self._objects, self._part_gets, times), disk]

    def _converted_copy(self) -> list[Charge]:
        workload = self._workload
        shards = math.ceil(workload.returned_gb * GB / workload.shard_bytes) or 1
        copy, parts = Factor(shards, "shards of the copy"), math.ceil(workload.shard_bytes / PART_BYTES)
        puts = Factor(parts + 2, "requests")  # to begin and to end the upload of each
        months = Factor(workload.months, "months")
        return [
            *self._reads(self._objects, self._part_gets, self._once),
            self._transform(self._once),
            self._charge("PUT requests", "store_put", copy, puts),
            self._charge("storage of the copy", "store_storage", self._returned, months),
            *self._reads(copy, Factor(parts, "GETs"), self._epochs, self._returned),
        ]

    def _object_lambda(self) -> list[Charge]:
        seconds = Factor(self._workload.transform_s, "s")
        memory = Factor(self._workload.function_bytes / GB, "GB of memory")
        return [
            *self._reads(self._objects, self._one_get, self._epochs, self._returned),
            self._charge("GB returned", "object_lambda_returned", self._returned, self._epochs),
            self._charge("function time", "function_time", self._objects, seconds, memory, self._epochs),
            self._charge("function calls", "function_call", self._objects, self._epochs),
        ]

    def _gateway(self) -> list[Charge]:
        one = Factor(1, "hosts")
        hours = max(self._hours, self._transform(self._once).quantity)
        what = "gateway host, for the run or for the transform, whichever is longer"
        return [
            *self._reads(self._objects, self._part_gets, self._once),
            self._charge(what, "cpu_host", one, Factor(hours, "hours")),
            self._disk("volume", self._returned, one, hours),
        ]

    def _cpu_cluster(self) -> list[Charge]:
        charge = self._transform(self._epochs)
        if self._workload.cluster_hosts is not None and self._hours:
            hosts = Factor(self._workload.cluster_hosts, "hosts")
            charge = self._charge("CPU hosts", "cpu_host", hosts, Factor(self._hours, "hours"))
        return [*self._direct(), charge]

    def _file_mode(self) -> list[Charge]:
        rate = Factor(self._workload.download_bytes_per_s / GB, "GB/s", True)
        factors = (self._size, rate, Factor(3600, "s", True), self._hosts)
        waiting = Charge("GPU hosts that wait for the download", self._gpu_host, factors)
        hours = waiting.quantity / self._workload.hosts + self._hours
        disk = self._disk("volume", self._size, self._hosts, hours)
        return [*self._reads(self._objects, self._part_gets, self._hosts), disk, waiting]

    def _mirror(self) -> list[Charge]:
        storage = self._charge("file system", "mirror", self._size, Factor(self._workload.months, "months"))
        return [*self._reads(self._objects, self._part_gets, self._once), storage]

    def _idle_gpu(self) -> list[Charge]:
        if not self.gpu_hosts.dollars:
            return []
        hours, busy = Factor(self._workload.hours or 0.0, "hours"), self._workload.busy_share
        idle = Factor(1 - busy, "of them idle")
        if self._workload.hours_are == "full-speed":
            idle = Factor(1 / busy - 1, "idle hours for each")
        return [Charge("GPU hosts that wait for data", self._gpu_host, (hours, idle, self._hosts))]
