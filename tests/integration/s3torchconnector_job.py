"""A program for the S3 Connector for PyTorch; only its import is penstock's. Argument: the URI of a prefix with 30 objects."""

import json
import sys
import warnings
from typing import Any

import torch

from penstock.compat.s3torchconnector import S3Checkpoint, S3IterableDataset, S3MapDataset

REGION = "eu-central-1"  # not that of the store
warnings.filterwarnings("ignore", ".*multi-threaded, use of fork.*", DeprecationWarning)


def sample(reader: Any) -> tuple[str, int]:
    return reader.key.rpartition("/")[2], sum(reader.read())


def main() -> None:
    prefix = sys.argv[1]
    images = S3MapDataset.from_prefix(f"{prefix}/data/", region=REGION, transform=sample)
    batches = torch.utils.data.DataLoader(images, batch_size=4, shuffle=True, num_workers=1, collate_fn=list)
    drawn = [one for batch in batches for one in batch]
    stream = S3IterableDataset.from_prefix(f"{prefix}/data/", region=REGION, transform=sample, enable_sharding=True)
    streamed = list(torch.utils.data.DataLoader(stream, batch_size=None, num_workers=2))

    checkpoint = S3Checkpoint(region=REGION)
    state = {"weights": torch.arange(2_000_000, dtype=torch.float32), "step": 7}
    with checkpoint.writer(f"{prefix}/state.pt") as writer:
        torch.save(state, writer)
    found = torch.load(checkpoint.reader(f"{prefix}/state.pt"), weights_only=True)
    same = torch.equal(found["weights"], state["weights"]) and found["step"] == 7
    print(json.dumps({"drawn": sorted(drawn), "streamed": streamed, "checkpoint": same, "length": len(images)}))


if __name__ == "__main__":
    main()
