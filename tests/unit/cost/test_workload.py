"""The training run: derived sizes, the two senses of hours, and rates of a benchmark."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.config import MIB, FetchConfig
from penstock.cost import Workload, estimate
from penstock.errors import ConfigError
from penstock.fetch.plan import cut
from penstock.types import ByteRange

RUN = Workload(objects_count=1000, size_bytes=115_000_000, hours=20, busy=0.25, host_dollars_per_hour=28)


def test_it_asks_which_hours() -> None:
    """Hours that may have two senses are an error that names both; `readings` gives each of them, the measured first."""
    with pytest.raises(
        ConfigError, match=r"20 h with the GPUs busy for 25%.*hours_are='measured'.*hours_are='full-speed'"
    ):
        estimate(RUN)
    assert [each.hours_are for each in RUN.readings()] == ["measured", "full-speed"]
    assert len(replace(RUN, busy=1.0).readings()) == len(replace(RUN, hours=None).readings()) == 1


def test_hours_follow_from_rates() -> None:
    """The step's rate gives hours at full speed, with a delivered one also the busy share; that one alone measured hours."""
    run = replace(RUN, hours=None, busy=None, epochs=36, hosts=2, step_samples_per_s=10.0)
    (found,) = run.readings()
    assert (found.hours, found.hours_are, found.busy_share) == (0.5, "full-speed", 1.0)
    both = replace(run, delivered_samples_per_s=5.0)
    (found,) = both.readings()
    assert (found.hours, found.busy_share) == (0.5, 0.5)
    wasted = {option.name: option.dollars for option in estimate(both).options}["idle-gpu"]
    assert wasted == pytest.approx(0.5 * 2 * 28)
    (found,) = replace(run, step_samples_per_s=None, delivered_samples_per_s=5.0, busy=0.5).readings()
    assert (found.hours, found.hours_are) == (1.0, "measured")


def test_a_faster_loader_than_the_step() -> None:
    """Data that arrives faster than the step takes it keeps the GPUs busy, and not more."""
    assert replace(RUN, busy=None, step_samples_per_s=10.0, delivered_samples_per_s=500.0).busy_share == 1.0


def test_samples() -> None:
    """A sample is 115 000 bytes, or an object if that is smaller, or as given."""
    assert RUN.samples_count == 1000
    assert replace(RUN, objects_count=10).samples_count == 1000
    assert replace(RUN, objects_count=115_000).samples_count == 115_000
    assert replace(RUN, sample_bytes=1000).samples_count == 115_000


@pytest.mark.parametrize("size_bytes", [0, 1, MIB, 12 * MIB, 12 * MIB + 1, 16 * MIB, 16 * MIB + 1, 100 * MIB + 7])
def test_parts_are_those_of_a_read(size_bytes: int) -> None:
    """The GETs of an object are as many as the reading side cuts it into."""
    cut_into = cut(ByteRange(0, size_bytes), FetchConfig().part_bytes)
    assert Workload(objects_count=1, size_bytes=size_bytes).object_parts == len(cut_into)


def test_other_object_sizes_keep_the_data() -> None:
    """In objects of another size, bytes, samples and the time of all transforms are the same."""
    other = replace(RUN, function_s=2.0).at_object_bytes(1_000_000)
    assert (other.objects_count, other.size_bytes, other.samples_count) == (115, 115_000_000, 1000)
    assert other.transform_s * other.objects_count == pytest.approx(2000)
    assert RUN.at_object_bytes(10**12).objects_count == 1


@pytest.mark.parametrize(
    "wrong",
    [{"objects_count": 0}, {"epochs": 0}, {"busy": 0.0}, {"busy": 25}, {"hours": -1}, {"hours_are": "wall"}, {"hosts": 1.5},
     {"size_bytes": -1}, {"step_samples_per_s": 0}, {"function_s": float("nan")}],
    ids=str,
)  # fmt: skip
def test_values_out_of_bounds(wrong: dict[str, object]) -> None:
    """A value that makes no sense is an error that names it."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        replace(RUN, **wrong)
