"""The clients of ``penstock bench`` on a real S3 server: each delivers every sample once, and none leaves anything behind."""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import penstock as ps
from loading import shard
from penstock.bench.clients import ANONYMOUS_VARIABLE, DECODING, ENTRIES, Entry
from penstock.bench.clients.decoders import SIDE
from penstock.bench.clients.loop import MASK, sample_check
from penstock.bench.data import look_at
from penstock.bench.process import BenchError, ClientProcess, client_command, client_environment
from penstock.bench.samples import digits, photographs
from penstock.formats import TFRecordWriter
from penstock.store import Store

pytestmark = [pytest.mark.server, pytest.mark.torch]

SHARDS, EACH = 3, 7
SAMPLES = [
    {"__key__": f"s{label:05d}", "jpg": data, "cls": str(label)}
    for label, data in enumerate(photographs(SHARDS * EACH, side=(30, 40)))
]
LIBRARIES = any(importlib.util.find_spec(name) for name in ("webdataset", "tensorflow_io"))
"""Whether these are ``make test-bench``'s, of all clients; otherwise a few clients are tested."""
FORMATS = ("tar", "objects", "tfrecord", "parquet", "mds", "litdata") if LIBRARIES else ("tar", "objects")
AT_ONCE = 2
FEW = {
    "tar": ("penstock", "penstock, DataLoader", "penstock, map-style", "penstock, mount", "penstock, gateway warm"),
    "objects": ("penstock", "penstock, map-style", "connector names on penstock"),
}
PACKERS = {"mds": "MosaicML Streaming", "litdata": "LitData"}
MOUNTS = ("penstock, mount", "rclone mount", "s3fs-fuse") if LIBRARIES else ("penstock, mount",)
PUBLIC = (
    "penstock", "penstock, mount", "penstock, pipe", "penstock, gateway cold", "webdataset on penstock", "rclone mount",
    "connector names on penstock", "connector, iterable", "webdataset, pipe:curl", "webdataset, pipe:aws", "s3fs-fuse",
    "webdataset, boto3", "webdataset, s3fs", "MinIO's SDK", "TorchData", "Hugging Face datasets", "Ray Data",
)  # fmt: skip
"""The clients that learn in a way of their own that data is public."""


@contextmanager
def client(entry: Entry, server: Any, bucket: str, **variables: str) -> Iterator[ClientProcess]:
    """The process of a client, which knows the server."""
    folder = tempfile.mkdtemp()  # libraries want a place for their own caches
    environment = client_environment(**server.environment, XDG_CACHE_HOME=folder, HF_HOME=folder, **variables)
    process = ClientProcess(entry.name, client_command(entry.module), environment=environment, answer_s_max=300)
    options = {**entry.options, **({entry.workers: 2} if entry.workers else {})}
    try:
        process.ask({"do": "open", "url": server.endpoint_url, "bucket": bucket, "options": options})
        yield process
    finally:
        process.close()
        shutil.rmtree(folder, ignore_errors=True)


def named(name: str) -> Entry:
    """The client of this name."""
    return next(entry for entry in ENTRIES if entry.name == name)


def write(store: Store, format_name: str, server: Any, bucket: str) -> None:
    """Write the same samples in a format, into a folder of its name; those of a library by the library."""
    groups = [SAMPLES[at : at + EACH] for at in range(0, len(SAMPLES), EACH)]
    records = [[{"jpg": sample["jpg"], "cls": int(sample["cls"])} for sample in group] for group in groups]
    if format_name == "objects":
        for sample in SAMPLES:
            store.write(f"objects/{int(sample['cls'])}.jpg", sample["jpg"])
    for number in range(SHARDS):
        if format_name == "tar":
            store.write(f"tar/{number}.tar", shard(groups[number]))
        elif format_name == "tfrecord":
            store.write(f"tfrecord/{number}.tfrecord", shard(records[number], TFRecordWriter))
        elif format_name == "parquet":
            store.write(f"parquet/{number}.parquet", parquet(records[number]))
    if format_name not in PACKERS:
        return
    with tempfile.TemporaryDirectory() as folder, client(named(PACKERS[format_name]), server, bucket) as process:
        source, target = Path(folder, "tars"), Path(folder, "packed")
        source.mkdir()
        for number, group in enumerate(groups):
            (source / f"{number}.tar").write_bytes(shard(group))
        process.ask({"do": "pack", "source": str(source), "target": str(target)})
        for path in target.iterdir():
            store.write(f"{format_name}/{path.name}", path.read_bytes())


