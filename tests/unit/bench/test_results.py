"""Summaries of a record, and what limits the training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from measuring import SAMPLE_BYTES, made_record, turn
from penstock.bench.clients import DECODING, RAW, STEP_ALONE, UNDECODED, WARM
from penstock.bench.record import BenchRecord
from penstock.bench.results import Verdict, allowed_by_parts, summarise, table, verdict
from penstock.bench.running import names_of, selected
from penstock.errors import ConfigError

OURS, OTHER = "penstock", "webdataset, pipe:aws"


def raw(mb_per_s: float, **more: Any) -> dict[str, Any]:
    """Raw reading in parts of 1 MB."""
    return turn(RAW.name, mb_per_s, sample_bytes=1_000_000, **more)


def alone(samples_per_s: float, **more: Any) -> dict[str, Any]:
    return turn(STEP_ALONE.name, samples_per_s, stall_ratio=0.0, **more)


def of(folder: Path, *turns: dict[str, Any], **more: Any) -> Verdict:
    return verdict(made_record(folder, *turns, **more))


def test_a_summary_has_the_spread_of_the_rounds(tmp_path: Path) -> None:
    """The rate counts from the first batch to the last one of each round; the start is a figure of its own."""
    turns = [
        turn(OURS, rate, number=number, first_s=first_s) for number, (rate, first_s) in enumerate([(100, 3), (140, 1)])
    ]
    (found,) = summarise(made_record(tmp_path, *turns))
    assert found.samples_per_s == pytest.approx((120, 100, 140))
    assert found.bytes_per_s == pytest.approx((120e3, 100e3, 140e3))
    assert found.first_batch_s == pytest.approx((2, 1, 3))
    assert found.host_cores == pytest.approx(1.0)


def test_batches_that_were_read_ahead_are_no_rate(tmp_path: Path) -> None:
    """What comes at once after the first batch was read while the data set was made: a rate counts what comes later."""
    ahead = turn(OTHER, 100, batches=100)
    ahead["times_s"][:60] = [ahead["times_s"][0] + index * 1e-4 for index in range(60)]
    ahead["times_s"][60:] = [ahead["times_s"][0] + 0.1 * (index + 1) for index in range(40)]
    (found,) = summarise(made_record(tmp_path, ahead))
    assert found.samples_per_s.median == pytest.approx(100)
    assert found.window_s == pytest.approx(10)


def test_windows_leave_out_the_first_hundred_batches(tmp_path: Path) -> None:
    """Mean and variance are those of complete windows; without two windows, of a hundred mean batches."""
    slow = turn(OURS, 100, batches=350)
    slow["times_s"][200:] = [time_s + 2.0 for time_s in slow["times_s"][200:]]
    short = turn(OTHER, 100, batches=150)
    by_name = {each.name: each for each in summarise(made_record(tmp_path, slow, short))}
    assert by_name[OURS].window_s == pytest.approx((10 + 12) / 2)
    assert by_name[OURS].window_variance_s2 == pytest.approx(2.0)
    assert by_name[OTHER].window_s == pytest.approx(10)
    assert by_name[OTHER].window_variance_s2 == 0.0


def test_one_batch_and_none(tmp_path: Path) -> None:
    """A single batch has the rate of the whole turn; a client that delivered nothing is no row."""
    none = {**turn(OTHER, 10), "batches": 0, "samples": 0, "times_s": [], "counts": [], "sizes": []}
    (found,) = summarise(made_record(tmp_path, turn(OURS, 10, batches=1, first_s=2.0), none))
    assert found.samples_per_s.median == pytest.approx(5.0)


def test_the_busy_share_of_a_gpu(tmp_path: Path) -> None:
    """NVML's share counts where it was measured, otherwise that of the steps, which the table marks."""
    turns = [turn(OURS, 100, stall_ratio=0.25), turn(OTHER, 100, stall_ratio=0.25, gpu=0.5)]
    found = summarise(made_record(tmp_path, *turns, settings={"step": "gpu"}))
    by_name = {each.name: (each.busy_ratio, each.is_gpu_measured) for each in found}
    assert by_name == {OURS: (pytest.approx(0.75), False), OTHER: (0.5, True)}
    column = table(found)[0].index("GPU busy")
    assert {row[column] for row in table(found)[1:]} == {"75% (emulated)", "50%"}


