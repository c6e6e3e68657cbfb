"""Programs that the suite runs in processes of their own: ranks that form a group, and an object of a store that misbehaves.

Arguments: ``ranks connector|penstock URI before|after``, or ``weather connector|penstock URI``. They print one line of JSON.
"""

from __future__ import annotations

import json
import random
import sys
import warnings
from typing import Any

import torch
import torch.distributed

warnings.filterwarnings("ignore")

WEATHER = random.Random(7).randbytes(5000)
"""The object of the store that misbehaves."""


def library(name: str) -> Any:
    if name == "connector":
        import s3torchconnector

        return s3torchconnector
    import penstock.compat.s3torchconnector

    return penstock.compat.s3torchconnector


def key_of(reader: Any) -> str:
    return str(reader.key.rpartition("/")[2])


def ranks(module: Any, uri: str, when: str) -> Any:
    """The names that this rank's workers read; the data set is made before or after the group is formed."""

    def made() -> Any:
        config = module.S3ClientConfig(force_path_style=True)
        return module.S3IterableDataset.from_prefix(
            uri, region="us-east-1", transform=key_of, enable_sharding=True, s3client_config=config
        )

    data = made() if when == "before" else None
    torch.distributed.init_process_group("gloo")
    data = data or made()
    found = []
    for options in ({}, {"num_workers": 2}, {"num_workers": 2, "multiprocessing_context": "spawn"}):
        found.append(list(torch.utils.data.DataLoader(data, batch_size=None, **options)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return found


def weather(module: Any, uri: str) -> Any:
    """What a program gets of an object from a store that misbehaves: ``"right"`` or ``"wrong"`` bytes, or an error."""
    config = module.S3ClientConfig(force_path_style=True, unsigned=True, max_attempts=2)
    found = []
    for kind in (module.S3ReaderConstructor.sequential(), module.S3ReaderConstructor.range_based()):
        data = module.S3MapDataset.from_objects(
            uri, region="us-east-1", s3client_config=config, reader_constructor=kind
        )
        try:
            found.append("right" if data[0].read() == WEATHER else "wrong")
        except module.S3Exception:
            found.append("S3Exception")
    return found


def main() -> None:
    job, name, *arguments = sys.argv[1:]
    print(json.dumps({"ranks": ranks, "weather": weather}[job](library(name), *arguments)))


if __name__ == "__main__":
    main()
