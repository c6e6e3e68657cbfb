"""The clients of ``penstock bench`` on a real S3 server: each delivers every sample once, and none leaves anything behind."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from loading import shard
from penstock.bench.clients import DECODING, ENTRIES, Entry
from penstock.bench.clients.loop import MASK, sample_check
from penstock.bench.process import BenchError, ClientProcess, client_command, client_environment
from penstock.bench.samples import digits
from penstock.formats import TFRecordWriter
from penstock.store import Store

pytestmark = [pytest.mark.server, pytest.mark.torch]

SHARDS, EACH = 3, 7
SAMPLES = [
    {"__key__": f"s{label:05d}", "bin": os.urandom(3000 + label), "cls": str(label)} for label in range(SHARDS * EACH)
]
LIBRARIES = importlib.util.find_spec("webdataset") is not None
"""Whether these are ``make test-bench``'s, of all clients; otherwise a few clients are tested."""
FORMATS = ("tar", "objects", "tfrecord", "parquet") if LIBRARIES else ("tar", "objects")
AT_ONCE = 2
FEW = {
    "tar": ("penstock", "penstock, DataLoader", "penstock, map-style", "penstock, mount", "penstock, gateway warm"),
    "objects": ("penstock", "penstock, map-style", "connector names on penstock"),
}


@pytest.fixture
def keys(s3_store: Store) -> dict[str, list[str]]:
    """The same samples in each format."""
    groups = [SAMPLES[at : at + EACH] for at in range(0, len(SAMPLES), EACH)]
    for number, group in enumerate(groups):
        s3_store.write(f"tar/{number}.tar", shard(group))
        records = [{"bin": sample["bin"], "cls": int(sample["cls"])} for sample in group]
        s3_store.write(f"tfrecord/{number}.tfrecord", shard(records, TFRecordWriter))
        s3_store.write(f"parquet/{number}.parquet", parquet(records))
    for sample in SAMPLES:
        s3_store.write(f"objects/{int(sample['cls'])}.bin", sample["bin"])
    return {name: [info.key for info in s3_store.list(f"{name}/")] for name in FORMATS}


