"""Arguments of a wrong kind are refused by one of penstock's own errors, which says what was given and what may be."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

import penstock as ps


class Odd:
    """A value that nothing takes; shown the same in every process, for pytest-xdist compares what tests are called."""

    def __repr__(self) -> str:
        return "Odd()"


ODD: list[Any] = [None, True, -1, 0.5, 10**30, float("nan"), "", "x", b"x", [None], {}, Odd()]
NUMBERS = {
    ps.TransportConfig: ["connect_s_max", "connections_max", "receive_buffer_bytes", "proxy"],
    ps.RetryConfig: ["attempts_max", "total_s_max", "backoff_s", "backoff_s_max"],
    ps.HedgeConfig: ["quantile", "ratio_max", "wait_s_min"],
    ps.FetchConfig: ["part_bytes", "requests_min", "requests_max", "gap_bytes_max", "budget_bytes_max"],
}


def refused(call: Any) -> None:
    """`call` may succeed, or fail with an error of the package."""
    with contextlib.suppress(ps.PenstockError):
        call()


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_records_of_settings_refuse_what_they_cannot_hold(odd: Any) -> None:
    """Every field of the configurations, and of a picture's, takes its values or refuses them itself."""
    for kind, names in NUMBERS.items():
        for name in names:
            refused(lambda kind=kind, name=name: kind(**{name: odd}))
    for name in ("height", "mode", "crop", "crop_fraction", "scale", "aspect"):
        refused(lambda name=name: ps.Image("jpg", **{name: odd}))
    refused(lambda: ps.shards("data/").join("t.csv", bytes_max=odd))


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_stores_refuse_odd_keys_and_sizes(odd: Any, tmp_path: Path) -> None:
    """Keys, lists of keys, modes and sizes of a wrong kind are refused, by a store in memory and by one on disk."""
    for store in (ps.connect("memory://odd"), ps.connect(tmp_path)):
        store.write("k", b"abc")
        refused(lambda store=store: store.read(odd))
        refused(lambda store=store: list(store.read_many(odd)))
        refused(lambda store=store: list(store.read_many(["k", odd])))
        refused(lambda store=store: list(store.read_parts(odd)))
        refused(lambda store=store: list(store.read_parts(["k"], requests_max=odd)))
        refused(lambda store=store: store.open("k", odd))
        refused(lambda store=store: store.writer("other", part_bytes=odd).abort())
        refused(lambda store=store: store.delete(odd))
    refused(lambda: ps.open(odd))


def test_a_request_that_is_none_does_not_end_a_reading() -> None:
    """None among the requests is refused; before, it was taken for their end, and what followed was not read."""
    store = ps.connect("memory://none")
    store.write("a", b"1")
    with pytest.raises(ps.ConfigError, match="None is neither a key"):
        list(store.read_many(["a", None, "a"]))  # type: ignore[list-item]
    with pytest.raises(ps.ConfigError, match="None is neither a key"):
        store.read(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_random_access_refuses_an_odd_epoch(odd: Any) -> None:
    """The epoch that random numbers are drawn for is a whole number from 0."""

    def read(key: str) -> bytes:
        return b"1"

    with ps.objects(["a"], read=read).open() as dataset:
        refused(lambda: dataset.read_samples([0], epoch=odd))
        refused(lambda: list(dataset.iter_samples([0], epoch=odd)))
    refused(lambda: ps.objects(["a"], read=read).open(fetch=odd))


def test_a_dict_with_any_keys_is_described() -> None:
    """A dict whose keys are no texts is described as well."""
    assert ps.describe({1: 2}) == "1  2"


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_packing_refuses_odd_options(odd: Any, tmp_path: Path) -> None:
    """Source, destination and every option of packing take their values or refuse them, and none makes it hang."""
    names = [
        "name",
        "fields",
        "labels",
        "label_field",
        "key_field",
        "seed",
        "split",
        "bytes_max",
        "samples_max",
        "jobs",
    ]
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "000.cls").write_bytes(b"1")
    refused(lambda: ps.pack(odd if odd != "" else None, tmp_path / "to"))
    refused(lambda: ps.pack(tmp_path / "files", odd if not isinstance(odd, str) else None))
    for name in [*names, "memory_bytes_max"]:
        refused(lambda name=name: ps.pack(tmp_path / "files", tmp_path / "to", overwrite=True, **{name: odd}))
