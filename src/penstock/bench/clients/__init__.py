"""The libraries that ``penstock bench`` knows, each with what it needs and what it can read."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


ANONYMOUS_VARIABLE = "PENSTOCK_BENCH_ANONYMOUS"
"""Is set in the processes of clients if they are to read without credentials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One way to read a data set.

    Attributes:
        name: The name in tables and in ``--clients``.
        module: Name of the module in this folder.
        formats: Formats that it reads, as ``DataFacts.format`` has them.
        packages: Packages that must be importable.
        programs: Programs that must be on the path.
        options: Arguments of its class.
        job: Entries of its job.
        is_ours: Whether it is penstock.
        is_signed: Whether it cannot be told to read without credentials.
        workers: Name of the option that a sweep over workers sets; None if it has none.
        reads_chunks: Whether it reads ranges at random places, of ``chunk_bytes`` of a job.
        is_asked: Whether it runs only where its name is asked for: it answers a question of its own.
    """

    name: str
    module: str
    formats: frozenset[str]
    packages: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    is_ours: bool = False
    is_signed: bool = False
    workers: str | None = None
    reads_chunks: bool = False
    is_asked: bool = False

    def reason_not_run(self, format_name: str, *, anonymous: bool = False) -> str | None:
        """Return why this client cannot read such data here; None if it can."""
        if format_name not in self.formats:
            return f"does not read {format_name}"
        if missing := [name for name in self.packages if not _is_installed(name)]:
            return f"not installed: {', '.join(missing)}"
        if missing := [name for name in self.programs if shutil.which(name) is None]:
            return f"not installed: the program {', '.join(missing)}"
        if anonymous and self.is_signed:
            return "does not read without credentials"
        return None


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a part of a package that is not installed
        return False


_TAR, _OBJECTS, _PARQUET, _TFRECORD, _MDS, _LITDATA = (
    frozenset({name}) for name in ("tar", "objects", "parquet", "tfrecord", "mds", "litdata")
)
_PLAIN = _TAR | _TFRECORD | _MDS | {"recordio", "jsonl"}
_COMPRESSED = frozenset(f"{name}.{kind}" for name in _PLAIN for kind in ("gz", "zst"))
_BY_NUMBER = _PLAIN | _OBJECTS | {"zip"}  # others are read a block or a shard at a time
_ANY = _BY_NUMBER | _COMPRESSED | _PARQUET
_FILES = _TAR | _OBJECTS | _PARQUET


def _ours(name: str, module: str = "penstock", formats: frozenset[str] = _ANY, **about: Any) -> Entry:
    return Entry(name=name, module=module, formats=formats, is_ours=True, **about)


def _webdataset(way: str, *packages: str, **about: Any) -> Entry:
    return Entry(
        name=about.pop("name", f"webdataset, {way}"), module="webdataset", formats=_TAR, options={"way": way},
        packages=("webdataset", "torch", *packages), workers="workers", **about,
    )  # fmt: skip


def _tensorflow(name: str, way: str, formats: frozenset[str] = _TFRECORD, *packages: str, **about: Any) -> Entry:
    return Entry(
        name=name, module="tensorflow", formats=formats, packages=("tensorflow", *packages), options={"way": way},
        workers="readers", **about,
    )  # fmt: skip


def _in_dataloader(name: str, module: str, formats: frozenset[str], *packages: str, **about: Any) -> Entry:
    return Entry(name=name, module=module, formats=formats, packages=("torch", *packages), workers="workers", **about)


WARM = "penstock, gateway warm"
"""The client that reads what has been read before: it says nothing of the store."""

ENTRIES = (
    _ours("penstock", workers="threads", reads_chunks=True),
    _ours("penstock, processes", packages=("cloudpickle",), options={"processes": 2}, workers="processes"),
    _ours("penstock, Ray workers", packages=("ray", "cloudpickle"), options={"cluster": 2}, workers="cluster"),
    _ours("penstock, DataLoader", packages=("torch",), options={"mode": "torch"}, workers="workers"),
    _ours("penstock, map-style", formats=_BY_NUMBER, packages=("torch",), options={"mode": "map"}, workers="workers"),
    _tensorflow("penstock, TensorFlow", "dataset", _ANY, is_ours=True),
    _tensorflow("penstock, TensorFlow on the mount", "mount", is_ours=True, is_asked=True),
    _tensorflow("penstock, TensorFlow on the pipe", "pipe", is_ours=True, is_asked=True),
    _in_dataloader("penstock, mount", "files", _FILES, options={"way": "mount"}, is_ours=True, reads_chunks=True),
    _in_dataloader("penstock, pipe", "files", _TAR, options={"way": "pipe", "workers": 2}, is_ours=True),
    _in_dataloader("penstock, files", "files", _FILES, options={"way": "file"}, is_ours=True),
    _ours("penstock, gateway cold", packages=("aiohttp",), options={"through": "cold"}, workers="threads"),
    _ours(WARM, packages=("aiohttp",), options={"through": "warm"}, workers="threads"),
    _ours(
        "penstock, gateway handler", formats=_TAR, packages=("aiohttp", "boto3", "PIL"), options={"through": "handler"},
        workers="threads", is_asked=True,
    ),
    _webdataset("penstock", name="webdataset on penstock", is_ours=True),
    _in_dataloader("connector names on penstock", "penstock_connector", _TAR | _OBJECTS, is_ours=True),
    _in_dataloader("connector, iterable", "s3torchconnector", _TAR, "s3torchconnector"),
    _in_dataloader("connector, map", "s3torchconnector", _OBJECTS, "s3torchconnector"),
    _webdataset("curl", name="webdataset, pipe:curl", programs=("curl",)),
    _webdataset("aws", name="webdataset, pipe:aws", programs=("aws",)),
    _webdataset("boto3", "boto3"),
    _webdataset("s3fs", "s3fs"),
    _in_dataloader("MinIO's SDK", "minio", _TAR | _OBJECTS, "minio"),
    _in_dataloader("TorchData", "torchdata", _TAR | _OBJECTS, "torchdata.datapipes", "s3fs"),
    _in_dataloader("LitData", "litdata", _LITDATA, "litdata", is_signed=True),
    _in_dataloader("MosaicML Streaming", "mosaicml", _MDS | {"mds.gz", "mds.zst"}, "streaming", is_signed=True),
    Entry(
        name="Hugging Face datasets", module="datasets", formats=_PARQUET | _TAR, packages=("datasets", "s3fs", "torch"),
        workers="workers",
    ),
    Entry(name="Ray Data", module="ray", formats=_FILES | _TFRECORD, packages=("ray", "pyarrow", "pandas", "torch")),
    _in_dataloader("rclone mount", "files", _FILES, options={"way": "rclone"}, programs=("rclone",), reads_chunks=True),
    _in_dataloader("s3fs-fuse", "files", _FILES, options={"way": "s3fs"}, programs=("s3fs",), reads_chunks=True),
    _tensorflow("TensorFlow, local files", "local"),
    _tensorflow("TensorFlow, rclone mount", "rclone", programs=("rclone",), is_asked=True),
    _tensorflow("TensorFlow, s3fs-fuse", "s3fs", programs=("s3fs",), is_asked=True),
    _tensorflow("TensorFlow, tensorflow-io", "io", _TFRECORD, "tensorflow_io", is_signed=True),
    _tensorflow("TensorFlow, py_function", "naive", _TAR, "boto3"),
    _tensorflow("TensorFlow, tf.data service", "service", _TAR | _TFRECORD, "boto3"),
)  # fmt: skip

RAW = Entry(
    name="raw reading",
    module="penstock",
    formats=_ANY | _LITDATA,
    options={"mode": "raw"},
    job={"step": None},
    is_ours=True,
)
"""The bytes of the shards, unparsed: what the store gives to this machine."""
UNDECODED = Entry(name="without decoding", module="penstock", formats=_ANY, job={"decode": False, "step": None})
"""Reading without preprocessing and without a step."""
DECODING = Entry(
    name="decoding alone", module="penstock", formats=_ANY, options={"mode": "local"}, job={"step": None}, is_ours=True
)
"""Preprocessing of a local copy of the first samples, again and again: what the processors allow."""
STEP_ALONE = Entry(name="one cached batch", module="penstock", formats=_ANY, job={"cached": True})
"""The step on one batch again and again: what a training loop reaches that never waits for data."""
PROBES = (RAW, UNDECODED, DECODING, STEP_ALONE)
"""Measurements that are not clients: what the store, reading and the step allow."""
