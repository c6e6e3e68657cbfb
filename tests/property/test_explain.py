"""The plan that ``explain`` prints, held against what a loader with the same options does."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import penstock as ps
from counting import Counted, counted_stores
from loading import formatted, index, shard
from penstock.config import KIB, MIB, FetchConfig
from penstock.errors import PenstockError
from penstock.loader.explain import Explanation

NO_DEADLINE = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FORMATS = ("tar", "tar.gz", "tfrecord", "parquet", "zip", "mds", "objects")


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Sources, stages and a loader's options; samples of a data set are alike, which an estimate can know."""
    world_size = draw(st.sampled_from([1, 1, 2, 3]))
    return {
        "sources": draw(
            st.lists(
                st.tuples(
                    st.sampled_from(FORMATS),
                    st.lists(st.integers(1, 30), min_size=1, max_size=8),
                    st.sampled_from([100, 5_000, 40_000, 300_000]),
                ),
                min_size=1,
                max_size=2,
            )
        ),
        "stop": draw(st.sampled_from(["all", "first", "repeat"])),
        "window": draw(st.sampled_from([None, 1, 8, 64, 4096])),
        "batch": draw(st.sampled_from([{"n": 1}, {"n": 5}, {"global_size": 6}, {"n": 64}])),
        "drop_last": draw(st.booleans()),
        "take": draw(st.sampled_from([None, None, None, 1, 17])),
        "refill": draw(st.booleans()),
        "lanes": draw(st.sampled_from([None, world_size, 2 * world_size, 6 * world_size])),
        "rank": draw(st.integers(0, world_size - 1)),
        "world_size": world_size,
        "index": draw(st.sampled_from(["auto", "stream", "require"])),
        "has_index": draw(st.booleans()),
        "agrees": draw(st.sampled_from([True, True, True, False])),
        "budget": draw(st.sampled_from([2, 16, 64, 1024])) * MIB,
        "part": draw(st.sampled_from([64 * KIB, 8 * MIB])),
        "gap": draw(st.sampled_from([0, 16 * KIB, 512 * KIB])),
    }


def _write(folder: Path, format_name: str, sizes: list[int], sample_bytes: int) -> Any:
    folder.mkdir()
    for at, size in enumerate(sizes):
        samples: list[dict[str, Any]] = [
            {"__key__": f"{at:03d}{number:05d}", "n": bytes(sample_bytes)} for number in range(size)
        ]
        if format_name == "objects":
            for sample in samples[:6]:
                (folder / f"{sample['__key__']}.n").write_bytes(sample["n"])
            continue
        made = shard(samples) if format_name == "tar" else formatted(format_name, samples)
        (folder / f"s-{at:03d}.{format_name}").write_bytes(made)
    return ps.objects(f"{folder}/") if format_name == "objects" else ps.shards(f"{folder}/")


def _pipeline(folder: Path, job: dict[str, Any]) -> Any:
    leaves = [_write(folder / str(number), *source) for number, source in enumerate(job["sources"])]
    made = leaves[0] if len(leaves) == 1 else ps.mix({leaves[0]: 2, leaves[1]: 1}, stop=job["stop"])
    if job["has_index"]:
        stored = [leaf for leaf, (name, *_) in zip(leaves, job["sources"], strict=True) if name != "objects"]
        for leaf in stored:
            index(leaf, folder / "index")
    if job["window"] is not None:
        made = made.shuffle(window=job["window"])
    if job["take"] is not None:
        made = made.take(job["take"])
    if job["refill"]:
        made = made.filter(lambda _: True, refill=True)
    return made.batch(**job["batch"], drop_last=job["drop_last"])


def _tried(call: Callable[[], Any]) -> tuple[Any, type[PenstockError] | None]:
    try:
        return call(), None
    except PenstockError as error:
        return error, type(error)


TWO_SAMPLES: dict[str, Any] = {
    "sources": [("tar", [1], 100), ("tar", [1], 100)], "stop": "all", "window": None, "batch": {"n": 1}, "drop_last": False,
    "take": 1, "refill": False, "lanes": None, "rank": 1, "world_size": 2, "index": "require", "has_index": True,
    "agrees": True, "budget": 64 * MIB, "part": 8 * MIB, "gap": 0,
}  # fmt: skip
"""A job whose second rank has no sample, and pads its only batch with that of the first one."""


@settings(NO_DEADLINE, max_examples=30)
@given(job=jobs())
@example(job=TWO_SAMPLES)
@example(job={**TWO_SAMPLES, "sources": [("tar", [2], 100)], "take": None, "rank": 2, "world_size": 3})
def test_the_plan_is_what_the_loader_does(job: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals are the same; lanes are the order's; GETs and bytes lie in the range, which is tight."""
    ps.set_process_budget(job["budget"])
    with tempfile.TemporaryDirectory() as name, monkeypatch.context() as patch:
        folder = Path(name)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        made = _pipeline(folder, job)
        options = {
            "lanes": job["lanes"],
            "rank": job["rank"],
            "world_size": job["world_size"],
            "index": job["index"],
            "index_dir": folder / "index",
            "agree": (lambda n: n) if job["agrees"] else None,
            "fetch": FetchConfig(budget_bytes_max=job["budget"], part_bytes=job["part"], gap_bytes_max=job["gap"]),
        }
        plan, refused = _tried(lambda: ps.explain(made, file=io.StringIO(), **options))
        counted = counted_stores(patch)
        ran, failed = _tried(lambda: _run(made, options, counted))
        assert (refused, str(plan) if refused else "") == (failed, str(ran) if failed else "")
        if refused is None:
            # a rank without samples pads batches with the first sample that is left after filtering, whichever that is
            samples_count = sum(
                min(size, 6) if name == "objects" else size for name, sizes, _ in job["sources"] for size in sizes
            )
            pads = job["world_size"] > 1 and (job["refill"] or job["rank"] >= samples_count)
            cuts = job["take"] is not None or job["drop_last"] or len(job["sources"]) > 1 or pads
            _check(plan, ran, counted, cuts=cuts)


def _run(made: Any, options: dict[str, Any], counted: Counted) -> Any:
    with ps.Loader(made, threads=1, **options) as loader:
        order = loader._session.planned().read_plan.order
        counted.clear()
        for _ in loader:
            pass
        return order, loader.statistics()


def _check(plan: Explanation, ran: Any, counted: Counted, *, cuts: bool) -> None:
    order, statistics = ran
    assert plan.lanes_count == order.lanes_count
    assert plan.epoch_requests is not None
    assert plan.epoch_requests_min is not None
    assert plan.epoch_bytes is not None
    assert plan.epoch_bytes_min is not None
    assert plan.epoch_requests_min <= len(counted.spans) <= plan.epoch_requests
    assert plan.epoch_bytes_min <= statistics.bytes <= plan.epoch_bytes
    if not cuts and not {"parquet", "zip"} & {name for source in plan.sources for name in source.formats}:
        assert plan.epoch_requests_min == plan.epoch_requests
