"""The libraries that ``penstock bench`` knows, each with what it needs and what it can read."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


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
        decodes: Whether it can decode pictures.
        workers: Name of the option that a sweep over workers sets; None if it has none.
    """

    name: str
    module: str
    formats: frozenset[str]
    packages: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    is_ours: bool = False
    decodes: bool = True
    workers: str | None = None

    def reason_not_run(self, format_name: str, *, decode: bool) -> str | None:
        """Return why this client cannot read such data here; None if it can."""
        if format_name not in self.formats:
            return f"does not read {format_name}"
        if missing := [name for name in self.packages if importlib.util.find_spec(name) is None]:
            return f"not installed: {', '.join(missing)}"
        if missing := [name for name in self.programs if shutil.which(name) is None]:
            return f"not installed: the program {', '.join(missing)}"
        if decode and not self.decodes:
            return "does not decode"
        return None


_SHARDS = frozenset({"tar", "tar.gz", "tfrecord", "parquet", "recordio", "mds", "jsonl", "zip"})
_TAR, _OBJECTS, _PARQUET = frozenset({"tar"}), frozenset({"objects"}), frozenset({"parquet"})
_WEBDATASET = ("webdataset", "torch")
_CONNECTOR = ("s3torchconnector", "torch")

ENTRIES = (
    Entry(name="penstock", module="penstock", formats=_SHARDS | _OBJECTS, is_ours=True, workers="threads"),
    Entry(
        name="penstock, processes", module="penstock", formats=_SHARDS | _OBJECTS, packages=("cloudpickle",),
        options={"processes": 2}, is_ours=True, workers="processes",
    ),
    Entry(
        name="webdataset on penstock", module="webdataset_s3", formats=_TAR, packages=_WEBDATASET, is_ours=True,
        options={"way": "penstock"}, decodes=False, workers="workers",
    ),
    Entry(
        name="webdataset, pipe:aws", module="webdataset_s3", formats=_TAR, packages=_WEBDATASET, programs=("aws",),
        options={"way": "aws"}, decodes=False, workers="workers",
    ),
    Entry(
        name="connector names on penstock", module="penstock_connector", formats=_TAR | _OBJECTS, packages=("torch",),
        is_ours=True, workers="workers",
    ),
    Entry(
        name="connector, iterable", module="s3torchconnector", formats=_TAR, packages=_CONNECTOR, workers="workers",
    ),
    Entry(
        name="connector, map", module="s3torchconnector", formats=_OBJECTS, packages=_CONNECTOR, workers="workers",
    ),
    Entry(name="datasets", module="datasets", formats=_PARQUET, packages=("datasets", "s3fs"), decodes=False),
    Entry(name="Ray Data", module="ray", formats=_PARQUET, packages=("ray", "pyarrow"), decodes=False),
)  # fmt: skip

RAW = Entry(
    name="raw reading",
    module="penstock",
    formats=_SHARDS | _OBJECTS,
    options={"mode": "raw"},
    job={"step": None},
    is_ours=True,
)
"""The bytes of the shards, unparsed: what the store gives to this machine."""
UNDECODED = Entry(
    name="without decoding", module="penstock", formats=_SHARDS | _OBJECTS, job={"decode": False, "step": None}
)
"""Reading without preprocessing and without a step."""
STEP_ALONE = Entry(name="one cached batch", module="penstock", formats=_SHARDS | _OBJECTS, job={"cached": True})
"""The step on one batch again and again: what a training loop reaches that never waits for data."""
PROBES = (RAW, UNDECODED, STEP_ALONE)
"""Measurements that are not clients: what the store, reading and the step allow."""