def parquet(records: list[dict[str, Any]]) -> bytes:
    """A file of these rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(records), out)
    return out.getvalue().to_pybytes()


def job_of(url: str, scratch: Path, **connection: Any) -> dict[str, Any]:
    """An epoch in which every byte is compared, of what ``penstock bench run`` finds at a URL."""
    facts = look_at(url, connection)
    assert facts.is_picture
    names = ("prefix", "source", "format", "image", "label", "label_kind")
    return {
        **{name: getattr(facts, name) for name in names}, "keys": list(facts.keys), "objects": facts.format == "objects",
        "batch": 4, "scratch": str(scratch), "check": True, "decode": False, "shuffle": 0,
    }  # fmt: skip


def runs(entry: Entry, format_name: str) -> bool:
    """Whether the client can read this here, and belongs to this suite."""
    if ("mount" in entry.name or "fuse" in entry.name) and not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return False
    return entry.reason_not_run(format_name) is None and (LIBRARIES or entry.name in FEW[format_name])


def means() -> dict[str, float]:
    """The mean colour of each picture as Pillow decodes it, by its label."""
    sizes = {}
    for sample in SAMPLES:
        with Image.open(io.BytesIO(sample["jpg"])) as picture:
            data = picture.resize((SIDE, SIDE)).tobytes()
        sizes[sample["cls"]] = sum(data) / len(data)
    return sizes


EXPECTED = {
    "samples": len(SAMPLES),
    "bytes": sum(len(sample["jpg"]) for sample in SAMPLES),
    "check": sum(sample_check(sample["jpg"], int(sample["cls"])) for sample in SAMPLES) & MASK,
}


def wrong(answer: dict[str, Any], *, decode: bool) -> dict[str, Any]:
    """What a client delivered, if it is not what was written."""
    if not decode:
        found = {name: answer[name] for name in EXPECTED}
        return {} if found == EXPECTED else found
    found, close = answer["means"], means()
    is_same = found.keys() == close.keys() and all(abs(found[label] - close[label]) < 3 for label in close)
    return {} if is_same and answer["samples"] == len(SAMPLES) else answer


def failures(
    entries: list[Entry], server: Any, bucket: str, job: dict[str, Any], *, again: bool, **variables: str
) -> Any:
    """What each client did wrong; `again`, also in a second epoch, shuffled and decoded if it can do that."""

    def failure(entry: Entry) -> Any:
        try:
            with client(entry, server, bucket, **variables) as process:
                found = wrong(process.ask({"do": "epoch", "job": {**job, **entry.job}}), decode=False)
                if found or not again:
                    return found
                more = {"shuffle": 5, "decode": True}
                return wrong(process.ask({"do": "epoch", "job": {**job, **entry.job, **more}}), decode=True)
        except BenchError as error:
            return str(error)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = zip([entry.name for entry in entries], pool.map(failure, entries), strict=True)
        return {name: value for name, value in found if value}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("format_name", FORMATS)
def test_clients_deliver_the_same(user: Any, bucket: str, s3_store: Store, tmp_path: Path, format_name: str) -> None:
    """Every client that is installed delivers every sample once, with its label; so it does shuffled and decoded."""
    packer = PACKERS.get(format_name)
    if packer and (reason := named(packer).reason_not_run(format_name)):
        pytest.skip(reason)
    write(s3_store, format_name, user, bucket)
    job = job_of(f"s3://{bucket}/{format_name}/", tmp_path)
    assert (job["format"], job["image"]) == (format_name, "jpg")
    entries = [entry for entry in ENTRIES if runs(entry, format_name)]
    assert len(entries) >= (1 if format_name == "litdata" else 3)
    assert failures(entries, user, bucket, job, again=True) == {}
    assert list(tmp_path.iterdir()) == []


OURS = ("penstock", "penstock, DataLoader", "penstock, map-style", "penstock, files", "penstock, gateway cold")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", ["mixed/", "mixed/[0-2].tar", "more/0.tar"])
def test_only_what_the_url_names(user: Any, bucket: str, s3_store: Store, tmp_path: Path, names: str) -> None:
    """Beside it lie shards of the same format and of another one, which no way of penstock reads."""
    for number in range(SHARDS):
        s3_store.write(f"mixed/{number}.tar", shard(SAMPLES[number * EACH : (number + 1) * EACH]))
    s3_store.write("mixed/other.jsonl", b'{"a": 1}\n')
    for number in range(2):
        s3_store.write(f"more/{number}.tar", shard(SAMPLES))
    if names == "mixed/[0-2].tar":
        s3_store.write("mixed/3.tar", shard(SAMPLES))
    job = job_of(f"s3://{bucket}/{names}", tmp_path)
    entries = [named(name) for name in OURS]
    assert failures(entries, user, bucket, job, again=False) == {}


@pytest.mark.timeout(600)
@pytest.mark.skipif(not LIBRARIES, reason="libraries are in make test-bench")
def test_public_data(moto: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no credentials, ``--anonymous`` has every client read without; others say that they do not."""
    bucket = moto.create_bucket()
    with ps.connect(f"s3://{bucket}", endpoint_url=moto.endpoint_url, anonymous=True) as store:
        write(store, "tar", moto, bucket)
    with closing(moto.client()) as owner:
        for number in range(SHARDS):
            owner.put_object_acl(Bucket=bucket, Key=f"tar/{number}.tar", ACL="public-read")
    job = job_of(f"s3://{bucket}/tar/", tmp_path, endpoint_url=moto.endpoint_url, anonymous=True)
    region = moto.environment["AWS_REGION"]
    monkeypatch.setattr(type(moto), "environment", {"AWS_REGION": region, "AWS_DEFAULT_REGION": region}, raising=False)
    entries = [entry for entry in ENTRIES if entry.name in PUBLIC and runs(entry, "tar")]
    found = failures(entries, moto, bucket, job, again=False, **{ANONYMOUS_VARIABLE: "1"})
    assert found == {}
    for name, format_name in {"LitData": "litdata", "MosaicML Streaming": "mds"}.items():
        reason = replace(named(name), packages=()).reason_not_run(format_name, anonymous=True)
        assert reason == "does not read without credentials"


