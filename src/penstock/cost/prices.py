"""Prices: a table of a dated TOML file, of which each line can be replaced."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Self

from penstock.config import check_number
from penstock.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

STORE_PREFIX = "store_"
"""What the names of prices that the store itself takes begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What one thing costs.

    Attributes:
        value: US dollars for `per` units.
        per: Number of units that `value` pays, e.g. 1 000 for requests.
        unit: The thing that is paid for, in the plural: ``"requests"``, ``"GB-months"``. A GB is 10^9 bytes.
        region: Region in which the price applies.
        source: Page or contract in which it was read.
        date: Day on which it was read or written there, as YYYY-MM-DD.

    Raises:
        ConfigError: A value is negative or no number, or a text is none.
    """

    value: float
    per: float = 1
    unit: str
    region: str = "any"
    source: str = "given"
    date: str = ""

    def __post_init__(self) -> None:
        check_number("value", self.value, 0)
        check_number("per", self.per, 0, opened=True)
        for name in ("unit", "region", "source"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}={getattr(self, name)!r} of a price must be a text")


class Prices(dict[str, Price]):
    """Prices by their names, in US dollars."""

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> Self:
        """Return the prices that come with penstock, list prices of Amazon in us-east-1.

        Args:
            path: TOML file of prices that replace some or all of them; a line needs only what differs.

        Raises:
            ConfigError: The file is not TOML, names an unknown price, or holds a value that cannot be used.
            OSError: The file cannot be read.

        Cost: Reads one or two small files.
        """
        lines = tomllib.loads(files(__package__).joinpath("prices.toml").read_text())
        if path is not None:
            try:
                given = tomllib.loads(Path(path).read_text())
            except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
                raise ConfigError(f"{path} is not TOML: {error}") from error
            _check_known(f"price in {path}", given, lines)
            for name, line in given.items():
                if not isinstance(line, dict):
                    raise ConfigError(f"{path}: {name} must be a table", hint=f"[{name}], and below it: value = 0.001")
                lines[name] |= {"source": str(path), "date": ""} | line
        for name, line in lines.items():
            _check_known(f"entry of [{name}]", line, Price.__slots__)
        return cls({name: Price(**line | {"date": str(line["date"])}) for name, line in lines.items()})

    def replacing(self, values: Mapping[str, float]) -> Self:
        """Return prices of which some have other values, in the same units.

        Args:
            values: US dollars by name, for as many units as the price that is replaced.

        Raises:
            ConfigError: A name is unknown, or a value is negative or no number.
        """
        _check_known("price", values, self)
        changed = {name: Price(value=value, per=self[name].per, unit=self[name].unit) for name, value in values.items()}
        return type(self)(self | changed)

    def on_premises(self) -> Self:
        """Return prices of which those of the store are zero; hosts, disks and functions keep theirs."""
        return self.replacing({name: 0.0 for name in self if name.startswith(STORE_PREFIX)})


def _check_known(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    names = list(known)
    for name in given:
        if name not in names:
            raise ConfigError(f"there is no {what} with the name {name!r}", hint=f"there are {', '.join(names)}")
