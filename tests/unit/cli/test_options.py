"""Groups of options: what typer sees of a command, and what the command gets."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import typer

from penstock.cli.options import ConnectionGroup, SourceConnectionGroup, Stores, expand_groups


@dataclass(frozen=True, kw_only=True)
class SizeGroup:
    """Two options, one of which is required."""

    width: Annotated[int, typer.Option("--width")]
    height: Annotated[int, typer.Option("--height")] = 2


def test_a_group_becomes_its_options() -> None:
    """Each field is a keyword parameter in the group's place; the command gets an instance of the group."""
    called: list[Any] = []

    @expand_groups
    def command(name: str, *, before: bool = False, size: SizeGroup, after: bool = True) -> None:
        """Help."""
        called.append((name, before, size, after))

    parameters = inspect.signature(command).parameters
    assert list(parameters) == ["name", "before", "width", "height", "after"]
    assert parameters["width"].default is inspect.Parameter.empty
    assert parameters["height"].default == 2
    assert (
        get_type_hints(command, include_extras=True)["height"]
        == Annotated[int, parameters["height"].annotation.__metadata__[0]]
    )
    assert command.__doc__ == "Help."
    command(name="a", before=True, width=1, height=3, after=False)
    assert called == [("a", True, SizeGroup(width=1, height=3), False)]


def test_options_of_the_source_replace_those_of_the_target() -> None:
    """Without options of its own SRC is reached like DST; with them the others stay as far as they fit."""
    both = ConnectionGroup(endpoint_url="http://a", region="r", profile="p")
    stores = Stores(both)
    assert stores.for_source(SourceConnectionGroup()) is stores
    anonymous = stores.for_source(SourceConnectionGroup(source_anonymous=True)).connection
    assert anonymous == ConnectionGroup(endpoint_url="http://a", region="r", anonymous=True)
    other = stores.for_source(SourceConnectionGroup(source_endpoint_url="http://b")).connection
    assert other == ConnectionGroup(endpoint_url="http://b", profile="p")
