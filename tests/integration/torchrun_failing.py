"""What each process of ``test_torchrun_failing.py`` does: one rank's function fails, and it stays alive for a while.

``torchrun torchrun_failing.py DATA OUT``: the file ``OUT/RANK.json`` has what was raised, and after how long.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

import penstock as ps


def main() -> None:
    data, out = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def fails(sample: dict[str, Any]) -> dict[str, Any]:
        if rank == 1 and sample["__position__"] > 12:
            raise ValueError("only here")
        return sample

    pipeline = ps.shards(data).shuffle(window=16, seed=3).decode(ps.Integer("cls")).map(fails).batch(3)
    said = []
    for processes in (0, 1):
        with ps.Loader(pipeline, agree=ps.torch.agree, lanes=4, index="stream", processes=processes) as loader:
            for _ in range(2):  # again at each further call, without waiting for anybody
                began_s = time.monotonic()
                try:
                    for _ in loader:
                        pass
                except ps.PenstockError as error:
                    said.append([type(error).__name__, str(error), time.monotonic() - began_s])
    (Path(out) / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier()  # nobody's end is what wakes the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
