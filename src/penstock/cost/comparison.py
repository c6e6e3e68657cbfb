"""The options side by side: what each costs in all, for other epochs and sizes, and from which epoch on it is cheaper."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING

from penstock.cost.options import Bill
from penstock.cost.prices import Prices
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.cost.options import Charge, Option
    from penstock.cost.workload import Workload

EPOCHS = (1, 2, 5, 10, 30, 100)
"""Epochs for which sensitivity is shown."""

OBJECT_BYTES = (100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
"""Object sizes for which sensitivity is shown."""

BREAK_EVEN_EPOCHS_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a training run costs with each option.

    Attributes:
        workload: The run.
        hosts: The charge for the GPU hosts, if they never wait for data.
        options: The options.
    """

    workload: Workload
    hosts: Charge
    options: tuple[Option, ...]

    def total_dollars(self, option: Option) -> float:
        """Return hours x hosts x price + option, in US dollars; the hours are those at full speed."""
        return self.hosts.dollars + option.dollars

    def dollars(self) -> dict[str, float]:
        """Return the US dollars of each option by its name, without the GPU hosts."""
        return {each.name: each.dollars for each in self.options}


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """From which number of epochs on an option is cheaper than another one, and for fewer it is not.

    Attributes:
        option: Name of the option that becomes cheaper.
        instead_of: Name of the other option.
        epochs: The least number of epochs for which it is cheaper.
    """

    option: str
    instead_of: str
    epochs: int


def estimate(workload: Workload, prices: Prices | None = None) -> Estimate:
    """Return what a training run costs with each option.

    Args:
        workload: The run.
        prices: Prices; None takes ``Prices.load()``.

    Returns:
        The options and their charges in US dollars. Without hours or a price per hour, what depends on them is left out.

    Raises:
        ConfigError: The GPUs are not busy all the time, and the workload does not say whether its hours were measured
            or are those at full speed; ``Workload.readings`` returns both.
    """
    readings = workload.readings()
    if len(readings) > 1:
        what = f"{workload.hours:g} h with the GPUs busy for {workload.busy_share:.0%}: is that the time with the bottleneck?"
        raise ConfigError(what, hint="hours_are='measured' if it is, hours_are='full-speed' if it is the time without")
    bill = Bill(readings[0], Prices.load() if prices is None else prices)
    return Estimate(workload=readings[0], hosts=bill.gpu_hosts, options=bill.options())


def by_epochs(workload: Workload, prices: Prices, epochs: Iterable[int] = EPOCHS) -> dict[int, dict[str, float]]:
    """Return the US dollars of each option by its name, for several numbers of epochs."""
    return {each: estimate(workload.at_epochs(each), prices).dollars() for each in sorted({*epochs, workload.epochs})}


def by_object_bytes(
    workload: Workload, prices: Prices, sizes: Iterable[int] = OBJECT_BYTES
) -> dict[int, dict[str, float]]:
    """Return the US dollars of each option by its name, if the same bytes were in objects of other sizes."""
    own = max(1, round(workload.object_bytes))
    found = {each: estimate(workload.at_object_bytes(each), prices).dollars() for each in sizes}
    return dict(sorted((found | {own: estimate(workload, prices).dollars()}).items()))


def break_even(workload: Workload, prices: Prices) -> tuple[BreakEven, ...]:
    """Return all pairs of options of which one becomes cheaper than the other as epochs grow, up to 10 000."""
    table: dict[int, dict[str, float]] = {}

    def at(epochs: int) -> dict[str, float]:
        if epochs not in table:
            table[epochs] = estimate(workload.at_epochs(epochs), prices).dollars()
        return table[epochs]

    most = BREAK_EVEN_EPOCHS_MAX
    found = []
    for option, other in permutations(at(1), 2):

        def is_cheaper(epochs: int, option: str = option, other: str = other) -> bool:
            return at(epochs)[option] < at(epochs)[other]

        if at(1)[option] >= at(1)[other] and is_cheaper(most):
            # But for a bend where a transform is done or each host has its copy, costs grow evenly: the sign changes once.
            epochs = 1 + bisect_left(range(1, most), True, key=is_cheaper)
            found.append(BreakEven(option=option, instead_of=other, epochs=epochs))
    return tuple(sorted(found, key=lambda each: each.epochs))
