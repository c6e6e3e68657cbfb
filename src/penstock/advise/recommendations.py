"""What follows from a measurement: pure functions that choose a configuration, and give each choice its evidence and gain."""

from __future__ import annotations

import math
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.advise.model import break_even_gap_bytes, in_flight, limits_of, predict_samples_per_s
from penstock.advise.profiles import Advice, Configuration, Report
from penstock.ray.workers import COUNT_MAX
from penstock.text.patterns import is_pattern, split_glob
from penstock.text.sizes import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from penstock.advise.profiles import CpuRate, DataProfile, Profile, StoreProfile

GAIN_MIN = 1.1  # what gains less than a tenth is not worth a change
DECODE_GAIN_MIN = 1.15  # beside other programs, rates of decoding differ by a tenth by themselves
NEAR = 0.97  # rates that differ by less than this are alike
REQUESTS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
WORKERS = (1, 2, 4, 8, 16, 32, 64, 128)
SHARD_BYTES = (4_000_000, 16_000_000, 64_000_000, 256_000_000)
SHARDS_PER_LANE_MIN = 2  # fewer for each lane, or worker, leave some of them without work at the end of an epoch
SHARDS_MANY = 1000  # data that makes more shards is cut into larger ones...
SHARD_BYTES_USUAL = 64_000_000  # ...up to this size
DISK_RATIO_MAX = 0.9  # a cache may take this share of the free disk


def recommend(profile: Profile) -> Report:
    """Return what follows from a measurement; parts that were not measured lead to no advice."""
    now = Configuration(threads=profile.machine.cores_count)
    plain = _with_requests(profile, _with_decoding(profile, now))
    peer = replace(plain, client="blocking")
    workers = _near_best({count: min(limits_of(profile, replace(peer, workers=count))) for count in WORKERS})
    plain = replace(plain, workers=workers[0])  # the fewest with which a blocking client is near its best
    if profile.store is not None:
        plain = replace(plain, gap_bytes_max=break_even_gap_bytes(profile.store, plain.requests_max))
    is_cached = _cache_factor(profile, plain) >= GAIN_MIN
    best = replace(plain, shard_bytes=_shard_bytes(profile, plain), is_cached=is_cached)
    report = Report(profile=profile, now=now, best=best)
    return replace(report, advice=tuple(_advice(report, plain)))


def _with_decoding(profile: Profile, best: Configuration) -> Configuration:
    """The setting that decodes fastest; another one than the default only where it gains clearly."""
    rates = profile.data.cpu_rates if profile.data else ()
    for rate in sorted(rates, key=lambda rate: (rate.processes, -rate.threads)):
        found = replace(best, threads=rate.threads, processes=rate.processes)
        if limits_of(profile, found).decode > DECODE_GAIN_MIN * limits_of(profile, best).decode:
            best = found
    return best


