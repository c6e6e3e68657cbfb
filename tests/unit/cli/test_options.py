"""Groups of options: what typer sees of a command, and what the command gets."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, get_type_hints

from penstock.cli.options import (
    ConnectionGroup,
    SourceConnectionGroup,
    Stores,
    argument,
    expand_groups,
    flag,
    option,
)
from penstock.config import RetryConfig


@dataclass(frozen=True, kw_only=True)
class SizeGroup:
    """Two options, one of which is required."""

    width: int = option("N", "Pixels.", required=True)
    height: int = option("N", "Pixels.", names=("--height", "-h"), default=2)


def test_a_group_becomes_its_options() -> None:
    """Each field is a keyword parameter in the group's place; the command gets an instance of the group."""
    called: list[Any] = []

    @expand_groups
    def command(
        name: str = argument("NAME", "A name."), *, before: bool = flag("Before."), size: SizeGroup, after: bool = True
    ) -> None:
        """Help."""
        called.append((name, before, size, after))

    parameters = inspect.signature(command).parameters
    assert list(parameters) == ["name", "before", "width", "height", "after"]
    assert parameters["width"].default is inspect.Parameter.empty
    assert parameters["name"].default is inspect.Parameter.empty
    assert parameters["before"].default is False
    assert parameters["height"].default == 2
    declared = {
        name: hint.__metadata__[0]
        for name, hint in get_type_hints(command, include_extras=True).items()
        if name != "after"
    }
    names = [(each.default, *(each.param_decls or ())) for each in declared.values()]  # typer keeps the first one there
    assert names == [(...,), ("--before",), ("--width",), ("--height", "-h")]
    assert [each.metavar for each in declared.values()] == ["NAME", None, "N", "N"]
    assert command.__doc__ == "Help."
    command(name="a", before=True, width=1, height=3, after=False)
    assert called == [("a", True, SizeGroup(width=1, height=3), False)]


def test_how_long_commands_wait_for_a_store() -> None:
    """A minute, unless the command serves a program or the user says how long."""
    assert ConnectionGroup().options()["retry"] == RetryConfig(total_s_max=60)
    assert ConnectionGroup().options(retry_s=120)["retry"] == RetryConfig()
    assert ConnectionGroup(retry_s=7.5).options(retry_s=120)["retry"] == RetryConfig(total_s_max=7.5)


def test_options_of_the_source_replace_those_of_the_target() -> None:
    """Without options of its own SRC is reached like DST; with them the others stay as far as they fit."""
    both = ConnectionGroup(endpoint_url="http://a", region="r", profile="p")
    stores = Stores(both)
    assert stores.for_source(SourceConnectionGroup()) is stores
    anonymous = stores.for_source(SourceConnectionGroup(source_anonymous=True)).connection
    assert anonymous == ConnectionGroup(endpoint_url="http://a", region="r", anonymous=True)
    other = stores.for_source(SourceConnectionGroup(source_endpoint_url="http://b")).connection
    assert other == ConnectionGroup(endpoint_url="http://b", profile="p")
