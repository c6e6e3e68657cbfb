"""The door to JAX: batches become arrays on a mesh of devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import penstock as ps
from doors.matrix.data_set import Record, as_record
from doors.matrix.door import BATCH, Door, Job
from doors.matrix.plain_doors import records

RECORD_BYTES = 1024


def as_array(sample: dict[str, Any]) -> dict[str, Any]:
    """Pad a record to a length that all samples have, as JAX needs it."""
    padded = np.full(RECORD_BYTES, ord(" "), np.uint8)
    text = np.frombuffer(as_record(sample)["record"], np.uint8)
    padded[: len(text)] = text
    return {"record": padded}


class JaxDoor(Door):
    """``jax.device_put`` of a loader's batches."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        shards = ps.shards(job.url)
        if job.seed is not None:
            shards = shards.shuffle(window=32, seed=job.seed)
        pipeline = shards.map(as_array).batch(BATCH)
        self.loader = self.open.enter_context(ps.Loader(pipeline, processes=job.workers, cache=job.node_cache))
        self.cut = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec())

    def epoch(self) -> Iterator[list[Record]]:
        for batch in self.loader:
            array = jax.device_put(batch["record"], self.cut)
            assert array.dtype == np.uint8
            yield records(np.asarray(array))

    def state(self) -> Any:
        return self.loader.state_dict()

    def restore(self, state: Any) -> None:
        self.loader.load_state_dict(state)