def _with_requests(profile: Profile, configuration: Configuration) -> Configuration:
    """The default number of requests, unless the store throttles it, or more of them bring more."""
    throttled = None if profile.store is None else profile.store.throttled_connections
    allowed = [count for count in REQUESTS if throttled is None or count <= max(4, throttled // 2)]
    good = _near_best({count: min(limits_of(profile, replace(configuration, requests_max=count))) for count in allowed})
    if configuration.requests_max in good:
        return configuration
    return replace(configuration, requests_max=good[0] if throttled is None else good[-1])


def _near_best(rates: Mapping[int, float]) -> list[int]:
    """The choices whose rate is near the largest."""
    return [choice for choice, rate in rates.items() if rate >= NEAR * max(rates.values())]


def _shard_bytes(profile: Profile, plain: Configuration) -> int | None:
    """The smallest size of shards with which our loader and few blocking workers are near their best; None: no gain."""
    data, cores_count = profile.data, profile.machine.cores_count
    if data is None or profile.store is None:
        return None
    shards_min = SHARDS_PER_LANE_MIN * max(data.lanes, cores_count)
    sizes = good = [size for size in SHARD_BYTES if size * shards_min <= data.objects_bytes]
    has_gain = False
    for client in (plain, replace(plain, client="blocking", workers=min(plain.workers, 2 * cores_count))):
        limits = {size: limits_of(profile, replace(client, shard_bytes=size)) for size in sizes}
        near = _near_best({size: min(found.latency, found.bandwidth) for size, found in limits.items()})
        good = [size for size in good if size in near]
        has_gain |= max(map(min, limits.values()), default=0.0) >= GAIN_MIN * min(limits_of(profile, client))
    if not has_gain:
        return None
    many = [size for size in sizes if size <= SHARD_BYTES_USUAL and data.objects_bytes > SHARDS_MANY * size]
    return max([min(good, default=sizes[-1]), *many])


def _cache_factor(profile: Profile, plain: Configuration) -> float:
    """How many times faster all epochs together are with a cache on the disk, whose first epoch fills it."""
    rate = predict_samples_per_s(profile, plain)
    cached = max(rate, predict_samples_per_s(profile, replace(plain, is_cached=True)))
    if profile.data is None or not math.isfinite(cached):
        return 1.0
    hits = min(1.0, DISK_RATIO_MAX * profile.machine.disk_free_bytes / max(1, profile.data.objects_bytes))
    later_s = hits / cached + (1 - hits) / rate
    return profile.epochs / rate / (1 / rate + (profile.epochs - 1) * later_s)


# ── the advice ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _advice(report: Report, plain: Configuration) -> Iterator[Advice]:
    """All that can be said; `plain` is the best configuration for the data as it is, without a cache."""
    data, store = report.profile.data, report.profile.store
    if data is None:
        return
    yield _of_limit(report, data)
    if data.cpu_rates:
        yield _of_decoding(report, data)
        yield from _of_cluster(report, data, plain)
    if store is not None:
        yield from _of_requests(report, data, store, plain)
        yield from _of_storage(report, data, plain)
        yield _of_random_access(report, store)
    yield from _of_contents(report, data, plain)
    if store is not None and data.cpu_rates:
        yield _of_door(report, data, plain)


def _of_limit(report: Report, data: DataProfile) -> Advice:
    limits, step = limits_of(report.profile, report.now), report.profile.step_samples_per_s
    connections, request_bytes = in_flight(data, report.now)
    evidence = (
        f"{connections} requests of {format_bytes(request_bytes)} in flight / their time = {rate_text(limits.latency)}, "
        f"bandwidth / size = {rate_text(limits.bandwidth)}, cores / decode = {rate_text(limits.decode)}, "
        f"training step = {rate_text(step)}; a Loader delivered {rate_text(data.samples_per_s or math.inf)}"
    )
    part = {"latency": "latency", "bandwidth": "the bandwidth", "decode": "decoding"}[limits.part]
    text = f"data is the limit, by {part}: the training step waits"
    if not math.isfinite(step):
        text = f"{part} limits reading; a training step (--step, --step-ms) to compare it with was not given"
    elif min(*limits, data.samples_per_s or math.inf) >= step:
        text = "data is not the limit: it comes faster than the training step takes it"
    return Advice("limit", text, evidence, flags(replace(report, best=report.now)))


def _of_decoding(report: Report, data: DataProfile) -> Advice:
    evidence = ", ".join(f"{_crew(rate)} {rate_text(rate.samples_per_s)}" for rate in data.cpu_rates)
    then = replace(report.now, threads=report.best.threads, processes=report.best.processes)
    made = Advice("decoding", f"decode in {_crew(then)}", evidence, flags(replace(report, best=then)))
    return _gaining(made, report.profile, report.now, then)


def _of_cluster(report: Report, data: DataProfile, plain: Configuration) -> Iterator[Advice]:
    """Cores of other machines, where those of this one decode less than the store gives and the step takes."""
    limits = limits_of(report.profile, plain)
    wanted = min(limits.latency, limits.bandwidth, report.profile.step_samples_per_s)
    if not math.isfinite(wanted) or wanted < GAIN_MIN * limits.decode:
        return
    count = min(COUNT_MAX, math.ceil(wanted * data.decode_s))
    lanes = f", lanes={count}" if count > data.lanes else ""
    cores = (
        f"{rate_text(wanted)} * {1e3 * data.decode_s:.3g} ms to decode a sample = {wanted * data.decode_s:.1f} cores"
    )
    rate = min(wanted, count / data.decode_s)
    text = f"Loader(pipeline, workers=ps.ray.Workers(count={count}){lanes}): cores of a Ray cluster decode"
    evidence = f"{cores}; this machine decodes {rate_text(limits.decode)}"
    yield Advice("cluster", text, evidence, "", rate, rate - limits.decode)


def _of_requests(report: Report, data: DataProfile, store: StoreProfile, plain: Configuration) -> Iterator[Advice]:
    """What many requests in flight gain: for the loader, and for a library whose workers each have one."""
    count, throttled, profile = report.best.requests_max, store.throttled_connections, report.profile
    curve = ", ".join(f"{rate.connections}: {format_bytes(rate.bytes_per_s)}/s" for rate in store.rates)
    kept, _ = in_flight(data, report.best)
    evidence = f"bandwidth by connections {curve}; knee at {store.knee_connections}; this data keeps {kept} in flight"
    text = f"FetchConfig(requests_max={count})"
    if throttled is not None:
        text = f"the store throttles at {throttled} connections: {text}"
    elif count == report.now.requests_max:
        text = "leave requests_max as it is: the number of requests follows the store by itself"
    made = Advice("concurrency", text, evidence, _try(profile, {"requests_max": count}))
    yield _gaining(made, profile, report.now, replace(report.now, requests_max=count))
    one, many = (replace(plain, client="blocking", workers=each) for each in (1, plain.workers))
    read_ms = 1e3 * (store.first_byte_p50_s + data.object_bytes / store.connection_bytes_per_s)
    decode_ms = 1e3 * data.decode_s * data.samples_per_object
    evidence = f"a worker takes {read_ms:.1f} ms to read an object, then {decode_ms:.1f} ms to decode it"
    text = f"a library that reads one object at a time needs num_workers={plain.workers}; a penstock Loader needs none"
    yield _gaining(Advice("workers", text, evidence, f"penstock info {_url(profile)}"), profile, one, many)


def _of_storage(report: Report, data: DataProfile, plain: Configuration) -> Iterator[Advice]:
    """Where the data should lie: in larger shards, in a cache on this machine."""
    profile, machine, size = report.profile, report.profile.machine, report.best.shard_bytes
    evidence = f"{data.objects_count} {data.kind} of {format_bytes(data.object_bytes)} on average"
    if size is None:
        yield Advice("shard size", f"leave the {data.kind} as they are: packing gains less than a tenth", evidence)
    else:
        peers = [replace(plain, client="blocking", workers=4, shard_bytes=each) for each in (None, size)]
        rates = [rate_text(predict_samples_per_s(profile, peer)) for peer in peers]
        evidence += f"; 4 workers that read one object at a time: {rates[0]} now, {rates[1]} then"
        verb, packed = "pack" if data.kind == "objects" else "convert --to tar", _packed(profile)
        megabytes = size // 10**6
        then = f"penstock advise {_url(replace(profile, url=packed))}"
        command = f"penstock {verb} {_url(profile)} {shlex.quote(packed)} --shard-size {megabytes}MB && {then}"
        made = Advice("shard size", f"pack it into shards of {megabytes} MB", evidence, command)
        yield _gaining(made, profile, plain, replace(plain, shard_bytes=size))
    cached = rate_text(predict_samples_per_s(profile, replace(plain, is_cached=True)))
    stored, free = format_bytes(data.objects_bytes), format_bytes(machine.disk_free_bytes)
    evidence = f"{'about ' if data.is_sampled else ''}{stored} of data, {free} free at {machine.disk_path}, "
    evidence += f"{profile.epochs} epochs, {cached} from the cache"
    if not report.best.is_cached:
        yield Advice("cache", "no cache: over all epochs it gains less than a tenth", evidence)
        return
    command = flags(replace(report, best=replace(report.now, is_cached=True)))
    factor, rate = _cache_factor(profile, plain), predict_samples_per_s(profile, plain)
    yield Advice("cache", f"Loader(cache={_cache(report)!r})", evidence, command, factor * rate, (factor - 1) * rate)


def _of_random_access(report: Report, store: StoreProfile) -> Advice:
    one_bytes, rate = store.first_byte_p50_s * store.connection_bytes_per_s, store.connection_bytes_per_s
    if not math.isfinite(one_bytes):
        return Advice("random access", "one request for each object", "the objects are small")
    size, wait = format_bytes(one_bytes), f"{1e3 * store.first_byte_p50_s:.1f} ms to the first byte"
    text = f"read chunks of {size} or more; FetchConfig(gap_bytes_max={report.best.gap_bytes_max})"
    evidence = f"{wait} * {format_bytes(rate)}/s on a connection = {size}"
    return Advice("random access", text, evidence, f"penstock info {_url(report.profile)}")


def _of_contents(report: Report, data: DataProfile, plain: Configuration) -> Iterator[Advice]:
    """What is known of shards, and what is read of them and not used."""
    profile = report.profile
    if data.is_indexed:
        yield Advice("index", "keep the index", "it knows all shards")
    elif data.kind == "shards":
        text = "build an index: samples by number, a length, equal batches on all ranks, and a resume that reads nothing again"
        evidence = f"no index knows the {data.objects_count} shards of {format_bytes(data.object_bytes)}"
        yield Advice("index", text, evidence, f"penstock index {_url(profile)}")
    if data.unused_members:
        used = {name: size for name, size in data.member_bytes.items() if name not in data.unused_members}
        share = sum(used.values()) / max(1.0, sum(data.member_bytes.values()))
        smaller = replace(profile, data=replace(data, objects_bytes=round(share * data.objects_bytes)))
        rate = predict_samples_per_s(smaller, plain)
        text = f"leave out {', '.join(data.unused_members)}: the pipeline does not use what it reads"
        spec = shlex.quote(",".join(f"{name}={name}" for name in used))
        command = f"penstock convert {_url(profile)} {shlex.quote(_packed(profile))} --to tar --fields {spec}"
        evidence, gain = f"{1 - share:.0%} of the bytes of a sample", rate - predict_samples_per_s(profile, plain)
        yield Advice("fields", text, evidence, command, rate, gain)


def _of_door(report: Report, data: DataProfile, plain: Configuration) -> Advice:
    profile = report.profile
    peer = replace(plain, client="blocking", workers=profile.machine.cores_count)
    rate, slower = (predict_samples_per_s(profile, each) for each in (plain, peer))
    evidence = f"Loader {rate_text(rate)}, {peer.workers} workers that read one object at a time {rate_text(slower)}"
    if rate < GAIN_MIN * slower:
        text = "any door: a DataLoader with a worker for each core is as fast, and so are files on a mount or from the gateway"
        return Advice("door", text, evidence)
    text = "ps.Loader, or penstock.torch.DataLoader; for programs that read files, a mount or the gateway with a cache here"
    text += "; by number or key, pipeline.open()" if data.kind == "objects" or data.is_indexed else ""
    return _gaining(Advice("door", text, evidence, flags(report)), profile, peer, plain)


def _gaining(advice: Advice, profile: Profile, since: Configuration, then: Configuration) -> Advice:
    """The advice with what leads from one configuration to another gains, unless that has no limit."""
    before, rate = (predict_samples_per_s(profile, each) for each in (since, then))
    if not math.isfinite(rate):
        return advice
    return replace(advice, samples_per_s=rate, gain_samples_per_s=max(0.0, rate - before))


# ── the configuration, for people to paste ──────────────────────────────────────────────────────────────────────────


def _cache(report: Report) -> str:
    """The cache that is advised, as ``PATH:SIZE``."""
    machine, data = report.profile.machine, report.profile.data
    size_bytes = min(DISK_RATIO_MAX * machine.disk_free_bytes, 1.1 * (data.objects_bytes if data else math.inf))
    return f"{(machine.disk_path or '').rstrip('/')}/penstock:{max(64, math.ceil(size_bytes / 1e6))}MB"


def loader_options(report: Report) -> dict[str, int | str]:
    """Return the advised options of a ``Loader`` that differ from its defaults; ``requests_max`` belongs to its ``fetch``."""
    now, best, data = report.now, report.best, report.profile.data
    options: dict[str, int | str] = {} if best.threads == now.threads else {"threads": best.threads}
    if best.processes:  # each has lanes of its own
        options |= {"processes": best.processes, "lanes": max(data.lanes if data else 1, best.processes)}
    if best.requests_max != now.requests_max:
        options["requests_max"] = best.requests_max
    return options | ({"cache": _cache(report)} if best.is_cached else {})


def flags(report: Report) -> str:
    """Return the advised configuration as a command that measures it against the defaults."""
    return _try(report.profile, loader_options(report) or {"threads": report.best.threads})


def code(report: Report) -> str:
    """Return the advised configuration as a Python program that reads one batch; empty if the data was not looked at."""
    data, profile = report.profile.data, report.profile
    if data is None:
        return ""
    options = loader_options(report)
    if "requests_max" in options:
        options["fetch"] = f"ps.FetchConfig(requests_min=1, requests_max={options.pop('requests_max')})"
    settings = "".join(f", {name}={value if name == 'fetch' else repr(value)}" for name, value in options.items())
    given = {"group_by": data.group_by, **profile.options}
    connected = "".join(f", {name}={value!r}" for name, value in given.items() if value)
    stages = data.stages.replace("Image(", "ps.Image(").replace("Bytes(", "ps.Bytes(")
    made = f"pipeline = ps.{data.kind}({profile.url!r}{connected}){stages}.batch({data.batch_size})"
    if profile.pipeline_name is not None:
        module, name = profile.pipeline_name.split(":")
        value = f"{name}()" if profile.is_pipeline_function else name
        made = f"from {module} import {name}" + (f"\n\npipeline = {value}" if value != "pipeline" else "")
    body = f"    with ps.Loader(pipeline{settings}) as loader:\n        print(ps.describe(next(iter(loader))))"
    return f'import penstock as ps\n\n{made}\n\nif __name__ == "__main__":\n{body}'


def rate_text(samples_per_s: float) -> str:
    """Return a rate for people."""
    if not math.isfinite(samples_per_s):
        return "no limit"
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 100 else f"{samples_per_s:.3g} samples/s"


def _crew(rate: CpuRate | Configuration) -> str:
    kind = ("process", "processes") if rate.processes else ("thread", "threads")
    return f"{rate.threads} {kind[rate.threads != 1]}"


def _url(profile: Profile) -> str:
    """The URL as an argument of a command, with the options of the connection."""
    options = {f"--{name.replace('_', '-')}": value for name, value in profile.options.items()}
    given = [name if value is True else f"{name} {shlex.quote(str(value))}" for name, value in options.items()]
    return " ".join([shlex.quote(profile.url), *given])


def _packed(profile: Profile) -> str:
    folder = split_glob(profile.url)[0] if is_pattern(profile.url) else profile.url
    return f"{folder.rstrip('/')}-packed/"


def _try(profile: Profile, options: Mapping[str, int | str]) -> str:
    pipeline = "" if profile.pipeline_name is None else f" --pipeline {profile.pipeline_name}"
    tried = shlex.quote(",".join(f"{name}={value}" for name, value in options.items()))
    return f"penstock advise {_url(profile)}{pipeline} --try {tried}"