def parquet(records: list[dict[str, Any]]) -> bytes:
    """A file of these rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(records), out)
    return out.getvalue().to_pybytes()


@contextmanager
def client(entry: Entry, server: Any, bucket: str) -> Iterator[ClientProcess]:
    """The process of a client, which knows the server."""
    folder = tempfile.mkdtemp()  # libraries want a place for their own caches
    environment = client_environment(**server.environment, XDG_CACHE_HOME=folder, HF_HOME=folder)
    process = ClientProcess(entry.name, client_command(entry.module), environment=environment, answer_s_max=120)
    try:
        process.ask({"do": "open", "url": server.endpoint_url, "bucket": bucket, "options": dict(entry.options)})
        yield process
    finally:
        process.close()
        shutil.rmtree(folder, ignore_errors=True)


def job_of(format_name: str, keys: list[str], scratch: Path) -> dict[str, Any]:
    """An epoch in which every byte is compared."""
    return {
        "keys": keys, "prefix": format_name, "format": format_name, "objects": format_name == "objects", "batch": 4,
        "image": "bin", "label": None if format_name == "objects" else "cls", "scratch": str(scratch), "check": True,
        "label_kind": "string" if format_name == "tar" else "int64", "decode": False, "shuffle": 0,
    }  # fmt: skip


def runs(entry: Entry, format_name: str) -> bool:
    """Whether the client can read this here, and belongs to this suite."""
    if "mount" in entry.name and not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return False
    return entry.reason_not_run(format_name, decode=False) is None and (LIBRARIES or entry.name in FEW[format_name])


@pytest.mark.parametrize("format_name", FORMATS)
def test_clients_deliver_the_same(
    user: Any, bucket: str, keys: dict[str, list[str]], tmp_path: Path, format_name: str
) -> None:
    """Every client that is installed delivers every sample once, with its label."""
    expected = {
        "samples": len(SAMPLES),
        "bytes": sum(len(sample["bin"]) for sample in SAMPLES),
        "check": sum(sample_check(sample["bin"], int(sample["cls"])) for sample in SAMPLES) & MASK,
    }
    entries = [entry for entry in ENTRIES if runs(entry, format_name)]

    def delivered(entry: Entry) -> Any:
        try:
            with client(entry, user, bucket) as process:
                answer = process.ask(
                    {"do": "epoch", "job": {**job_of(format_name, keys[format_name], tmp_path), **entry.job}}
                )
        except BenchError as error:
            return str(error)
        return {name: answer[name] for name in expected}

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip([entry.name for entry in entries], pool.map(delivered, entries), strict=True))
    assert len(found) >= 3
    assert {name: value for name, value in found.items() if value != expected} == {}
    assert list(tmp_path.iterdir()) == []


def test_a_mount_ends_with_its_client(user: Any, bucket: str, keys: dict[str, list[str]], tmp_path: Path) -> None:
    """A client that is closed inside an epoch unmounts."""
    entry = next(entry for entry in ENTRIES if entry.name == "penstock, mount")
    if not runs(entry, "tar"):
        pytest.skip("mounts need /dev/fuse")
    job = {**job_of("tar", keys["tar"], tmp_path), "step": "time:sleep"}  # a step that fails: the epoch is not over
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


def test_an_epoch_that_is_cut(user: Any, bucket: str, keys: dict[str, list[str]], tmp_path: Path) -> None:
    """Without labels, and without time: four batches are read nevertheless."""
    entry = next(entry for entry in ENTRIES if entry.name == "penstock, DataLoader")
    job = {**job_of("tar", keys["tar"], tmp_path), "label": None, "seconds_max": 1e-6}
    with client(entry, user, bucket) as process:
        assert process.ask({"do": "epoch", "job": job})["samples"] == 16
        assert process.ask({"do": "epoch", "job": {**job, "seconds_max": None}})["samples"] == len(SAMPLES)


def ask(name: str, user: Any, bucket: str, job: dict[str, Any]) -> dict[str, Any]:
    """The answer of the client of this name."""
    with client(next(entry for entry in ENTRIES if entry.name == name), user, bucket) as process:
        return process.ask({"do": "epoch", "job": job})


def test_pixels_of_pictures(user: Any, bucket: str, s3_store: Store, tmp_path: Path) -> None:
    """The gateway, and a Lambda handler in it, deliver the same pixels, and the loader as many."""
    pictures = digits(12)
    s3_store.write(
        "tar/0.tar",
        shard([{"__key__": f"{label:03d}", "bin": data, "cls": str(label)} for label, data in enumerate(pictures)]),
    )
    job = {**job_of("tar", ["tar/0.tar"], tmp_path), "pixels": True}
    cold, handler = (ask(f"penstock, gateway {way}", user, bucket, job) for way in ("cold", "handler"))
    assert cold["bytes"] == len(pictures) * 28 * 28 * 3
    assert [handler[name] for name in ("samples", "bytes", "check")] == [
        cold[name] for name in ("samples", "bytes", "check")
    ]
    names = ["penstock", "penstock, map-style", *["penstock, TensorFlow", "TensorFlow, py_function"] * LIBRARIES]
    assert {ask(name, user, bucket, {**job, "check": False})["bytes"] for name in names} == {cold["bytes"]}


def test_chunks_at_random_places(user: Any, bucket: str, keys: dict[str, list[str]], tmp_path: Path) -> None:
    """Clients read ranges of the size that was asked for, or whole objects that are shorter, as many as there is time for."""
    job = {**job_of("objects", keys["objects"], tmp_path), "objects": False, "batches_max": 5, "check": False}
    names = ["penstock", *["penstock, mount"] * os.access("/dev/fuse", os.R_OK | os.W_OK)]
    for name in names:
        assert ask(name, user, bucket, {**job, "chunk_bytes": 100})["bytes"] == 5 * 4 * 100
        whole = ask(name, user, bucket, {**job, "chunk_bytes": 1 << 20})["bytes"]
        assert 5 * 4 * 3000 <= whole <= 5 * 4 * (3000 + len(SAMPLES))


def test_decoding_alone_needs_no_store(user: Any, bucket: str, s3_store: Store, tmp_path: Path) -> None:
    """A local copy of the first shard, or of the first objects, is decoded as often as there is time for."""
    for number, data in enumerate(digits(8)):
        s3_store.write(f"objects/{number}.bin", data)
        s3_store.write(f"tar/{number}.tar", shard([{"__key__": "a", "bin": data, "cls": str(number)}]))
    for format_name, suffix in (("tar", "tar"), ("objects", "bin")):
        job = {
            **job_of(format_name, [f"{format_name}/{number}.{suffix}" for number in range(8)], tmp_path),
            "decode": True, "batches_max": 6, "label": None,
        }  # fmt: skip
        with client(DECODING, user, bucket) as process:
            for _ in range(2):
                answer = process.ask({"do": "epoch", "job": {**job, "check": False}})
                assert answer["batches"] == 6
                assert answer["samples"] == (6 if format_name == "tar" else 24)
    assert list(tmp_path.iterdir()) == []
