"""The options of a loader are the same wherever they are stated."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, fields

import pytest

import penstock as ps
from penstock.errors import ConfigError
from penstock.loader import LoaderArguments
from penstock.loader.options import LoaderOptions


def test_options_are_stated_alike() -> None:
    """``Loader``, its checked options and the options that other functions pass on have equal names, types and defaults."""
    parameters = list(inspect.signature(ps.Loader).parameters.values())[1:]
    stated = [(each.name, each.annotation, each.default) for each in parameters]
    assert [(each.name, each.type, each.default) for each in fields(LoaderOptions)] == stated
    passed_on = {name: kind.__forward_arg__ for name, kind in LoaderArguments.__annotations__.items()}
    assert list(passed_on.items()) == [(name, kind) for name, kind, _ in stated]


def test_every_option_is_described() -> None:
    """``help(penstock.Loader)`` describes each option, in the order of the signature."""
    text = inspect.getdoc(ps.Loader)
    assert text is not None
    places = [text.index(f"\n    {each.name}: ") for each in fields(LoaderOptions)]
    assert places == sorted(places)


def test_options_are_checked_once_and_never_change() -> None:
    """Options cannot be made outside of their bounds, nor changed afterwards."""
    options = LoaderOptions(lanes=4)
    assert options.given() == {"lanes": 4}
    with pytest.raises(FrozenInstanceError):
        options.lanes = 5  # type: ignore[misc]
    with pytest.raises(ConfigError, match="lanes"):
        LoaderOptions(lanes=0)