@pytest.mark.parametrize("name", MOUNTS)
def test_a_mount_ends_with_its_client(user: Any, bucket: str, s3_store: Store, tmp_path: Path, name: str) -> None:
    """A client that is closed inside an epoch unmounts, and so does one whose step fails."""
    entry = named(name)
    if entry.reason_not_run("tar") or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("mounts need their program and /dev/fuse")
    write(s3_store, "tar", user, bucket)
    job = {**job_of(f"s3://{bucket}/tar/", tmp_path), "step": "time:sleep"}  # a step that fails: the epoch is not over
    with client(entry, user, bucket) as process, ThreadPoolExecutor(1) as pool:
        with pytest.raises(BenchError, match="TypeError"):
            process.ask({"do": "epoch", "job": job})
        assert str(tmp_path) not in Path("/proc/mounts").read_text()
        answer = pool.submit(process.ask, {"do": "epoch", "job": {**job, "step": "python", "cached": True}})
        until_s = time.monotonic() + 30
        while str(tmp_path) not in Path("/proc/mounts").read_text() and time.monotonic() < until_s:
            time.sleep(0.01)
        assert str(tmp_path) in Path("/proc/mounts").read_text()
        process.close()
        with pytest.raises((BenchError, ValueError)):
            answer.result()
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    until_s = time.monotonic() + 5
    while (left := served(tmp_path)) and time.monotonic() < until_s:  # the kernel ends what was killed
        time.sleep(0.01)
    assert left == []


