"""The tables of a comparison, as texts that the terminal and the page show."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cost.comparison import break_even, by_epochs, by_object_bytes
from penstock.cost.options import dollars_text, number, price_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock.cost.comparison import Estimate
    from penstock.cost.prices import Prices


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts. Cells that begin with ``$`` are amounts.

    Attributes:
        title: Title of the table.
        note: A sentence below the title; may be empty.
        columns: Heads of the columns.
        rows: Cells of each row, at least one row. The first cell names the row.
    """

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def options_table(estimates: Sequence[Estimate]) -> Table:
    """Return the options side by side, for each estimate with its cost alone and with the GPU hosts."""
    has_hosts = any(each.hosts.dollars for each in estimates)
    heads = ["", "what it is"]
    for each in estimates:
        sense = f" ({each.workload.hours:g} h {each.workload.hours_are})" if len(estimates) > 1 else ""
        heads += [f"option{sense}", f"total{sense}"] if has_hosts else [f"option{sense}"]
    rows = []
    for options in zip(*(each.options for each in estimates), strict=True):
        cells = [options[0].name, options[0].title]
        for each, option in zip(estimates, options, strict=True):
            amounts = [option.dollars, each.total_dollars(option)] if has_hosts else [option.dollars]
            cells += map(dollars_text, amounts)
        rows.append(tuple(cells))
    note = "Totals need --price-per-hour, and --hours, --step-rate or --bench."
    if has_hosts:
        hosts = " or ".join(f"{each.hosts.formula} ({each.workload.hours_are} hours)" for each in estimates)
        note = f"Total = hours at full speed x hosts x price + option. GPU hosts: {hosts}."
    return Table("Options", note, tuple(heads), tuple(rows))


def formulas_table(estimate: Estimate) -> Table:
    """Return the formula of each charge of each option."""
    rows = [
        (option.name if index == 0 else "", charge.what, charge.formula)
        for option in estimate.options
        for index, charge in enumerate(option.charges)
    ]
    return Table("Formulas", "", ("", "paid for", "formula"), tuple(rows))


def further_tables(estimate: Estimate, prices: Prices) -> list[Table]:
    """Return how options depend on epochs and on the size of objects, and from which epochs on they are cheaper."""
    workload = estimate.workload
    sizes = by_object_bytes(workload, prices)
    overtaken: dict[str, list[str]] = {}
    for each in break_even(workload, prices):
        overtaken.setdefault(each.option, []).append(f"{each.instead_of} from {each.epochs}")
    tables = [
        _sensitivity("By epochs", {number(each): row for each, row in by_epochs(workload, prices).items()}),
        _sensitivity("By size of an object", {f"{number(each / 10**6)} MB": row for each, row in sizes.items()}),
    ]
    if overtaken:
        note = "These cost as much as others or more for few epochs, and less from the given number of epochs on."
        rows = tuple((option, ", ".join(others)) for option, others in overtaken.items())
        tables.append(Table("Break-even epochs", note, ("", "costs less than"), rows))
    return tables


def prices_table(prices: Prices) -> Table:
    """Return all prices with their regions, sources and dates."""
    rows = [(name, price_text(each), each.region, each.date, each.source) for name, each in prices.items()]
    return Table("Prices", "", ("", "price", "region", "date", "source"), tuple(rows))


def _sensitivity(title: str, found: Mapping[str, Mapping[str, float]]) -> Table:
    names = next(iter(found.values()))
    rows = tuple((name, *(dollars_text(each[name]) for each in found.values())) for name in names)
    return Table(title, "Options without the GPU hosts.", ("", *found), rows)