def test_the_table_has_no_samples_of_raw_reading(tmp_path: Path) -> None:
    """Parts of raw reading are no samples, and one cached batch reads no bytes; unknown columns are left out."""
    head, *rows = table(summarise(made_record(tmp_path, raw(50), alone(1000), turn(OURS, 100))))
    by_name = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    assert by_name[RAW.name]["samples/s"] == by_name[RAW.name]["s/100 batches"] == ""
    assert by_name[RAW.name]["MB/s"] == "50"
    assert by_name[STEP_ALONE.name]["MB/s"] == ""
    assert "requests" not in head
    asked = turn(OURS, 100, requests={"GET": 3, "LIST": 1}, fetched_bytes=2_000_000, batches=100)
    head, row = table(summarise(made_record(tmp_path / "asked", asked)))
    assert dict(zip(head, row, strict=True)) | {"requests": "4", "fetched/used": "2.00"} == dict(
        zip(head, row, strict=True)
    )


def test_the_step_is_the_limit(tmp_path: Path) -> None:
    """The loop is as fast as on one cached batch."""
    found = of(tmp_path, alone(100), raw(50), turn(OURS, 95, stall_ratio=0.05), settings={"step": "gpu"})
    assert found.limit == "step"
    assert "95 samples/s, and the step alone takes 100." in found.evidence
    assert "not the bottleneck" in found.advice


def test_loading_slows_the_step_down(tmp_path: Path) -> None:
    """The loop is slower than on one cached batch, though it hardly waits for data."""
    found = of(tmp_path, alone(100), raw(50), turn(OURS, 70, stall_ratio=0.02), settings={"step": "python"})
    assert found.limit == "contention"
    assert "waits for data only 2% of the time" in found.evidence
    assert "processes" in found.advice


def test_the_store_is_the_limit(tmp_path: Path) -> None:
    """The client takes nearly as many bytes as raw reading, also if a step would be faster."""
    for number, more in enumerate([[], [alone(1000)]]):
        found = of(tmp_path / str(number), raw(0.1), turn(OURS, 90, stall_ratio=0.9), *more)
        assert found.limit == "store"
        assert "0.09 of the 0.1 MB/s" in found.evidence


def test_headers_count_as_bytes_of_the_store(tmp_path: Path) -> None:
    """Small samples take more of a tar than their largest field has."""
    assert of(tmp_path / "a", raw(0.2), turn(OURS, 90)).limit == "reading"
    assert of(tmp_path / "b", raw(0.2), turn(OURS, 90), stored_bytes=2000).limit == "store"


def test_a_pipeline_of_the_users(tmp_path: Path) -> None:
    """What it decodes is larger than what is stored, of which the store gives more; reading and its stages are one."""
    decoded = turn(OURS, 100, sample_bytes=224 * 224 * 3, fetched_bytes=600_000)
    for number, (settings, limit) in enumerate(
        [({"pipeline": "train:data"}, "pipeline"), ({"decode": True}, "unknown")]
    ):
        found = of(folder := tmp_path / str(number), raw(5), decoded, settings=settings)
        assert found.limit == limit
        (_, summary) = sorted(summarise(BenchRecord.load(folder)), key=lambda each: each.name == OURS)
        assert summary.bytes_per_s.median == pytest.approx(100 * SAMPLE_BYTES)
        assert summary.fetched_ratio == pytest.approx(600_000 / decoded["samples"] / SAMPLE_BYTES)
    assert "0.1 of the 5 MB/s" in of(tmp_path / "more", raw(5), decoded, settings={"pipeline": "train:data"}).evidence


def test_decoding_is_the_limit(tmp_path: Path) -> None:
    """The same samples come much faster if they are not decoded."""
    decoded = turn(OURS, 100, sample_bytes=224 * 224 * 3, host_cores=1.9)
    found = of(tmp_path, turn(UNDECODED.name, 400), raw(5), decoded, settings={"decode": True})
    assert found.limit == "decoding"
    assert "400 if it does not decode; the store allows 5,000." in found.evidence
    assert "the whole machine 1.9 of 2." in found.evidence
    alone = turn(DECODING.name, 110)
    apart = of(tmp_path / "apart", turn(UNDECODED.name, 400), raw(5), decoded, alone, settings={"decode": True})
    assert "400 if it does not decode, and decodes 110 of a local copy; the store" in apart.evidence


def test_the_store_limits_a_decoding_loop(tmp_path: Path) -> None:
    """If it is no faster without decoding, the stored bytes are compared, and not those of the decoded pictures."""
    decoded = turn(OURS, 100, sample_bytes=224 * 224 * 3)
    turns = (turn(UNDECODED.name, 102), decoded)
    assert of(tmp_path / "a", raw(0.11), *turns, settings={"decode": True}).limit == "store"
    assert of(tmp_path / "b", raw(5), *turns, settings={"decode": True}).limit == "reading"
    rates = {
        each.name: each.bytes_per_s.median
        for each in summarise(made_record(tmp_path / "c", *turns, settings={"decode": True}))
    }
    assert rates == pytest.approx({UNDECODED.name: 102e3, OURS: 100e3})


