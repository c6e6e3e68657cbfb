"""The model of ``advise``: rates are arithmetic on records, and nothing is measured here."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from penstock.advise.model import break_even_gap_bytes, capacity_bytes_per_s, in_flight, limits_of
from penstock.advise.model import predict_samples_per_s as predict
from penstock.advise.profiles import (
    Configuration,
    ConnectionRate,
    CpuRate,
    DataProfile,
    MachineProfile,
    Profile,
    StoreProfile,
)
from penstock.advise.recommendations import code, flags, recommend

MB = 1_000_000
CPU = (CpuRate(1, 0, 1000.0), CpuRate(8, 0, 8000.0), CpuRate(1, 1, 900.0), CpuRate(8, 8, 7000.0))


def rate(connections: int, request_bytes: int, mb_per_s: float, **more: Any) -> ConnectionRate:
    return ConnectionRate(connections=connections, request_bytes=request_bytes, bytes_per_s=mb_per_s * MB, **more)


STORE = StoreProfile(
    first_byte_p50_s=0.03,
    first_byte_p99_s=0.05,
    rates=(
        rate(1, 8 * MB, 67, body_bytes_per_s=90.0 * MB),
        rate(4, 8 * MB, 270),
        rate(16, 4 * MB, 950),
        rate(64, MB, 1000),
        rate(64, 65_536, 131),
    ),
)
OBJECTS = DataProfile(
    kind="objects", objects_count=10_000, is_sampled=False, objects_bytes=1000 * MB, formats={".jpg": 10_000},
    samples_per_object=1.0, member_bytes={"jpg": 100_000.0}, batch_size=128, cpu_rates=CPU,
)  # fmt: skip
SHARDS = replace(OBJECTS, kind="shards", objects_count=10, samples_per_object=1000.0, formats={"tar": 10})
PROFILE = Profile(
    url="s3://bucket/train/", machine=MachineProfile(cores_count=8, memory_bytes=1 << 34), store=STORE, data=OBJECTS
)


def test_a_rate_is_the_smallest_of_its_parts() -> None:
    """Latency, bandwidth, decoding and the training step each set the pace where they are the smallest."""
    one = Configuration(threads=8, requests_max=1)
    assert predict(PROFILE, one) == pytest.approx(1 / (0.03 + 0.1 / 90), rel=1e-6)
    assert limits_of(PROFILE, one).part == "latency"
    many = Configuration(threads=8)
    assert limits_of(PROFILE, many).part == "bandwidth"
    assert predict(PROFILE, replace(many, threads=1)) == 1000.0
    assert predict(replace(PROFILE, step_samples_per_s=50.0), many) == 50.0
    assert predict(replace(PROFILE, data=None), many) == math.inf


def test_requests_of_objects_and_of_shards() -> None:
    """Objects have a request each; shards are read in parts, of which few lanes have many and a small data set has few."""
    assert in_flight(OBJECTS, Configuration(requests_max=64)) == (64, 100_000)
    connections, part_bytes = in_flight(SHARDS, Configuration())
    assert connections == 24
    assert part_bytes < 8 * MB
    assert in_flight(replace(SHARDS, objects_bytes=2 * MB, objects_count=1), Configuration())[0] == 1
    assert in_flight(replace(SHARDS, lanes=64), Configuration())[0] == 128
    assert in_flight(SHARDS, Configuration(client="blocking", workers=4)) == (4, 100 * MB)


def test_a_blocking_client_decodes_between_its_requests() -> None:
    """Its workers wait and decode in turn, and no more of them decode than there are cores."""
    peer = Configuration(client="blocking", workers=4)
    assert predict(PROFILE, peer) == pytest.approx(4 / (0.03 + 0.1 / 90 + 0.001), rel=1e-6)
    slow = replace(PROFILE, data=replace(OBJECTS, cpu_rates=(CpuRate(1, 0, 10.0), CpuRate(8, 0, 80.0))))
    assert predict(slow, replace(peer, workers=128)) == pytest.approx(80.0)


def test_what_a_request_costs_is_measured_by_small_ones() -> None:
    """Large requests reach the bandwidth, small ones the rate at which small ones were answered."""
    assert capacity_bytes_per_s(STORE, 64, 65_536) == pytest.approx(131 * MB, rel=0.01)
    assert capacity_bytes_per_s(STORE, 64, 8 * MB) == pytest.approx(1000 * MB, rel=0.25)
    small = replace(STORE, rates=(rate(256, 100_000, 300, busy_cores=0.95),))
    assert capacity_bytes_per_s(small, 256, MB) == pytest.approx(3000 * MB)  # we were the limit, not the store
    idle = replace(small, rates=(rate(256, 100_000, 300, busy_cores=0.1),))
    assert capacity_bytes_per_s(idle, 256, MB) == pytest.approx(300 * MB)


def test_a_gap_is_worth_a_wait_or_a_request() -> None:
    """Where connections wait, it is first byte times rate; where they fill the bandwidth, only what a request costs."""
    assert break_even_gap_bytes(STORE, 1) == round(0.03 * 90 * MB)
    assert break_even_gap_bytes(STORE, 256) < 1 * MB
    unknown = replace(STORE, rates=STORE.rates[1:])
    assert break_even_gap_bytes(unknown, 1) == Configuration().gap_bytes_max


def test_processes_only_where_they_pay() -> None:
    """Threads are advised unless processes decode a tenth more; each process gets a lane."""
    assert (recommend(PROFILE).best.threads, recommend(PROFILE).best.processes) == (8, 0)
    python = replace(
        OBJECTS, cpu_rates=(CpuRate(1, 0, 100.0), CpuRate(8, 0, 90.0), CpuRate(1, 1, 95.0), CpuRate(8, 8, 700.0))
    )
    report = recommend(replace(PROFILE, data=python))
    assert (report.best.threads, report.best.processes) == (8, 8)
    assert flags(report).endswith("--try processes=8,lanes=8")
    decoding = next(advice for advice in report.advice if advice.topic == "decoding")
    assert decoding.gain_samples_per_s == pytest.approx(610.0)


def test_a_cluster_where_the_cores_here_do_not_suffice() -> None:
    """As many workers as the step needs cores, with a lane for each; nothing where another part limits."""
    slow = replace(SHARDS, cpu_rates=(CpuRate(1, 0, 100.0), CpuRate(8, 0, 800.0)))
    report = recommend(replace(PROFILE, data=slow, step_samples_per_s=3000.0))
    (advice,) = (each for each in report.advice if each.topic == "cluster")
    assert "workers=ps.ray.Workers(count=30), lanes=30)" in advice.text
    assert advice.evidence == (
        "3,000 samples/s * 10 ms to decode a sample = 30.0 cores; this machine decodes 800 samples/s"
    )
    assert (advice.samples_per_s, advice.gain_samples_per_s) == (3000.0, 2200.0)
    heavy = recommend(
        replace(PROFILE, data=replace(slow, lanes=64, cpu_rates=(CpuRate(1, 0, 1.0), CpuRate(8, 0, 8.0))))
    )
    (most,) = (each for each in heavy.advice if each.topic == "cluster")
    assert "Workers(count=512), lanes=512)" in most.text
    assert most.samples_per_s == 512.0
    for step in (500.0, 850.0):
        assert "cluster" not in {
            each.topic for each in recommend(replace(PROFILE, data=slow, step_samples_per_s=step)).advice
        }


def test_a_store_that_throttles_gets_fewer_requests() -> None:
    """At most half of the connections at which it throttled, and what it sends then is what it sent."""
    rates = (rate(16, 100_000, 50), rate(64, 100_000, 180), rate(256, 100_000, 90, throttled_ratio=0.2))
    profile = replace(PROFILE, store=replace(STORE, rates=rates))
    report = recommend(profile)
    assert report.best.requests_max == 128
    assert predict(profile, report.best) > predict(profile, report.now)
    assert "requests_max=128" in code(report)
    compile(code(report), "advised", "exec")


def test_cache_only_if_it_pays_and_fits() -> None:
    """A cache is advised for several epochs of a store that is slower than decoding and disk; a full disk holds little."""
    disk = {"disk_path": "/nvme", "disk_free_bytes": 10**12, "disk_bytes_per_s": 2e9}
    slow = replace(STORE, rates=(rate(256, 100_000, 20),))
    profile = replace(PROFILE, store=slow, epochs=10, machine=replace(PROFILE.machine, **disk))
    report = recommend(profile)
    assert report.best.is_cached
    (cache,) = (advice for advice in report.advice if advice.topic == "cache")
    assert cache.samples_per_s == pytest.approx(10 / (1 / 200 + 9 / 8000), rel=0.01)
    assert "/nvme/penstock:1100MB" in cache.text
    for other in (
        replace(profile, epochs=1),
        replace(profile, machine=replace(profile.machine, disk_free_bytes=20 * MB)),
        replace(profile, machine=replace(profile.machine, disk_bytes_per_s=20e6)),
        replace(profile, machine=PROFILE.machine),
    ):
        assert not recommend(other).best.is_cached


def test_packing_only_if_it_pays() -> None:
    """Small objects are packed, because blocking workers wait for each of them; large shards are left as they are."""
    assert recommend(PROFILE).best.shard_bytes is not None
    assert recommend(replace(PROFILE, data=SHARDS)).best.shard_bytes is None
    near = replace(STORE, first_byte_p50_s=1e-5, rates=(rate(16, 100_000, 900),))
    assert recommend(replace(PROFILE, store=near)).best.shard_bytes is None


def test_the_limit_is_named() -> None:
    """Data is not the limit if the step is slower; otherwise the part is named, with all rates."""
    slow_step = recommend(replace(PROFILE, step_samples_per_s=100.0)).advice[0]
    assert slow_step.text.startswith("data is not the limit")
    fast_step = recommend(replace(PROFILE, step_samples_per_s=1e6)).advice[0]
    assert "by the bandwidth" in fast_step.text
    assert "cores / decode = 8,000 samples/s" in fast_step.evidence


def test_fields_and_index() -> None:
    """Members that are read and not used are named with their share; shards without an index should get one."""
    data = replace(SHARDS, member_bytes={"jpg": 60_000.0, "depth": 40_000.0}, unused_members=("depth",))
    topics = {advice.topic: advice for advice in recommend(replace(PROFILE, data=data)).advice}
    assert topics["fields"].evidence == "40% of the bytes of a sample"
    assert "--fields jpg=jpg" in topics["fields"].command
    assert topics["index"].command == "penstock index s3://bucket/train/"
    indexed = recommend(replace(PROFILE, data=replace(data, is_indexed=True)))
    assert {advice.topic: advice.text for advice in indexed.advice}["index"] == "keep the index"


def test_parts_that_are_missing_lead_to_no_advice() -> None:
    """An interrupted measurement has what it has."""
    assert recommend(replace(PROFILE, data=None)).advice == ()
    assert [advice.topic for advice in recommend(replace(PROFILE, store=None)).advice] == ["limit", "decoding"]
    undecoded = recommend(replace(PROFILE, data=replace(OBJECTS, cpu_rates=())))
    assert "decoding" not in [advice.topic for advice in undecoded.advice]


def test_commands_name_the_connection_and_the_pipeline() -> None:
    """What is printed can be pasted: options of the connection, and the user's pipeline, are part of it."""
    profile = replace(
        PROFILE, options={"endpoint_url": "http://127.0.0.1:9000", "anonymous": True}, pipeline_name="train:data"
    )
    report = recommend(profile)
    expected = (
        "penstock advise s3://bucket/train/ --endpoint-url http://127.0.0.1:9000 --anonymous --pipeline train:data"
    )
    assert flags(report).startswith(f"{expected} --try ")
    assert "from train import data\n\npipeline = data\n" in code(report)
    made = replace(report, profile=replace(profile, is_pipeline_function=True))
    assert "from train import data\n\npipeline = data()\n" in code(made)
    assert "anonymous=True" in code(replace(report, profile=replace(profile, pipeline_name=None)))


def test_a_packed_copy_lies_beside_what_a_pattern_names() -> None:
    """The copy is not written into its own source, and what is advised for it afterwards asks the same store."""
    profile = replace(
        PROFILE, url="s3://bucket/train/*.jpg", options={"endpoint_url": "http://127.0.0.1:9000", "anonymous": True}
    )
    (advice,) = (each for each in recommend(profile).advice if each.topic == "shard size")
    pack, then = advice.command.split(" && ")
    assert pack.startswith("penstock pack 's3://bucket/train/*.jpg' --endpoint-url http://127.0.0.1:9000 --anonymous ")
    assert " s3://bucket/train-packed/ " in pack
    assert then == "penstock advise s3://bucket/train-packed/ --endpoint-url http://127.0.0.1:9000 --anonymous"