def served(folder: Path) -> list[str]:
    """The command lines of processes that name a folder, as those of mounts do."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text().replace("\0", " ")
        except OSError:  # ended meanwhile
            continue
        found += [line] if f"{folder}/" in line else []
    return found


def test_an_epoch_that_is_cut(user: Any, bucket: str, s3_store: Store, tmp_path: Path) -> None:
    """Without labels, and without time: four batches are read nevertheless."""
    write(s3_store, "tar", user, bucket)
    job = {**job_of(f"s3://{bucket}/tar/", tmp_path), "label": None, "seconds_max": 1e-6}
    with client(named("penstock, DataLoader"), user, bucket) as process:
        assert process.ask({"do": "epoch", "job": job})["samples"] == 16
        assert process.ask({"do": "epoch", "job": {**job, "seconds_max": None}})["samples"] == len(SAMPLES)


def ask(name: str, user: Any, bucket: str, job: dict[str, Any]) -> dict[str, Any]:
    """The answer of the client of this name."""
    with client(named(name), user, bucket) as process:
        return process.ask({"do": "epoch", "job": job})


def test_pixels_of_pictures(user: Any, bucket: str, s3_store: Store, tmp_path: Path) -> None:
    """The gateway, and a Lambda handler in it, deliver the same pixels, and the loader as many."""
    pictures = digits(12)
    s3_store.write(
        "tar/0.tar",
        shard([{"__key__": f"{label:03d}", "bin": data, "cls": str(label)} for label, data in enumerate(pictures)]),
    )
    job = {**job_of(f"s3://{bucket}/tar/", tmp_path), "pixels": True}
    cold, handler = (ask(f"penstock, gateway {way}", user, bucket, job) for way in ("cold", "handler"))
    assert cold["bytes"] == len(pictures) * 28 * 28 * 3
    assert [handler[name] for name in ("samples", "bytes", "check")] == [
        cold[name] for name in ("samples", "bytes", "check")
    ]
    names = ["penstock", "penstock, map-style", *["penstock, TensorFlow", "TensorFlow, py_function"] * LIBRARIES]
    assert {ask(name, user, bucket, {**job, "check": False})["bytes"] for name in names} == {cold["bytes"]}


def test_chunks_at_random_places(user: Any, bucket: str, s3_store: Store, tmp_path: Path) -> None:
    """Clients read ranges of the size that was asked for, or whole objects that are shorter, as many as there is time for."""
    write(s3_store, "objects", user, bucket)
    sizes = [len(sample["jpg"]) for sample in SAMPLES]
    job = {**job_of(f"s3://{bucket}/objects/", tmp_path), "objects": False, "batches_max": 5, "check": False}
    names = ["penstock", *["penstock, mount"] * os.access("/dev/fuse", os.R_OK | os.W_OK)]
    for name in names:
        assert ask(name, user, bucket, {**job, "chunk_bytes": 100})["bytes"] == 5 * 4 * 100
        whole = ask(name, user, bucket, {**job, "chunk_bytes": 1 << 20})["bytes"]
        assert 5 * 4 * min(sizes) <= whole <= 5 * 4 * max(sizes)


def test_decoding_alone_needs_no_store(user: Any, bucket: str, s3_store: Store, tmp_path: Path) -> None:
    """A local copy of the first shard, or of the first objects, is decoded as often as there is time for."""
    for number, data in enumerate(digits(8)):
        s3_store.write(f"objects/{number}.bin", data)
        s3_store.write(f"tar/{number}.tar", shard([{"__key__": "a", "bin": data, "cls": str(number)}]))
    for format_name in ("tar", "objects"):
        job = {
            **job_of(f"s3://{bucket}/{format_name}/", tmp_path), "decode": True, "batches_max": 6, "label": None,
        }  # fmt: skip
        with client(DECODING, user, bucket) as process:
            for _ in range(2):
                answer = process.ask({"do": "epoch", "job": {**job, "check": False}})
                assert answer["batches"] == 6
                assert answer["samples"] == (6 if format_name == "tar" else 24)
    assert list(tmp_path.iterdir()) == []