def test_reading_is_the_limit(tmp_path: Path) -> None:
    """The store gives much more than the client takes; what to do depends on the format."""
    assert "Loader(processes=)" in of(tmp_path / "a", raw(5), turn(OURS, 100)).advice
    busy = of(tmp_path / "c", raw(5), turn(OURS, 100, host_cores=1.9))
    assert busy.limit == "reading"
    assert "more cores" in busy.advice
    found = of(tmp_path / "b", raw(5), turn(OURS, 100), format="objects")
    assert found.limit == "reading"
    assert "Pack samples into shards" in found.advice


def test_a_store_that_throttles(tmp_path: Path) -> None:
    """Answers that ask to slow down are named, whether raw reading counts them or the log of the store."""
    slowed = turn(OURS, 100, requests={"GET": 90, "GET 503": 1200})
    found = of(tmp_path, turn(RAW.name, 5, throttled_count=34), slowed)
    assert "The store asked 1,234 times to slow down" in found.evidence
    assert "slow down" not in of(tmp_path / "b", raw(5), turn(OURS, 100, requests={"GET": 90})).evidence


def test_too_little_was_measured(tmp_path: Path) -> None:
    """Without penstock, without raw reading, or of a decoding loop without reading alone, nothing is claimed."""
    assert of(tmp_path / "a", turn(OTHER, 100, is_ours=False)).limit == "unknown"
    assert of(tmp_path / "b", turn(OURS, 100)).limit == "unknown"
    assert of(tmp_path / "c", raw(5), turn(OURS, 100), settings={"decode": True}).limit == "unknown"
    assert of(tmp_path / "d").limit == "unknown"
    assert of(tmp_path / "f", raw(5), turn(OURS, 100), settings={"decode": True}, is_picture=False).limit == "reading"
    assert "so these figures are rough" in of(tmp_path / "e", raw(5), turn(OURS, 100, seconds=0.2)).evidence


def test_a_faster_library_is_named(tmp_path: Path) -> None:
    """The verdict does not hide that another library delivers more."""
    found = of(tmp_path, raw(5), turn(OURS, 100), turn(OTHER, 300, is_ours=False))
    assert f"{OTHER} was faster: 300 samples/s." in found.evidence


def test_probes_of_a_sweep(tmp_path: Path) -> None:
    """The step and reading count with the settings of the best client, and raw reading with the best settings."""
    turns = [
        {**made, "settings": {"batch": batch}}
        for batch, made in [
            (1, alone(500)), (2, alone(100)), (1, turn(OURS, 60)), (2, turn(OURS, 95)), (1, raw(5)), (2, raw(4)),
        ]
    ]  # fmt: skip
    record = made_record(tmp_path, *turns, settings={"step": "gpu"})
    assert allowed_by_parts(record, summarise(record)) == pytest.approx({STEP_ALONE.name: 100, RAW.name: 5000})
    assert verdict(record).limit == "step"


def test_a_warm_gateway_says_nothing_of_the_store(tmp_path: Path) -> None:
    """What is limited is the fastest way that reads from the store; the cache is a row of the table only."""
    said = of(tmp_path, raw(100), turn(WARM, 900, sample_bytes=1_000_000), turn(OURS, 95, sample_bytes=1_000_000))
    assert said.limit == "store"
    assert said.evidence.startswith(f"{OURS} delivers 95")


def test_a_name_selects_one_client_and_a_beginning_all() -> None:
    """The whole name of a client selects it alone, though others begin so."""
    assert [entry.name for entry in selected(["penstock"])] == ["penstock"]
    assert {entry.name for entry in selected(["Penstock, g"])} == {
        "penstock, gateway cold",
        WARM,
        "penstock, gateway handler",
    }
    assert names_of("penstock, processes") == ("penstock, processes",)
    assert names_of("penstock,webdataset") == ("penstock", "webdataset")
    with pytest.raises(ConfigError, match="no client is called 'penstok'"):
        selected(["penstok"])


def test_more_than_raw_reading_is_no_verdict(tmp_path: Path) -> None:
    """Where a loop outruns raw reading by far, too little was measured to say what limits it."""
    said = of(tmp_path, raw(100), turn(OURS, 300, sample_bytes=1_000_000))
    assert said.limit == "unknown"
    assert "too little data or time" in said.evidence
