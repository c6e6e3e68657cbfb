"""Limits and defaults: checked at construction, frozen, keyword-only."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import config
from penstock.config import GIB, KIB, MIB, FetchConfig, HedgeConfig, RetryConfig, TransportConfig, check_whole
from penstock.errors import ConfigError

CONFIGS = [TransportConfig, RetryConfig, HedgeConfig, FetchConfig]


@pytest.mark.parametrize("kind", CONFIGS)
def test_defaults_hold_and_nothing_changes(kind: Any) -> None:
    """Defaults are valid; a config is frozen, keyword-only, comparable and has no attribute beyond its fields."""
    made = kind()
    assert made == kind()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(made)[0].name, 1)
    with pytest.raises(TypeError):
        kind(1)
    assert not hasattr(made, "__dict__")


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_field_is_documented(kind: Any) -> None:
    """The docstring names every field."""
    assert [field.name for field in dataclasses.fields(kind) if f"{field.name}:" not in kind.__doc__] == []


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_tuning_guide_shows_the_defaults(kind: Any) -> None:
    """The guide's table states the default of every field."""
    guide = (Path(__file__).parents[2] / "docs/guides/tuning.md").read_text()
    row = re.search(rf"^\| `{kind.__name__}` \| `(.*)` \|$", guide, re.MULTILINE)
    assert row is not None
    stated = eval(f"dict({row[1]})", {"KIB": KIB, "MIB": MIB})
    assert stated == {field.name: field.default for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (TransportConfig, "connect_s_max", 0),
        (TransportConfig, "first_byte_s_max", -1),
        (TransportConfig, "stall_s_max", 0),
        (TransportConfig, "total_s_max", 0),
        (TransportConfig, "connections_max", 0),
        (TransportConfig, "threads_count", 0),
        (TransportConfig, "receive_buffer_bytes", 1000),
        (RetryConfig, "attempts_max", 0),
        (HedgeConfig, "quantile", 1.0),
        (HedgeConfig, "quantile", 0.4),
        (HedgeConfig, "ratio_max", 1.5),
        (FetchConfig, "part_bytes", 1000),
        (FetchConfig, "requests_min", 0),
        (FetchConfig, "requests_min", 100_000),
        (FetchConfig, "gap_bytes_max", -1),
    ],
)
def test_values_out_of_bounds_are_named(kind: Any, name: str, value: float) -> None:
    """A value out of bounds raises a ``ConfigError`` that names the field and the value."""
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        kind(**{name: value})


def test_negative_waits_are_refused() -> None:
    """Backoff and total time cannot be negative."""
    for name in ("total_s_max", "backoff_s", "backoff_s_max"):
        with pytest.raises(ConfigError, match=name):
            RetryConfig(**{name: -1.0})


def test_the_budget_fits_the_memory() -> None:
    """The default budget is at most 2 GiB and an eighth of what this process may use."""
    assert 0 < config.default_budget_bytes() <= min(2 * GIB, config.memory_bytes_max() // 8)


def test_an_integer_of_another_library_is_refused_with_a_hint() -> None:
    """NumPy's integers and PyTorch's tensors are not written to JSON, so the caller says int()."""
    with pytest.raises(ConfigError, match=r"step=.*3.* must be a whole number of at least 0\. Hint: int\(step\)"):
        check_whole("step", np.int64(3), 0)
    for value in (True, 1.0, -1, "1"):
        with pytest.raises(ConfigError) as caught:
            check_whole("step", value, 0)
        assert "Hint" not in str(caught.value)
